"""Reads a Hugging Face `config.json`: the text model's keys, under whichever of their names a family uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
"""Keys under which a multimodal model keeps its language model."""


@dataclass(frozen=True)
class Config:
    """The keys of one model."""

    path: str
    keys: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """The family."""
        return str(self.keys.get("model_type", "unnamed"))

    def has(self, *names: str) -> bool:
        """Whether one of the keys is there and not null."""
        return any(self.keys.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of the keys that is there.

        Raises:
            ConfigError: none is, and there is no default; or its value is no integer >= 1.
        """
        for name in names:
            value = self.keys.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise self.error(f"{name}: got {value!r}; expected an integer >= 1")
                return value
        if default is None:
            raise self.error(f"model type {self.model_type} says none of {', '.join(names)}")
        return default

    def number(self, name: str) -> float | None:
        """Return a key that is a number > 0, or None where it is not there.

        Raises:
            ConfigError: it is something else.
        """
        value = self.keys.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.error(f"{name}: got {value!r}; expected a number > 0")
        return float(value)

    def words(self, name: str) -> list[str] | None:
        """Return a key that is a list of words, or None where it is not there.

        Raises:
            ConfigError: it is something else.
        """
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(f"{name}: got {value!r}; expected a list of words")
        return value

    def error(self, what: str) -> ConfigError:
        """Return the error that says what is wrong with this file."""
        return ConfigError(f"{self.path}: {what}.")


def read(path: Path) -> Config:
    """Read the config of a model.

    Args:
        path: `config.json`, or the folder that holds it.

    Raises:
        ConfigError: it is not there, no JSON, or no object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. Give a config.json, or the folder that holds one.") from error
    except ValueError as error:
        raise ConfigError(f"{file}: no JSON: {error}.") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{file}: got a {type(keys).__name__}; expected an object of keys.")
    for part in _LANGUAGE_PARTS:
        if isinstance(keys.get(part), dict):
            keys = {**keys, **keys[part]}
    return Config(str(file), keys)
