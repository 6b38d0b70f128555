"""What a rerun asks for, and when it may answer for the whole change."""

import pytest
from support import plans as toyplans
from support.rest import build as answer

from hilgate.buildkite.api import (
    IMAGES_KEY,
    RERUN_KEY,
    RemoteBuild,
    RemoteError,
    images_of,
    request,
    shortfall,
)
from hilgate.model import Loosening


def build(**changes):
    return RemoteBuild.model_validate(answer(41, **changes))


def plan(*names, **changes):
    steps = [toyplans.step(name, "true") for name in names]
    return toyplans.plan(*steps, **{"profile": "pr", "merge_base": "b" * 40, **changes})


def test_request_names_the_models_and_the_build_whose_images_it_uses():
    body = request(build(), ["jamba", "pocket-hybrid"], profile="pr")
    assert body["env"] == {
        "HILGATE_FLOW": "rerun",
        "HILGATE_MODELS": "jamba pocket-hybrid",
        "HILGATE_PROFILE": "pr",
        "HILGATE_IMAGE_FROM_BUILD": "41",
    }
    assert body["meta_data"] == {RERUN_KEY: "41"}
    assert (body["commit"], body["branch"]) == ("c" * 40, "feature")


def test_fork_stays_a_fork():
    theirs = {"id": "7", "base": "main", "repository": "https://example.invalid/somebody/rocm.git"}
    body = request(build(pull_request=theirs), ["jamba"], profile="pr")
    assert body["pull_request_repository"] == theirs["repository"]
    assert (body["pull_request_id"], body["pull_request_base_branch"]) == (7, "main")


@pytest.mark.parametrize("gone", ["id", "base", "repository"])
def test_pull_request_that_might_be_a_fork_is_refused(gone):
    known = {"id": "7", "base": "main", "repository": "https://example.invalid/acme/rocm.git"}
    del known[gone]
    with pytest.raises(RemoteError, match="which repository"):
        request(build(pull_request=known), ["jamba"], profile="pr")
    with pytest.raises(RemoteError, match="which repository"):
        request(build(pull_request=None), ["jamba"], profile="pr")


def test_images_are_those_of_the_verdict():
    digest = f"sha256:{'0' * 64}"
    assert images_of(build(meta_data={IMAGES_KEY: f'{{"rocm": "{digest}"}}'})) == {"rocm": digest}
    assert images_of(build()) == {}


@pytest.mark.parametrize("text", ["", "rocm", "[]", '{"rocm": 5}', 5, None])
def test_images_that_cannot_be_read_are_not_guessed(text):
    made = build(meta_data={IMAGES_KEY: text})
    if text is None:
        assert images_of(made) == {}
    else:
        with pytest.raises(RemoteError, match="cannot be read"):
            images_of(made)


def test_rerun_of_everything_is_complete():
    assert shortfall(plan("a", "b"), plan("a", "b")) == ()
    assert shortfall(plan("a", "b"), plan("b", "c", "a")) == ()


def test_reason_of_a_step_is_not_what_it_does():
    required = plan("a")
    other = required.model_copy(update={"steps": (required.steps[0].model_copy(update={"reason": "asked for"}),)})
    assert shortfall(required, other) == ()


@pytest.mark.parametrize(
    ("rerun", "expected"),
    [
        (plan("a"), ["b-cpu is missing"]),
        (plan(), ["a-cpu is missing", "b-cpu is missing"]),
        (plan("a", "b", profile="nightly"), ["the profile is another"]),
        (plan("a", "b", commit="d" * 40), ["the commit is another"]),
        (plan("a", "b", base=None), ["the base is another"]),
        (plan("a", "b", merge_base="d" * 40), ["the merge_base is another"]),
        (plan("a", "b", dirty=True), ["the dirty is another"]),
        (plan("a", "b", fork=True), ["the fork is another"]),
        (plan("a", "b", images={"rocm": "e" * 64}), ["the images is another"]),
        (plan("a", "b", changed_files=("x",)), ["the changed_files is another"]),
    ],
    ids=["part", "nothing", "profile", "commit", "base", "merge-base", "dirty", "fork", "images", "files"],
)
def test_part_of_a_plan_or_another_plan_is_not_complete(rerun, expected):
    assert list(shortfall(plan("a", "b"), rerun)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"minimum": 0},
        {"command": "true || true"},
        {"queue": "amd_mi300_1"},
        {"image": "rocm"},
        {"timeout_minutes": 2},
        {"env": {"A": "b"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_step_that_does_something_else_is_not_the_same(change):
    required = plan("a", "b")
    steps = (toyplans.changed(required.steps[0], **change), required.steps[1])
    assert shortfall(required, required.model_copy(update={"steps": steps})) == ("a-cpu differs",)


@pytest.mark.parametrize(
    "changes",
    [
        {"changed_files": ("README.md", "ci/hilgate/judge/verdict.py")},
        {"changed_files": (".buildkite/approve.yml",)},
        {"loosened": (Loosening(path="evals/gates.yaml", what="margin: 1 -> 2"),)},
    ],
    ids=["gate", "flow", "loosened"],
)
def test_change_to_the_gate_is_never_complete(changes):
    both = plan("a", **changes)
    assert shortfall(both, both) == ("the change edits its own gate, which needs an approval",)


def test_plan_of_another_profile_is_not_what_a_merge_needs():
    both = plan("a", profile="nightly")
    assert shortfall(both, both) == ("a plan of profile nightly is not what a merge needs",)
