#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A source distribution by its hash: fetch.sh NAME VERSION SHA256 FOLDER
set -euo pipefail
name=$1 version=$2 sha256=$3 folder=$4
[[ $sha256 =~ ^[0-9a-f]{64}$ ]] || { echo "fetch.sh: '$sha256' is no sha256 of $name $version" >&2; exit 2; }
mkdir -p "$folder"
printf '%s==%s --hash=sha256:%s\n' "$name" "$version" "$sha256" > "$folder/source.txt"
# pip asks a package for its metadata: *_SKIP_CUDA_BUILD and VLLM_TARGET_DEVICE keep that from looking for compilers.
MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
  python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
  --no-binary :all: --require-hashes --dest "$folder" --requirement "$folder/source.txt"
mv "$folder"/*.tar.gz "$folder/source.tar.gz"
