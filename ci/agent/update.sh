#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring this host's clone to the newest commit of the default branch, or to COMMIT (which is also how to go back), and
# restart its agents, whose jobs go to other hosts. As root, one host after the other; gate hosts first.
#
#   update.sh [COMMIT]
#
# Where the environment of a host that plans and judges cannot be made again, the clone goes back and nothing restarts.
set -euo pipefail
clone="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)"
before="$(git -C "$clone" rev-parse HEAD)"
git -C "$clone" fetch --quiet origin "${HILGATE_BRANCH:-main}"
git -C "$clone" -c advice.detachedHead=false checkout --quiet --detach "${1:-FETCH_HEAD}"
after="$(git -C "$clone" rev-parse HEAD)"
if [ -d "$clone/.venv" ] && ! git -C "$clone" diff --quiet "$before" "$after" -- requirements Makefile pyproject.toml; then
  if ! make -C "$clone" setup; then
    git -C "$clone" -c advice.detachedHead=false checkout --quiet --detach "$before"
    make -C "$clone" setup || true
    echo "not updated: the environment of $after cannot be made; this host still has $before" >&2
    exit 1
  fi
fi
systemctl daemon-reload
systemctl restart 'buildkite-agent@*'
echo "updated from $before to $after; back: $0 $before"
