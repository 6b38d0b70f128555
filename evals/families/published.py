# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints: where one is, which family it belongs to, whether it can be judged, and what became of it.

A checkpoint is named as on the hub (`owner/name`) or by a folder. Which ones are run where is said in
`ci/areas/models.yaml` and nowhere else.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families.cell import FamilyCell
from families.family import BEHAVIOURS, FAMILIES, TINY_ALONE, UnknownNameError, columns, rows
from families.processes import Drivers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from families.family import Family


CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
FILES = (CONFIG, "generation_config.json", INDEX, "model*.safetensors")
"""What is fetched: some owners publish the same weights a second time under other names."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UnfitError(Exception):
    """Whoever named the checkpoint must name another; the message says why."""


class NotFetchedError(Exception):
    """The hub did not give it, and this machine does not have it: that says nothing about the kernels."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that is on this machine."""

    name: str
    """Name as it was asked for."""
    folder: str
    family: str
    """A key of FAMILIES."""
    dtype: str
    """Dtype of its weights, "bfloat16" say."""
    positions: int
    """Most tokens of a request, as its config says; 0 where it says nothing."""
    judged_by: str
    """Folder of the weights that transformers computes with: the same one, but for planted faults."""

    @property
    def slug(self) -> str:
        """The name as that of a file."""
        return self.name.replace("/", "--")

    @property
    def revision(self) -> str:
        """The commit that the hub's cache has it under; empty for a folder that is none of the cache."""
        folder = Path(self.folder)
        return folder.name if folder.parent.name == "snapshots" else ""


def folder_of(name: str, *, weights: bool) -> Path:
    """The folder of a checkpoint, fetched if need be; without `weights` that of its config alone.

    Raises:
        UnfitError: The name is neither a folder's nor one that the hub has.
        NotFetchedError: See `fetch`.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    if not HUB_NAME.fullmatch(name):
        raise UnfitError(f"{name}: there is no such folder, and a name of the hub reads owner/name")
    return fetch(name, weights=weights)


def family_of(name: str, config: dict[str, Any]) -> Family:
    """The family of a checkpoint, by its config.

    Raises:
        UnfitError: No family has its architecture; or it is quantised, or listens.
    """
    named = config.get("architectures") or ["none"]
    found = next((family for family in FAMILIES.values() if family.architecture in named), None)
    if found is None:
        known = ", ".join(sorted({family.architecture for family in FAMILIES.values()}))
        raise UnfitError(f"{name}: no family has the architecture {', '.join(named)}; known: {known}")
    if quantised := config.get("quantization_config") or config.get("compression_config"):
        kind = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else "unknown method"
        raise UnfitError(
            f"{name} is quantised ({kind}): the oracle computes with plain weights. Name one in 16 or 32 bits, "
            "or gate its accuracy (evals/gates.yaml)"
        )
    if found.attention == "cross":
        raise UnfitError(
            f"{name} listens: this table asks models that read. The row {found.name} of the tiny table hears"
        )
    return found


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """The checkpoint in a folder, with its weights.

    Raises:
        UnfitError: The table cannot judge it, or weights are missing.
    """
    config = _config(name, folder)
    family = family_of(name, config)
    if lacking := missing(folder):
        raise UnfitError(f"{name}: {folder} lacks {', '.join(lacking)}")
    inner = config.get("text_config") or {}
    both = config | {key: value for key, value in inner.items() if value is not None}
    dtype = both.get("dtype") or both.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UnfitError(f"{name}: weights in {dtype}; bfloat16, float16 or float32 are wanted")
    positions = both.get("max_position_embeddings") or 0
    return Checkpoint(name, str(folder), family.name, dtype, positions, str(folder))


def missing(folder: Path) -> list[str]:
    """Files of weights that should be there and are not: a cache may hold half a checkpoint."""
    index = folder / INDEX
    if not index.exists():
        return [] if (folder / "model.safetensors").exists() else ["model.safetensors"]
    try:
        wanted = set(json.loads(index.read_text())["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError):
        return [f"a readable {INDEX}"]
    return sorted(name for name in wanted if not (folder / name).exists())


def fetch(name: str, *, weights: bool, download: Callable[..., str] | None = None) -> Path:
    """Folder of a checkpoint of the hub: from this machine's cache where it is whole, else from the hub.

    Args:
        name: `owner/name`.
        weights: Whether its weights are wanted; else its config alone.
        download: In place of the hub's `snapshot_download`.

    Raises:
        UnfitError: The hub answers that it has none that it would give to us.
        NotFetchedError: It is not on this machine, and the hub could not be asked or broke off.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    ask = download or snapshot_download
    what: dict[str, Any] = {"allow_patterns": list(FILES if weights else FILES[:1])}
    try:
        folder = Path(ask(name, local_files_only=True, **what))
        if (folder / CONFIG).exists() and not (weights and missing(folder)):
            return folder
    except Exception:  # noqa: BLE001, S110 - whatever is wrong with the cache, the hub is asked next
        pass
    try:
        return Path(ask(name, **what))
    except RepositoryNotFoundError as error:
        raise UnfitError(f"{name}: the hub has no such model, or not for us ({type(error).__name__})") from None
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise NotFetchedError(
            f"{name} is not on this machine and could not be fetched: {type(error).__name__}: {text}"
        ) from error


def _config(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise UnfitError(f"{name}: {folder} has no {CONFIG}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnfitError(f"{name}: {folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UnfitError(f"{name}: {folder / CONFIG} is not an object")
    return config


@dataclass(frozen=True)
class PublishedRow:
    """One checkpoint that is asked for."""

    name: str
    family: str
    """Empty where even its config could not be fetched."""
    behaviours: tuple[str, ...]


def select_rows(
    published: Sequence[str], checkpoint: Sequence[str], family: Sequence[str], behaviour: Sequence[str]
) -> list[PublishedRow]:
    """The rows that these options ask for, in the order of the options.

    Args:
        published: The checkpoints of a table, if there is one.
        checkpoint: Only these of them; where there is no table, these.
        family: Only those of these families. One whose config cannot be fetched may be of them.
        behaviour: Only these columns.

    Raises:
        UnknownNameError: One is named that the table lacks, or no row is left.
        UnfitError: The table cannot judge one.
    """
    names = list(dict.fromkeys(published or checkpoint))
    if unknown := sorted(set(checkpoint) - set(names)):
        raise UnknownNameError(
            f"no checkpoint of this table is called {', '.join(unknown)}; there are {', '.join(names)}"
        )
    known = rows(family)
    found = [_row(name, behaviour) for name in names if not checkpoint or name in checkpoint]
    left = [row for row in found if not row.family or row.family in known]
    if not left:
        have = ", ".join(f"{row.name} ({row.family})" for row in found)
        raise UnknownNameError(f"no checkpoint is of the family {', '.join(family)}; there are {have}")
    return left


def _row(name: str, behaviour: Sequence[str]) -> PublishedRow:
    try:
        folder = folder_of(name, weights=False)
    except NotFetchedError:
        every = [one for one in BEHAVIOURS if one not in TINY_ALONE and (not behaviour or one in behaviour)]
        return PublishedRow(name, "", tuple(every))
    # Weights are fetched from the hub later, once a cell needs them.
    is_folder = Path(name).is_dir()
    family = read_checkpoint(name, folder).family if is_folder else family_of(name, _config(name, folder)).name
    return PublishedRow(
        name, family, tuple(column for column in columns(family, behaviour) if column not in TINY_ALONE)
    )


class PublishedCells:
    """Fetches the checkpoints and drives those that it got."""

    def __init__(
        self,
        folder: Path,
        asked_for: Sequence[PublishedRow],
        fuzz: dict[str, int],
        seconds: int,
        changed: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
    ) -> None:
        """Fetch, then start.

        Args:
            folder: Where specs, logs and results are written.
            asked_for: The rows.
            fuzz: Seed and number of random schedules.
            seconds: When a checkpoint is given up.
            changed: What to drive in place of a checkpoint, for planted faults.
        """
        self.not_fetched: dict[str, str] = {}
        """Name of a checkpoint to why it is not here."""
        self._unfit: dict[str, str] = {}
        found: dict[str, Checkpoint] = {}
        for row in asked_for:
            try:
                found[row.name] = changed(read_checkpoint(row.name, folder_of(row.name, weights=True)))
            except NotFetchedError as error:
                self.not_fetched[row.name] = str(error)
            except UnfitError as error:  # of the others more can be learned
                self._unfit[row.name] = str(error)
        self._slugs = {name: checkpoint.slug for name, checkpoint in found.items()}
        spec = {
            "behaviours": sorted({name for row in asked_for for name in row.behaviours}),
            "fuzz": fuzz,
            "published": {checkpoint.slug: asdict(checkpoint) for checkpoint in found.values()},
        }
        # One at a time: an engine, its oracle and their pools are given a GPU.
        self._drivers = Drivers(folder, list(self._slugs.values()), spec, processes=1, seconds=seconds)

    def cell(self, name: str, behaviour: str) -> FamilyCell:
        """What became of a cell."""
        if name in self.not_fetched:
            return FamilyCell("did not run", self.not_fetched[name])
        if name in self._unfit:
            return FamilyCell("fail", self._unfit[name])
        return self._drivers.cells(self._slugs[name])[behaviour]
