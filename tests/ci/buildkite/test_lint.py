# SPDX-License-Identifier: Apache-2.0
"""Every rule of the lint, each with its violation planted."""

import re
from pathlib import Path

import pytest
import yaml
from support.pipelines import DECLARED

from hilgate.buildkite.lint import FLOWS, SUFFIXES, lint, lint_files

FOLDER = Path(__file__).resolve().parents[3] / ".buildkite"
FILES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yml")}
HAND = {"manual": {"allowed": False}}
POST = [{"github_commit_status": {"context": "rocm/required"}}]


def one_step(**change):
    step = {"key": "a", "command": ["x"], "agents": {"queue": "q"}, "timeout_in_minutes": 1, "retry": HAND, **change}
    return {key: value for key, value in step.items() if value is not None}


def text(*steps, **top):
    return yaml.safe_dump({"steps": list(steps), **top})


def retry(*automatic):
    return {"retry": {"automatic": list(automatic), **HAND}}


def test_a_sound_pipeline_has_no_problems():
    assert lint(text(group("g", one_step(), one_step(key="b", depends_on=["a"])), env={"A": "b"})) == []


@pytest.mark.parametrize(
    "rule",
    [
        {"exit_status": -1},
        {"exit_status": 5, "limit": 1},
        {"exit_status": [-1, 75]},
        {"signal_reason": "agent_stop"},
        {"signal_reason": "agent_refused"},
        {"signal_reason": "stack_error"},
    ],
    ids=str,
)
def test_infrastructure_may_be_retried(rule):
    assert lint(text(one_step(**retry(rule)))) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key": None}, "has no key"),
        ({"key": "triton-3.6"}, "has no key that Buildkite takes"),
        ({"key": "k" * 101}, "has no key that Buildkite takes"),
        ({"key": "plan"}, "key 'plan' belongs to .buildkite"),
        ({"key": "approve"}, "key 'approve' belongs to .buildkite"),
        ({"key": "a-recheck"}, "key 'a-recheck' ends in '-recheck'"),
        ({"command": None}, "has no command"),
        ({"command": [" "]}, "has no command"),
        ({"command": "", "trigger": "other"}, "has 'trigger'"),
        ({"agents": None}, "has no queue"),
        ({"agents": {"queue": ""}}, "has no queue"),
        ({"timeout_in_minutes": None}, "has no timeout"),
        ({"soft_fail": True}, "has 'soft_fail'"),
        ({"soft_fail": False}, "has 'soft_fail'"),
        ({"soft_fail": [{"exit_status": 1}]}, "has 'soft_fail'"),
        ({"block": "wait for me"}, "has 'block'"),
        ({"input": "tell me"}, "has 'input'"),
        ({"skip": "later"}, "has 'skip'"),
        ({"if": "build.branch == 'main'"}, "has 'if'"),
        ({"if_changed": "x"}, "has 'if_changed'"),
        ({"branches": "main"}, "has 'branches'"),
        ({"matrix": ["a", "b"]}, "has 'matrix'"),
        ({"depends_on": ["gone"]}, "depends on 'gone', which does not exist"),
        ({"depends_on": "gone"}, "depends on 'gone', which does not exist"),
        ({"depends_on": [{"step": "gone", "allow_failure": True}]}, "depends on 'gone', which does not exist"),
        ({"depends_on": ["a"]}, "wait for each other: "),
        ({"label": "costs $5"}, "contains '$'"),
        ({"concurrency": 1}, "Buildkite needs both"),
        ({"concurrency_group": "g"}, "Buildkite needs both"),
        ({"notify": POST}, "notifies, which is the verdict's"),
        ({"retry": None}, "can be retried by hand"),
        ({"retry": {"manual": {"allowed": True}}}, "can be retried by hand"),
        ({"retry": {"automatic": True, **HAND}}, "retries everything"),
        (retry({"exit_status": 1}), "which is not infrastructure"),
        (retry({"exit_status": 6}), "which is not infrastructure"),
        (retry({"exit_status": "*"}), "which is not infrastructure"),
        (retry({"exit_status": [75, 1]}), "which is not infrastructure"),
        (retry({"exit_status": 1, "signal_reason": "agent_stop"}), "which is not infrastructure"),
        (retry({"signal_reason": "cancel"}), "which is not infrastructure"),
        (retry({"signal_reason": "*"}), "which is not infrastructure"),
        (retry({"limit": 1}), "which is not infrastructure"),
        ({"retry": {"automatic": {"exit_status": 1}, **HAND}}, "which is not infrastructure"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:60],
)
def test_unsound_step_is_found(change, expected):
    assert any(expected in problem for problem in lint(text(one_step(**change))))


def group(name, *steps, **more):
    return {"group": name, "key": name, "steps": list(steps), **more}


GREENING = "which can turn a failure or a skip green"


@pytest.mark.parametrize(
    ("tops", "expected"),
    [
        ([group("g", one_step()), group("h", one_step())], "key 'a' is used twice"),
        ([group("a", one_step())], "key 'a' is used twice"),
        *(
            ([group("g", one_step(), **{word: "x"})], f"step 'g' has {word!r}, {GREENING}")
            for word in ("if", "skip", "soft_fail", "branches")
        ),
        ([group("g", one_step(depends_on=["g"]))], "wait for each other"),
        ([group("g", one_step(), depends_on="h"), group("h", one_step(key="b", depends_on=["a"]))], "for each other"),
    ],
)
def test_unsound_group_is_found(tops, expected):
    assert any(expected in problem for problem in lint(text(*tops)))


def test_nothing_is_set_for_the_whole_build():
    assert lint(text(one_step(), notify=POST)) == ["it sets 'notify' for the whole build"]
    assert lint(text(one_step(), agents={"queue": "q"})) == ["it sets 'agents' for the whole build"]


@pytest.mark.parametrize(("number", "problems"), [(500, []), (501, ["501 steps, but one upload may hold 500"])])
def test_steps_that_one_upload_may_hold(number, problems):
    assert lint(text(*[one_step(key=f"s{n}") for n in range(number)])) == problems


def test_secrets_are_not_for_forks():
    given = text(one_step(secrets=["HF_TOKEN"]))
    assert lint(given) == []
    assert lint(given, secrets=False) == ["step 'a' gives secrets to a fork's build"]


def test_rechecks_are_named_so():
    for suffix in SUFFIXES:
        assert lint(text(one_step(key=f"a{suffix}")), suffix=suffix) == []
        assert lint(text(one_step()), suffix=suffix) == [f"key 'a' does not end in {suffix!r}"]
        assert lint(text(one_step(key=f"a{suffix}"))) == [f"key 'a{suffix}' ends in {suffix!r}"]


def test_step_that_posts_is_named_by_the_caller():
    step = one_step(key="required", notify=POST)
    assert lint(text(step), posts="required") == []
    assert len(lint(text(step))) == 2


def test_files_of_this_repository_are_sound():
    assert set(FILES) == set(FLOWS)
    assert lint_files(FILES, DECLARED) == []


def find(pipeline, key):
    return next(step for step in pipeline["steps"] if step.get("key", "wait" if "wait" in step else "") == key)


def change(key, /, **values):
    return lambda pipeline: find(pipeline, key).update(values)


def drop(key, word):
    return lambda pipeline: find(pipeline, key).pop(word)


def bare_wait(pipeline):
    pipeline["steps"][1] = "wait"


def verdict_first(pipeline):
    pipeline["steps"].insert(0, pipeline["steps"].pop())


@pytest.mark.parametrize(
    ("name", "edit", "expected"),
    [
        ("pipeline.yml", verdict_first, "its steps are verdict, plan, wait, recheck, wait, not plan,"),
        ("pipeline.yml", lambda p: p["steps"].remove(find(p, "recheck")), "its steps are plan, wait, wait, verdict"),
        ("pipeline.yml", drop("wait", "continue_on_failure"), "a wait stops at a failure"),
        ("pipeline.yml", bare_wait, "a wait stops at a failure"),
        ("pipeline.yml", lambda p: p.update(notify=POST), "notifies for the whole build"),
        ("pipeline.yml", drop("verdict", "notify"), "step 'verdict' posts nothing"),
        ("pipeline.yml", change("verdict", notify=[*POST, *POST]), "step 'verdict' posts ["),
        ("pipeline.yml", change("plan", notify=POST), "step 'plan' posts ['rocm/required']"),
        ("pipeline.yml", change("plan", notify=[{"slack": "#ci"}]), "step 'plan' posts [None]"),
        ("pipeline.yml", change("verdict", soft_fail=True), "step 'verdict' has 'soft_fail'"),
        ("pipeline.yml", change("verdict", **{"if": "false"}), "step 'verdict' has 'if'"),
        ("pipeline.yml", drop("plan", "timeout_in_minutes"), "step 'plan' has no timeout"),
        ("pipeline.yml", drop("plan", "agents"), "step 'plan' has no queue"),
        ("pipeline.yml", change("plan", command=[]), "step 'plan' has no command"),
        ("pipeline.yml", change("plan", command=["echo $HOME"]), "a single '$' is replaced"),
        ("pipeline.yml", change("plan", command=["echo $$$HOME"]), "a single '$' is replaced"),
        ("pipeline.yml", change("recheck", key="plan"), "key 'plan' is used twice"),
        ("pipeline.yml", change("recheck", depends_on="verdct"), "depends on 'verdct', which does not exist"),
        ("pipeline.yml", change("plan", retry={"automatic": [{"exit_status": 1}]}), "which is not infrastructure"),
        ("rerun.yml", change("verdict", notify=POST), "rocm/required is posted by no step here"),
        ("release.yml", change("verdict", notify=POST), "rocm/required is posted by no step here"),
        ("approve.yml", drop("approve", "allowed_teams"), "step 'approve' lets anybody approve"),
        ("approve.yml", change("approve", allowed_teams=["everyone"]), "lets ['everyone'] approve, and not rocm-gate"),
        (
            "pipeline.yml",
            change("plan", agents={"queue": "elsewhere"}),
            "runs on the queue 'elsewhere' and not on amd-gate",
        ),
        ("pipeline.yml", change("verdict", agents={"queue": "amd-cpu"}), "not on amd-gate, that of what decides"),
        ("release.yml", change("sign", agents={"queue": "amd-gate"}), "not on amd-release, that of what signs"),
        ("release.yml", change("bundle", agents={"queue": "amd-release"}), "not on amd-gate, that of what decides"),
        ("pipeline.yml", lambda p: p.update(env={"PYTHONPATH": "ci"}), "it sets PYTHONPATH: what decides is Python"),
        ("pipeline.yml", change("verdict", notify=POST), "posts in builds that nobody asked to merge"),
        ("approve.yml", lambda p: find(p, "approve").update(input=find(p, "approve").pop("block")), "is no block step"),
        ("approve.yml", change("approve", **{"if": "false"}), "can be left out by a condition"),
        ("approve.yml", drop("approve", "key"), "has no key that Buildkite takes"),
        ("waiting.yml", change("waiting", command=["echo $TOKEN"]), "a single '$' is replaced"),
        ("waiting.yml", change("waiting", notify=POST), "rocm/required is posted by no step here"),
        ("waiting.yml", change("waiting", agents={"queue": "amd-cpu"}), "not on amd-gate, that of what decides"),
        ("other.yml", lambda _: None, "its steps are approve, approved, wait, required, not none"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:50] if isinstance(value, str) else "",
)
def test_unsound_file_is_found(name, edit, expected):
    pipeline = yaml.safe_load(FILES.get(name, FILES["approve.yml"]))
    edit(pipeline)
    problems = lint_files({**FILES, name: yaml.safe_dump(pipeline)}, DECLARED)
    assert any(problem.startswith(f"{name}: ") and expected in problem for problem in problems), problems


@pytest.mark.parametrize("text", ["", "x: 1", "- a", "steps: 3", "steps: [3]", "steps: [{key: [1]}]", "a: ["])
def test_what_is_no_pipeline_is_told_by_the_schema_alone(text):
    problems = lint_files({**FILES, "waiting.yml": text}, DECLARED)
    assert len(problems) == 1
    assert re.match(r"waiting.yml: (.*(is not valid|is not of type|is a required)|is no YAML)", problems[0])


def test_file_that_is_missing_is_found():
    for missing in ("pipeline.yml", "approve.yml"):
        rest = {name: FILES[name] for name in FILES if name != missing}
        assert lint_files(rest, DECLARED) == [f"{missing} is missing"]
