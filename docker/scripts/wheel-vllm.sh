#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM for ROCm: wheel-vllm.sh VERSION FOLDER WHEELS ARCH...
# TRITON_KERNELS_SRC_DIR: its CMake clones them otherwise. The Rust front end is not what is tested here.
set -euo pipefail
version=$1 folder=$2 wheels=$3
shift 3
kernels=$folder/triton_kernels/python/triton_kernels/triton_kernels
[ -d "$kernels" ] || { echo "wheel-vllm.sh: $kernels is missing" >&2; exit 3; }
export VLLM_TARGET_DEVICE=rocm VLLM_REQUIRE_RUST_FRONTEND=0 TRITON_KERNELS_SRC_DIR=$kernels
export SETUPTOOLS_SCM_PRETEND_VERSION=$version VCS_VERSIONING_PRETEND_VERSION=$version
PYTORCH_ROCM_ARCH=$(IFS=';'; echo "$*")
export PYTORCH_ROCM_ARCH
exec "$(dirname "$0")/wheel.sh" "$folder" "$wheels" "$@"
