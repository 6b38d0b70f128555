# SPDX-License-Identifier: Apache-2.0
"""Edited bodies of kernels select the steps that launched them; whatever else changes, imports decide as ever."""

from pathlib import Path

import pytest
from support.declarations import declare, reasons, step
from support.plans import git

from hilgate.declare.imports import build
from hilgate.git import inspect
from hilgate.plan.launched import Launched, Launches, edited_bodies
from hilgate.plan.make import assemble

SOURCE = """\
import triton
import triton.language as tl
from triton.experimental import gluon

from pagedkv.strides import wide

TILE = 16


@triton.jit
def helper(x):
    # A comment of the body.
    return x + 1


@triton.autotune(configs=[], key=[])
@triton.jit(do_not_specialize=["n"])
def kernel(x, n, TILE: tl.constexpr = 16):
    "Adds."
    tl.store(x, helper(wide(n)))


@gluon.jit
def other(x):
    return x


def launch(x):
    kernel[(1,)](x, 3)
"""

EDITS = {
    "a body": ("x + 1", "x + 2", {"helper"}),
    "a comment in a body": ("    # A comment of the body.\n    return", "    return", set()),
    "a comment after code": ("return x + 1", "return x + 1  # one", {"helper"}),
    "two bodies": ("wide(n)", "n", {"kernel"}),
    "a body of Gluon": ("return x\n", "return -x\n", {"other"}),
    "more lines": ("return x + 1", "x += 1\n    return x", {"helper"}),
    "a docstring": ('"Adds."', '"Adds one."', {"kernel"}),
    "a signature": ("def helper(x)", "def helper(y)", set()),
    "a default": ("constexpr = 16", "constexpr = 32", set()),
    "an annotation": ("TILE: tl.constexpr", "TILE: int", set()),
    "a decorator": ('["n"]', "[]", set()),
    "another decorator": ("@gluon.jit", "@triton.jit", set()),
    "a decorator of somebody else": ("@gluon.jit\n", "@cached\n@gluon.jit\n", set()),
    "a constant": ("TILE = 16\n", "TILE = 32\n", set()),
    "an import": ("strides import wide", "layout import wide", set()),
    "a launcher": ("(x, 3)", "(x, 4)", set()),
    "a new kernel": ("def launch", "@triton.jit\ndef new(x):\n    return x\n\n\ndef launch", set()),
    "a kernel that is gone": ("@gluon.jit\ndef other(x):\n    return x\n", "", set()),
    "a comment outside": ("TILE = 16", "TILE = 16  # tokens", set()),
    "no syntax": ("return x + 1", "return x +", set()),
    "nothing": ("x + 1", "x + 1", set()),
}


@pytest.mark.parametrize(("old", "new", "edited"), EDITS.values(), ids=EDITS)
def test_only_lines_of_bodies_count_as_edited_bodies(old, new, edited):
    after = SOURCE.replace(old, new)
    assert edited_bodies(SOURCE.encode(), after.encode()) == edited
    assert edited_bodies(SOURCE.replace("\n", "\r\n").encode(), after.replace("\n", "\r\n").encode()) == edited


@pytest.mark.parametrize(
    ("beginning", "decorator", "known"),
    [
        ("from triton import jit", "@jit", True),
        ("import triton as t", "@t.jit(debug=True)", True),
        ("from vllm.triton_utils import tl, triton", "@triton.jit", True),
        ("from .compat import triton", "@triton.jit", True),
        ("import numba", "@numba.jit", False),
        ("from numba import jit  # not triton", "@jit", False),
        ("import triton, functools", "@functools.cache\n@triton.jit", False),
        ("import triton", "@triton.constexpr_function", False),
        ("", "@triton.jit", False),
    ],
)
def test_a_kernel_is_what_triton_makes_one(beginning, decorator, known):
    before, after = (f"{beginning}\n{decorator}\ndef f(x):\n    return {value}\n".encode() for value in (1, 2))
    assert edited_bodies(before, after) == ({"f"} if known else set())


def test_what_cannot_be_told_apart_is_no_edited_body():
    twice = "import triton\n" + "@triton.jit\ndef f(x):\n    return 1\n" * 2
    inner = "import triton\ndef make():\n    @triton.jit\n    def f(x):\n        return 1\n"
    for text in (twice, inner):
        assert edited_bodies(text.encode(), text.replace("return 1", "return 2").encode()) == set()
    assert edited_bodies(None, SOURCE.encode()) == edited_bodies(SOURCE.encode(), None) == set()
    assert edited_bodies(SOURCE.encode(), b"\xff") == set()


FILES = {
    "kernels/pagedkv/__init__.py": "",
    "kernels/pagedkv/kernel.py": SOURCE,
    "kernels/pagedkv/launcher.py": "from pagedkv import kernel",
    "tests/kernels/test_one.py": "import pagedkv.launcher",
    "tests/kernels/test_two.py": "import pagedkv.launcher",
    "kernels/notes.txt": "",
}
KERNEL = "kernels/pagedkv/kernel.py"


class Checkout:
    """A repository with kernels, two steps that import them, and a third that does not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)
        git(root, "init", "--quiet", "--initial-branch=main")
        self.commit()
        both = ("cpu", "gfx942")
        self.declarations = declare(
            kernels=[
                step("one", both, imports=("tests/kernels/test_one.py",)),
                step("two", both, imports=("tests/kernels/test_two.py",), needs=("one",)),
                step("whole", both),
            ],
            tests=[step("lint")],
            docs=[step("pages")],
        )

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def edit(self, old, new, name=KERNEL):
        self.write(name, (self.root / name).read_text().replace(old, new))

    def commit(self):
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--allow-empty", "-m", "more")
        return git(self.root, "rev-parse", "HEAD")

    def plan(self, records):
        """The plan of what differs from HEAD; `records`: (step, device) -> records, the newest first."""

        def asked(key, device):
            return records.get((key, device), [])

        changed = inspect(self.root, "HEAD")
        graph = build(self.root, ["kernels", "."])
        launched = Launched(self.root, changed, self.declarations.areas, graph, asked)
        return assemble(self.declarations, changed, None, profile="pr", graph=graph, launched=launched)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def why(plan):
    return {one.key: one.reason for one in plan.steps}


IMPORTS = f"{KERNEL} changed, imported by tests/kernels/test_{{}}.py"
HELPER, OTHER = f"{KERNEL}::helper", f"{KERNEL}::other"


def test_a_record_selects_what_launched_and_omits_what_did_not(checkout):
    commit = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("x + 1", "x + 2")
    records = {
        ("one", "cpu"): [Launches(commit, frozenset({OTHER}))],
        ("two", "cpu"): [Launches(commit, frozenset({HELPER, OTHER}))],
    }
    plan = checkout.plan(records)
    where = f"the build of {commit[:12]}"
    assert why(plan) == {
        "one-gfx942": IMPORTS.format("one"),  # no record of another device stands for it
        "two-cpu": f"{KERNEL}: body of helper changed, launched in {where}",
        "two-gfx942": IMPORTS.format("two"),
        "whole-cpu": f"{KERNEL} changed",
        "whole-gfx942": f"{KERNEL} changed",
    }
    assert reasons(plan)["one-cpu"] == f"not affected: it passed and launched no changed kernel in {where}"
    assert next(one.cause for one in plan.omissions if one.key == "one-cpu") == "not affected"
    needs = {one.key: one.depends_on for one in plan.steps}
    assert needs["two-cpu"] == (), "it passed, and nothing of it has changed"
    assert needs["two-gfx942"] == ("one-gfx942",)


def test_a_step_that_launches_nothing_changed_is_omitted_once(checkout):
    commit = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("x + 1", "x + 2")
    silent = [Launches(commit, frozenset({OTHER}))]
    keys = [(key, device) for key in ("one", "two") for device in ("cpu", "gfx942")]
    plan = checkout.plan(dict.fromkeys(keys, silent))
    assert {one.step.key for one in plan.steps} == {"whole"}
    silence = f"not affected: it passed and launched no changed kernel in the build of {commit[:12]}"
    assert {key: text for key, text in reasons(plan).items() if "launched" in text} == {"one": silence, "two": silence}


def test_a_step_of_its_areas_files_is_selected_by_its_record_too(checkout):
    """It declares no imports; what it reads by name selects it whatever it launches."""
    commit = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("x + 1", "x + 2")
    silent = {("whole", "cpu"): [Launches(commit, frozenset({OTHER}))]}
    plan = checkout.plan(silent)
    assert why(plan)["whole-gfx942"] == f"{KERNEL} changed"
    assert reasons(plan)["whole-cpu"].startswith("not affected: it passed and launched no changed kernel in the build")
    checkout.declarations = declare(kernels=[step("whole", reads=(KERNEL,))], tests=[step("lint")])
    assert why(checkout.plan(silent))["whole-cpu"] == f"{KERNEL} changed"
    checkout.edit("import", "import  ", "kernels/pagedkv/launcher.py")
    assert why(checkout.plan(silent))["whole-cpu"].startswith(f"{KERNEL} and 1 more changed")


@pytest.mark.parametrize(
    "names",
    [
        {HELPER},
        {"*::helper"},
        {".venv/pagedkv/kernel.py::helper"},
        {KERNEL},
        {"*/pagedkv/kernel.py"},
        {"results/copy/kernels/pagedkv/kernel.py"},
        {"kernels/"},
        {"./"},
        {HELPER, OTHER},
    ],
    ids=[
        "launched",
        "a copy of it",
        "an installed copy",
        "its source is read",
        "that of a copy is read",
        "that of a copy in the checkout is read",
        "its folder is read",
        "everything is read",
        "among others",
    ],
)
def test_each_kind_of_note_selects(checkout, names):
    commit = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("x + 1", "x + 2")
    plan = checkout.plan({("one", "cpu"): [Launches(commit, frozenset(names))]})
    assert why(plan)["one-cpu"].startswith(f"{KERNEL}: body of helper changed, launched in")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (KERNEL, "(x, 3)", "(x, 4)"),
        (KERNEL, "def helper(x)", "def helper(y)"),
        ("kernels/pagedkv/launcher.py", "import", "import  "),
        ("tests/kernels/test_one.py", "import", "import  "),
    ],
)
def test_whatever_else_changes_selects_by_imports(checkout, name, old, new):
    commit = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("x + 1", "x + 2")
    checkout.edit(old, new, name)
    plan = checkout.plan({("one", "cpu"): [Launches(commit)]})
    assert "launched" not in why(plan)["one-cpu"]
    assert "changed" in why(plan)["one-cpu"]


def test_an_earlier_record_counts_while_nothing_of_it_changed(checkout):
    old = git(checkout.root, "rev-parse", "HEAD")
    checkout.edit("return x\n", "return -x\n")  # a body that it does not launch
    checkout.write("docs/a.md", "x")
    checkout.commit()
    checkout.edit("x + 1", "x + 2")
    calls = {("one", "cpu"): [Launches(old, frozenset({f"{KERNEL}::kernel"}))]}
    assert reasons(checkout.plan(calls))["one-cpu"].endswith(f"in the build of {old[:12]}")


OUTDATED = {
    "its test": ("tests/kernels/test_one.py", "import", "import  "),
    "a launcher": (KERNEL, "(x, 3)", "(x, 4)"),
    "a body that it launched": (KERNEL, "wide(n)", "n"),
    "a file that no area claims": ("setup.cfg", "", "x"),
}


@pytest.mark.parametrize(("name", "old", "new"), OUTDATED.values(), ids=OUTDATED)
def test_a_record_that_is_out_of_date_says_so_and_imports_select(checkout, name, old, new):
    before = git(checkout.root, "rev-parse", "HEAD")
    if old:
        checkout.edit(old, new, name)
    else:
        checkout.write(name, new)
    checkout.commit()
    checkout.edit("x + 1", "x + 2")
    plan = checkout.plan({("one", "cpu"): [Launches(before, frozenset({f"{KERNEL}::kernel"}))]})
    assert why(plan)["one-cpu"].startswith(
        f"{IMPORTS.format('one')}; its record of the build of {before[:12]} is out of date: {name}"
    )


def test_records_that_do_not_count_say_why_and_an_older_one_may(checkout):
    commit = git(checkout.root, "rev-parse", "HEAD")
    git(checkout.root, "checkout", "--quiet", "-b", "aside")
    aside = checkout.commit()
    git(checkout.root, "checkout", "--quiet", "main")
    checkout.edit("x + 1", "x + 2")
    cut = Launches(commit, problem="is cut off")
    for record, says in [
        (cut, f"its record of the build of {commit[:12]} is cut off"),
        (Launches(commit, problem="is of 1 of 2 shards"), "is of 1 of 2 shards"),
        (Launches(aside), f"its record of the build of {aside[:12]} is of another line"),
        (Launches("f" * 40), "its record of the build of ffffffffffff is of another line"),
        (Launches("no commit"), "is of another line"),
    ]:
        plan = checkout.plan({("one", "cpu"): [record]})
        assert why(plan)["one-cpu"].startswith(f"{IMPORTS.format('one')}; its record of the build of")
        assert why(plan)["one-cpu"].endswith(says)
    assert "one-cpu" in reasons(checkout.plan({("one", "cpu"): [cut, Launches(commit)]}))


def test_an_unchanged_need_that_passed_is_not_planned(checkout):
    commit = git(checkout.root, "rev-parse", "HEAD")
    both = ("cpu", "gfx942")
    beside = step("beside", both, imports=("tests/kernels/test_two.py",))
    needy = step("needy", both, imports=("tests/kernels/test_one.py",), needs=("beside",))
    checkout.declarations = declare(kernels=[beside, needy], tests=[step("lint")])
    checkout.edit("import", "import  ", "tests/kernels/test_one.py")
    assert {"beside-cpu", "beside-gfx942"} < why(checkout.plan({})).keys()
    plan = checkout.plan({("beside", "cpu"): [Launches(commit, frozenset({HELPER}))]})
    assert {one.key: one.depends_on for one in plan.steps if one.step.key != "lint"} == {
        "needy-cpu": (),
        "beside-gfx942": (),
        "needy-gfx942": ("beside-gfx942",),
    }
    assert reasons(plan)["beside-cpu"].startswith("not affected: it passed and launched no changed kernel in the build")
