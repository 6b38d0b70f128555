"""Opens a bundle's tar without trusting it: no links, no devices, no way out of its folder, no byte unaccounted for."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate import bundle, judge
from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

MOST_MEMBERS = 100_000
MOST_BYTES = 8 * 1024**3
"""More than any build leaves; a file that claims more is refused before it fills a disk."""

DEMANDED = frozenset({bundle.MANIFEST_FILE, bundle.PLAN_FILE, judge.VERDICT_FILE, bundle.REPORT_FILE, bundle.SBOM_FILE})


class UnsoundError(RecordsError):
    """What one check found."""

    def __init__(self, words: str) -> None:
        super().__init__(words)


def unpack(file: Path, folder: Path, members: dict[str, Path]) -> int:
    """Write every member below `folder` and into `members`; returns the time that all of them carry.

    Raises:
        UnsoundError: It is truncated, holds anything but plain files in its one folder, or differs in a single byte
            from what `bundle.write_tar` writes for these members.
    """
    size = file.stat().st_size
    if size == 0 or size % tarfile.RECORDSIZE:
        raise UnsoundError(f"truncated: {size} bytes are no whole number of tar records ({tarfile.RECORDSIZE} bytes)")
    mtimes: set[float] = set()
    total = 0
    with _tar(file) as tar:
        for entry in tar:
            name = entry.name.removeprefix(f"{bundle.TOP}/")
            _refuse(entry, name, members)
            total += entry.size
            if total > MOST_BYTES or len(members) >= MOST_MEMBERS:
                raise UnsoundError(f"more than {MOST_MEMBERS} members or {MOST_BYTES} bytes: no build leaves as much")
            mtimes.add(entry.mtime)
            members[name] = _extract(tar, entry, folder / name)
    mtime = int(min(mtimes, default=0))
    hashing = _Hashing()
    bundle.write_tar(hashing, members, mtime)
    if hashing.digest.hexdigest() != bundle.file_sha256(file):
        raise UnsoundError(
            "its bytes are not those that hilgate writes for these members: another order, owner or time, or data "
            "between or behind them"
        )
    return mtime


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> Path:
    source = tar.extractfile(entry)
    assert source is not None  # a plain file has contents
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        while chunk := source.read(bundle.CHUNK_BYTES):
            out.write(chunk)
    return target


@contextmanager
def _tar(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, mode="r:", errorlevel=2) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError, ValueError, UnicodeError) as error:
        raise UnsoundError(f"no readable tar: {error}") from error


def _refuse(entry: tarfile.TarInfo, name: str, members: dict[str, Path]) -> None:
    if entry.issym() or entry.islnk():
        raise UnsoundError(f"{entry.name!a} is a link to {entry.linkname!a}")
    if entry.type != tarfile.REGTYPE:
        raise UnsoundError(f"{entry.name!a} is no plain file (type {entry.type!r})")
    if not entry.name.startswith(f"{bundle.TOP}/") or not bundle.NAME.fullmatch(name):
        raise UnsoundError(f"{entry.name!a} lies outside of {bundle.TOP}/")
    parents = {parent.as_posix() for parent in Path(name).parents}
    if name in members or parents & members.keys():
        raise UnsoundError(f"{entry.name!a} stands in it twice")


class _Hashing(io.BytesIO):
    """A file that keeps the digest of what is written and how much it was."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._place = 0

    def write(self, data: Buffer, /) -> int:
        self.digest.update(data)
        size = memoryview(data).nbytes
        self._place += size
        return size

    def tell(self) -> int:
        return self._place


def check_sums(members: dict[str, Path]) -> int:
    """Compare every member with its line of `SHA256SUMS`; returns how many there are.

    Raises:
        UnsoundError: A member is missing, too much, or another than its checksum.
    """
    sums = members.get(bundle.SUMS_FILE)
    if sums is None:
        raise UnsoundError(f"{bundle.SUMS_FILE} is missing")
    lines = sums.read_bytes().decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    listed: dict[str, str] = {match[2]: match[1] for match in matches}
    if len(listed) != len(lines):
        raise UnsoundError(f"{bundle.SUMS_FILE} has a line that is no checksum, or names a file twice")
    present = members.keys() - {bundle.SUMS_FILE}
    if missing := sorted((listed.keys() | DEMANDED) - present):
        raise UnsoundError(f"missing: {', '.join(map(ascii, missing[:5]))}")
    if extra := sorted(present - listed.keys()):
        raise UnsoundError(f"not in {bundle.SUMS_FILE}: {', '.join(map(ascii, extra[:5]))}")
    if wrong := sorted(name for name in present if bundle.file_sha256(members[name]) != listed[name]):
        raise UnsoundError(f"another content than its checksum: {', '.join(map(ascii, wrong[:5]))}")
    return len(listed)
