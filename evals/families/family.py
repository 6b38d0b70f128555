# SPDX-License-Identifier: Apache-2.0
"""Families of hybrid models: a tiny model each, how vLLM serves it, and what vLLM cannot do with it.

They are declared in `families.yaml`, and are the rows of the table; its columns are BEHAVIOURS.
"""

from __future__ import annotations

import re  # noqa: TC003 - pydantic reads it
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

Platform = Literal["cpu", "cuda", "rocm"]
Attention = Literal["paged", "latent", "cross", ""]
State = Literal["conv", "ssm", "delta"]
Kernels = Literal["pagedkv", ""]
Behaviour = Literal[
    "prefill",
    "decode",
    "chunked",
    "mixed",
    "fuzz",
    "preempt",
    "reuse",
    "prefix",
    "again",
    "padded",
    "blocks",
    "state",
    "spec",
    "verify",
    "mtp",
    "production",
    "graphs",
]
PLATFORMS: tuple[str, ...] = get_args(Platform)
BEHAVIOURS: tuple[str, ...] = get_args(Behaviour)
"""Columns of the table, in its order. `behaviours.py` says what each one is."""

TINY_ALONE = ("verify", "mtp", "production", "graphs")
"""Columns whose lengths are made for blocks of a few tokens; published checkpoints have none of them."""

FAMILIES_FILE = Path(__file__).with_name("families.yaml")


class FamilyDeclarationError(ValueError):
    """A file of families does not say what it should; the message has the file, the key, and what is wanted."""


class UnknownNameError(Exception):
    """Somebody asked for a family or a behaviour that does not exist."""


@dataclass(frozen=True)
class FamilyLimit:
    """What vLLM cannot do on a platform."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    error: re.Pattern[str]
    """What it says."""
    needs: Annotated[str, Field(pattern=r"^[a-z]+:\S+$")]
    """Condition without which it cannot, as hilgate asks for it (`hilgate.conditions`)."""
    everywhere: bool = True
    """Whether every machine of the platform has it; else those alone that lack the condition."""


def another_platform(platform: str) -> str:
    """The condition that a step runs on another platform than this one."""
    return f"device:{','.join(one for one in PLATFORMS if one != platform)}"


def _limits(declared: Any) -> Any:
    """Limits of each platform by behaviour, "" for any, as `Family.cannot` holds them."""
    if not isinstance(declared, dict):
        return declared
    made = {}
    for platform, limits in declared.items():
        by_behaviour = limits if isinstance(limits, dict) and "error" not in limits else {"": limits}
        made[platform] = {name: _limit(platform, limit) for name, limit in by_behaviour.items()}
    return made


def _limit(platform: str, declared: Any) -> Any:
    """A limit of every machine of a platform, or of those alone that lack what the declaration says."""
    if isinstance(declared, dict):
        return {**declared, "everywhere": False}
    return {"error": declared, "needs": another_platform(platform)}


@dataclass(frozen=True)
class Family:
    """One family; but for the name, every field is a key of `families.yaml`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str
    """Name in ids of tests: lower case, hyphens."""
    architecture: str
    """Name under which vLLM's registry knows the model class."""
    config_class: str = ""
    """Class of the tiny config in transformers; empty where transformers has none."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the configuration."""
    drafter: str = ""
    """Name under which vLLM's registry knows the head of the checkpoint that drafts (MTP); empty where it has none."""
    attention: Attention = ""
    """"paged", "latent" (MLA), "cross" (beside self attention) or "" for none."""
    states: tuple[State, ...] = ()
    """What a state page holds, in vLLM's order: "conv", "ssm", "delta"."""
    blocks: tuple[Annotated[int, Field(ge=16, multiple_of=16)], ...] = ()
    """Tokens of a block of paged attention, as published models of the family get them on 1, 2, 4 and 8 ranks."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's `LLM` on every platform."""
    ssd: Kernels = ""
    """Kernels of the prefill of Mamba-2: "pagedkv" for ours, empty for vLLM's."""
    gdn: Kernels = ""
    """Kernels of the gated delta rule: "pagedkv" for ours, empty for vLLM's."""
    engine_cpu: dict[str, Any] = field(default_factory=dict)
    """Further arguments on the CPU platform."""
    engine_gpu: dict[str, Any] = field(default_factory=dict)
    """Further arguments on CUDA and ROCm."""
    cannot: Annotated[dict[Platform, dict[Literal[Behaviour, ""], FamilyLimit]], BeforeValidator(_limits)] = field(
        default_factory=dict
    )
    """Platform of PLATFORMS to a limit, or to one for each behaviour that cannot be had. A limit is a regular
    expression, what vLLM's error there says; or {error, needs} where only a machine without the condition `needs` has
    it. Each is held against the run: another error is a failure, and so is a limit that is none any more."""

    def __post_init__(self) -> None:
        """Refuse what no engine could serve."""
        if not self.attention and not self.states:
            raise ValueError("neither attention nor states: nothing of it would be served by a cache")
        if self.blocks and self.attention != "paged":
            raise ValueError(f"got blocks {list(self.blocks)}; expected none without paged attention")

    @property
    def fp8_cache(self) -> bool:
        """Whether its KV cache holds FP8 codes."""
        return str(self.engine.get("kv_cache_dtype", "auto")).startswith("fp8")

    def make_config(self, **changes: Any) -> PretrainedConfig:
        """The tiny config, with some values changed."""
        import transformers

        made: PretrainedConfig = getattr(transformers, self.config_class)(**{**self.config, **changes})
        return made

    def arguments(self, platform: str) -> dict[str, Any]:
        """Arguments of vLLM's `LLM` beyond those that all engines share.

        Raises:
            KeyError: `platform` is none of PLATFORMS.
        """
        if platform not in PLATFORMS:
            raise KeyError(f"platform {platform!r}; one of {', '.join(PLATFORMS)}")
        return {**self.engine, **(self.engine_cpu if platform == "cpu" else self.engine_gpu)}

    def limit(self, platform: str, behaviour: str | None = None) -> FamilyLimit | None:
        """What vLLM is known not to do; None where it is known to work.

        Args:
            platform: Of PLATFORMS. On ROCm nothing has been measured yet, so nothing that it might do is excused.
            behaviour: Of BEHAVIOURS; None for the start of any engine.
        """
        limits = cast("dict[str, dict[str, FamilyLimit]]", self.cannot).get(platform, {})
        return limits.get("") or limits.get(behaviour or "")

    def has(self, behaviour: str) -> bool:
        """Whether a behaviour means anything for this family."""
        conditions = {
            "state": "ssm" in self.states or "delta" in self.states,
            "blocks": bool(self.blocks),
            # On CPUs the updates of other states ignore which drafts were taken, as the column spec declares.
            "verify": "delta" in self.states if self.states else self.attention in {"paged", "latent"},
            "mtp": bool(self.drafter),
        }
        return conditions.get(behaviour, True)


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error and not the last one's value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What a YAML file says; a key that stands twice is an error.

    Raises:
        FamilyDeclarationError: It cannot be read, or is no YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except (OSError, yaml.YAMLError) as error:
        raise FamilyDeclarationError(f"{path.name}: {' '.join(str(error).split())}") from None


def _named(declared: Any) -> Any:
    """Entries of a mapping, each with its key as its name."""
    if not isinstance(declared, dict):
        return declared
    return {key: {**entry, "name": key} if isinstance(entry, dict) else entry for key, entry in declared.items()}


Entry = TypeVar("Entry")
Named = Annotated[dict[str, Entry], Field(min_length=1), BeforeValidator(_named)]
"""Declarations by name."""


class FamiliesFile(BaseModel):
    """The keys of `families.yaml`."""

    model_config = ConfigDict(extra="forbid")

    families: Named[Family]
    shared: dict[str, Any] = {}
    """What families repeat by anchors."""


File = TypeVar("File", bound=BaseModel)


def load(path: Path, kind: type[File]) -> File:
    """Read a file of declarations.

    Raises:
        FamilyDeclarationError: It is no YAML, or a key or value of it is wrong.
    """
    try:
        return kind.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "")
        what = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] in {"missing", "value_error"} else f"; got {first['input']!r}"
        raise FamilyDeclarationError(": ".join(filter(None, (path.name, place, what + got)))) from None


FAMILIES: dict[str, Family] = load(FAMILIES_FILE, FamiliesFile).families


def rows(chosen: Sequence[str]) -> list[str]:
    """The families asked for, in the order of the table; all of them where none is named.

    Raises:
        UnknownNameError: There is no such family.
    """
    return _only(chosen, tuple(FAMILIES), "family")


def columns(family: str, chosen: Sequence[str]) -> list[str]:
    """The behaviours that a family has, of those asked for, in the order of the table.

    Raises:
        UnknownNameError: There is no such behaviour.
    """
    return [name for name in _only(chosen, BEHAVIOURS, "behaviour") if FAMILIES[family].has(name)]


def _only(chosen: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    if unknown := sorted(set(chosen) - set(known)):
        raise UnknownNameError(f"no {what} is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if not chosen or name in chosen]
