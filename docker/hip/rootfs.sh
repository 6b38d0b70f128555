#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A root folder with Debian's HIP tool chain, from the packages of debs.txt by sha256: rootfs.sh NAME FOLDER
# They are unpacked and not configured: it compiles, and nothing else. FOLDER appears only when it is complete; packages that
# are fetched stay in FOLDER.debs until then, so an interrupted run goes on. DEBIAN_MIRROR: another mirror, or a snapshot
# (experimental drops what it replaces).
set -euo pipefail
folder=$2 debs=$2.debs partial=$2.partial
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
list=$(dirname "$0")/debs.txt
mkdir -p "$debs"
while read -r sum path; do
  file=$debs/$sum.deb
  if [ ! -e "$file" ]; then
    curl --fail --silent --show-error --location --retry 3 --output "$debs/download" "$mirror/$path" ||
      { echo "rootfs.sh: $mirror has no $path (any more): name another DEBIAN_MIRROR, or run docker/hip/lock.sh" >&2; exit 4; }
    echo "$sum  $debs/download" | sha256sum --check --quiet ||
      { echo "rootfs.sh: $path is not the package of debs.txt" >&2; exit 3; }
    mv "$debs/download" "$file"
  fi
done < "$list"
rm -rf --one-file-system "$partial"
mkdir -p "$partial"/{dev,proc,sys,tmp,usr/{bin,lib,lib64,sbin,local/bin}}
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$partial/$name"; done
while read -r sum _; do
  dpkg-deb --fsys-tarfile "$debs/$sum.deb" | tar --extract --keep-directory-symlink --directory "$partial" \
    --exclude './usr/share/doc/*' --exclude './usr/share/man/*' --exclude './usr/share/locale/*'
done < "$list"
# What the packages' own scripts would have done, as far as a compiler asks for it.
for link in mawk:awk gcc:cc g++:c++; do ln -sf "${link%:*}" "$partial/usr/bin/${link#*:}"; done
ln -s ../../bin/python3.11 "$partial/usr/local/bin/python3"
rm -f "$partial/usr/lib/python3.11/EXTERNALLY-MANAGED"
mkdir -p "$partial/opt/rocm/.info"
LC_ALL=C sort --key 2 "$list" |
  grep -E '/(clang-22|hipcc|libclang-common-22-dev|libclang-cpp22|libllvm22|lld-22|rocm-device-libs-22)_' \
    > "$partial/opt/rocm/.info/toolchain"
sed -n 's#.*/libamdhip64-dev_\([0-9.]*\).*#\1#p' "$list" > "$partial/opt/rocm/.info/version"
rm -rf "$debs"
mv "$partial" "$folder"
