"""Whether this machine's Triton can do the work. Imports nothing heavy, so that refusals are quick."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from .errors import CannotRunHereError

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
        raise CannotRunHereError("Triton is not installed.\n  to do: pip install the triton of requirements/triton.txt")
    package = Path(spec.origin).parent
    version = _version(package)
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
    interpreted = os.environ.get("TRITON_INTERPRET", "") not in {"", "0"}  # "0" is how a runner says: compile
    if altering := [n for n in _ALTERING if (interpreted if n == "TRITON_INTERPRET" else os.environ.get(n))]:
        raise CannotRunHereError(
            f"{', '.join(altering)} is set: the compiler would not make the code that a server runs.\n"
            f"  to do: unset {' '.join(altering)}"
        )
    return version


def _version(package: Path) -> str:
    """Version of the Triton in this folder, which need not be the one that pip lists first."""
    for distribution in importlib.metadata.distributions(name="triton", path=[str(package.parent)]):
        return distribution.version
    raise CannotRunHereError(
        f"the Triton in {package} does not say its version.\n  to do: install it with pip, not by copying"
    )
