#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles docker/rocm.in and docker/build.in, for the Python of the ROCm image, into hashed *.txt. Needs uv.
set -euo pipefail
cd "$(dirname "$0")"
compile() {
  "${UV:-uv}" pip compile --quiet --generate-hashes --no-header --python-version 3.12 \
    --python-platform x86_64-manylinux_2_35 --override rocm.override "$@"
}
cp ../requirements/laptop.txt rocm.txt  # versions of the environment are kept where vLLM's requirements let them
compile rocm.in --output-file rocm.txt
rm build.txt
compile --constraint rocm.txt build.in --output-file build.txt
