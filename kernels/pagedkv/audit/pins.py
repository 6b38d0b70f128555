# SPDX-License-Identifier: Apache-2.0
"""Whether what will be imported is what a file of pins names."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    from pathlib import Path

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def check_pins(file: Path) -> None:
    """Refuse an environment whose distributions are not those that a file of requirements pins.

    The public version counts: 0.33.0+cpu is 0.33.0.

    Raises:
        MisuseError: The file cannot be read, or pins nothing.
        CannotRunHereError: Something else is installed, or nothing.
    """
    try:
        pins = _PIN.findall(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MisuseError(f"{file} cannot be read: {error}\n  to do: name a file of requirements") from error
    if not pins:
        raise MisuseError(f"{file} pins nothing\n  to do: write lines such as triton==3.9.0")
    for name, version in pins:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] != version:
            raise CannotRunHereError(
                f"`make {file.stem}` installs what is missing: {file} pins {name} {version}, and Python finds {found}\n"
                f"  to do: make {file.stem}, and run with .triton/{file.stem} in front of PYTHONPATH"
            )
