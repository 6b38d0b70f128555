# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: a few hundred bytes of YAML that are gigabytes once aliases are written out, or nested too deep.

What must happen: the planner says within a second what is wrong and ends with 3; no host hangs or runs out of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.plans import hilgate

if TYPE_CHECKING:
    from support.forks import Project

LEVELS = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 12))
BOMBS = {
    "aliases": "b0: &b0 [x, x, x, x, x, x, x, x, x]\n" + LEVELS,
    "nested": "a: " + "[" * 20000 + "]" * 20000 + "\n",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["ci/areas/a.yaml", "ci/protected.yaml"])
def test_a_bomb_is_a_mistake_in_a_file(change: Project, bomb: str, name: str) -> None:
    change.write(name, BOMBS[bomb])
    change.commit()
    done = hilgate(change.theirs, "plan", "--profile", "pr", "--base", "main")
    assert "a bug in hilgate" not in done.stderr
    assert done.returncode == (3 if name == "ci/areas/a.yaml" else 0), "the merge base's own list counts"
    assert "aliases are written out" in done.stderr or "not YAML" in done.stderr or name != "ci/areas/a.yaml"
