# SPDX-License-Identifier: Apache-2.0
"""Families of hybrid models: a tiny model each, how vLLM serves it, and what vLLM cannot do with it.

They are declared in `families.yaml`, and are the rows of the table; its columns are BEHAVIOURS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PretrainedConfig

PLATFORMS = ("cpu", "cuda", "rocm")
ATTENTION = ("paged", "latent", "cross", "")
STATES = ("conv", "ssm", "delta")
BEHAVIOURS = (
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
)
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

    error: str
    """Regular expression of what it says."""
    needs: str
    """Condition without which it cannot, as hilgate asks for it (`hilgate.conditions`)."""
    everywhere: bool = True
    """Whether every machine of the platform has it; else those alone that lack the condition."""


def another_platform(platform: str) -> str:
    """The condition that a step runs on another platform than this one."""
    return f"device:{','.join(one for one in PLATFORMS if one != platform)}"


@dataclass(frozen=True)
class Family:
    """One family; but for the name, every field is a key of `families.yaml`."""

    name: str
    """Name in ids of tests: lower case, hyphens."""
    architecture: str
    """Name under which vLLM's registry knows the model class."""
    config_class: str = ""
    """Class of the tiny config in transformers; empty where transformers has none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configuration."""
    drafter: str = ""
    """Name under which vLLM's registry knows the head of the checkpoint that drafts (MTP); empty where it has none."""
    attention: str = ""
    """"paged", "latent" (MLA), "cross" (beside self attention) or "" for none."""
    states: tuple[str, ...] = ()
    """What a state page holds, in vLLM's order: "conv", "ssm", "delta"."""
    blocks: tuple[int, ...] = ()
    """Tokens of a block, as published models of the family get them on 1, 2, 4 and 8 ranks."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's `LLM` on every platform."""
    ssd: str = ""
    """Kernels of the prefill of Mamba-2: "pagedkv" for ours, empty for vLLM's."""
    gdn: str = ""
    """Kernels of the gated delta rule: "pagedkv" for ours, empty for vLLM's."""
    engine_cpu: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments on the CPU platform."""
    engine_gpu: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments on CUDA and ROCm."""
    cannot: Mapping[str, Any] = field(default_factory=dict)
    """Platform of PLATFORMS to a limit, or to one for each behaviour that cannot be had. A limit is a regular
    expression, what vLLM's error there says; or {error, needs} where only a machine without the condition `needs` has
    it. Each is held against the run: another error is a failure, and so is a limit that is none any more."""

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
        found = self.cannot.get(platform)
        if isinstance(found, dict):
            found = found.get(behaviour)
        if isinstance(found, dict):
            return FamilyLimit(found["error"], found["needs"], everywhere=False)
        return None if found is None else FamilyLimit(found, another_platform(platform))

    def has(self, behaviour: str) -> bool:
        """Whether a behaviour means anything for this family."""
        if behaviour == "state":
            return "ssm" in self.states or "delta" in self.states
        if behaviour == "blocks":
            return bool(self.blocks)
        if behaviour == "verify":
            if self.states:  # on CPUs the updates of others ignore which drafts were taken, as the column spec declares
                return "delta" in self.states
            return self.attention in {"paged", "latent"}
        if behaviour == "mtp":
            return bool(self.drafter)
        return True


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


def with_tuples(declared: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a declaration as fields of a frozen class take them: lists as tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in declared.items()}


def load(path: Path) -> dict[str, Family]:
    """Read the families of a YAML file: `families` by name; under `shared` stands what they repeat by anchors.

    Raises:
        DeclarationError: It is no YAML, or a key or value of it is wrong.
    """
    document = read_yaml(path)
    _require_mapping(document, ("shared", "families"), path.name)
    declared = document.get("families")
    if not isinstance(declared, dict) or not declared:
        raise FamilyDeclarationError(f"{path.name}: no families; expected a mapping of names under the key families")
    return {name: _family(str(name), keys, f"{path.name}: families.{name}") for name, keys in declared.items()}


def _family(name: str, declared: Any, where: str) -> Family:
    """The family that a mapping of families.yaml declares; a wrong key or value is named with its place."""
    known = {entry.name: entry for entry in fields(Family) if entry.name != "name"}
    _require_mapping(declared, tuple(known), where)
    if "architecture" not in declared:
        raise FamilyDeclarationError(f"{where}: the key architecture is missing: vLLM's name of the model class")
    for key, value in declared.items():
        kind = {"str": str, "tuple[str, ...]": list, "tuple[int, ...]": list}.get(str(known[key].type), dict)
        if not isinstance(value, kind):
            words = {str: "text", list: "a list", dict: "a mapping"}
            raise FamilyDeclarationError(f"{where}.{key}: got {value!r}; expected {words[kind]}")
    made = Family(name=name, **with_tuples(declared))
    _require_of((made.attention,), ATTENTION, f"{where}.attention")
    _require_of(made.states, STATES, f"{where}.states")
    for key in ("ssd", "gdn"):
        _require_of((getattr(made, key),), ("", "pagedkv"), f"{where}.{key}")
    _require_of(made.cannot, PLATFORMS, f"{where}.cannot")
    for platform, limit in made.cannot.items():
        limits = limit if isinstance(limit, dict) else {"": limit}
        _require_of(limits, ("", *BEHAVIOURS), f"{where}.cannot.{platform}")
        for behaviour, one in limits.items():
            _require_limit(one, ".".join(filter(None, (f"{where}.cannot.{platform}", behaviour))))
    if not made.attention and not made.states:
        raise FamilyDeclarationError(f"{where}: neither attention nor states: nothing of it would be served by a cache")
    if any(not isinstance(size, int) or size < 16 or size % 16 for size in made.blocks):
        raise FamilyDeclarationError(f"{where}.blocks: got {list(made.blocks)}; expected multiples of 16 tokens")
    if made.blocks and made.attention != "paged":
        raise FamilyDeclarationError(f"{where}.blocks: got {list(made.blocks)}; expected none without paged attention")
    return made


def _require_limit(limit: Any, where: str) -> None:
    error = limit
    if isinstance(limit, dict):
        _require_of(limit, ("error", "needs"), where)
        if not {"error", "needs"} <= limit.keys() or not re.fullmatch(r"[a-z]+:\S+", str(limit["needs"])):
            raise FamilyDeclarationError(
                f"{where}: got {limit!r}; expected {{error: what vLLM says, needs: a condition}}"
            )
        error = limit["error"]
    try:
        re.compile(error)
    except (re.error, TypeError) as problem:
        raise FamilyDeclarationError(f"{where}: {error!r} is no regular expression: {problem}") from None


def _require_mapping(value: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(value, dict):
        raise FamilyDeclarationError(f"{where}: got {value!r}; expected a mapping of {', '.join(keys)}")
    _require_of(value, keys, where)


def _require_of(names: Any, known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            similar = get_close_matches(str(name), known, n=1)
            guess = f"did you mean {similar[0]}? " if similar else ""
            raise FamilyDeclarationError(
                f"{where}: got {name!r}; {guess}expected {', '.join(word for word in known if word)}"
            )


FAMILIES: dict[str, Family] = load(FAMILIES_FILE)


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
