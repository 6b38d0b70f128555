"""A detached signature of a file by an OpenSSH key (`ssh-keygen -Y`, OpenSSH 8.2 and later)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hilgate.errors import CannotRunHereError, MisuseError

NAMESPACE = "hilgate-evidence"
"""Of the signature: one made for anything else does not count."""

SECONDS = 60


def of(file: Path) -> Path:
    """Where the signature of a file lies."""
    return file.with_name(file.name + ".sig")


def sign(file: Path, key: Path) -> Path:
    """Sign a file; returns the path of the signature.

    Raises:
        MisuseError: The key is none, or has a passphrase that nobody can be asked for.
        CannotRunHereError: OpenSSH is not installed.
    """
    of(file).unlink(missing_ok=True)  # ssh-keygen would ask whether to replace it
    status, words = _ssh_keygen("sign", "-q", "-f", str(key.absolute()), str(file.absolute()), stdin=Path("/dev/null"))
    if status != 0 or not of(file).is_file():
        raise MisuseError(f"it could not be signed: {words}", where=str(key), remedy="name a private OpenSSH key")
    return of(file)


def verify(file: Path, signers: Path, signer: str) -> tuple[bool, str]:
    """Whether `<file>.sig` is a signature of the file by `signer`, and OpenSSH's words.

    Raises:
        CannotRunHereError: OpenSSH is not installed.
    """
    signature = of(file)
    if not signature.is_file():
        return False, f"there is no {signature.name}"
    options = ("-f", str(signers.absolute()), "-I", signer, "-s", str(signature.absolute()))
    status, words = _ssh_keygen("verify", *options, stdin=file)
    return status == 0, words


def _ssh_keygen(verb: str, *arguments: str, stdin: Path) -> tuple[int, str]:
    """(exit status, the last line it said); without a terminal, so that it can ask nothing."""
    with stdin.open("rb") as source:
        try:
            done = subprocess.run(
                ("ssh-keygen", "-Y", verb, "-n", NAMESPACE, *arguments),
                stdin=source,
                capture_output=True,
                check=False,
                timeout=SECONDS,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise CannotRunHereError(
                "ssh-keygen is not installed", remedy="install OpenSSH's client (openssh-client)"
            ) from error
        except subprocess.TimeoutExpired:
            return 1, f"no answer of ssh-keygen within {SECONDS} s"
    text = (done.stdout + done.stderr).decode(errors="replace").strip()
    return done.returncode, (text.splitlines() or ["no message"])[-1]
