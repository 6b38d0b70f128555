# SPDX-License-Identifier: Apache-2.0
"""Attention backends that serve the families: ours, and vLLM's own beside it. Declared in `backends.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from families.family import FAMILIES, Named, Platform, UnknownNameError, load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from families.family import Family

PLUGIN = "pagedkv"
BACKENDS_FILE = Path(__file__).with_name("backends.yaml")


class OtherBackendError(Exception):
    """An attention layer is served by another backend than the one that was asked for."""


@dataclass(frozen=True)
class Backend:
    """One backend; but for the name, every field is a key of `backends.yaml`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str
    """Name in vLLM's registry; `pagedkv` is our plugin."""
    platforms: Annotated[tuple[Platform, ...], Field(min_length=1)]
    """Where it exists."""
    attention: Annotated[tuple[Literal["paged", "latent", "cross", "none"], ...], Field(min_length=1)]
    """Kinds of attention that it serves: "paged", "latent", "cross", and "none" where it has families without any."""
    head_size: int = 0
    """Least channels of a head; tiny models get so many. 0 takes them as they are."""
    kv_lora_rank: int = 0
    """Least channels of a latent."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of its engines."""

    @property
    def ours(self) -> bool:
        """Whether it is our plugin."""
        return self.name == PLUGIN

    @property
    def condition(self) -> str:
        """What a machine needs for it, as hilgate asks for it."""
        return f"device:{','.join(self.platforms)}"

    def takes(self, family: Family) -> bool:
        """Whether a family has cells with it: by the kind of its attention, and nothing else."""
        return (family.attention or "none") in self.attention

    def fitted(self, family: Family) -> Family:
        """A family with a tiny config of sizes that the backend takes, and vLLM's own kernels for states."""
        if self.ours:
            return family
        config = dict(family.config)
        if self.head_size and family.attention == "paged":
            config |= _heads_of(family, self.head_size)
        if self.kv_lora_rank and family.attention == "latent":
            config["kv_lora_rank"] = self.kv_lora_rank
        return replace(family, config=config, ssd="", gdn="")


def _heads_of(family: Family, channels: int) -> dict[str, int]:
    """The changes of a tiny config with which its heads, of 32 channels, have so many."""
    config = family.config
    if "head_dim" in config:
        return {"head_dim": channels}
    fewer = channels // 32
    return {key: max(1, config[key] // fewer) for key in ("num_attention_heads", "num_key_value_heads")}


class BackendsFile(BaseModel):
    """The keys of `backends.yaml`."""

    model_config = ConfigDict(extra="forbid")

    backends: Named[Backend]


BACKENDS: dict[str, Backend] = load(BACKENDS_FILE, BackendsFile).backends


def backend_of(name: str) -> Backend:
    """The backend of a name.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in BACKENDS:
        raise UnknownNameError(f"no backend is called {name}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]


def served_by(backend: Backend, families: Sequence[str], *, named: bool) -> list[str]:
    """The families that have cells with a backend.

    Args:
        backend: Which one.
        families: Names.
        named: Whether these were asked for by name; then each must have cells.

    Raises:
        UnknownNameError: One that was named has none.
    """
    lacking = [name for name in families if not backend.takes(FAMILIES[name])]
    if named and lacking:
        raise UnknownNameError(
            f"{backend.name} serves {', '.join(backend.attention)} attention: no cells of {', '.join(lacking)}"
        )
    return [name for name in families if name not in lacking]


def require_backend(backend: Backend, path: str, layers: Sequence[Mapping[str, Any]]) -> None:
    """Check that one of vLLM's backends serves every attention layer, by the classes that the workers report.

    Args:
        backend: What was asked for.
        path: Class path of the backend in vLLM's registry.
        layers: What the workers say (`served_layers`).

    Raises:
        OtherBackendError: There is no attention layer, or another class serves one.
    """
    problems = [] if layers else ["the workers report no attention layer at all"]
    for row in layers:
        where = f"{row['layer']} (rank {row['rank']})"
        if row["backend"] != path:
            problems.append(f"{where}: served by {row['backend']}")
        elif row["impl"].rpartition(".")[0] != path.rpartition(".")[0]:
            problems.append(f"{where}: run by {row['impl']}")
    if problems:
        raise OtherBackendError(f"asked for {backend.name} ({path}); {'; '.join(problems)}")
