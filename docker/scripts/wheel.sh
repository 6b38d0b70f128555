#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles one wheel for named architectures, without a GPU: wheel.sh FOLDER WHEELS ARCH...
# wheel-<name>.sh sets what its setup.py reads. --no-index: nothing is fetched; --no-deps: nothing may replace torch or triton.
set -euo pipefail
folder=$1 wheels=$2
shift 2
[ "$#" -gt 0 ] || { echo "wheel.sh: name the architectures; a builder has no GPU to ask" >&2; exit 2; }
for arch in "$@"; do
  [[ $arch =~ ^gfx[0-9a-f]{3,4}$ ]] || { echo "wheel.sh: '$arch' is no architecture (never native)" >&2; exit 2; }
done
command -v hipcc > /dev/null || { echo "wheel.sh: there is no hipcc; the base is no ROCm image" >&2; exit 5; }
mkdir -p "$wheels"
# One compilation for each core and each 4 GiB of memory: a unit of these wants 1 to 3.
jobs=$(awk -v cores="$(nproc)" '/^MemAvailable/{n = int($2 / 4194304); print n < 1 ? 1 : n < cores ? n : cores}' /proc/meminfo)
export MAX_JOBS=${MAX_JOBS:-$jobs}
# --verbose: a wheel takes up to hours, and ninja says which unit it is at.
python3 -m pip wheel --verbose --no-cache-dir --disable-pip-version-check --no-index --no-deps --no-build-isolation \
  --wheel-dir "$wheels" "$folder"
