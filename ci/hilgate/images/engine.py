"""What the builder needs of a program that builds images; `buildah` and `docker` are the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Order:
    """One image to build.

    Attributes:
        image: cpu or rocm.
        content: Its key, which becomes its tag.
        context: Folder with exactly the files of the key.
        labels: Labels it is given.
        variables: Those of docker-bake.hcl.
        pip_conf: Text of the pip configuration inside the build.
        mounts: Path here -> path inside, for that configuration.
        fork: Whether a stranger's change is built: nothing it makes may be found by another build.
        log: Where the build's output goes.
    """

    image: str
    content: str
    context: Path
    labels: dict[str, str]
    variables: dict[str, str]
    pip_conf: str
    mounts: dict[str, str]
    fork: bool
    log: Path


class Engine(Protocol):
    """A program that builds images and finds them by their content."""

    store: str
    """Prefix of the names it gives."""

    def truly(self, labels: dict[str, str]) -> dict[str, str]:
        """The labels as this program can give them: about the base that it really builds on."""

    def find(self, image: str, content: str) -> str | None:
        """Digest of the image with this content, where it is already built."""

    def build(self, order: Order) -> None:
        """Build it and name it by its content."""

    def labels(self, image: str, content: str) -> dict[str, str]:
        """Labels of a built image."""

    def run(self, image: str, content: str, words: list[str], mounts: dict[str, str]) -> tuple[int, str]:
        """Exit status and output of a command in a container that is removed afterwards.

        Args:
            image: cpu or rocm.
            content: Its key.
            words: The command.
            mounts: Path here -> path inside, with `:rw` where it may write.
        """
