"""Which variables of its agent a fork's job does not see."""

from __future__ import annotations

import pytest

from hilgate.agent import withheld

FACTS = {
    "PATH": "/usr/bin",
    "BUILDKITE": "true",
    "BUILDKITE_AGENT_ACCESS_TOKEN": "of this job",
    "BUILDKITE_STEP_KEY": "kernels",
    "HILGATE_JOB_STARTED": "1700000000",
    "HILGATE_RENDER_NODES": "renderD128",
    "HTTPS_PROXY": "http://proxy",
    "SPT_NOENV": "1",
}


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "BUILDKITE_API_TOKEN",
        "BUILDKITE_ANALYTICS_TOKEN",
        "BUILDKITE_S3_SECRET_ACCESS_KEY",
        "BUILDKITE_PLUGIN_DOCKER_LOGIN_PASSWORD",
        "HILGATE_API_KEY",
        "SSH_AUTH_SOCK",
        "LD_PRELOAD",
        "BUILDKITEX",
        "anything_else",
    ],
)
def test_what_may_open_something_is_withheld_from_forks_alone(name: str) -> None:
    assert withheld.names({**FACTS, name: "value"}, fork=True) == [name]
    assert withheld.names({**FACTS, name: "value"}, fork=False) == []


def test_facts_about_the_job_stay() -> None:
    assert withheld.names(FACTS, fork=True) == []


def test_a_name_that_the_shell_cannot_unset_is_not_printed() -> None:
    env = {"BASH_FUNC_which%%": "() { :; }", "a b": "1", "$(reboot)": "1", "OK_1": "1"}
    assert withheld.names(env, fork=True) == ["OK_1"]
