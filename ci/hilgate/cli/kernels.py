"""Commands that ask the kernels themselves. hilgate imports none of them: it starts their own command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import typer

from hilgate.errors import CannotRunHereError, Exit

if TYPE_CHECKING:
    from hilgate.cli.app import Settings

ROUTING = "pagedkv.routing"
_STATUSES = (Exit.PASS, Exit.FAIL, Exit.MISUSE, Exit.INVALID_DECLARATION)


def register(app: typer.Typer) -> None:
    """Add the commands about kernels."""
    # Options, --help among them, are those of the command that is started.
    theirs = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("explain-kernel", context_settings=theirs)(explain_kernel)


def explain_kernel(ctx: typer.Context) -> None:
    """Which kernel serves each attention layer of a model, and why: --model config.json --arch gfx942 (--help: all)."""
    settings: Settings = ctx.obj
    kernels = settings.repository() / "kernels"
    if not (kernels / ROUTING.replace(".", "/") / "__main__.py").is_file():
        raise CannotRunHereError(
            f"this repository has no {ROUTING}", where=str(kernels), remedy="take a commit that has it, or --root"
        )
    path = os.pathsep.join(filter(None, (str(kernels), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", ROUTING, "explain", *ctx.args],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode not in _STATUSES:
        raise RuntimeError(f"{ROUTING} ended with status {done.returncode}")
    raise typer.Exit(done.returncode)
