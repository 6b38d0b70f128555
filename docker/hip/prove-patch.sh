#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a patch of mamba-ssm changes, by the device's own preprocessor: prove-patch.sh TARBALL PATCH
# Prints `ARCH without=WAVE with=WAVE`: the wave size that the backward scan is compiled for, `guessed` where the source did
# not know the architecture, `refused` where that is an error. Of gfx950 the guess is right; of gfx1250, whose waves are 32, wrong.
set -euo pipefail
tarball=$1 patch=$2 work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
/opt/image/scripts/unpack.sh "$tarball" "$work/without" >&2
/opt/image/scripts/unpack.sh "$tarball" "$work/with" "$patch" >&2
printf '#include <hip/hip_runtime.h>\n#include "reverse_scan.cuh"\nwave = WARP_THREADS\n' > "$work/ask.hip"
clang=$(echo /usr/lib/llvm-*/bin/clang++)
wave() {  # wave TREE ARCH
  if ! "$clang" -E -x hip --offload-device-only --offload-arch="$2" -DUSE_ROCM \
    -I "$work/$1/csrc/selective_scan" "$work/ask.hip" > "$work/out" 2> "$work/errors"; then
    grep --quiet 'unknown AMD GPU architecture' "$work/errors" || { cat "$work/errors" >&2; exit 1; }
    echo refused
  elif grep --quiet 'Unknown AMD GPU architecture' "$work/errors"; then
    echo guessed
  else
    sed -n 's/^wave = //p' "$work/out"
  fi
}
for arch in gfx90a gfx942 gfx950 gfx1250; do
  echo "$arch without=$(wave without "$arch") with=$(wave with "$arch")"
done
