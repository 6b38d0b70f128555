"""What a plan records besides its steps: images, what the change loosens, and whether it comes from a fork."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.agent.trust import of_build
from hilgate.images import contents
from hilgate.loosening import loosened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hilgate.changes import Changes
    from hilgate.model import Key, Loosening


@dataclass(frozen=True)
class Facts:
    """What was found out about a change before it is planned."""

    images: Mapping[Key, str] = field(default_factory=dict)
    """Image -> sha256 of everything it is built from; images that no planned step uses or builds are left out."""
    loosened: tuple[Loosening, ...] = ()
    fork: bool = False


def gather_facts(root: Path, change: Changes) -> Facts:
    """The facts of a checkout and its change; outside of a checkout there is no content to tell images by.

    Raises:
        DeclarationError: The pins or the list of protected files are wrong.
        CannotRunHereError: The merge base is not in this checkout.
    """
    return Facts(
        images=contents(root) if change.commit else {},
        loosened=loosened(root, change.merge_base, change.files or ()),
        fork=of_build(os.environ).fork,
    )
