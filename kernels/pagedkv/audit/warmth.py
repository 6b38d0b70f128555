"""What every audit does around its compilations: start the compiler before the forks, and say how far it is."""

from __future__ import annotations

import sys

from .compilation import compile_launches
from .errors import CannotRunHereError
from .probe import probe


def warm_up() -> None:
    """Start LLVM once, before the forks, with the one kernel that compiles wherever anything does.

    Raises:
        CannotRunHereError: Not even that one compiles.
    """
    try:
        compiled = compile_launches("gfx942", probe)
    except Exception as error:
        raise CannotRunHereError(f"the AMD compiler does not work here: {type(error).__name__}: {error}") from error
    if not compiled:
        raise CannotRunHereError("the AMD compiler was called and compiled nothing\n  to do: look at environment.py")


def progress(done: int, total: int) -> None:
    """Show it where a person is looking."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcompiled {done} of {total}" + ("\n" if done == total else ""))
        sys.stderr.flush()
