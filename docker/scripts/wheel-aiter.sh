#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# aiter with its kernels compiled ahead: wheel-aiter.sh VERSION FOLDER WHEELS ARCH...
# AITER_USE_SYSTEM_TRITON: without it setup.py installs a Triton of its own over the base's.
set -euo pipefail
version=$1 folder=$2 wheels=$3
shift 3
[ -d "$folder/3rdparty/composable_kernel/include" ] ||
  { echo "wheel-aiter.sh: composable_kernel is missing: its submodules were not fetched" >&2; exit 3; }
export AITER_USE_SYSTEM_TRITON=1 PREBUILD_KERNELS=1 SETUPTOOLS_SCM_PRETEND_VERSION=$version
GPU_ARCHS=$(IFS=';'; echo "$*")
PYTORCH_ROCM_ARCH=$GPU_ARCHS
export GPU_ARCHS PYTORCH_ROCM_ARCH
exec "$(dirname "$0")/wheel.sh" "$folder" "$wheels" "$@"
