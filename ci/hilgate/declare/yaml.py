"""YAML into a noun, strictly, remembering the line of every key.

PyYAML keeps the last of two equal keys and pydantic knows no line numbers. Here a file is composed to nodes, which
carry marks, turned into plain data once, and validated; each mistake is reported as `file:line key.path`.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import yaml
from pydantic import ValidationError

from hilgate.model import Noun
from hilgate.text import suggest

if TYPE_CHECKING:
    from pathlib import Path

NounT = TypeVar("NounT", bound=Noun)
Loc = tuple[str | int, ...]

_MESSAGES = {
    "string_type": "must be text (quote it)",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_pattern_mismatch": "must be lower case letters, digits, '_', '.' or '-', starting with a letter or digit",
    "too_short": "must not be empty",
}


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in one place."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass
class Document(Generic[NounT]):
    """A parsed file: the noun (None when it has mistakes) and where each key stands."""

    shown: str
    """Path relative to the repository root, as printed."""
    noun: NounT | None = None
    lines: dict[Loc, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def at(self, *loc: str | int) -> str:
        """`file:line key.path` of a location, or of its nearest ancestor that has a line."""
        known = next(loc[:n] for n in range(len(loc), -1, -1) if loc[:n] in self.lines or n == 0)
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        return f"{self.shown}:{self.lines.get(known, 1)}" + (f" {path}" if path else "")

    def blame(self, loc: Loc, what: str, remedy: str = "") -> None:
        """Record a mistake at `loc`."""
        self.mistakes.append(Mistake(self.at(*loc), what, remedy))


def read(path: Path, root: Path, model: type[NounT]) -> Document[NounT]:
    """Parse and validate one file; mistakes are collected in the document, never raised."""
    document: Document[NounT] = Document(path.relative_to(root).as_posix())
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        document.blame((), f"cannot be read: {error}", "restore the file")
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        document.lines[()] = mark.line + 1 if mark else 1
        document.blame((), f"is not YAML: {error.problem or error.context}", "check indentation, quotes and brackets")
        return document
    except yaml.YAMLError as error:
        document.blame((), f"is not YAML: {error}", "save it as UTF-8 text without control characters")
        return document
    if node is None:
        document.blame((), "is empty", "declare something or delete the file")
        return document
    data = _plain(node, (), document, ())
    if not document.mistakes:
        _validate(data, model, document)
    return document


def _plain(node: yaml.Node, loc: Loc, document: Document[Any], above: tuple[int, ...]) -> Any:
    """Plain data of a node; remembers lines, refuses duplicate keys, odd keys, aliases that loop and odd scalars."""
    document.lines.setdefault(loc, node.start_mark.line + 1)
    if id(node) in above:
        document.blame(loc, "is an alias of what contains it", "write it out")
        return None
    inside = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node)
            if not isinstance(key, str):
                document.lines[(*loc, str(key))] = key_node.start_mark.line + 1
                document.blame((*loc, str(key)), f"key {key!r} is not text", "quote it")
                continue
            if key in mapping:
                first = document.lines[(*loc, key)]
                document.lines[(*loc, key)] = key_node.start_mark.line + 1
                document.blame((*loc, key), f"key {key!r} is already on line {first}", "keep one of them")
                continue
            document.lines[(*loc, key)] = key_node.start_mark.line + 1
            mapping[key] = _plain(value_node, (*loc, key), document, inside)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*loc, index), document, inside) for index, item in enumerate(node.value)]
    value = _scalar(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        document.blame(loc, f"{node.value!r} is read as a {type(value).__name__}", "quote it")
        return None
    return value


def _scalar(node: yaml.Node) -> object:
    """Value of a scalar node as safe YAML reads it; a collection (as a key) is returned as its tag."""
    if not isinstance(node, yaml.ScalarNode):
        return (node.tag,)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return (node.tag,)
    finally:
        loader.dispose()


def _validate(data: object, model: type[NounT], document: Document[NounT]) -> None:
    """Validate in strict JSON mode: text stays text, 0 is not '0', lists become tuples."""
    try:
        document.noun = model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        details = error.errors()
        unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
        for detail in details:
            loc = tuple(part for part in detail["loc"] if part != "[key]")
            name = str(loc[-1]) if loc else ""
            if _follows_from_another(detail["type"], detail["loc"], detail["input"], unknown):
                continue
            if detail["type"] == "extra_forbidden":
                document.blame(loc, f"unknown key {name!r}", suggest(name, _keys_at(model, loc[:-1])))
            elif detail["type"] == "missing":
                document.blame(loc[:-1], f"key {name!r} is missing", _meaning(model, loc))
            else:
                what = _MESSAGES.get(detail["type"], detail["msg"].lower())
                document.blame(loc, f"{what}, got {_short(detail['input'])}", _meaning(model, loc))


def _follows_from_another(kind: str, loc: Loc, value: object, unknown: list[Loc]) -> bool:
    """Whether a mistake only repeats another: pydantic counts invalid items as absent, and a typo as a missing key."""
    if kind == "too_short":
        return bool(value)
    typos = [str(other[-1]) for other in unknown if other[:-1] == loc[:-1]]
    return kind == "missing" and bool(difflib.get_close_matches(str(loc[-1]), typos))


def _model_at(model: type[Noun], loc: Loc) -> type[Noun]:
    """The noun that holds the key after `loc`: follows fields, skips list indices and mapping keys."""
    for part in loc:
        info = model.model_fields.get(part) if isinstance(part, str) else None
        nested = _nested(info.annotation) if info else None
        model = nested or model
    return model


def _nested(annotation: object) -> type[Noun] | None:
    if isinstance(annotation, type) and issubclass(annotation, Noun):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _nested(argument))), None)


def _keys_at(model: type[Noun], loc: Loc) -> list[str]:
    return list(_model_at(model, loc).model_fields)


def _meaning(model: type[Noun], loc: Loc) -> str:
    """The field's own documentation, which says what belongs there."""
    fields = [part for part in loc if isinstance(part, str)]
    info = _model_at(model, loc[:-1]).model_fields.get(fields[-1]) if fields else None
    return " ".join((info.description or "").split()) if info else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
