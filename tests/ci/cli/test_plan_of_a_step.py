# SPDX-License-Identifier: Apache-2.0
"""`hilgate plan STEP`, `plan --models`, profiles and minutes as a person meets them, in a small repository."""

import json
import socket

import pytest
from support.plans import git, hilgate, passing, write_repository, writes_findings

from hilgate.errors import Exit
from hilgate.model.plan import Plan
from hilgate.plan.estimate import MINUTES_FILE, LastMinutes


@pytest.fixture
def repository(tmp_path):
    """Three steps; `reader` imports a module, `night` belongs to nightly plans."""
    for name, text in {
        "kernels/pagedkv/__init__.py": "",
        "kernels/pagedkv/layout.py": "",
        "kernels/pagedkv/reader.py": "from pagedkv import layout",
        "kernels/pagedkv/other.py": "",
        "kernels/pagedkv/data.toml": "",
        "ci/project.yaml": "python_path: [kernels, .]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = dict.fromkeys(("plain", "reader", "night"), writes_findings(passing()))
    root = write_repository(
        tmp_path,
        commands,
        reader={"imports": ["pagedkv.reader"], "models": ["pocket-hybrid"]},
        night={"profiles": ["nightly"], "tools": ["no-such-tool"]},
    )
    area = json.loads((root / "ci/areas/samples.yaml").read_text())
    (root / "ci/areas/samples.yaml").write_text(json.dumps(area | {"always": False}))
    git(root, "commit", "-qam", "not always")
    return root


def test_module_that_a_step_does_not_import_leaves_it_out(repository):
    (repository / "kernels/pagedkv/other.py").write_text("x = 1")
    plan = Plan.model_validate_json(hilgate(repository, "plan", "--base", "HEAD", "--json").stdout)
    assert [step.key for step in plan.steps] == ["plain-cpu"]
    assert {one.key: one.reason for one in plan.omissions} == {
        "reader": "not affected: nothing it imports changed",
        "night": "runs nightly",
    }
    explained = " ".join(hilgate(repository, "plan", "reader", "--base", "HEAD").stdout.split())
    assert "this change not affected: nothing it imports changed" in explained
    assert "a changed module that pagedkv.reader imports" in explained
    (repository / "kernels/pagedkv/layout.py").write_text("x = 1")
    explained = " ".join(hilgate(repository, "plan", "reader", "--base", "HEAD").stdout.split())
    assert "kernels/pagedkv/layout.py changed, imported by pagedkv.reader" in explained


def test_model_selects_its_step(repository):
    plan = Plan.model_validate_json(hilgate(repository, "plan", "--models", "pocket-hybrid", "--json").stdout)
    assert [(step.key, step.reason) for step in plan.steps] == [("reader-cpu", "asked for: model pocket-hybrid")]
    misspelt = hilgate(repository, "plan", "--models", "pocket-hybird")
    assert misspelt.returncode == Exit.MISUSE
    assert "did you mean 'pocket-hybrid'" in misspelt.stderr


def test_profiles(repository):
    everything = Plan.model_validate_json(
        hilgate(repository, "plan", "--base", "HEAD", "--profile", "nightly", "--json").stdout
    )
    assert [step.key for step in everything.steps] == ["plain-cpu", "reader-cpu", "night-cpu"]
    assert hilgate(repository, "plan", "--profile", "weekly").returncode == Exit.MISUSE
    by_name = hilgate(repository, "plan", "night")
    assert by_name.returncode == Exit.CANNOT_RUN_HERE
    assert "needs no-such-tool; not installed here (agents: amd-cpu)" in by_name.stderr


def test_measured_minutes_stand_in_footer_and_explanation(repository):
    assert "(as declared)" in hilgate(repository, "plan").stdout
    assert "about 2 minutes (as declared)" in hilgate(repository, "plan", "--profile", "pr").stdout
    last = LastMinutes(host=socket.gethostname(), minutes={"plain-cpu": 5.0})
    last.save(repository / MINUTES_FILE)
    assert "(measured for 1 of 2)" in hilgate(repository, "plan").stdout
    assert "about 2 minutes (as declared)" in hilgate(repository, "plan", "--profile", "pr").stdout
    assert "5 min" in hilgate(repository, "plan", "plain").stdout
