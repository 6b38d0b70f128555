# SPDX-License-Identifier: Apache-2.0
"""Programs that steps ask for are where their jobs run on agents: in the image, or on the hosts of the queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipelines import DECLARED

from hilgate.declare.load import InvalidDeclarationsError, load
from hilgate.git import Changes
from hilgate.images.pins import read
from hilgate.plan.make import ChangeFacts, assemble

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = {"ssh-keygen": "openssh-client"}
"""Program -> the Debian package that has it, where the two have different names."""

AGENTS = """devices: {cpu: {}}
queues:
  cpu: {device: cpu, gpus: 0, memory_gib: 16, image: small}
  hosts: {device: cpu, gpus: 0, memory_gib: 64, tools: [docker]}
"""
PROJECT = "images:\n  small: {recipe: Dockerfile, tools: [git]}\n"
AREA = """area: one
title: One
why: It works.
paths: ["*"]
steps:
  - {key: image, label: i, command: "true", devices: [cpu], evidence: findings, requires: ["program:docker"],
     agents: {queues: {cpu: hosts}, provides: small}}
  - {key: works, label: w, command: "true", devices: [cpu], evidence: findings, requires: ["program:git"]}
"""


@pytest.mark.parametrize("profile", ["pr", "nightly", "release"])
def test_every_planned_step_runs_where_its_tools_are(profile):
    change = Changes(base=None, merge_base="", commit="", dirty=False, files=None)
    images = ChangeFacts(images=dict.fromkeys(DECLARED.project.images, "0" * 64))
    plan = assemble(DECLARED, change, None, profile=profile, facts=images)
    asked = 0
    for step in plan.steps:
        there = DECLARED.project.images[step.image].tools if step.image else DECLARED.agents.queues[step.queue].tools
        assert set(step.step.tools) <= set(there), step.key
        asked += len(step.step.tools)
    assert asked >= 5, "the steps that build images, and those that sign, ask for programs"


def test_the_cpu_image_has_the_tools_that_it_is_said_to_have():
    packages = set(read(REPOSITORY).cpu.packages)
    tools = DECLARED.project.images["cpu"].tools
    assert tools
    assert {PACKAGES.get(tool, tool) for tool in tools} <= packages


def test_what_needs_root_and_a_builder_runs_in_no_image():
    _, step = DECLARED.step("rocm-extensions")
    assert DECLARED.image_for(step, "cpu") is None
    assert "buildah" in DECLARED.agents.queues[DECLARED.queue_for(step, "cpu")].tools


def write(root, **changes):
    texts = {"agents": AGENTS, "project": PROJECT, "areas/one": AREA} | changes
    for name, text in texts.items():
        path = root / "ci" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_tools_that_are_there_are_no_mistake(tmp_path):
    assert load(write(tmp_path)).step("works")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"areas/one": AREA.replace('["program:git"]', '["program:git", "program:buildah"]')},
            "one.yaml:8 steps[1].requires: on agents it runs in the image 'small', which does not declare buildah",
        ),
        (
            {"agents": AGENTS.replace(", tools: [docker]", "")},
            "one.yaml:6 steps[0].requires: on agents it runs on hosts of 'hosts', which does not declare docker",
        ),
        ({"project": "images: {small: {recipe: Dockerfile}}\n"}, "which does not declare git"),
        (
            {"agents": AGENTS + "  keys: {device: cpu, gpus: 0, memory_gib: 16, signs: true}\n"},
            "queues.keys.signs: it signs releases, and steps of a change could run there",
        ),
        (
            {"agents": AGENTS + "  g: {device: cpu, gpus: 0, memory_gib: 16, gate: true, report_only: true}\n"},
            "queues.g.report_only: it runs what decides, which cannot be reported alone",
        ),
    ],
    ids=["in an image", "on a host", "an image that names none", "a signing queue for steps", "a gate only reported"],
)
def test_tools_that_are_not_there_are_a_mistake_of_the_step(tmp_path, changes, words):
    with pytest.raises(InvalidDeclarationsError) as caught:
        load(write(tmp_path, **changes))
    assert any(words in str(mistake) for mistake in caught.value.mistakes), caught.value.mistakes
