# SPDX-License-Identifier: Apache-2.0
"""What the kernels' machine code executes: as recorded, and held against the merge base's record.

`figures.json` says what this tree executes, exactly: a change that executes something else records anew
(HILGATE_WRITE_FIGURES=1 python -m pytest --amdgcn gfx942 tests/amdgcn/compiled/test_figures.py). More than `MARGIN`
worse than the record of the merge base is red all the same, unless `accepted.json` gives a reason:
{"gfx942 Triton 3.6.0": {"attention_kernel": "why"}}. An entry is out of date as soon as the merge base has the figures.
"""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest
import triton
from support.launches import FIGURES

from amdgcn.figures import GPUS, worse
from amdgcn.launch import amdgcn
from hilgate import git
from hilgate.errors import HilgateError

RECORDED, ACCEPTED = (Path(__file__).with_name(name) for name in ("figures.json", "accepted.json"))
ROOT = Path(__file__).parents[3]
MARGIN = 0.02
"""Counts are equal on every machine: this leaves room for a schedule that moves a few instructions, and for no more."""
RECORD = "\n  to do: HILGATE_WRITE_FIGURES=1 (the module's first lines)"
ACCEPT = "\n  to do: make it cheaper, or give the reason in accepted.json (the module's first lines)"


@functools.cache
def of_merge_base(root=ROOT):
    """(commit, its figures) of the merge base with HILGATE_BASE or the default branch; ("", {}) where there is none."""
    base = os.environ.get("HILGATE_BASE") or git.default_base(root)[0]
    try:
        commit = git.inspect(root, base).merge_base if base else ""
        text = git.file_at(root, commit, RECORDED.relative_to(ROOT).as_posix()) if commit else None
    except HilgateError:
        commit, text = "", None
    assert commit or os.environ.get("BUILDKITE") != "true", f"the merge base with {base or 'main'} is not in this clone"
    return commit, json.loads(text or "{}")


def wrong(now, recorded, before, reason):
    """What is wrong with figures, in words; nothing if all is well.

    Args:
        now: What was executed.
        recorded: What the tree says.
        before: What the merge base says; nothing where it says nothing.
        reason: For being worse, as accepted.
    """
    old = recorded or {}
    if differ := [f"{name} {each}, recorded {old.get(name)}" for name, each in now.items() if each != old.get(name)]:
        return f"not as recorded: {'; '.join(differ)}{RECORD}"
    found = worse(now, before or recorded, MARGIN)
    if reason:
        return "" if found else "accepted.json has an entry that is out of date: take it out"
    return f"more than {MARGIN:.0%} worse than the merge base: {'; '.join(found)}{ACCEPT}" if found else ""


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name, request, record_property):
    arch, kernel = request.config.getoption("amdgcn"), name.split(",")[0]
    with amdgcn(arch) as session:
        assert not FIGURES[name][0]()
    launch = [each for each in session.launches if each.kernel == kernel][-1]
    now = {"wave_instructions": launch.wave_instructions} | launch.figures
    place = f"{arch} Triton {triton.__version__}"
    recorded = json.loads(RECORDED.read_text())
    if os.environ.get("HILGATE_WRITE_FIGURES"):
        recorded.setdefault(place, {})[name] = now
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    commit, base = of_merge_base()
    before = base.get(place, {}).get(name)
    accepted = json.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {}
    record_property("kernel", name)
    record_property("compared_with", commit[:12] or "as recorded")
    for each in (
        "wave_instructions",
        "matrix_instructions",
        "vector_instructions",
        "lds_instructions",
        "global_bytes",
        "lds_conflict_cycles",
        "mfma_share",
        f"{GPUS[arch].name}_roofline_us",
    ):
        record_property(each, now[each])
        if before:
            record_property(f"{each}_before", before[each])
    found = wrong(now, recorded.get(place, {}).get(name), before, accepted.get(place, {}).get(name, ""))
    assert not found, found


BEFORE = {"vector_instructions": 100, "global_bytes": 0, "MI300X_roofline_us": 1.0, "mfma_share": 0.5}
MORE = BEFORE | {"vector_instructions": 103}


def test_more_work_is_red_and_less_is_not():
    assert not worse(BEFORE | {"vector_instructions": 102, "mfma_share": 0.1, "MI300X_roofline_us": 0.5}, BEFORE, 0.02)
    assert worse(MORE, BEFORE, 0.02) == ["vector_instructions 103, was 100 (+3%)"]
    assert worse(BEFORE | {"global_bytes": 4}, BEFORE, 0.02) == ["global_bytes 4, was 0"]


@pytest.mark.parametrize(
    ("now", "recorded", "before", "reason", "says"),
    [
        (BEFORE, BEFORE, BEFORE, "", ""),
        (BEFORE, BEFORE, None, "", ""),
        (MORE, BEFORE, BEFORE, "", "not as recorded: vector_instructions 103, recorded 100"),
        (BEFORE, None, None, "", "not as recorded: vector_instructions 100, recorded None"),
        (MORE, MORE, BEFORE, "", "worse than the merge base: vector_instructions 103, was 100"),
        (MORE, MORE, BEFORE, "it computes more", ""),
        (MORE, MORE, MORE, "it computes more", "out of date"),
    ],
)
def test_a_worse_figure_that_is_recorded_anew_is_still_told(now, recorded, before, reason, says):
    found = wrong(now, recorded, before, reason)
    assert says in found
    assert bool(found) == bool(says)


def test_the_merge_base_s_own_record_counts(tmp_path, monkeypatch):
    """Of a branch that records anew, that of the branch's beginning; of the default branch alone, none."""
    monkeypatch.delenv("HILGATE_BASE", raising=False)
    record = tmp_path / RECORDED.relative_to(ROOT)
    record.parent.mkdir(parents=True)

    def run(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(("git", *who, *words), cwd=tmp_path, check=True, capture_output=True)

    run("init", "-b", "main")
    for branch, figure in (("main", 100), ("change", 103)):
        if branch != "main":
            assert of_merge_base(tmp_path) == ("", {})
            run("checkout", "-b", branch)
        record.write_text(json.dumps({"vector_instructions": figure}))
        run("add", ".")
        run("commit", "-m", branch)
    of_merge_base.cache_clear()
    assert of_merge_base(tmp_path)[1] == {"vector_instructions": 100}
    of_merge_base.cache_clear()
