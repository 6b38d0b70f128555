#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Refuses a tree that is not the pinned commit, or patches it: commit.sh FOLDER COMMIT "SUBMODULE=COMMIT ..." [PATCH...]
# Whatever fetched it is not believed: every object is hashed, and every file compared with the commit that is pinned.
set -euo pipefail
folder=$1 commit=$2
read -ra submodules <<< "$3"
shift 3
refuse() { echo "commit.sh: $*" >&2; exit 3; }
is_pinned() {
  [[ $2 =~ ^[0-9a-f]{40}$ ]] || refuse "'$2' is not the 40 hex digits of a commit of $1"
  [ -e "$1/.git" ] || refuse "$1 has no .git, so nothing says which commit it is"
  local found; found=$(git -C "$1" rev-parse HEAD)
  [ "$found" = "$2" ] || refuse "$1 is at commit $found, pinned is $2"
  git -C "$1" fsck --no-dangling --no-progress >&2 || refuse "$1 holds objects that are not what their hashes say"
  git -C "$1" read-tree HEAD # an index without times: every file is read
  found=$(git -C "$1" status --porcelain --ignored --ignore-submodules=none)
  [ -z "$found" ] || refuse "$1 is not what its commit holds: ${found//$'\n'/, }"
  found=$(git -C "$1" ls-tree -r HEAD | awk '$2 == "commit" { print $4 "=" $3 }' | sort | xargs)
  [ "$found" = "$3" ] || refuse "$1 has the submodules '$found', pinned are '$3'"
}
is_pinned "$folder" "$commit" "$(printf '%s\n' "${submodules[@]}" | sort | xargs)"
for one in "${submodules[@]}"; do is_pinned "$folder/${one%=*}" "${one##*=}" ""; done
find "$folder" -name .git -prune -exec rm -rf {} + # a build must not depend on it
for patch in "$@"; do # as unpack.sh: git takes no fuzz
  patch=$(realpath "$patch")
  (cd "$folder" && GIT_CEILING_DIRECTORIES=$(dirname "$PWD") git apply "$patch")
done
