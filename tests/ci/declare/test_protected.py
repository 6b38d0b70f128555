# SPDX-License-Identifier: Apache-2.0
"""Protected files: which edits are flagged, with which diff, whose list counts, and what is put back."""

from __future__ import annotations

import functools
from pathlib import Path

import pathspec
import pytest
from support.plans import git, plan

from hilgate.declare import protected
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.declare.yaml import parse
from hilgate.errors import CannotRunHereError
from hilgate.git import tracked_files
from hilgate.model.plan import ProtectedChange

ROOT = Path(__file__).parents[3]
AT = "tests/support/tolerances.py"
BEFORE = {
    AT: 'ROW = {"fp16": 2.0}\nLSE = 1\n',
    protected.PROTECTED_FILE: (ROOT / protected.PROTECTED_FILE).read_text(),
    "ci/areas/k.yaml": "minimum: 300\n",
    "ci/quarantine.yaml": "tests: []\n",
    "ci/hilgate/judge/verdict.py": "a = 1\n",
    ".buildkite/pipeline.yml": "steps: []\n",
    "ci/hooks/pre-command": "set -e\n",
    "evals/gates.yaml": "floor: 0.9\n",
    "evals/baselines/g.json": '{"a": [true]}',
    "docker/pins.toml": 'triton = "3.6.0"\n',
    "kernels/pagedkv/audit/budgets.toml": "spills = 0\n",
    "tests/bugs/x/bug.patch": "-a\n",
    "tests/kernels/test_a.py": "assert 1\n",
    "tests/conftest.py": "",
    "README.md": "words\n",
    "kernels/pagedkv/layout.py": "a = 1\n",
}
REVIEWED = {"tests/kernels/test_a.py"}
FREE = {"README.md", "kernels/pagedkv/layout.py", "benchmarks/run.py"}


@pytest.fixture
def checkout(tmp_path):
    """A merge base with one file of each kind, and its sha."""
    for name, text in BEFORE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        git(tmp_path, *arguments)
    return tmp_path, git(tmp_path, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", BEFORE)
def test_edits_and_deletions(checkout, name):
    root, sha = checkout
    assert protected.protected_changes(root, sha, [name]) == ()  # only touched
    (root / name).write_text(BEFORE[name] + "# more\n")
    edited = protected.protected_changes(root, sha, [name])
    assert [one.path for one in edited] == ([] if name in REVIEWED | FREE else [name])
    assert all(
        "+# more" in one.hunk and one.what == "changed: 1 lines added, 0 removed"
        for one in edited
        if "json" not in name
    )
    (root / name).unlink()
    gone = (ProtectedChange(path=name, what="deleted"),)
    assert protected.protected_changes(root, sha, [name]) == (() if name in FREE else gone)


@pytest.mark.parametrize(
    ("name", "flagged"),
    [
        ("kernels/pagedkv/audit/new.toml", True),
        ("ci/areas/new.yaml", True),
        ("ci/hilgate/new.py", True),
        (".buildkite/new.yml", True),
        ("tests/bugs/x/new.patch", False),
        ("evals/baselines/new.json", False),
        ("tests/kernels/test_new.py", False),
    ],
)
def test_a_new_file_is_flagged_where_it_decides_by_itself(checkout, name, flagged):
    root, sha = checkout
    (root / name).write_text("x")
    assert protected.protected_changes(root, sha, [name]) == (
        (ProtectedChange(path=name, what="new file"),) if flagged else ()
    )


@functools.cache
def entries():
    """Those of the working tree's list, as they count once it is merged."""
    listed = parse((ROOT / protected.PROTECTED_FILE).read_bytes(), "list", protected.ProtectedList).value
    return (protected.Protected(paths=("**",)), *listed.rules)


def test_every_file_is_protected_unless_it_is_what_is_tested():
    walked = {str(path) for path in tracked_files(ROOT)} | {*BEFORE, *FREE}
    free = {name for name in walked if protected.entry_for(entries(), name) is None}
    tested = {name for name in free if name.startswith("kernels/pagedkv/")}
    assert {name for name in free - tested if not name.startswith("benchmarks/")} == {
        name for name in walked - tested if name.endswith((".md", ".png", "LICENSE")) and name[:11] != "benchmarks/"
    }
    sources = {name for name in tested if not name.endswith(".md")}
    assert not [name for name in sources if "/audit/" in name or Path(name).name in HELD_AGAINST]
    assert len(walked - free) > 150


HELD_AGAINST = {"reference.py", "selfcheck.py", "configurations.py", "conftest.py", "sitecustomize.py"}


@pytest.mark.parametrize(
    "name",
    [
        "ci/sitecustomize.py",
        "kernels/pagedkv/conftest.py",
        "evals/yaml.py",
        "pytest.ini",
        "x.pth",
        "a folder that nobody has thought of/x",
    ],
)
def test_what_influences_a_verdict_is_protected_by_default(name):
    assert protected.entry_for(entries(), name).flag == "any change"


def test_a_long_diff_is_cut_and_its_size_is_said(checkout):
    root, sha = checkout
    (root / AT).write_text("".join(f"A{number} = {'x' * 999}\n" for number in range(99)))
    (found,) = protected.protected_changes(root, sha, [AT])
    assert found.what == "changed: 99 lines added, 2 removed"
    assert len(found.hunk.splitlines()) == protected.HUNK_LINES
    assert max(map(len, found.hunk.splitlines())) <= protected.HUNK_WIDTH


def test_the_diff_is_of_the_file_and_runs_no_configured_command(checkout):
    root, sha = checkout
    (root / ".gitattributes").write_text("*.py diff=evil\n")
    git(root, "config", "diff.evil.textconv", "false")
    git(root, "config", "diff.external", "false")
    (root / AT).write_text('ROW = {"fp16": 4.0}\nLSE = 1\n')
    assert protected.protected_changes(root, sha, ["README.md", AT]) == (
        ProtectedChange(
            path=AT,
            what="changed: 1 lines added, 1 removed",
            hunk='@@ -1 +1 @@\n-ROW = {"fp16": 2.0}\n+ROW = {"fp16": 4.0}',
        ),
    )
    assert protected.protected_changes(root, "", [AT]) == ()
    with pytest.raises(CannotRunHereError):
        protected.protected_changes(root, "0" * 40, [AT])


def test_a_change_cannot_take_a_file_off_the_list(checkout):
    root, sha = checkout
    (root / AT).write_text("")
    for text in ("rules:\n  - {paths: [nothing]}\n", "rules: nonsense\n"):
        (root / protected.PROTECTED_FILE).write_text(text)
        found = protected.protected_changes(root, sha, [protected.PROTECTED_FILE, AT])
        assert [one.path for one in found] == [protected.PROTECTED_FILE, AT]


def test_a_list_of_another_version_is_flagged_itself(checkout):
    root, _ = checkout
    (root / protected.PROTECTED_FILE).write_text(f"rules:\n  - {{paths: [{AT}], compare: values}}\n")
    git(root, "commit", "-qam", "as it was")
    (root / protected.PROTECTED_FILE).write_text("rules:\n  - {paths: [evals/gates.yaml]}\n")
    names = [protected.PROTECTED_FILE, "evals/gates.yaml"]
    (root / "evals/gates.yaml").write_text("")
    found = protected.protected_changes(root, git(root, "rev-parse", "HEAD"), names)
    assert [one.path for one in found] == names


def test_a_list_whose_first_rule_counted_is_refused_by_name(checkout):
    """Read as if the last rule counted, it could take out what it protects."""
    root, _ = checkout
    (root / protected.PROTECTED_FILE).write_text("files:\n  - {paths: [evals/gates.yaml]}\n")
    git(root, "commit", "-qam", "old")
    with pytest.raises(InvalidDeclarationsError, match="unknown key 'files'"):
        protected.protected_changes(root, git(root, "rev-parse", "HEAD"), [AT])


def test_of_two_rules_the_last_that_matches_counts():
    free, kept = protected.Protected(paths=("a/**",), flag="nothing"), protected.Protected(paths=("a/b.toml",))
    assert protected.entry_for((free, kept), "a/b.toml") == kept
    assert protected.entry_for((kept, free), "a/b.toml") is None


def test_an_invalid_list_without_another_is_refused(checkout):
    root, _ = checkout
    (root / protected.PROTECTED_FILE).write_text("rules: nonsense\n")
    git(root, "commit", "-qam", "bad")
    with pytest.raises(InvalidDeclarationsError):
        protected.protected_changes(root, git(root, "rev-parse", "HEAD"), [AT])


def test_only_data_is_restored(checkout):
    root, sha = checkout
    names = (AT, "evals/gates.yaml", "ci/hilgate/x.py", "ci/areas/k.yaml", "tests/bugs/x/bug.yaml")
    found = tuple(ProtectedChange(path=path, what="changed") for path in names)
    a_plan = plan(merge_base=sha, protected_changes=found, profile="pr")
    assert protected.files_to_restore(root, a_plan) == ("evals/gates.yaml", "tests/bugs/x/bug.yaml", AT)
    assert protected.files_to_restore(root, plan(merge_base=sha)) == ()
    with pytest.raises(CannotRunHereError, match="names no merge base"):
        protected.files_to_restore(root, plan(protected_changes=found))


def test_code_owners_cover_what_is_protected_and_nothing_else():
    tracked = tracked_files(ROOT)
    lines = [line.split() for line in (ROOT / "CODEOWNERS").read_text().splitlines() if line and line[0] != "#"]
    owner = {}
    for pattern, *owners in lines:
        matched = set(pathspec.PathSpec.from_lines("gitignore", [pattern]).match_files(tracked))
        assert matched, pattern
        assert owners in ([], ["@rocm-gate-owners"])
        owner |= dict.fromkeys(matched, bool(owners))
    known = entries()
    found = {name: protected.entry_for(known, name) for name in tracked}
    needed = {name for name, entry in found.items() if entry and entry.flag != "deletion"}
    assert sorted(needed - {name for name in tracked if owner.get(name)}) == []
    assert not owner["kernels/pagedkv/layout.py"]
