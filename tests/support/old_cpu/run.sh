#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command, and all that it starts, as on a processor that has AVX2 and neither AVX-512 nor AMX:
#
#   tests/support/old_cpu/run.sh make gate
#
# Whoever asks /proc/cpuinfo (hilgate, Inductor) finds none of their flags: another file is mounted there, for this
# command alone, as root or in a user namespace. torch asks the processor itself; sitecustomize.py beside this file has
# it agree with /proc/cpuinfo, so that vLLM loads its AVX2 library: it is laid over the folder of what the environment
# (.venv, else python3) has installed, because steps get no PYTHONPATH. The libraries below take a variable each.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# The second half: already where mounts are our own.
if [[ ${1:-} == --hidden ]]; then
    owner=$2 group=$3 cpuinfo=$4 packages=$5
    shift 5
    mount --bind "$cpuinfo" /proc/cpuinfo
    rm -f "$cpuinfo"
    mount -t overlay -o "lowerdir=$here:$packages" overlay "$packages"
    [[ $owner == 0 ]] && exec "$@"
    exec unshare --user --map-user="$owner" --map-group="$group" "$@"
fi

(($# > 0)) || { echo "usage: $0 COMMAND [ARGUMENT ...]" >&2; exit 2; }
# shellcheck source=tests/support/old_cpu/variables.sh
source "$here/variables.sh"
cpuinfo=$(mktemp)
old_cpuinfo >"$cpuinfo"
export "${OLD_CPU[@]}"
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
user=(--user --map-root-user)
[[ $(id -u) == 0 ]] && user=()
exec unshare "${user[@]}" --mount "${BASH_SOURCE[0]}" --hidden "$(id -u)" "$(id -g)" "$cpuinfo" "$packages" "$@"
