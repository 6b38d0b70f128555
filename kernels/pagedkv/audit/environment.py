# SPDX-License-Identifier: Apache-2.0
"""Whether this machine's Triton and packages can do what is asked. Nothing heavy is imported, so refusals are quick."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALTERING = (
    "TRITON_INTERPRET",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_STORE_BINARY_ONLY",
    "TRITON_DISABLE_LINE_INFO",
    "TRITON_DEFAULT_FP_FUSION",
    "AMDGCN_USE_BUFFER_OPS",
)
"""Settings of Triton that change the machine code, or keep us from reading it."""

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


def compiles_all(env: Mapping[str, str]) -> bool:
    """Return whether code objects of earlier runs do not count: on agents and before a release.

    `env` has hilgate's HILGATE_PROFILE, which says what the run is for; without it the run is local.
    """
    return env.get("HILGATE_PROFILE", "gate") not in {"gate", "quick"}


def check_environment(triton: str | None) -> str:
    """Refuse machines on which the audit would mislead or crash.

    Args:
        triton: The version that the caller means to audit with; None takes what is there.

    Returns:
        The version of the Triton that will be imported.

    Raises:
        CannotRunHereError: No Triton, another version than asked for, no AMD backend, or a setting that changes the
            machine code.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise CannotRunHereError("Triton is not installed.\n  to do: pip install 'pagedkv[audit]'")
    package = Path(spec.origin).parent
    installed = list(metadata.distributions(name="triton", path=[str(package.parent)]))
    if not installed:
        raise CannotRunHereError(
            f"the Triton in {package} does not say its version.\n  to do: install it with pip, not by copying"
        )
    version = installed[0].version  # of this folder, which need not be the one that pip lists first
    if triton is not None and version != triton:
        raise CannotRunHereError(
            f"asked for Triton {triton}, but `import triton` finds {version} in {package}.\n"
            f"  to do: pip install --target .triton/{triton} --no-deps triton=={triton}, "
            f"and run with PYTHONPATH=.triton/{triton} in front"
        )
    if not (package / "backends" / "amd" / "compiler.py").is_file():
        raise CannotRunHereError(
            f"Triton {version} in {package} has no AMD backend.\n  to do: install the triton wheel from PyPI"
        )
    altering = [name for name in _ALTERING if os.environ.get(name)]
    if os.environ.get("TRITON_INTERPRET") == "0":  # how a runner says: compile
        altering.remove("TRITON_INTERPRET")
    if altering:
        raise CannotRunHereError(
            f"{', '.join(altering)} is set: the compiler would not make the code that a server runs.\n"
            f"  to do: unset {' '.join(altering)}"
        )
    return version
