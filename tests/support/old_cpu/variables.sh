# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by run.sh and .ci/bare-machine: what /proc/cpuinfo says on an older processor, and variables of libraries that ask it themselves.
old_cpuinfo() { sed -E '/^flags/s/ (avx512|avx10|avx_vnni|amx)[a-z0-9_]*//g' /proc/cpuinfo; }
# shellcheck disable=SC2034  # who sources it uses it
OLD_CPU=(
  ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
  "NPY_DISABLE_CPU_FEATURES=AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
)
