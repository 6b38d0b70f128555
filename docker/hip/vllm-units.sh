#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM's own attention and cache kernels, compiled as its CMake does it for ROCm: vllm-units.sh SDIST ARCH [UNIT...]
# The objects are kept by hipcc; the whole of vLLM needs its CMake, Rust and hours.
set -euo pipefail
sdist=$1 arch=$2
shift 2
[ "$#" -gt 0 ] || set -- cache_kernels cache_kernels_fused attention/merge_attn_states rocm/attention
torch=$(python3 -c 'from importlib.util import find_spec as f; print(f("torch").submodule_search_locations[0])')
rm -rf /src/vllm/tree /src/vllm/hip
/opt/image/scripts/unpack.sh "$sdist" /src/vllm/tree
mkdir -p /src/vllm/hip
cd /src/vllm/hip
sources=("${@/#/csrc/}")
# Its hipify copies the sources here first, so that is where they are named.
python3 /src/vllm/tree/cmake/hipify.py -p /src/vllm/tree/csrc -o "$PWD/csrc" "${sources[@]/%/.cu}" > hipify.log
flags=$(python3 -c 'import torch.utils.cpp_extension as t; print(*t.COMMON_HIP_FLAGS, *t.COMMON_HIPCC_FLAGS)')
for unit in "$@"; do
  case $unit in
    rocm/*) abi=(-DTORCH_EXTENSION_NAME=_rocm_C) ;;
    *) abi=(-DTORCH_EXTENSION_NAME=_C_stable_libtorch -DTORCH_TARGET_VERSION=0x020B000000000000ULL) ;;
  esac
  # shellcheck disable=SC2086  # a list of flags
  hipcc -O2 -DNDEBUG -std=c++20 -fPIC $flags -DUSE_ROCM -DENABLE_FP8 -U__HIP_NO_HALF_CONVERSIONS__ -U__HIP_NO_HALF_OPERATORS__ \
    -fno-gpu-rdc -DPy_LIMITED_API=3 "${abi[@]}" -Icsrc "-I$torch/include" "-I$torch/include/torch/csrc/api/include" \
    -I/usr/include/python3.11 "--offload-arch=$arch" -c "csrc/$unit.hip" -o "/src/vllm/hip/${unit//\//_}.o"
done
