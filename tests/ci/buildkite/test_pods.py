# SPDX-License-Identifier: Apache-2.0
"""The files of ci/agent/pods: valid by Kubernetes' published schemas, and a policy that refuses what opens a pod."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import cel
import kubernetes_validate
import pytest
import yaml
from support.pipelines import WITH_PODS, pod_plan, steps_of
from support.pods import DOCUMENTS, OPEN, ROOT, VALUES, made, open_a_pod

from hilgate.buildkite.steps import pipeline_yaml
from hilgate.model.declaration import Queue

PLUGIN = steps_of(pipeline_yaml(pod_plan(), WITH_PODS))["models-gfx942"]["plugins"][0]["kubernetes"]
POLICY = next(one["spec"] for one in DOCUMENTS if one["kind"] == "ValidatingAdmissionPolicy")


def opened(place: str) -> dict[str, Any]:
    plugin = copy.deepcopy(PLUGIN)
    open_a_pod(plugin, place)
    return made(plugin)


def refusals(document: dict[str, Any]) -> list[str]:
    """Messages of the policy for a job or a pod, as the API server would evaluate it: an error refuses as well."""
    variables: dict[str, Any] = {}
    known = {"object": document, "variables": variables}
    found = []
    try:
        if not all(cel.evaluate(one["expression"], known) for one in POLICY["matchConditions"]):
            return []
        for one in POLICY["variables"]:
            variables[one["name"]] = cel.evaluate(one["expression"], known)
    except (RuntimeError, TypeError, ValueError) as error:
        return [str(error)]
    for one in POLICY["validations"]:
        try:
            if cel.evaluate(one["expression"], known) is not True:
                found.append(one["message"])
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"{one['message']}: {error}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifest_is_valid_by_the_schemas_of_kubernetes(document):
    kubernetes_validate.validate(document, "1.30", strict=True)


def test_a_job_is_valid_by_kubernetes_schemas_and_a_typo_is_not():
    job = made(PLUGIN)
    for version in ("1.29", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["template"]["spec"]["initContainers"][1]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(job, "1.29", strict=True)


def test_what_the_controller_makes_of_ours_is_let_in():
    job = made(PLUGIN)
    assert refusals(job) == []
    assert refusals({"kind": "Pod", "metadata": job["metadata"], "spec": job["spec"]["template"]["spec"]}) == []
    names = [one["name"] for one in job["spec"]["template"]["spec"]["initContainers"]]
    assert names == ["copy-agent", "hilgate", "fit", "step"]  # each waits for the one before it


@pytest.mark.parametrize("place", sorted(OPEN), ids=lambda place: place.replace("/", "."))
def test_an_open_pod_is_refused_or_closed_by_the_controller(place):
    job = opened(place)
    assert refusals(job) or job == made(PLUGIN)


def patched(**said: object) -> dict[str, Any]:
    """The plugin with more in its own patch, the last word on a pod."""
    plugin = copy.deepcopy(PLUGIN)
    plugin["podSpecPatch"] |= said
    return plugin


def change(name: str, *, kind: str = "initContainers", **said: object) -> dict[str, Any]:
    """The plugin whose own patch changes one container, or what else has a name."""
    return patched(**{kind: [*PLUGIN["podSpecPatch"].get(kind, ()), {"name": name, **said}]})


OF_THE_AGENT = {"kind": "containers"}
LAST_WORDS = [
    (change("hilgate", command=["cp", "-r", "/mine", "/hilgate/given/"]), "a command that is not the trusted one"),
    (change("step", args=["x"]), "a command that is not the trusted one"),
    (change("step", image="mine.example/rocm@sha256:" + "0" * 64), "an image of a step"),
    (change("mine", image=VALUES["image"]), "a container that is neither"),
    (change("mine", image=VALUES["image"], **OF_THE_AGENT), "a container that is neither"),
    (change("agent", image="mine", **OF_THE_AGENT), "an image of the agent's containers"),
    (change("checkout", securityContext={"privileged": True}, **OF_THE_AGENT), "a security context that is open"),
    (change("step", volumeMounts=[{"name": "workspace", "mountPath": "/w"}]), "a mount by which the code of a change"),
    (change("fit", env=[{"name": "LD_PRELOAD", "value": "/x"}]), "a variable that changes what trusted code does"),
    (change("agent", env=[{"name": "PYTHONPATH", "value": "/x"}], **OF_THE_AGENT), "a variable that changes"),
    (change("checkout", envFrom=[{"secretRef": {"name": "x"}}], **OF_THE_AGENT), "a secret in the environment"),
    (change("agent", resources={"limits": {"amd.com/gpu": "1"}}, **OF_THE_AGENT), "GPUs that `fit` has not judged"),
    (change("hilgate-out", kind="volumes", emptyDir=None, hostPath={"path": "/"}), "a volume that is neither"),
    (change("mine", kind="volumes", secret={"secretName": "agent-token"}), "a volume that is neither"),
    (patched(serviceAccountName="admin"), "another service account, or its token"),
    (patched(automountServiceAccountToken=True), "another service account, or its token"),
    (patched(hostPID=True), "the host's network, processes or IPC"),
]
"""Plugins, and what the policy says of each."""


@pytest.mark.parametrize(("plugin", "message"), LAST_WORDS, ids=[str(place) for place in range(len(LAST_WORDS))])
def test_what_the_plugin_says_last_is_refused(plugin, message):
    assert any(one.startswith(message) for one in refusals(made(plugin)))


def test_each_rule_of_the_policy_refuses_one_of_these():
    said = [message for _, message in LAST_WORDS]
    assert [rule for rule in POLICY["validations"] if not any(rule["message"].startswith(one) for one in said)] == []


def test_the_page_shows_queues_that_are_valid():
    page = (ROOT / "docs/how-to/hosts-or-pods.md").read_text(encoding="utf-8")
    queues = re.findall(r"^( +)(amd_\w+):\n((?:\1  .*\n)+)", page, re.MULTILINE)
    assert [name for _, name, _ in queues] == ["amd_mi300_1_pods", "amd_mi300_cpx_1"]
    for _, _, said in queues:
        assert Queue.model_validate_json(json.dumps(yaml.safe_load(said)), strict=True).pods


def test_a_pod_of_something_else_is_none_of_the_policys():
    assert refusals({"kind": "Pod", "metadata": {"labels": {"app": "controller"}}, "spec": {}}) == []


def test_a_bare_job_is_let_in_nowhere():
    labels = {"buildkite.com/job-uuid": "0192"}
    spec = {"containers": [{"name": "container-0", "image": VALUES["image"], "env": []}], "volumes": []}
    assert refusals({"kind": "Pod", "metadata": {"labels": labels}, "spec": spec})
