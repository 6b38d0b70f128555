#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# mamba-ssm with its extension selective_scan_cuda: wheel-mamba-ssm.sh VERSION FOLDER WHEELS ARCH...
# FORCE_BUILD: no ready-made wheel. KEEP_CUDA_BUILD: versions after 2.3.2 leave the extension out without it, and Mamba-1 is gone.
# Its --offload-arch takes HIP_ARCHITECTURES as it stands: a list with commas; the default, native, asks a GPU.
set -euo pipefail
version=$1 folder=$2 wheels=$3
shift 3
grep --quiet "^__version__ = \"$version\"$" "$folder/mamba_ssm/__init__.py" ||
  { echo "wheel-mamba-ssm.sh: the source is not version $version" >&2; exit 3; }
export MAMBA_FORCE_BUILD=TRUE MAMBA_KEEP_CUDA_BUILD=TRUE
HIP_ARCHITECTURES=$(IFS=,; echo "$*")
PYTORCH_ROCM_ARCH=$(IFS=';'; echo "$*")
export HIP_ARCHITECTURES PYTORCH_ROCM_ARCH
exec "$(dirname "$0")/wheel.sh" "$folder" "$wheels" "$@"
