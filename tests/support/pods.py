# SPDX-License-Identifier: Apache-2.0
"""Pods as agent-stack-k8s makes them of a plugin, and every way in which a plugin could open one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ci/agent/pods"
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text(encoding="utf-8"))["config"]
DOCUMENTS = list(yaml.safe_load_all((FOLDER / "policy.yaml").read_text(encoding="utf-8")))

HILGATE, FIT, STEP = (f"podSpec/initContainers/{place}" for place in range(3))
AGENT = "podSpecPatch/containers/0"
OPEN = {
    "podSpec/automountServiceAccountToken": True,
    "podSpec/serviceAccountName": "admin",
    "podSpec/hostNetwork": True,
    "podSpec/hostPID": True,
    "podSpec/shareProcessNamespace": True,
    "podSpec/containers": [{"image": "mine"}],
    "podSpec/securityContext/runAsUser": 0,
    "podSpec/securityContext/seccompProfile": {"type": "Unconfined"},
    "podSpec/securityContext/sysctls": [{"name": "kernel.msgmax", "value": "1"}],
    "podSpec/volumes/0": {"name": "hilgate-given", "hostPath": {"path": "/"}},
    f"{HILGATE}/image": "mine:latest",
    f"{HILGATE}/command": ["cp", "/bin/true", "/hilgate/given"],
    f"{FIT}/image": "registry.example/hilgate/rocm:latest",
    f"{FIT}/command/4": "step",
    f"{STEP}/image": "registry.example/hilgate/rocm",
    f"{STEP}/command": ["python3", "-m", "mine"],
    f"{STEP}/securityContext/allowPrivilegeEscalation": True,
    f"{STEP}/securityContext/privileged": True,
    f"{STEP}/securityContext/runAsNonRoot": False,
    f"{STEP}/securityContext/capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    f"{STEP}/securityContext/capabilities/drop": ["NET_RAW"],
    f"{STEP}/envFrom": [{"secretRef": {"name": "buildkite-agent-token"}}],
    f"{STEP}/env/1": {"name": "BUILDKITE_AGENT_TOKEN", "value": "x"},
    f"{STEP}/volumeMounts/0/readOnly": False,
    f"{STEP}/volumeMounts/4": {"name": "workspace", "mountPath": "/workspace"},
    f"{STEP}/resources/limits/memory": None,
    f"{STEP}/resources/limits/ephemeral-storage": None,
    f"{STEP}/resources/limits/amd.com~gpu": "8",
    f"{STEP}/resources/limits/nvidia.com~gpu": "1",
    f"{AGENT}/image": "mine@sha256:" + "0" * 64,
    f"{AGENT}/securityContext/privileged": True,
    f"{AGENT}/name": "agent",
    "podSpecPatch/hostIPC": True,
    "commandParams/extraVolumeMounts/1/readOnly": False,
    "commandParams/envFrom": [{"secretRef": {"name": "any"}}],
    "sidecars": [{"image": "mine"}],
    "gitEnvFrom": [{"secretRef": {"name": "any"}}],
}
"""Place in the plugin -> what opens the pod; None takes the key away."""


def open_a_pod(plugin: dict[str, Any], place: str) -> None:
    """Change a plugin at one place of `OPEN`."""
    at: Any = plugin
    *way, last = [int(part) if part.isdigit() else part.replace("~", "/") for part in place.split("/")]
    for part in way:
        at = at[part]
    if OPEN[place] is None:
        del at[last]
    elif isinstance(at, list):
        at[last:] = [OPEN[place], *at[last + 1 :]]
    else:
        at[last] = OPEN[place]


def made(plugin: dict[str, Any]) -> dict[str, Any]:
    """The job that the controller makes of a plugin with the values of `ci/agent/pods` (internal/controller/scheduler,
    version 0.53): its own containers, then its patch, then the plugin's."""
    spec = copy.deepcopy(plugin["podSpec"])
    workspace = [{"name": "workspace", "mountPath": "/workspace"}]
    image, git_env = VALUES["image"], plugin.get("gitEnvFrom", [])
    command = {
        "command": ["/workspace/tini-static"],
        "args": ["--", "/workspace/buildkite-agent", "kubernetes-bootstrap"],
    }
    params = plugin.get("commandParams", {})
    for number, one in enumerate(spec.setdefault("containers", []) or [{"image": image}]):
        mounts = workspace + params.get("extraVolumeMounts", [])
        given = {
            "name": f"container-{number}",
            "volumeMounts": mounts,
            "envFrom": [*params.get("envFrom", []), *git_env],
        }
        spec["containers"][number:] = [one | given | command]
    as_root = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}
    token = {"secretKeyRef": {"name": "agent-token", "key": "BUILDKITE_AGENT_TOKEN"}}
    agent = {"name": "agent", "image": image, "args": ["start"], "volumeMounts": workspace}
    checkout = {
        "name": "checkout",
        "image": image,
        "volumeMounts": workspace,
        "securityContext": as_root,
        "envFrom": git_env,
    }
    spec["containers"] += [agent | {"env": [{"name": "BUILDKITE_AGENT_TOKEN", "valueFrom": token}]}]
    spec["containers"] += [] if plugin.get("checkout", {}).get("skip") else [checkout]
    for number, one in enumerate(plugin.get("sidecars", ())):
        spec["initContainers"] += [
            one | {"name": f"sidecar-{number}", "restartPolicy": "Always", "volumeMounts": workspace}
        ]
    copies = {"name": "copy-agent", "image": image, "volumeMounts": workspace, "securityContext": as_root}
    spec["initContainers"] = [copies, *spec["initContainers"]]
    credentials = {"secretName": VALUES["default-checkout-params"]["gitCredentialsSecret"]["secretName"]}
    spec["volumes"] += [{"name": "workspace", "emptyDir": {}}, {"name": "git-credentials-ro", "secret": credentials},
                        {"name": "git-credentials", "emptyDir": {"medium": "Memory"}}]  # fmt: skip
    spec["restartPolicy"] = "Never"
    spec = _merged(_merged(spec, VALUES["pod-spec-patch"]), plugin.get("podSpecPatch", {}))
    for one in (*spec["containers"], *spec["initContainers"]):
        if not one.get("envFrom", True):
            del one["envFrom"]
    labels = plugin["metadata"]["labels"] | {"buildkite.com/job-uuid": "0192"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    metadata = {"name": "buildkite-0192", "labels": labels}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"backoffLimit": 0, "template": template},
    }


def _merged(old: Any, patch: Any) -> Any:
    """A strategic merge as far as ours needs it: mappings by key, lists of named things by name, all else replaced."""
    if isinstance(old, dict) and isinstance(patch, dict):
        new = old | {key: _merged(old[key], value) if key in old else value for key, value in patch.items()}
        return {key: value for key, value in new.items() if value is not None}
    if isinstance(old, list) and old and isinstance(old[0], dict) and "name" in old[0]:
        changes = {one["name"]: one for one in patch}
        known = [_merged(one, changes.pop(one["name"], {})) for one in old]
        return known + list(changes.values())
    return patch
