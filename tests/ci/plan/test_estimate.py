"""Measured minutes: the median of the last passes, and nothing that is no pass."""

import pytest
from support.builds import NOW, built, failed, passed, remember
from support.plans import step

from hilgate.errors import MisuseError, RecordsError
from hilgate.plan.estimate import PASSES, measured


def verdicts(folder, *minutes):
    """A history of builds in which step s took these minutes, the oldest first; None is a failure."""
    for number, taken in enumerate(minutes):
        _, _, verdict = built((step("s", "x"), [passed() if taken else failed()]))
        steps = tuple(one.model_copy(update={"seconds": 60.0 * (taken or 99)}) for one in verdict.steps)
        build = folder / f"{NOW:%Y%m%d}T{number:06}Z-{number:012}-0"
        build.mkdir(parents=True)
        (build / "verdict.json").write_text(verdict.model_copy(update={"steps": steps}).model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("minutes", "median"),
    [((1, None, 3), 2.0), ((10,) * 50 + (1,) * PASSES, 1.0), ((1,) * 5 + (100,), 1.0)],
    ids=["only passes", "the last passes", "one slow node"],
)
def test_the_median_of_the_last_passes_counts(tmp_path, minutes, median):
    assert measured(tmp_path, verdicts(tmp_path / "history", *minutes)) == {"s-cpu": median}


def test_a_build_of_the_history_is_measured(tmp_path):
    remember(tmp_path / "results" / "history", [passed()])
    assert measured(tmp_path) == {"a-cpu": 1.5}


def test_a_damaged_verdict_is_named(tmp_path):
    path = next(verdicts(tmp_path, 1).glob("*/verdict.json"))
    path.write_text("{")
    with pytest.raises(RecordsError) as caught:
        measured(tmp_path, tmp_path)
    assert caught.value.where == str(path)


def test_without_a_history_nothing_is_measured_but_a_named_one_must_exist(tmp_path):
    assert measured(tmp_path) == {}
    with pytest.raises(MisuseError, match="no such history"):
        measured(tmp_path, tmp_path / "absent")
