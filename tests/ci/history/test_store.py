# SPDX-License-Identifier: Apache-2.0
"""The folder of builds: each appears whole and once, and the builds of a commit are found by name."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
from pathlib import Path

import pytest
from support.builds import NOW, began, built, bytes_of, remember
from support.jobs import failed, passed
from support.plans import COMMIT, plan, step

from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.history import store
from hilgate.model import PLAN_FILE, VERDICT_FILE
from hilgate.run import results
from hilgate.run.results import RESULTS_FILE

CHECKS = [passed("n", numbers={"err": 0.5}), failed("f", "bad\nmore")]


def test_a_build_is_a_folder_of_three_files(tmp_path):
    build = remember(tmp_path, CHECKS)
    assert build.name.startswith(f"20261121T000000Z-{COMMIT[:12]}-")
    assert list(tmp_path.iterdir()) == [build]
    assert sorted(path.name for path in build.iterdir()) == [PLAN_FILE, RESULTS_FILE, VERDICT_FILE]
    kinds = [json.loads(line)["kind"] for line in (build / RESULTS_FILE).read_text().splitlines()]
    assert kinds == ["branch", "build", "check", "check", "step"]


def test_what_was_recorded_is_read_back(tmp_path):
    _, recorded, _ = built((step("a", "x"), CHECKS))
    assert store.read(remember(tmp_path, CHECKS)) == recorded


def test_the_checks_of_the_attempt_that_counts_are_kept_and_the_records_of_all(tmp_path):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    (last,) = recorded.attempts["a-cpu"]
    first = results.Attempt(last.record.model_copy(update={"seconds": 1.0}), (passed("old"),) * 2)
    build, _ = store.add(tmp_path, a_plan, results.Recorded(recorded.builds, {"a-cpu": (first, last)}), verdict)
    assert store.read(build).attempts["a-cpu"] == (last,)
    assert (build / RESULTS_FILE).read_text().count('"kind":"step"') == 2


def test_adding_or_judging_twice_changes_nothing(tmp_path):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    build, added = store.add(tmp_path, a_plan, recorded, verdict)
    before = bytes_of(tmp_path)
    again = verdict.model_copy(update={"decided": NOW + dt.timedelta(hours=1), "why": "decided again"})
    assert added
    assert store.add(tmp_path, a_plan, recorded, again) == (build, False)
    assert bytes_of(tmp_path) == before


def test_an_image_is_found_by_its_contents_in_the_newest_build_that_has_it(tmp_path):
    for minute, (content, digest) in enumerate((("1", "a"), ("1", "b"), ("2", "c"), ("3", "d"))):
        known = {"images": {"rocm": content * 64}, "digests": {"rocm": "sha256:" + digest * 64}}
        build = remember(tmp_path, CHECKS, minute=minute, **known)
    (build / PLAN_FILE).write_text("{")
    asked = [number * 64 for number in "1234"]
    assert store.images(tmp_path, asked) == {"1" * 64: "sha256:" + "b" * 64, "2" * 64: "sha256:" + "c" * 64}
    assert store.images(tmp_path / "none", asked) == {}


def test_builds_are_found_by_commit_and_sorted_by_time(tmp_path):
    folders = [remember(tmp_path, CHECKS, minute=n, commit=commit * 40) for n, commit in ((3, "a"), (1, "b"), (2, "a"))]
    (tmp_path / "history.html").write_text("")
    (tmp_path / ".new-x").mkdir()
    assert store.builds(tmp_path) == (folders[1], folders[2], folders[0])
    assert store.builds(tmp_path, "a" * 40) == (folders[2], folders[0])
    assert store.builds(tmp_path, "d" * 40) == ()


def test_a_verdict_of_another_plan_is_refused(tmp_path):
    a_plan, recorded, verdict = built((step("a", "x"), [passed()]))
    with pytest.raises(RecordsError, match="has no answer for b-cpu"):
        store.add(tmp_path, plan(step("a", "x"), step("b", "x")), recorded, verdict)
    with pytest.raises(RecordsError, match="is of commit cccc"):
        store.add(tmp_path, a_plan.model_copy(update={"commit": "d" * 40}), recorded, verdict)
    with pytest.raises(RecordsError, match="no job"):
        store.add(tmp_path, a_plan, results.Recorded((), {}), verdict)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_no_build(tmp_path, monkeypatch):
    def rename(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(MisuseError, match="No space left"):
        remember(tmp_path, CHECKS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NothingSelectedError, match="no build") as caught:
        store.builds(tmp_path)
    assert "hilgate history add" in str(caught.value)


@pytest.mark.parametrize("line", ["{}", "nonsense", "", '{"kind":"build","surprise":1}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = remember(tmp_path, CHECKS) / RESULTS_FILE
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(RecordsError) as caught:
        store.read(path.parent)
    assert f"{path}:6" in str(caught.value)


def test_failures_are_counted_without_the_passes(tmp_path):
    build = remember(tmp_path, [failed("f"), passed("p"), passed("sometimes")], flaky=("sometimes",))
    assert store.failures(build) == (
        {("a-cpu", "f"), ("a-cpu", "sometimes")},
        {("a-cpu", "sometimes")},
        {"a-cpu"},
    )
    (build / VERDICT_FILE).unlink()
    with pytest.raises(RecordsError, match="damaged build"):
        store.failures(build)


def add_many(folder):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    for number in range(12):
        store.add(Path(folder), a_plan, began(recorded, NOW + dt.timedelta(minutes=number)), verdict)


def test_two_writers_add_the_same_builds_once(tmp_path):
    writers = [multiprocessing.get_context("fork").Process(target=add_many, args=(str(tmp_path),)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(list(tmp_path.iterdir())) == len(store.builds(tmp_path)) == 12
