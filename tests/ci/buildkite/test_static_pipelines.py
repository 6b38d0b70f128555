# SPDX-License-Identifier: Apache-2.0
"""The files of `.buildkite`: valid, clean shell, and in agreement with the declarations and the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from support.pipelines import DECLARED
from support.static_steps import FILES, FOLDER, STEPS, script

from hilgate.buildkite.api import ALL
from hilgate.cli.app import program
from hilgate.git import Changes
from hilgate.plan.estimate import estimate
from hilgate.plan.make import ChangeFacts, assemble


@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_shell_is_clean(name, key):
    # SC2329: a function that only a trap calls.
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "--exclude=SC2329", "-"],
        input=f"set -e\n{script(STEPS[name, key])}\n",
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_a_step_starts_without_results_on_a_queue_without_gpus(name, key):
    assert script(STEPS[name, key]).startswith("rm -rf results")
    assert DECLARED.agents.queues[STEPS[name, key]["agents"]["queue"]].gpus == 0


OTHERS = {"recheck", "fetch", "flow", "approver"}
OPTIONS = {"--approved-by", "--models"}
"""Commands and options that other parts of the program may not have yet are not looked up here."""


def test_commands_and_options_are_known_to_the_command_line():
    commands = typer.main.get_command(program).commands
    seen = set()
    for name, key in STEPS:
        for line in script(STEPS[name, key]).splitlines():
            found = re.match(r"(?:status=0; |(?:[A-Z_]+=\S+ )+|\s*)hilgate (\S+)(.*)", line)
            if not found or found[1] in OTHERS:
                continue
            seen.add(found[1])
            command = getattr(commands[found[1]], "commands", {}).get((found[2].split() or [""])[0], commands[found[1]])
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", found[2])) - OPTIONS <= known, line
    assert seen == {
        "plan",
        "pipeline",
        "judge",
        "history",
        "end-waiting",
        "bundle",
        "verify-bundle",
    }


def test_rerun_offers_every_model_that_a_step_runs():
    """After a change to the models: HILGATE_WRITE_GOLDEN=1 pytest tests/ci/buildkite/test_static_pipelines.py."""
    options = [("the whole plan of the change", ALL), *((model, model) for model in sorted(DECLARED.models()))]
    written = "".join(f"          - label: {label}\n            value: {value}\n" for label, value in options)
    text = re.sub(r"(?<=        options:\n)(?:          .*\n)+", written, FILES["rerun.yml"])
    if os.environ.get("HILGATE_WRITE_GOLDEN"):
        (FOLDER / "rerun.yml").write_text(text, encoding="utf-8")
    choice = yaml.safe_load(FILES["rerun.yml"])["steps"][0]
    assert [(option["label"], option["value"]) for option in choice["fields"][0]["options"]] == options


def test_the_settings_as_data_are_those_of_the_page():
    settings = (FOLDER.parent / "ci/agent/pipeline.tf").read_text(encoding="utf-8")
    (steps,) = re.findall(r"<<-YAML\n(.*?)\n  YAML", settings, re.DOTALL)
    (shown,) = re.findall(
        r"```yaml\n(.*?)```", (FOLDER.parent / "docs/how-to/set-up-buildkite.md").read_text(encoding="utf-8"), re.DOTALL
    )
    # The uploader of neither replaces anything: there is no `$`.
    assert yaml.safe_load(f"{steps}\n") == yaml.safe_load(shown)
    assert "$" not in steps
    off = ("publish_commit_status", "build_pull_request_forks", "skip_pull_request_builds_for_existing_commits")
    assert all(re.search(rf"{name} += false", settings) for name in off)
    assert set(re.findall(r'HILGATE_\w+ = "(\w+)"', settings)) == {"nightly", "release", "waiting"}


def test_a_schedule_says_what_it_takes():
    settings = (FOLDER.parent / "ci/agent/pipeline.tf").read_text(encoding="utf-8")
    change = Changes(base=None, merge_base="", commit="", dirty=False, files=None)
    images = ChangeFacts(images=dict.fromkeys(DECLARED.project.images, "0" * 64))
    for profile, name in (("nightly", "nightly"), ("release", "weekly")):
        minutes = estimate(assemble(DECLARED, change, None, profile=profile, facts=images)).gpu_minutes
        (hours,) = re.findall(rf'label += "{name}: (\d+) GPU-hours as declared', settings)
        assert float(hours) == pytest.approx(minutes / 60, rel=0.1), "an owner reads it: within a tenth"


@pytest.mark.parametrize(("name", "key"), [one for one in STEPS if "hilgate judge" in script(STEPS[one])], ids="-".join)
def test_whoever_judges_leaves_every_table(name, key):
    on_agents = [step for _, step in DECLARED.steps() if step.profiles != ("gate",)]
    tables = {f"results/{step.matrix.file}" for step in on_agents if step.matrix}
    assert len(tables) == 8
    assert tables <= set(STEPS[name, key]["artifact_paths"])
