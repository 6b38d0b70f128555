"""The steps that decide, run with stand-ins: verdicts, approvals, and what they post when something is missing."""

import pytest
import yaml
from support.static_steps import ANNOTATES, FILES, JUDGE, PULL_REQUEST, STEPS, run


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("status", [0, 1, 3, 4, 5, 6, 70])
def test_verdict_ends_as_the_judge_and_posts_its_annotation(tmp_path, name, status):
    ended = run(
        tmp_path,
        STEPS[name, "verdict"],
        hilgate=JUDGE.format(loosened="[]", status=status),
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert ended.status == status
    assert any("the verdict" in call for call in ended.calls if call.startswith("annotate"))


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
def test_verdict_without_plan_or_results_still_judges(tmp_path, name):
    """Planning failed: nothing can be downloaded, the judge says so with 3, and the annotation is the judge's."""
    ended = run(
        tmp_path,
        STEPS[name, "verdict"],
        hilgate=JUDGE.format(loosened="[]", status=3),
        buildkite_agent='[ "$1" = artifact ] && exit 1; ' + ANNOTATES.format(status=0),
    )
    assert ended.status == 3
    assert "there is no plan" in ended.output
    assert "no job left results" in ended.output
    assert any(call.startswith("hilgate judge") for call in ended.calls)


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("how", ["exit 1", "kill -9 $$", "exit 127", "exit 0"])
def test_judge_that_leaves_nothing_is_said_to(tmp_path, name, how):
    ended = run(tmp_path, STEPS[name, "verdict"], hilgate=how, buildkite_agent=ANNOTATES.format(status=0))
    assert ended.status != 0
    assert any("There is no verdict" in call for call in ended.calls)


@pytest.mark.parametrize("status", [0, 1])
def test_annotation_that_fails_changes_no_verdict(tmp_path, status):
    hilgate = JUDGE.format(loosened="[]", status=status)
    ended = run(tmp_path, STEPS["pipeline.yml", "verdict"], hilgate=hilgate, buildkite_agent=ANNOTATES.format(status=1))
    assert ended.status == status
    assert "no annotation" in ended.output


@pytest.mark.parametrize(("status", "style"), [(0, "success"), (1, "error"), (4, "error"), (6, "warning")])
def test_annotation_has_the_colour_of_the_verdict(tmp_path, status, style):
    ended = run(
        tmp_path,
        STEPS["pipeline.yml", "verdict"],
        hilgate=JUDGE.format(loosened="[]", status=status),
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert any(f"--style {style}" in call for call in ended.calls)


DIFF = '[ "$1" = diff ] && exit {status}; [ "$1" = show ] && echo "steps: []"; exit 0'


@pytest.mark.parametrize(
    ("judged", "loosened", "diff", "env", "ends", "asks"),
    [
        (0, "[]", 0, PULL_REQUEST, 0, False),
        (6, "[]", 0, PULL_REQUEST, 6, False),
        (6, "[1]", 0, PULL_REQUEST, 6, True),
        (0, "[]", 1, PULL_REQUEST, 6, True),
        (0, "[]", 128, PULL_REQUEST, 6, True),
        (6, "[]", 1, PULL_REQUEST, 6, True),
        (1, "[1]", 1, PULL_REQUEST, 1, False),
        (4, "[]", 1, PULL_REQUEST, 4, False),
        (0, "[]", 1, {}, 0, False),
        (6, "[1]", 0, {}, 6, False),
    ],
    ids=[
        "clean",
        "inconclusive",
        "loosened",
        "judge-did-not-notice",
        "git-cannot-tell",
        "both",
        "failed-anyway",
        "did-not-run",
        "main",
        "main-loosened",
    ],
)
def test_change_to_its_own_gate_asks_for_a_name(tmp_path, judged, loosened, diff, env, ends, asks):
    ended = run(
        tmp_path,
        STEPS["pipeline.yml", "verdict"],
        env=env,
        hilgate=JUDGE.format(loosened=loosened, status=judged),
        git=DIFF.format(status=diff),
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert ended.status == ends
    assert ended.uploads == (["results/approve.yml"] if asks else [])
    assert not asks or "git show origin/hilgate-base:.buildkite/approve.yml" in ended.calls


def test_base_that_cannot_be_fetched_is_no_pass(tmp_path):
    ended = run(
        tmp_path,
        STEPS["pipeline.yml", "verdict"],
        env=PULL_REQUEST,
        hilgate=JUDGE.format(loosened="[]", status=0),
        git="exit 128",
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert ended.status == 128
    assert any("There is no verdict" in call for call in ended.calls)


def test_images_are_left_for_reruns(tmp_path):
    ended = run(tmp_path, STEPS["pipeline.yml", "verdict"], hilgate=JUDGE.format(loosened="[]", status=0))
    assert 'buildkite-agent meta-data set hilgate-images {"rocm": "sha256:00"}' in ended.calls


APPROVER = {"BUILDKITE_UNBLOCKER": "Ada", "BUILDKITE_UNBLOCKER_EMAIL": "ada@example.invalid"}


def test_approval_judges_again_with_the_name(tmp_path):
    env = {**APPROVER, "BUILDKITE_BUILD_CREATOR_EMAIL": "bob@example.invalid"}
    ended = run(tmp_path, STEPS["approve.yml", "required"], env=env, hilgate=JUDGE.format(loosened="[1]", status=1))
    assert ended.status == 1
    assert any(call.endswith("--approved-by Ada <ada@example.invalid>") for call in ended.calls)
    assert any(call.startswith("buildkite-agent annotate --context verdict") for call in ended.calls)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BUILDKITE_UNBLOCKER": "Ada"},
        {"BUILDKITE_UNBLOCKER_EMAIL": "ada@example.invalid"},
        {**APPROVER, "BUILDKITE_BUILD_CREATOR_EMAIL": "ada@example.invalid"},
    ],
    ids=["nobody", "no-address", "no-name", "herself"],
)
def test_approval_without_another_name_is_none(tmp_path, env):
    ended = run(tmp_path, STEPS["approve.yml", "required"], env=env, hilgate=JUDGE.format(loosened="[1]", status=0))
    assert ended.status == 2
    assert not any(call.startswith("hilgate") for call in ended.calls)


def test_approval_belongs_to_a_team_and_the_verdict_depends_on_it():
    ask, judge = yaml.safe_load(FILES["approve.yml"])["steps"]
    assert ask["allowed_teams"] == ["rocm-gate-owners"]
    assert ask["blocked_state"] == "failed"
    assert judge["depends_on"] == "approve"


def test_evidence_is_of_a_release_that_passed():
    bundle = yaml.safe_load(FILES["release.yml"])["steps"][-1]
    assert bundle["depends_on"] == "verdict"
    assert "allow_dependency_failure" not in bundle
