#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Last step of the CPU image: proof-cpu.sh VENV. Starts as the gate starts: no network needed, no GPU.
set -euo pipefail
venv=$1
export TRITON_INTERPRET=1 HF_HUB_OFFLINE=1
"$venv/bin/python" /opt/image/prove.py cpu /opt/image/proof.json
"$venv/bin/hilgate" --help > /dev/null
