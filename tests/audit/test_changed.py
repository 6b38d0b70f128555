# SPDX-License-Identifier: Apache-2.0
"""Which kernels a change compiles to something else: what counts, what does not, and what cannot be said."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from pagedkv.audit import changed
from pagedkv.audit.changed import (
    BaseUnreadableError,
    Code,
    KernelListing,
    compare,
    findings_of,
    installed_triton,
    merge_base,
    triton_findings,
)
from pagedkv.audit.code_object import UnreadableCodeObjectError, machine_code
from pagedkv.audit.compile import specialisations
from pagedkv.audit.objects import given_key
from pagedkv.errors import CannotRunHereError

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return x + 1

@triton.jit
def kernel(x_ptr, out_ptr, SIDE: tl.constexpr):
    offsets = tl.arange(0, SIDE)
    tl.store(out_ptr + offsets, helper(tl.load(x_ptr + offsets)))
"""


@pytest.fixture
def launch(run_source):
    """launch(old, new, folder): runs the kernel above, with one text replaced, from a file of a folder."""

    def make(old="", new="", folder="one"):
        scope = run_source(KERNEL, old, new, folder)
        tile = torch.empty(64)
        kernel = next(value for name, value in scope.items() if name.startswith("kernel"))
        return lambda: kernel[(1,)](tile, tile, SIDE=64)

    return make


def test_neither_a_place_nor_a_line_is_machine_code(launch, compiled):
    [first] = compiled("gfx942", launch())
    for edit in (
        ("import triton\n", "import triton\n\n\n", "other folder"),
        ("    offsets", "    # why\n    offsets", "one"),
    ):
        [second] = compiled("gfx942", launch(*edit))
        assert (second.machine_code, second.lds_bytes) == (first.machine_code, first.lds_bytes)


def test_a_name_is_no_machine_code(launch, compiled):
    """It stands in the note, which moves the code: the descriptor then says another distance."""
    found = [compiled("gfx942", launch("def kernel(", f"def kernel{'x' * more}("))[0] for more in (0, 24, 48, 72)]
    assert len({each.machine_code for each in found}) == 1


def test_an_instruction_is_machine_code(launch, compiled):
    [first] = compiled("gfx942", launch())
    [second] = compiled("gfx942", launch("x + 1", "x + 2"))
    assert second.machine_code != first.machine_code


@pytest.mark.parametrize("code", [b"", b"no ELF", b"\x7fELF\x02\x01\x01" + bytes(57)])
def test_what_holds_no_instructions_has_no_machine_code(code):
    with pytest.raises(UnreadableCodeObjectError):
        machine_code(code)


def test_compiler_input_has_helpers_and_no_places(launch):
    def key(*edit):
        [wanted] = specialisations("gfx942", launch(*edit))
        return given_key(wanted)

    assert key("import triton\n", "import triton\n\n", "elsewhere") == key()
    assert key("x + 1", "x + 2") != key()


NUMBERS = dict.fromkeys(changed.FIGURES, 10)
SAME = Code("", "machine code", NUMBERS)
OTHER = Code("", "another", NUMBERS | {"vgpr": 12})
CRASH = Code("Crash: the compiler ended the process")


def compiles(*, asked=None, **codes):
    def run(ids):
        if asked is not None:
            asked.extend(ids)
        return {name: codes[name] for name in ids}

    return run


def test_what_is_given_the_same_is_not_compiled():
    both = KernelListing({"a": "1", "b": "1", "c": "2"}, {})
    asked = []
    found = compare("gfx942", both, both, compiles(asked=asked), compiles(asked=asked))
    assert (found.kernels, found.changed, asked) == (2, (), [])
    [finding] = findings_of(found, "abc")
    assert (finding.outcome, finding.message) == ("pass", "0 of 2 kernels changed for gfx942")
    assert "passed_but" not in finding.labels


@pytest.mark.parametrize(
    ("was", "now", "outcome", "says"),
    [
        (SAME, SAME, "pass", "0 of 2 kernels changed for gfx942"),
        (SAME, OTHER, "pass", "1 of 2 kernels changed for gfx942: b (vgpr 10 -> 12)"),
        (SAME, Code("", "another", NUMBERS), "pass", "other instructions, the same figures"),
        (SAME, None, "pass", "0 of 2 kernels changed for gfx942, 1 gone"),
        (None, SAME, "pass", "0 of 2 kernels changed for gfx942, 1 new"),
        (CRASH, SAME, "pass", "1 new: b (new, did not compile before: Crash"),
        (CRASH, CRASH, "pass", "0 of 2 kernels changed for gfx942"),
        (SAME, CRASH, "fail", "1 broken: b (compiled before and does not now: Crash"),
    ],
)
def test_what_is_said_of_a_kernel_that_is_given_something_else(was, now, outcome, says):
    before, after = (
        {"gfx942/a": "1"} | ({"gfx942/b": each} if side else {}) for side, each in ((was, "2"), (now, "3"))
    )
    sides = [compiles(**{"gfx942/b": side} if side else {}) for side in (was, now)]
    found = findings_of(compare("gfx942", KernelListing(before, {}), KernelListing(after, {}), *sides), "abc")
    assert found[0].outcome == outcome
    assert says in found[0].message
    moved = len(found) > 1
    assert moved == (says != "0 of 2 kernels changed for gfx942")
    assert bool(found[0].labels.get("passed_but")) == moved
    if moved:
        assert (found[1].id, found[1].outcome) == ("changed/gfx942/b", outcome)


SPILT = Code("", "spilt", NUMBERS | {"vgpr_spills": 16, "scratch_bytes": 64, "loop_instructions": 12})
SLOWER = Code("", "slower", NUMBERS | {"waves_per_simd": 5, "loop_moves": 11, "instructions": 15})
BETTER = Code("", "better", NUMBERS | {"waves_per_simd": 11, "vgpr_spills": 0, "loop_moves": 0, "instructions": 5})


@pytest.mark.parametrize(
    ("now", "outcome", "says", "of_it"),
    [
        (SAME, "pass", "0 of 1 kernels worse", None),
        (OTHER, "pass", "0 of 1 kernels worse; instructions x 1.00 to 1.00, median 1.00", None),
        (BETTER, "pass", "0 of 1 kernels worse; instructions x 0.50", None),
        (SPILT, "pass", "1 of 1 kernels worse, spills 1, scratch 1;", "vgpr_spills 10 -> 16, scratch_bytes 10 -> 64"),
        (SLOWER, "pass", "fewer waves 1, moves 1;", "waves_per_simd 10 -> 5, loop_moves 10 -> 11"),
        (CRASH, "fail", "1 of 1 kernels worse, no code 1", "compiled before and does not now: Crash"),
        (None, "fail", "1 of 1 kernels worse, no code 1", "gone"),
    ],
)
def test_what_another_triton_compiles_worse_is_listed(now, outcome, says, of_it):
    before, after = (KernelListing({"gfx942/b": key} if side else {}, {}) for side, key in ((SAME, "2"), (now, "3")))
    sides = [compiles(**{"gfx942/b": side} if side else {}) for side in (SAME, now)]
    found = triton_findings(compare("gfx942", before, after, *sides), "3.6.0", "3.8.0")
    assert (found[0].id, found[0].outcome) == ("changed/3.6.0-3.8.0/gfx942", outcome)
    assert found[0].message.startswith("gfx942, Triton 3.6.0 -> 3.8.0: ")
    assert says in found[0].message
    assert bool(found[0].labels.get("passed_but")) == (of_it is not None) == (len(found) == 2)
    if of_it:
        assert (found[1].id, found[1].outcome) == ("changed/3.6.0-3.8.0/gfx942/b", outcome)
        assert of_it in found[1].message


def test_a_triton_is_found_by_folder_or_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metadata = tmp_path / ".triton" / "next" / "triton-9.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9.0\n")
    assert installed_triton("next") == installed_triton("9.9.0") == ("9.9.0", tmp_path / ".triton" / "next")
    assert installed_triton(triton.__version__) == (triton.__version__, Path(triton.__file__).parents[1])


def test_one_kernel_of_two_tritons_is_compiled_by_each(tmp_path, monkeypatch, capsys):
    """With itself in a folder, because a machine may have no other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".triton").mkdir()
    (tmp_path / ".triton" / "same").symlink_to(Path(triton.__file__).parents[1])
    command = ["--tritons", triton.__version__, "same", "--arch", "gfx942", "--only", "merge-copy-float32"]
    assert changed.main([*command, "--jobs", "1", "--out", str(tmp_path)]) == 0
    [finding] = left_by(tmp_path)
    assert finding["id"] == f"changed/{triton.__version__}-{triton.__version__}/gfx942"
    assert finding["numbers"]["kernels"] >= 1
    assert "0 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--tritons", "3.6.0"], 2, "--tritons takes at least two and no --base"),
        (["--tritons", "3.6.0", "3.8.0", "--base", "main"], 2, "--tritons takes at least two and no --base"),
        (["--tritons", triton.__version__, "0.1"], 5, "pip install --target .triton/0.1 --no-deps triton==0.1"),
    ],
)
def test_tritons_that_cannot_be_compared_are_refused(words, status, says, capsys):
    assert changed.main(words) == status
    assert says in capsys.readouterr().err


def test_a_launcher_that_raises_where_it_did_not_is_broken():
    before, after = KernelListing({"gfx942/a": "1"}, {}), KernelListing({}, {"gfx942/a+": "TypeError: no"})
    found = compare("gfx942", before, after, compiles(**{"gfx942/a": SAME}), compiles())
    assert [(one.change, one.ids) for one in found.changed] == [("gone", ("gfx942/a",)), ("broken", ("gfx942/a+",))]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository without kernels, with a commit on main and one on a branch that is checked out."""
    monkeypatch.delenv("HILGATE_BASE", raising=False)

    def run(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(("git", *who, *words), cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("init", "-b", "main")
    run("commit", "--allow-empty", "-m", "base")
    return tmp_path, run


def test_the_merge_base_is_that_of_the_default_branch(repository):
    root, run = repository
    base = run("rev-parse", "HEAD").strip()
    with pytest.raises(CannotRunHereError, match="no default branch to compare with"):
        merge_base(root, "")
    run("checkout", "-b", "change")
    run("commit", "--allow-empty", "-m", "change")
    assert merge_base(root, "") == merge_base(root, "main") == base
    with pytest.raises(CannotRunHereError, match="knows no commit 'other'"):
        merge_base(root, "other")
    run("checkout", "--orphan", "alone")
    run("commit", "--allow-empty", "-m", "alone")
    with pytest.raises(CannotRunHereError, match="share no history"):
        merge_base(root, "main")


def test_a_base_without_kernels_or_audit_is_said(repository):
    root, run = repository
    commit = run("rev-parse", "HEAD").strip()
    with pytest.raises(BaseUnreadableError, match="has no kernels/pagedkv"), changed.kernels_at(root, commit):
        pass
    with pytest.raises(BaseUnreadableError, match="has no audit"):
        changed.asked_with_ours(root)


def test_a_checkout_that_cannot_be_imported_is_said(tmp_path):
    audit = tmp_path / "pagedkv" / "audit"
    audit.mkdir(parents=True)
    (audit.parent / "__init__.py").touch()
    (audit / "__init__.py").write_text("raise ImportError('no such module')")
    with pytest.raises(BaseUnreadableError, match="cannot be asked: ImportError: no such module"):
        changed.Checkout(tmp_path, [])
    shutil.rmtree(audit.parent)
    with pytest.raises(BaseUnreadableError, match="python imports pagedkv from"):
        changed.Checkout(tmp_path, [])


def left_by(tmp_path):
    return [json.loads(line) for line in Path(tmp_path, "findings.jsonl").read_text().splitlines()]


def test_no_merge_base_is_said_and_refused_on_agents(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HILGATE_BASE", raising=False)

    def nothing(root, _):
        raise CannotRunHereError(f"{root} has no default branch to compare with\n  to do: name one")

    monkeypatch.setattr(changed, "merge_base", nothing)
    monkeypatch.delenv("BUILDKITE", raising=False)
    assert changed.main(["--out", str(tmp_path)]) == 0
    [finding] = left_by(tmp_path)
    assert "compared with nothing" in finding["labels"]["passed_but"]
    for env, words in (("true", []), ("", ["--base", "gone"])):
        monkeypatch.setenv("BUILDKITE", env)
        assert changed.main(words) == 5
        assert "no default branch" in capsys.readouterr().err


def test_a_base_that_cannot_be_listed_is_inconclusive(tmp_path, monkeypatch):
    monkeypatch.setattr(changed, "merge_base", lambda *_: "abcdef" * 6)
    assert changed.main(["--arch", "gfx942", "--only", "merge-", "--out", str(tmp_path)]) == 6
    [finding] = left_by(tmp_path)
    assert finding["outcome"] == "inconclusive"
    assert "merge base abcdefabcdef: commit abcdefabcdef has no kernels/pagedkv" in finding["message"]


def test_misuse_is_2(capsys):
    assert changed.main(["--jobs", "0"]) == 2
    assert "--jobs" in capsys.readouterr().err
