#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts another repository under hilgate, plants a bug in its kernel, and ends with the gate's exit status: 1.
set -euo pipefail
cd "$(mktemp -d)"
git init --quiet --initial-branch main
mkdir fuse tests && touch fuse/__init__.py
printf 'def row_sum(rows):\n    return [sum(row) for row in rows]\n' > fuse/rows.py
cat > tests/test_rows.py <<'PYTHON'
from fuse.rows import row_sum


def test_row_sum():
    assert row_sum([[1, 2], [3, 4]]) == [3, 7]
PYTHON
hilgate init
git add -A
git -c user.name=you -c user.email=you@example.invalid commit --quiet --message "Use hilgate"
hilgate gate --all              # green
sed -i 's/sum(row)/sum(row[1:])/' fuse/rows.py # the bug
hilgate gate --base HEAD                      # red: which test, its numbers, the line that repeats it
