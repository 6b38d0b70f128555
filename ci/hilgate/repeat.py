"""The line that repeats a step in the image it ran in, by digest, for a person at a machine with such a GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hilgate.model import PlannedStep, StepVerdict

IMAGES_VARIABLE = "HILGATE_IMAGES"
"""The repository that images are pulled from; a report names none, so that it can be shown to anybody."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WORKSPACE = "/hilgate/workspace"


def container_line(verdict: StepVerdict, step: PlannedStep) -> str:
    """`docker run ... <image>@<digest> python3 -m hilgate run ...`; empty when the step ran in no image.

    As the agents run it, but for the GPUs (all of the desk's) and the limits of memory. `/dev/kfd` and the render nodes
    belong to groups whose numbers are the host's own, so the line asks the host.
    """
    if not _DIGEST.fullmatch(verdict.image):
        return ""
    image = f'"${IMAGES_VARIABLE}/{step.image}@{verdict.image}"' if step.image else verdict.image
    gpus = ["--device=/dev/kfd", "--device=/dev/dri", '--group-add="$(stat -c %g /dev/kfd)"', "--shm-size=16g"]
    return " ".join(
        [
            *("docker run --rm --init", *(gpus if step.gpus else ())),
            *('--user="$(id -u):$(id -g)"', "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(() if step.network else ("--network=none",)),
            *("--env=HOME=/tmp", "--env=PYTHONPATH=ci:kernels:evals", f'--volume="$PWD:{_WORKSPACE}"'),
            *(f"--workdir={_WORKSPACE}", "--entrypoint=", image, f"python3 -m {verdict.reproduce}"),
        ]
    )
