#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs requirements by hash, then wheels: install.sh REQUIREMENTS [WHEEL...]
# --no-deps throughout: requirements are complete, and no dependency may choose another torch or triton.
set -euo pipefail
requirements=$1
shift
pip() { python3 -m pip --disable-pip-version-check "$@"; }
if grep --quiet --extended-regexp '^(torch|torchaudio|torchvision|triton|pytorch-triton-rocm|amdsmi)[ =<>]' "$requirements"; then
  echo "install.sh: $requirements names torch, triton or amdsmi, which belong to the base" >&2
  exit 3
fi
pip install --quiet --no-cache-dir --no-deps --require-hashes --requirement "$requirements"
[ "$#" -eq 0 ] || pip install --quiet --no-cache-dir --no-index --no-deps --force-reinstall "$@"
