# SPDX-License-Identifier: Apache-2.0
"""Check the signature of a release: OpenSSH's, of the checksums in the bundle (`ssh-keygen -Y verify`).

The checksums name every file of the bundle, so one signature covers all of it: wheels, report, logs, and in the
manifest the commit, the plan and the images. `ci/allowed_signers` names the keys that may sign.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from hilgate.errors import CannotRunHereError, MisuseError, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

PRINCIPAL: Final = "release"
NAMESPACE: Final = "hilgate-release"
"""Signature namespace: a signature made with the same key for another purpose does not count."""
SIGNERS_FILE: Final = "ci/allowed_signers"
SECONDS: Final = 60


def require_signed(file: Path, signature: Path, signers: Path) -> str:
    """Have OpenSSH check the signature of a file; returns its words, which name the key.

    Raises:
        RecordsError: It is not signed, by a key that may not, or for another purpose; or nobody may sign.
        MisuseError: There is no list of signers.
        CannotRunHereError: `ssh-keygen` is not installed, or hangs.
    """
    try:
        keys = [line for line in signers.read_text("utf-8").splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"name it with --signers; by default it is {SIGNERS_FILE} of --root"
        raise MisuseError(f"no list of signers: {error}", where=str(signers), remedy=remedy) from error
    if not keys:
        raise RecordsError(
            "nobody may sign a release: it names no key", where=str(signers), remedy="see its first lines"
        )
    if not signature.is_file():
        raise RecordsError("there is no such signature", where=str(signature), remedy="take the one of the release")
    words = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-I", PRINCIPAL, "-f", str(signers), "-s", str(signature)]
    try:
        with file.open("rb") as text:
            done = subprocess.run(
                words, stdin=text, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
            )
    except FileNotFoundError as error:
        raise CannotRunHereError("ssh-keygen is not installed", remedy="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise CannotRunHereError(f"ssh-keygen did not answer in {SECONDS} s", remedy="try it by hand") from error
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split())[:200]
        raise RecordsError(
            f"not signed by a key that may: {output}", where=str(signature), remedy=f"see {signers.name}"
        )
    return " ".join(done.stdout.split())[:200]
