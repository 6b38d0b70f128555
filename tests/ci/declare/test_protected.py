"""What a change makes of its own gate: which direction is looser, and that nothing passes unseen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import IDENTITY, plan

from hilgate.declare import protected as loosening
from hilgate.declare import values
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.declare.protected import Protected
from hilgate.errors import CannotRunHereError
from hilgate.model import Loosening

ROOT = Path(__file__).parents[3]
OURS = loosening.Lists(loosening._read(ROOT / loosening.PROTECTED_FILE, ROOT))

TOLERANCES = """\"\"\"Why they are what they are.\"\"\"
U = {"fp16": 2.0**-11, "fp32": 2.0**-24}
ROW = {("attention", "fp16"): 2 * U["fp16"], ("scan", "fp16"): 3 * U["fp16"]}
LSE = -(1) + 2
def allowed(op): return ROW[op, "fp16"]
"""
AREA = """area: kernels
title: Kernels
paths: [kernels/, tests/, "!*.md"]
steps:
  - {key: a, label: A, command: pytest a, devices: [cpu, gfx942], minimum: 300, timeout_minutes: 20}
  - {key: b, label: B, command: pytest b, devices: [cpu], minimum: 5, timeout_minutes: 20}
"""
BUDGETS = '[every]\nvgpr_spills = 0\nwide_share = 1.0\n\n[[narrow]]\nrow = "r"\ntriton = "3.8.0"\nwhy = "w"\n'
QUARANTINE = """tests:
  - {test: t, step: a, devices: [gfx942], reason: r, owner: o, added: "2026-11-01", expires: "2026-11-10"}
  - {test: t, step: b, reason: r, owner: o, added: "2026-11-01", expires: "2026-11-10"}
"""
AT = "tests/support/tolerances.py"
GATES = "gates:\n  g: {title: g, floor: 0.9, margin: 0.03, alpha: 0.01}\n"

# (path, text before, old, new) -> what is told, and whether it is looser; None: nothing is told.
EDITS = {
    "tolerance-up": (AT, TOLERANCES, "2 * U", "4 * U", "ROW[attention, fp16]: 0.000976562 ->", True),
    "tolerance-down": (AT, TOLERANCES, "2 * U", "1 * U", "ROW[attention, fp16]:", False),
    "roundoff-up-moves-all": (AT, TOLERANCES, "**-11", "**-9", "U.fp16: 0.000488281 ->", True),
    "tolerance-removed": (
        AT, TOLERANCES, '("scan", "fp16"): 3 * U["fp16"]', "", "removed: ROW[scan", True),
    "tolerance-added": (
        AT, TOLERANCES, 'LSE = -(1) + 2', 'LSE = 1\nNEW = {("x", "y"): 9.0}', "added: NEW", False),
    "constant-becomes-code": (AT, TOLERANCES, "LSE = -(1) + 2", "LSE = f()", "code around", True),
    "code-around-it": (
        AT, TOLERANCES, 'ROW[op, "fp16"]', '9 * ROW[op, "fp16"]', "code around", True),
    "a-docstring": (AT, TOLERANCES, "Why they are", "What they are", None, None),
    "a-comment": (AT, TOLERANCES, "LSE = -(1) + 2", "LSE = -(1) + 2  # as ever", None, None),
    "syntax-error": (AT, TOLERANCES, "def ", "dfe ", "cannot be compared", True),
    "endless-power": (AT, TOLERANCES, "**-11", "**10**10**10", "cannot be compared", True),
    "minimum-down": ("ci/areas/k.yaml", AREA, "300", "3", "steps[a].minimum: 300 -> 3", True),
    "minimum-up": ("ci/areas/k.yaml", AREA, "300", "400", "steps[a].minimum: 300 -> 400", False),
    "minimum-to-text": ("ci/areas/k.yaml", AREA, "300", "many", "steps[a].minimum: 300 -> many", True),
    "minimum-to-false": ("ci/areas/k.yaml", AREA, "300", "false", "steps[a].minimum: 300 -> False", True),
    "timeout-up": ("ci/areas/k.yaml", AREA, "20}\n  - {key: b", "60}\n  - {key: b", "steps[a].timeout_minutes", True),
    "device-lost": ("ci/areas/k.yaml", AREA, "cpu, gfx942", "cpu", "removed: steps[a].devices[gfx942]", True),
    "device-more": ("ci/areas/k.yaml", AREA, "gfx942", "gfx942, gfx950", "added: steps[a].devices[gfx950]", False),
    "step-lost": ("ci/areas/k.yaml", AREA, AREA.splitlines()[-1], "", "removed: steps[b]", True),
    "step-more": (
        "ci/areas/k.yaml", AREA, "  - {key: b", "  - {key: c, minimum: 1}\n  - {key: b", "added: steps[c]", False),
    "steps-in-another-order": (
        "ci/areas/k.yaml", AREA, "\n".join(AREA.splitlines()[4:]), "\n".join(AREA.splitlines()[:3:-1]), None, None),
    "command": ("ci/areas/k.yaml", AREA, "pytest a", "pytest a -k easy", "pytest a -> pytest a -k easy", True),
    "globs-in-another-order": ("ci/areas/k.yaml", AREA, 'tests/, "!*.md"', '"!*.md", tests/', "paths:", True),
    "always-gone": (
        "ci/areas/k.yaml", f"always: true\n{AREA}", "always: true", "always: false", "always: True ->", True),
    "network": ("ci/areas/k.yaml", AREA, "minimum: 5", "minimum: 5, network: true", "network = True", True),
    "a-label": ("ci/areas/k.yaml", AREA, "label: A", "label: Better", None, None),
    "spills-up": ("kernels/pagedkv/audit/budgets.toml", BUDGETS, "spills = 0", "spills = 9", "every.vgpr_spills", True),
    "wide-down": ("kernels/pagedkv/audit/budgets.toml", BUDGETS, "1.0", "0.5", "every.wide_share: 1 -> 0.5", True),
    "wide-up": ("kernels/pagedkv/audit/budgets.toml", BUDGETS, "1.0", "1.5", "every.wide_share", False),
    "an-excuse-more": (
        "kernels/pagedkv/audit/declared.toml", BUDGETS, "[[narrow]]", '[[narrow]]\nrow = "q"\ntriton = "3"\n[[narrow]]',
        "added: narrow[q, 3].row", True),
    "not-toml": ("kernels/pagedkv/audit/budgets.toml", BUDGETS, "[every]", "[every", "cannot be compared", True),
    "quarantine-more": (
        "ci/quarantine.yaml", QUARANTINE, "tests:", "tests:\n  - {test: u, step: a}", "added: tests[u, a]", True),
    "quarantine-fewer": (
        "ci/quarantine.yaml", QUARANTINE, QUARANTINE.splitlines()[2], "", "removed: tests[t, b]", False),
    "quarantine-longer": (
        "ci/quarantine.yaml", QUARANTINE, "11-10", "11-15", "expires: 2026-11-10 -> 2026-11-15", True),
    "quarantine-everywhere": ("ci/quarantine.yaml", QUARANTINE, "devices: [gfx942], ", "", "added: tests[t, a]", True),
    "floor-down": ("evals/gates.yaml", GATES, "0.9", "0.5", "gates.g.floor: 0.9 -> 0.5", True),
    "margin-down": ("evals/gates.yaml", GATES, "0.03", "0.01", "gates.g.margin: 0.03 -> 0.01", False),
    "alpha-either-way": ("evals/gates.yaml", GATES, "0.01", "0.001", "gates.g.alpha", True),
    "gate-gone": ("evals/gates.yaml", GATES, GATES.splitlines()[1], "", "removed: gates", True),
    "a-baseline": ("evals/baselines/g.json", '{"a": [true, false]}', "true", "false", "removed: a[True]", True),
    "a-pin": ("docker/pins.toml", 'triton = "3.6.0"\n', "3.6.0", "3.5.0", "triton: 3.6.0 -> 3.5.0", True),
    "hilgate": ("ci/hilgate/judge/verdict.py", "a = 1\n", "1", "2", "changed", True),
    "a-hook": (".buildkite/hooks/pre-command", "set -e\n", "-e", "-u", "changed", True),
    "a-planted-bug": ("tests/bugs/x/bug.patch", "-a\n", "-a", "-b", "changed", True),
    "the-list-itself": ("ci/protected.yaml", "files: []\n", "[]", "[1]", "changed", True),
    "a-test": ("tests/kernels/test_a.py", "assert 1\n", "1", "2", None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_each_edit_is_told_with_its_direction(name):
    path, before, old, new, what, looser = EDITS[name]
    assert old in before
    told = loosening.compare(path, before.encode(), before.replace(old, new, 1).encode(), OURS.of(path))
    if what is None:
        assert told == []
    else:
        assert any(what in text and loose is looser for text, loose in told), told
        assert any(loose for _, loose in told) is looser


WHOLE = {
    "deleted-test": ("tests/kernels/test_a.py", b"x", None, [("deleted", True)]),
    "new-test": ("tests/kernels/test_a.py", None, b"x", []),
    "deleted-conftest": ("tests/conftest.py", b"x", None, [("deleted", True)]),
    "deleted-bug": ("tests/bugs/x/bug.yaml", b"x", None, [("deleted", True)]),
    "new-bug": ("tests/bugs/x/bug.yaml", None, b"x", [("new file", False)]),
    "new-baseline": ("evals/baselines/x.json", None, b"{}", [("new file", False)]),
    "new-code": ("ci/hilgate/x.py", None, b"x", [("new file", True)]),
    "deleted-tolerances": (AT, b"x", None, [("deleted", True)]),
    "new-area": ("ci/areas/x.yaml", None, b"area: x", [("new file", False)]),
    "deleted-area": ("ci/areas/x.yaml", b"area: x", None, [("deleted", True)]),
    "first-quarantine": (
        "ci/quarantine.yaml", None, b"tests: [{test: t, step: a}]",
        [("added: tests[t, a].step = a", True), ("added: tests[t, a].test = t", True)]),
    "quarantine-gone": ("ci/quarantine.yaml", b"tests: []", None, [("deleted", False)]),
    "only-touched": ("ci/hilgate/x.py", b"x", b"x", []),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_come_and_go(name):
    path, before, after, told = WHOLE[name]
    assert loosening.compare(path, before, after, OURS.of(path)) == told


@pytest.mark.parametrize(
    "path", ["README.md", "kernels/pagedkv/layout.py", "tests/support/plans.py", "sub/ci/quarantine.yaml"]
)
def test_what_decides_nothing_is_not_listed(path):
    assert OURS.of(path) is None


def test_a_baseline_of_thousands_is_cut_short():
    before, after = (str({f"q{n}": sign for n in range(500)}).replace("'", '"').encode() for sign in (1, 2))
    told = loosening.compare("evals/baselines/g.json", before, after, OURS.of("evals/baselines/g.json"))
    assert len(told) == loosening.MOST_VALUES + 1
    assert told[-1] == ("and 480 more values", True)


numbers = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5), min_size=1)
UP_IS_LOOSER = Protected(paths=("x",), compare="values", collections=("*",), higher_is_looser=("*",))


@given(numbers, numbers)
def test_a_table_of_limits_is_looser_exactly_when_one_rises_or_goes(before, after):
    told = loosening._told({**before}, {**after}, UP_IS_LOOSER)
    rises = any(name not in after or after[name] > limit for name, limit in before.items())
    assert any(looser for _, looser in told) == rises
    assert (told == []) == (before == after)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("minimum", "minimum"),
        ("steps[a.b].minimum", "minimum"),
        ("steps[a].paths[x/[y]]", "paths"),
        ("ROW[a, b]", "ROW"),
    ],
)
def test_the_name_of_a_path(path, name):
    assert values.name_of(path) == name


@pytest.fixture
def checkout(tmp_path):
    """A merge base with tolerances and a protected list, and its sha."""
    for name, text in {
        AT: TOLERANCES,
        loosening.PROTECTED_FILE: (ROOT / loosening.PROTECTED_FILE).read_text(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "base"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    return tmp_path, sha.strip()


def test_the_working_tree_is_compared_with_the_merge_base(checkout):
    root, sha = checkout
    (root / AT).write_text(TOLERANCES.replace("2 * U", "4 * U"))
    assert loosening.loosened(root, sha, ["README.md", AT]) == (
        Loosening(path=AT, what="ROW[attention, fp16]: 0.000976562 -> 0.00195312", looser=True),
    )
    assert loosening.loosened(root, "", [AT]) == ()
    with pytest.raises(CannotRunHereError):
        loosening.loosened(root, "0" * 40, [AT])


def test_a_change_cannot_take_a_file_off_the_list(checkout):
    root, sha = checkout
    (root / loosening.PROTECTED_FILE).write_text("files:\n  - {paths: [nothing], compare: text}\n")
    (root / AT).write_text(TOLERANCES.replace("2 * U", "4 * U"))
    told = loosening.loosened(root, sha, [loosening.PROTECTED_FILE, AT])
    assert [(one.path, one.looser) for one in told] == [
        ("ci/protected.yaml", True),
        (AT, True),
    ]
    (root / loosening.PROTECTED_FILE).write_text("files: nonsense\n")
    assert len(loosening.loosened(root, sha, [loosening.PROTECTED_FILE, AT])) == 2


def test_an_invalid_list_without_another_is_refused(checkout):
    root, _ = checkout
    (root / loosening.PROTECTED_FILE).write_text("files: nonsense\n")
    subprocess.run(["git", *IDENTITY, "commit", "-qam", "bad"], cwd=root, check=True)
    bad = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()
    with pytest.raises(InvalidDeclarationsError):
        loosening.loosened(root, bad, [AT])


def test_only_data_is_put_back_and_only_what_is_looser(checkout):
    root, sha = checkout
    names = {
        AT: True,
        "evals/gates.yaml": False,
        "ci/hilgate/x.py": True,
        "ci/areas/k.yaml": True,
    }
    told = tuple(Loosening(path=path, what="changed", looser=looser) for path, looser in names.items())
    told += (Loosening(path="tests/bugs/x/bug.yaml", what="deleted", looser=True),)
    a_plan = plan(merge_base=sha, loosened=told, profile="pr")
    assert loosening.to_put_back(root, a_plan) == ("tests/bugs/x/bug.yaml", AT)
    assert loosening.to_put_back(root, plan(merge_base=sha)) == ()
    with pytest.raises(CannotRunHereError, match="names no merge base"):
        loosening.to_put_back(root, plan(loosened=told))
