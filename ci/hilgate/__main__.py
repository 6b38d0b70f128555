# SPDX-License-Identifier: Apache-2.0
"""`hilgate` and `python -m hilgate`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the command line and exit with one of the statuses of `hilgate.errors.Exit`.

    Ctrl-C is one line and status 130 from here on. While modules are imported nothing has to be tidied up, and some
    would turn a KeyboardInterrupt into an error of their own; at the end nothing is left to be interrupted.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored under nohup, and stays so
    if ours:
        signal.signal(signal.SIGINT, _quit)
    from hilgate.cli import app

    try:
        if ours:
            signal.signal(signal.SIGINT, app.interrupt)
        app.main()
    except KeyboardInterrupt:
        _quit()
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _quit(*_: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    if not __package__:  # run as a file, isolated, as agents do
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
