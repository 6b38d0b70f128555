"""Every answer on disk as soon as it is given, so that a crash or Ctrl-C costs no question twice.

One JSON line per answer below a line that names what was asked: gate, identity, engine and a fingerprint of the code
under test. Answers of anything else are set aside, never mixed in; a line cut short by a crash is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hileval.records import Identity, Sample
from hilgate.model import Noun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.conduct import Questions


class Heading(Noun):
    """First line of a journal."""

    gate: str
    identity: Identity
    engine: str
    code: str
    """sha256 of the kernels and of this package: answers of other code are not these answers."""


class _Line(Noun):
    run: int
    sample: Sample


class Journal:
    """Questions that remembers its answers across processes."""

    def __init__(self, inner: Questions, path: Path, heading: Heading) -> None:
        """Read what an earlier process left, if it is about the same thing; else set it aside as `<name>.before`."""
        self._inner, self._path = inner, path
        self._known: dict[int, dict[int, Sample]] = defaultdict(dict)
        self.identity = inner.identity
        self.available = inner.available
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if lines and lines[0] != _bytes(heading):
            path.replace(path.with_name(path.name + ".before"))
            lines = []
        sound = lines[:1] or [_bytes(heading)]
        for line in lines[1:]:
            try:
                entry = _Line.model_validate_json(line)
            except ValidationError:
                continue
            sound.append(line if line.endswith(b"\n") else line + b"\n")
            self._known[entry.run][entry.sample.doc_id] = entry.sample
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(b"".join(sound))
        fresh.replace(path)

    @property
    def resumed(self) -> int:
        """Answers that need not be asked again."""
        return sum(map(len, self._known.values()))

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; only those not in the journal are asked."""
        known = self._known[run]
        missing = [one for one in ids if one not in known]
        if missing:
            fresh = self._inner.ask(missing, run)
            with self._path.open("ab") as file:
                file.write(b"".join(_bytes(_Line(run=run, sample=sample)) for sample in fresh))
                file.flush()
                os.fsync(file.fileno())
            known.update({sample.doc_id: sample for sample in fresh})
        return [known[one] for one in ids]

    def finish(self) -> None:
        """The gate has its answer: a later run asks again, because it is to say something about another day."""
        self._path.unlink(missing_ok=True)


def code_fingerprint(*folders: Path) -> str:
    """sha256 over the names and contents of the Python and TOML files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.suffix in {".py", ".toml"}):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _bytes(noun: Noun) -> bytes:
    return json.dumps(noun.model_dump(mode="json"), sort_keys=True).encode() + b"\n"
