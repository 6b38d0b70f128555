# SPDX-License-Identifier: Apache-2.0
"""The pod of a job on Kubernetes: the `kubernetes` plugin of Buildkite's agent-stack-k8s. Pure.

Five containers, of which the pipeline says two. `agent`, `checkout` and `container-0` hold Buildkite's token and run in
the controller's own image; `hilgate` copies trusted code out of that image. What stands here of its image and command
fails: the controller puts its own in their place, or the pod ends as infrastructure. `fit` judges the GPUs, and `step`
runs the code of the change: without a token, a service account, a mount of the workspace or a way to write to what it
was given (`agent_host.pod`). It is an init container that lives as long as the pod (Kubernetes 1.29), because the
controller gives its own `sidecars` the workspace with the token's socket in it, and turns every entry of `containers`
into an agent.

`ci/agent/pods/policy.yaml` lets no other pod in, because not only this file can upload steps; tests hold what this file
makes against that policy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hilgate.model.declaration import CPU

if TYPE_CHECKING:
    from hilgate.model.declaration import Pods
    from hilgate.model.plan import PlannedStep

PLUGIN = "kubernetes"
AGENT = "container-0"
"""What the controller calls the container of a job's command, where a pod names none."""

USER = 1000
"""User of all containers but the two in which the controller prepares workspace and checkout as root."""

CLOSED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
"""The security context of every container that the pipeline says something of."""

POD: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "securityContext": {
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
"""What every pod has."""

SHM_GIB = 16
"""Size of /dev/shm, where RCCL and vLLM's workers share buffers, as `agent_host.container.SHM_GIB`."""

NETWORK = "hilgate/network"
"""Label of a pod: `open` where its step declares a network, `none` elsewhere; network policies select by it."""

GIVEN = {"name": "hilgate-given", "mountPath": "/hilgate/given"}
OUT = {"name": "hilgate-out", "mountPath": "/hilgate/out"}
WORK = {"name": "hilgate-work", "mountPath": "/hilgate/workspace"}
SHM = {"name": "hilgate-shm", "mountPath": "/dev/shm"}  # noqa: S108
READ_ONLY = {"readOnly": True}

NODE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")

FAILS = ["false"]
"""The command of a container that only the controller can make do anything; it must have an image to be accepted."""

PROGRAM = ["python3", "-I", "/hilgate/given/hilgate/ci/agent_host/__main__.py", "pod"]
"""The trusted code, which `hilgate` has copied; isolated, so nothing of image or change stands before it."""


def plugin(step: PlannedStep, queue: str, pods: Pods, digest: str, *, fork: bool, avoid: str = "") -> dict[str, Any]:
    """The plugin of a job of this step on a queue of pods; its image is named by its `digest`.

    It goes to another node than `avoid`, where there is one: a recheck on the same node says nothing.
    """
    image = f"{pods.registry}/{step.image}@{digest}"
    gpus = {pods.resource: str(step.gpus)} if step.gpus else {}
    limits = {"cpu": str(pods.cpus), "memory": f"{pods.memory_gib}Gi", "ephemeral-storage": f"{pods.disk_gib}Gi"}
    inside = {"image": image, "securityContext": CLOSED, "resources": {"limits": limits | gpus}}
    fit = {
        "name": "fit",
        "command": [*PROGRAM, "fit", "--queue", queue, "--step", step.key, "--gpus", str(step.gpus)],
        "volumeMounts": [GIVEN],
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the controller shows it in the job's log
        "env": [_node_name()],
    }
    runs = {
        "name": "step",
        "restartPolicy": "Always",
        "command": [*PROGRAM, "step"],
        "volumeMounts": [GIVEN | READ_ONLY, OUT, WORK, SHM],
        "env": [_node_name()],
    }
    copies = {"name": "hilgate", "image": image, "command": FAILS, "securityContext": CLOSED, "volumeMounts": [GIVEN]}
    sizes = {"sizeLimit": f"{pods.disk_gib}Gi"}
    spec = POD | {
        "initContainers": [copies, *([fit | inside] if step.gpus else []), runs | inside],
        "volumes": [
            *({"name": mount["name"], "emptyDir": sizes} for mount in (GIVEN, OUT, WORK)),
            {"name": SHM["name"], "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_GIB}Gi"}},
        ],
    }
    if pods.node_selector:
        spec["nodeSelector"] = pods.node_selector
    if NODE_NAME.fullmatch(avoid):  # a result says it, so a change may have chosen it
        spec["affinity"] = _other_than(avoid)
    if pods.groups:
        spec["securityContext"] = {**POD["securityContext"], "supplementalGroups": list(pods.groups)}
    online = step.step.network and not (fork and step.device != CPU)
    variables = [{"name": "HILGATE_POD", "value": "/hilgate"}, _node_name()]
    agent = {"name": AGENT, "securityContext": CLOSED, "env": variables}
    return {
        PLUGIN: {
            "metadata": {"labels": {NETWORK: "open" if online else "none"}},
            "podSpec": spec,
            "commandParams": {"extraVolumeMounts": [GIVEN, OUT | READ_ONLY]},
            "podSpecPatch": {"containers": [agent]},
        }
    }


def _other_than(node: str) -> dict[str, Any]:
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]
    rule = {"weight": 100, "preference": {"matchFields": fields}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [rule]}}


def _node_name() -> dict[str, Any]:
    return {"name": "HILGATE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
