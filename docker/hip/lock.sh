#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes docker/hip/debs.txt, the packages of the tool chain by sha256: lock.sh > docker/hip/debs.txt. Needs apt and network,
# no root. HIP of the image's ROCm version is in Debian's experimental, over sid; Python 3.11 and git are bookworm's.
# An index past its date is refused as apt does it; where a mirror stands still on purpose, LOCK_EXPIRED=1 takes it.
set -euo pipefail
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"  # apt fetches as a user of its own

lists() {  # lists NAME SUITE...: an apt that knows nothing installed and these suites alone
  mkdir -p "$work/$1/lists/partial" "$work/$1/cache/archives/partial"
  : > "$work/$1/status"
  printf "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror %s main\n" "${@:2}" > "$work/$1/sources.list"
  cat > "$work/$1/apt.conf" << CONF
Dir::State "$work/$1"; Dir::State::Lists "$work/$1/lists"; Dir::State::status "$work/$1/status";
Dir::Cache "$work/$1/cache"; Dir::Etc::sourcelist "$work/$1/sources.list"; Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null"; Dir::Etc::main "/dev/null";
APT::Architecture "amd64"; APT::Architectures "amd64"; Acquire::Languages "none";
Acquire::Check-Valid-Until "$([ "${LOCK_EXPIRED:-0}" = 1 ] && echo false || echo true)";
CONF
  APT_CONFIG=$work/$1/apt.conf apt-get update --quiet --quiet >&2
}

sums() {  # sums NAME: `sha256 path` of each line that apt-get --print-uris printed
  # shellcheck disable=SC2016  # it is apt's own
  APT_CONFIG=$work/$1/apt.conf apt-get indextargets --format '$(FILENAME)' 'Created-By: Packages' |
    xargs -n 1 /usr/lib/apt/apt-helper cat-file |
    awk '/^Filename: /{path=$2} /^SHA256: /{print $2, path}' > "$work/$1/sums"
  sed -n "s#^'[^']*/\(pool/[^']*\)' .*#\1#p" | sed 's/%2b/+/g; s/%7e/~/g; s/%3a/:/g' |
    awk 'NR == FNR {sum[$2] = $1; next} !($1 in sum) {print "lock.sh: no sha256 of " $1 > "/dev/stderr"; exit 3} {print sum[$1], $1}' \
      "$work/$1/sums" -
}

lists python bookworm
lists hip sid experimental
get=(apt-get --quiet --quiet --yes --print-uris --no-install-recommends)
{
  APT_CONFIG=$work/python/apt.conf "${get[@]}" install python3.11-dev python3.11-venv git |
    grep -E '/(lib)?python3\.11|/python3-(pip|setuptools)-whl|/git_' | sums python
  APT_CONFIG=$work/hip/apt.conf "${get[@]}" --target-release experimental install \
    base-files bash ca-certificates coreutils dash diffutils findutils g++ grep gzip hipcc libc-bin libc6-dev libhipcub-dev \
    mawk sed tar zstd | sums hip
  # Headers alone: torch's name them, and nothing here is linked with these libraries.
  APT_CONFIG=$work/hip/apt.conf "${get[@]}" --target-release experimental download libhipblas-common-dev libhipblas-dev \
    libhipblaslt-dev libhipfft-dev libhiprand-dev libhipsolver-dev libhipsparse-dev librocblas-dev librocrand-dev \
    librocsolver-dev librocsparse-dev librocthrust-dev libroctx-dev | sums hip
} > "$work/debs.txt"
cat "$work/debs.txt"
