"""`plan.json`: its digest, and that a damaged one is refused."""

import datetime as dt
import json
import re

import pytest

from hilgate.errors import RecordsError
from hilgate.model import Plan, PlannedStep, Step
from hilgate.plan.make import plan_digest, read_plan

DECLARED = Step(key="s", label="S", command="python -m x", devices=("cpu",), evidence="junit", timeout_minutes=5)
STEP = PlannedStep(step=DECLARED, area="a", device="cpu", queue=None, reason="a/x changed")
NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)


@pytest.fixture
def plan():
    return Plan(
        created=NOW,
        commit="c" * 40,
        dirty=False,
        base=None,
        profile="gate",
        changed_files=(),
        steps=(STEP,),
        omissions=(),
    )


def test_digest_ignores_when_and_sees_everything_else(plan):
    later = plan.model_copy(update={"created": plan.created + dt.timedelta(days=1)})
    assert plan_digest(plan) == plan_digest(later)
    assert re.fullmatch("[0-9a-f]{64}", plan_digest(plan))
    for field in ("commit", "dirty", "base", "profile", "changed_files", "steps", "omissions"):
        other = {
            "commit": "d",
            "dirty": True,
            "base": "b",
            "profile": "pr",
            "changed_files": ("f",),
            "steps": (),
            "omissions": ({"key": "k", "area": "a", "label": "l", "reason": "r"},),
        }[field]
        assert plan_digest(type(plan).model_validate({**plan.model_dump(), field: other})) != plan_digest(plan), field


def test_plan_survives_its_file(tmp_path, plan):
    plan.save(tmp_path / "results" / "plan.json")
    assert read_plan(tmp_path / "results" / "plan.json") == plan
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[:100], "not a plan"),
        (lambda text: text.replace('"profile"', '"profil"'), "not a plan"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 1'), "not a plan"),
        (lambda text: json.dumps({**json.loads(text), "steps": json.loads(text)["steps"] * 2}), "stands twice"),
        (lambda text: text.replace('"depends_on": []', '"depends_on": ["gone"]'), "depends on gone"),
    ],
)
def test_damaged_plan_is_refused(tmp_path, plan, damage, expected):
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordsError, match=expected):
        read_plan(path)


def test_missing_plan_is_refused(tmp_path):
    with pytest.raises(RecordsError, match="there is no plan"):
        read_plan(tmp_path / "plan.json")
