"""Images by buildah: root and two Debian packages, no daemon and no registry.

The store is a folder of its own. There is no base image to pull, so debootstrap makes one, once per suite.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from hilgate.errors import CannotRunHereError
from hilgate.images import programs

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.images.engine import Order

PROGRAMS = ("buildah", "debootstrap")


class Buildah:
    """buildah over the store in `folder`."""

    def __init__(self, folder: Path, suite: str, script: Path) -> None:
        """Check that it can work here.

        Args:
            folder: Of the store; made when it is missing.
            suite: Debian suite of the base.
            script: docker/scripts/debootstrap.sh.

        Raises:
            CannotRunHereError: A program is missing, or this is not root.
        """
        missing = [name for name in PROGRAMS if not shutil.which(name)]
        if missing:
            raise CannotRunHereError(
                f"{' and '.join(missing)} not installed, and neither is docker buildx",
                where="image build",
                remedy=f"as root: apt-get install --no-install-recommends {' '.join(PROGRAMS)}",
            )
        if os.geteuid() != 0:
            raise CannotRunHereError(
                "debootstrap and buildah's chroot isolation need root",
                where=f"user id {os.geteuid()}",
                remedy="run it as root, or where docker buildx is installed",
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.store = "localhost/hilgate"
        self.folder = folder
        self.suite = suite
        self.script = script
        self.words = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def truly(self, labels: dict[str, str]) -> dict[str, str]:
        """The labels with the base that debootstrap made."""
        base = {"name": f"debootstrap {self.suite}", "digest": self.find("base", self.suite) or ""}
        return labels | {f"org.opencontainers.image.base.{key}": value for key, value in base.items()}

    def find(self, image: str, content: str) -> str | None:
        """Digest of an image in the store."""
        listed: list[dict[str, Any]] = json.loads(programs.ask([*self.words, "images", "--json"]) or "[]") or []
        name = self._name(image, content)
        return next((str(one["digest"]) for one in listed if name in (one.get("names") or [])), None)

    def build(self, order: Order) -> None:
        """Build on the base of the suite, layer by layer: an interrupted build goes on from its last layer."""
        self._make_base(order.log)
        pip_conf = self.folder / "pip.conf"
        pip_conf.write_text(order.pip_conf, encoding="utf-8")
        command = [
            *(*self.words, "bud", "--isolation", "chroot", "--format", "docker", "--layers", "--force-rm"),
            *("--file", f"docker/{order.image}.Dockerfile", "--tag", self._name(order.image, order.content)),
            *("--build-arg", f"BASE={self._name('base', self.suite)}"),
            *("--build-arg", f"PACKAGES={order.variables['CPU_PACKAGES']}"),
            *("--secret", f"id=pip,src={pip_conf}"),
        ]
        for here, inside in order.mounts.items():
            command += ["--volume", f"{here}:{inside}:ro"]
        for name, value in self.truly(order.labels).items():
            command += ["--label", f"{name}={value}"]
        try:
            programs.build([*command, "."], order.log, order.context)
        finally:
            pip_conf.unlink(missing_ok=True)

    def labels(self, image: str, content: str) -> dict[str, str]:
        """Labels of an image in the store."""
        text = programs.ask([*self.words, "inspect", "--type", "image", self._name(image, content)])
        return dict(json.loads(text)["Docker"]["config"].get("Labels") or {})

    def run(self, image: str, content: str, words: list[str], mounts: dict[str, str]) -> tuple[int, str]:
        """Run in a container that is removed whatever happens."""
        container = programs.ask([*self.words, "from", self._name(image, content)]).strip()
        command = [*self.words, "run", "--isolation", "chroot"]
        for here, inside in mounts.items():
            command += ["--volume", f"{here}:{inside}" if inside.endswith(":rw") else f"{here}:{inside}:ro"]
        try:
            return programs.heard([*command, container, "--", *words])
        finally:
            programs.ask([*self.words, "rm", container])

    def _name(self, image: str, content: str) -> str:
        return f"{self.store}/{image}:{content}"

    def _make_base(self, log: Path) -> None:
        """A folder of debootstrap, imported as an image and removed."""
        if self.find("base", self.suite):
            return
        folder = self.folder / "rootfs"
        if not folder.exists():
            programs.build([str(self.script), self.suite, str(folder)], log, self.folder)
        container = programs.ask([*self.words, "from", "scratch"]).strip()
        try:
            programs.ask([*self.words, "add", "--quiet", container, str(folder), "/"])
            programs.ask([*self.words, "commit", "--quiet", container, self._name("base", self.suite)])
        finally:
            programs.ask([*self.words, "rm", container])
        shutil.rmtree(folder)
