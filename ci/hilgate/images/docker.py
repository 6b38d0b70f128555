"""Images by docker buildx: bases by digest, wheels and images found in the registry by their content.

A build of a fork pushes nothing and exports no cache; what it may read is public or content-addressed.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from hilgate.errors import CannotRunHereError
from hilgate.images import programs
from hilgate.images.described import WHEELS

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.images.engine import Order

INSPECT = ("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}")


def available() -> bool:
    """Whether docker with buildx answers."""
    return bool(shutil.which("docker")) and programs.heard(["docker", "buildx", "version"])[0] == 0


class Docker:
    """docker with buildx.

    Attributes:
        store: Prefix of the names it gives: the registry, or a name of this machine's own images.
    """

    def __init__(self, registry: str, bake_file: Path, *, fork: bool) -> None:
        """Use the targets of `bake_file`.

        Args:
            registry: Where images are found and pushed; empty for none.
            bake_file: docker/docker-bake.hcl.
            fork: Whether a stranger's change is built: it goes under a name that no other build looks for.
        """
        self.registry = registry
        self.store = "hilgate-fork" if fork else registry or "hilgate"
        self.bake_file = bake_file

    def truly(self, labels: dict[str, str]) -> dict[str, str]:
        """The labels: the base is the one of the pins."""
        return labels

    def find(self, image: str, content: str) -> str | None:
        """Digest of an image in the registry, or else among those that a build like this one left on this machine."""
        return self._find(image, content)[1] or None

    def _find(self, image: str, content: str) -> tuple[str, str]:
        """Name and digest of an image; empty when there is none."""
        places: list[tuple[str, tuple[str, ...]]] = [(self.registry, INSPECT)] if self.registry else []
        if self.store != self.registry:
            places.append((self.store, ("docker", "image", "inspect", "--format", "{{.Id}}")))
        for store, inspect in places:
            name = f"{store}/{image}:{content}"
            status, said = programs.heard([*inspect, name])
            digest = said.strip().splitlines()[-1] if said.strip() else ""
            if status == 0 and digest.startswith("sha256:"):
                return name, digest
        return "", ""

    def build(self, order: Order) -> None:
        """Bake the image, and the wheels that the registry does not have yet."""
        env = order.variables | {"HILGATE_PIP_CONF": order.pip_conf}
        programs.build(self.command(order), order.log, order.context, env)

    def command(self, order: Order) -> list[str]:
        """The words of the build.

        Raises:
            CannotRunHereError: This machine's packages come from folders, which docker cannot mount into a build.
        """
        if order.mounts:
            raise CannotRunHereError(
                "pip's configuration names folders or a certificate of this machine",
                where=", ".join(order.mounts),
                remedy="give docker's builders an index over the network",
            )
        targets = [order.image]
        words: list[str] = []
        publish = bool(self.registry) and self.store == self.registry
        for prefix in WHEELS.values() if order.image == "rocm" else ():
            wheels = f"wheels-{prefix.lower()}"
            name, digest = self._find(wheels, order.variables[f"{prefix}_KEY"]) if self.registry else ("", "")
            if digest:
                words += ["--set", f"rocm.contexts.{wheels}=docker-image://{name}@{digest}"]
            elif publish:
                targets.append(wheels)
        command = ["docker", "buildx", "bake", "--file", str(self.bake_file), "--progress", "plain"]
        return [*command, "--push" if publish else "--load", *words, *targets]

    def labels(self, image: str, content: str) -> dict[str, str]:
        """Labels of a built image."""
        name, _ = self._find(image, content)
        if self.registry and name.startswith(f"{self.registry}/"):
            text = programs.ask([*INSPECT[:4], "--format", "{{json .Image.Config.Labels}}", name])
        else:
            text = programs.ask(["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", name])
        found: dict[str, Any] | None = json.loads(text)
        return {key: str(value) for key, value in (found or {}).items()}

    def run(self, image: str, content: str, words: list[str], mounts: dict[str, str]) -> tuple[int, str]:
        """Run without network, capabilities or devices."""
        command = ["docker", "run", "--rm", "--network", "none", "--cap-drop", "ALL"]
        command += ["--security-opt", "no-new-privileges"]
        for here, inside in mounts.items():
            command += ["--volume", f"{here}:{inside}" if inside.endswith(":rw") else f"{here}:{inside}:ro"]
        return programs.heard([*command, self._find(image, content)[0], *words])
