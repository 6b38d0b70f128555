#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# causal-conv1d with its extension causal_conv1d_cuda: wheel-causal-conv1d.sh VERSION FOLDER WHEELS ARCH...
set -euo pipefail
version=$1 folder=$2 wheels=$3
shift 3
grep --quiet "^__version__ = \"$version\"$" "$folder/causal_conv1d/__init__.py" ||
  { echo "wheel-causal-conv1d.sh: the source is not version $version" >&2; exit 3; }
export CAUSAL_CONV1D_FORCE_BUILD=TRUE
HIP_ARCHITECTURES=$(IFS=,; echo "$*")
PYTORCH_ROCM_ARCH=$(IFS=';'; echo "$*")
export HIP_ARCHITECTURES PYTORCH_ROCM_ARCH
exec "$(dirname "$0")/wheel.sh" "$folder" "$wheels" "$@"
