"""The pip configuration of this machine, for a build: where packages come from belongs to the machine, not the recipe.

pip merges files and environment variables; the build gets the merged result as one file, mounted as a secret. What it
names on this machine (folders of wheels, a certificate bundle) is mounted read-only below `/run/hilgate`, so no path of
the machine reaches a layer.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from hilgate.errors import CannotRunHereError

INSIDE: Final = "/run/hilgate"

LEFT_OUT: Final = {
    "cache-dir",
    "disable-pip-version-check",
    "user",
    "target",
    "prefix",
    "root",
    "break-system-packages",
}
"""Settings about where pip installs here, which are wrong in an image."""


def pip_configuration(listing: str | None = None) -> tuple[str, dict[str, str]]:
    """A `pip.conf` for the build, and the mounts it needs: path here -> path inside.

    Args:
        listing: What `pip config list` prints; None asks pip.

    Raises:
        CannotRunHereError: pip does not answer.
    """
    settings: dict[str, str] = {}
    for line in (_listing() if listing is None else listing).splitlines():
        section, _, value = line.partition("=")
        name = section.rpartition(".")[2]
        if section.startswith(("global.", ":env:.")) and value and name not in LEFT_OUT:
            settings[name] = str(ast.literal_eval(value))
    mounts: dict[str, str] = {}
    lines = ["[global]"]
    for name, value in sorted(settings.items()):
        words = [_moved(word, mounts) for word in value.split()]
        lines.append(f"{name.removeprefix('default-')} = " + "\n    ".join(words))
    return "\n".join([*lines, ""]), mounts


def _moved(word: str, mounts: dict[str, str]) -> str:
    """A word with its path replaced by the one inside; of an index, the folder above `simple` is mounted."""
    match = re.fullmatch(r"(file://)?(/.*?)(/simple/?)?", word)
    if not match:
        return word
    here = match[2]
    inside = mounts.setdefault(here, f"{INSIDE}/pip-{len(mounts)}")
    return f"{match[1] or ''}{inside}{match[3] or ''}"


def mountable(mounts: dict[str, str]) -> dict[str, str]:
    """The mounts that exist here; what does not, pip ignores here as well."""
    return {here: inside for here, inside in mounts.items() if Path(here).exists()}


def _listing() -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CannotRunHereError(
            "pip does not say how it is configured",
            where=" ".join(command),
            remedy=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "install pip here",
        )
    return done.stdout
