#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks a tarball and patches what was in it: unpack.sh TARBALL FOLDER [PATCH...]
# A patch that does not apply exactly is an error: with fuzz it may land in another function.
set -euo pipefail
tarball=$1 folder=$2
shift 2
mkdir -p "$folder"
tar --extract --gzip --file "$tarball" --directory "$folder" --strip-components=1 --no-same-owner
for patch in "$@"; do
  patch=$(realpath "$patch")
  echo "unpack.sh: $patch"
  # git takes no fuzz, and in a checkout it would look for the files at the top of that.
  (cd "$folder" && GIT_CEILING_DIRECTORIES=$(dirname "$PWD") git apply "$patch")
done
