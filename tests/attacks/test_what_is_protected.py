# SPDX-License-Identifier: Apache-2.0
"""Who: a branch, a fork. What: a file that decides, brought so that nobody sees it: under a name that is not UTF-8, in
a folder that is called like a page, called binary by an attribute, so that its diff is empty, or under another path
that Python finds by the same name (`reference/` for `reference.py`). Or a module that a protected one imports: not the
budgets, but what reads them.

What must happen: agents plan no change with such a name, a local run reports it; a folder called `x.md` is no page; the
diff is shown whatever attributes the change gives, and the attributes themselves need a name; all that Python finds by
the name of a protected module is protected, and so is what it imports, except for what is tested.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.forks import BASE
from support.nodes import ROOT
from support.plans import git, hilgate

from ci.lint import RULES
from hilgate.declare import protected
from hilgate.declare.yaml import parse

if TYPE_CHECKING:
    from pathlib import Path

    from support.forks import Project

LISTED = parse((ROOT / protected.PROTECTED_FILE).read_bytes(), "list", protected.ProtectedList).value
assert LISTED is not None
ENTRIES = (protected.Protected(paths=("**",)), *LISTED.rules)

ODD = os.fsdecode(b"tests/report/\xff/conftest.py")


@pytest.mark.parametrize("name", [ODD, os.fsdecode(b"src/\xc3\x28.py"), os.fsdecode(b"\xff.md")])
def test_a_name_that_is_not_utf8_is_planned_for_no_agent(change: Project, name: str) -> None:
    change.write(name, "import pytest\n")
    change.commit()
    made = hilgate(change.theirs, "plan", "--profile", "pr", "--base", "main")
    assert (made.returncode, "not UTF-8" in made.stderr) == (3, True)
    base = git(change.ours, "rev-parse", "main")
    shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    for commit in ("", git(change.theirs, "rev-parse", "HEAD")):
        assert [one.path for one in protected.protected_changes(change.theirs, base, [shown], commit)] == [shown]


def test_a_name_of_the_changed_files_that_is_nowhere_is_reported(change: Project) -> None:
    base = git(change.ours, "rev-parse", "main")
    (found,) = protected.protected_changes(change.theirs, base, ["src/what/nobody/has"])
    assert found.what == protected.UNREADABLE


def flag(path: str) -> str:
    """What of a path is protected; empty where it is free."""
    entry = protected.entry_for(ENTRIES, path)
    return entry.flag if entry else ""


FOLDERS_LIKE_PAGES = [
    *("docker/LICENSE/apt.sh", "evals/hileval.md/rule.py", ".github/workflows/x.md/y.yml", "ci/x.png/hook"),
    *("tests/test_a.py/helper.py", "kernels/pagedkv/reference.py/x"),
]
ATTRIBUTES = ["kernels/pagedkv/.gitattributes", "benchmarks/.gitattributes", ".gitmodules"]
MEASURE = [
    *("toml", "arch", "device", "errors", "interpreter", "prepared", "vllm_plugin/inspect", "vllm_plugin/compiling"),
    *("__init__", "attention/__init__", "cache/__init__", "fp8/__init__", "ssd/__init__"),
]
"""Modules of `pagedkv` that measure with a protected one."""


@pytest.mark.parametrize(
    "path", [*FOLDERS_LIKE_PAGES, *ATTRIBUTES, *(f"kernels/pagedkv/{name}.py" for name in MEASURE)]
)
def test_what_decides_is_protected(path: str) -> None:
    assert flag(path) == "any change"


LIKE_A_PROTECTED_NAME = ["references/x.py", "attention/my_reference/x.py", "attention/reference.md", "a.reference"]
TESTED = [
    *("attention/kernel.py", "attention/paged.py", "cache/write.py", "mla/decode.py", "ssd/prefill.py"),
    *("routing/router.py", "launch.py"),
]


@pytest.mark.parametrize("path", [*LIKE_A_PROTECTED_NAME, *TESTED])
def test_what_is_tested_is_free(path: str) -> None:
    assert flag(f"kernels/pagedkv/{path}") == ""


@pytest.mark.parametrize(
    "name",
    [
        *("/__init__.py", "/__init__.pyi", "/part.py", "/a/b/part.py", "/__init__.pyc", "/x.toml"),
        *(".pyi", ".pyc", ".so", ".abi3.so", ".cpython-311-x86_64-linux-gnu.so", ".pyd", ".PY", ".py.orig"),
    ],
)
@pytest.mark.parametrize(
    "module", ["kernels/pagedkv/attention/reference", "kernels/pagedkv/selfcheck", "benchmarks/oracle"]
)
def test_whatever_python_finds_by_a_protected_name_is_protected(module: str, name: str) -> None:
    for path in (f"{module}{name}", f"{module.replace('reference', 'Reference')}{name}"):
        assert flag(path) == "any change", path


IMPORTING = {
    "ci/agents.yaml": BASE["ci/agents.yaml"],
    "ci/project.yaml": "python_path: [src]\n",
    "ci/protected.yaml": "rules:\n- {paths: ['src/lib/*'], flag: nothing}\n- paths: [src/lib/oracle.py]\n",
    "src/lib/__init__.py": "",
    "src/lib/oracle.py": "def right(x):\n    return x\n",
    "src/lib/helper.py": "TOLERANCE = 0.1\n",
}
WAYS = (
    "from lib import helper",
    "from . import helper",
    "import lib.helper",
    "from lib.helper import TOLERANCE",
    "def f():\n    from lib.helper import TOLERANCE",
    "try:\n    import lib.helper\nexcept ImportError:\n    pass",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tested", [True, False])
def test_a_free_module_that_an_oracle_imports_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, tested: bool
) -> None:
    rules = IMPORTING["ci/protected.yaml"] + ("tested: [src/lib/helper.py, src/lib/__init__.py]\n" if tested else "")
    files = IMPORTING | {"ci/protected.yaml": rules, "src/lib/oracle.py": f"{way}\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    found = {line.partition(":")[0] for line in RULES["protected-imports"](files)}
    assert found == (set() if tested else {"src/lib/__init__.py", "src/lib/helper.py"})


@pytest.mark.parametrize("name", [glob.replace("*", "x").replace("[0-9]", "1") for glob in protected.UNREADABLE_CODE])
def test_code_that_nobody_can_read_is_protected_wherever_it_lies(name: str) -> None:
    for path in (name, name.upper()):
        entry = protected.entry_for(ENTRIES[-1:], f"kernels/pagedkv/{path}")
        assert entry is not None, path
        assert entry.flag == "any change"


@pytest.mark.parametrize("attribute", ["-diff", "binary", "diff=evil", "-text -diff", "working-tree-encoding=UTF-16"])
@pytest.mark.parametrize("committed", [True, False])
def test_no_attribute_hides_what_is_loosened(change: Project, attribute: str, committed: bool) -> None:
    for place in (".gitattributes", "src/.gitattributes"):
        change.write(place, f"*.toml {attribute}\n")
    change.write("src/limits.toml", "floor = 0.01\n")
    base = git(change.ours, "rev-parse", "main")
    commit = change.commit() if committed and "encoding" not in attribute else ""
    names = [".gitattributes", "src/.gitattributes", "src/limits.toml"]
    found = {one.path: one for one in protected.protected_changes(change.theirs, base, names, commit)}
    assert list(found) == names
    if "encoding" not in attribute or commit:
        assert found["src/limits.toml"].what == "changed: 1 lines added, 1 removed"
        assert "+floor = 0.01" in found["src/limits.toml"].hunk
    else:
        assert found["src/limits.toml"].hunk


def test_a_file_that_looks_like_a_diff_shows_its_own(change: Project) -> None:
    base = git(change.ours, "rev-parse", "main")
    change.write("src/limits.toml", "diff --git a/x b/x\n--- a\n+++ b\n@@ -1 +1 @@\n")
    change.write("ci/agents.yaml", "evil\n")
    change.write("tests/test_a.py", "")
    commit = change.commit()
    found = protected.protected_changes(
        change.theirs, base, ["ci/agents.yaml", "src/limits.toml", "tests/test_a.py"], commit
    )
    assert [one.path for one in found] == ["ci/agents.yaml", "src/limits.toml"]
    assert "+evil" in found[0].hunk
    assert "+diff --git a/x b/x" in found[1].hunk
    assert "evil" not in found[1].hunk
