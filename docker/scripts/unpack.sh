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
  echo "unpack.sh: $patch"
  patch --directory "$folder" --strip=1 --fuzz=0 --batch --forward --no-backup-if-mismatch < "$patch"
done
