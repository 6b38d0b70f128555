# SPDX-License-Identifier: Apache-2.0
"""The configuration of pip on this machine as one file for another root folder; the standard library alone.

`python -m pip config list | python pip_conf.py FILE` writes FILE, and prints what it names as `path here<TAB>path
inside` lines.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Final

PIP_LEFT_OUT: Final = frozenset(
    {"cache-dir", "disable-pip-version-check", "user", "target", "prefix", "root", "break-system-packages"}
)
"""Settings about where pip installs here, which are wrong in another root folder."""


def pip_configuration(listing: str) -> tuple[str, dict[str, str]]:
    """A `pip.conf` for a build from what `pip config list` prints, and its mounts: path here -> path inside.

    Where packages come from belongs to the machine, not to the recipe: the build gets the merged configuration as one
    file, mounted as a secret. What it names on this machine (folders of wheels, a certificate bundle) is mounted below
    `/run/hilgate`, so no path of the machine reaches a layer.
    """
    mounts: dict[str, str] = {}

    def inside(word: str) -> str:
        """A word with its path replaced; of an index, the folder above `simple` is mounted."""
        match = re.fullmatch(r"(file://)?(/.*?)(/simple/?)?", word)
        if not match:
            return word
        return f"{match[1] or ''}{mounts.setdefault(match[2], f'/run/hilgate/pip-{len(mounts)}')}{match[3] or ''}"

    settings: dict[str, str] = {}
    for line in listing.splitlines():
        section, _, value = line.partition("=")
        name = section.rpartition(".")[2]
        if section.startswith(("global.", ":env:.")) and value and name not in PIP_LEFT_OUT:
            settings[name] = str(ast.literal_eval(value))
    lines = [
        f"{name.removeprefix('default-')} = " + "\n    ".join(inside(word) for word in value.split())
        for name, value in sorted(settings.items())
    ]
    return "\n".join(["[global]", *lines, ""]), mounts


if __name__ == "__main__":
    text, mounts = pip_configuration(sys.stdin.read())
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{here}\t{inside}\n" for here, inside in mounts.items() if Path(here).exists()))
