# SPDX-License-Identifier: Apache-2.0
"""Parse YAML text into a model, strictly, with `file:line key.path` and did-you-mean for each mistake.

PyYAML keeps the last of two equal keys and pydantic knows no line numbers. Here text is composed to nodes, which carry
marks, turned into plain data once, and validated.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import yaml
from pydantic import ValidationError

from hilgate.model import MAPPING, REFUSED, WORD, StrictModel
from hilgate.text import suggest

if TYPE_CHECKING:
    from pathlib import Path

ModelT = TypeVar("ModelT", bound=StrictModel)
Loc = tuple[str | int, ...]

MOST_BYTES = 256 * 1024
"""Most bytes of a file; ours have 20 KiB. Comments cost time too."""

MOST_VALUES = 50_000
"""Most values in a file: a few lines of aliases of aliases would be gigabytes."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in one place."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass
class Document(Generic[ModelT]):
    """A parsed file: its value (None when it has mistakes) and where each key stands."""

    name: str
    """Name as printed: a path relative to the repository root."""
    value: ModelT | None = None
    lines: dict[Loc, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def at(self, *loc: str | int) -> str:
        """`file:line key.path` of a location, or of its nearest ancestor that has a line."""
        known = next(loc[:n] for n in range(len(loc), -1, -1) if loc[:n] in self.lines or n == 0)
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        return f"{self.name}:{self.lines.get(known, 1)}" + (f" {path}" if path else "")

    def blame(self, loc: Loc, what: str, remedy: str = "") -> None:
        """Record a mistake at `loc`."""
        self.mistakes.append(Mistake(self.at(*loc), what, remedy))


def read(path: Path, root: Path, model: type[ModelT], *, aliases: bool = True) -> Document[ModelT]:
    """Parse a file below `root`; mistakes are collected in the document, never raised.

    Without `aliases` one is a mistake: agents' hosts read the file too, and refuse it.
    """
    name = path.relative_to(root).as_posix()
    if path.resolve() != root.resolve() / name:
        return Document(name, mistakes=[Mistake(name, "is a link, or lies below one", "put the file itself there")])
    try:
        with path.open("rb") as file:  # never more of it than is parsed
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        return Document(name, mistakes=[Mistake(name, f"cannot be read: {error}", "restore the file")])
    document = parse(text, name, model)
    if document.value is not None and not aliases:
        for event in yaml.parse(text.decode(), Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 1
                document.value, document.lines[()] = None, line
                document.blame((), f"agents' hosts refuse the alias *{event.anchor}", "write out what it stands for")
    return document


def parse(text: bytes, name: str, model: type[ModelT]) -> Document[ModelT]:
    """Parse YAML and validate it as `model`; mistakes are collected in the document, never raised."""
    document: Document[ModelT] = Document(name)
    if len(text) > MOST_BYTES:
        document.blame((), f"has more than {MOST_BYTES // 1024} KiB", "split it, or say less")
        return document
    try:
        node = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
        data = _plain(node, (), document, ()) if node else None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        document.lines[()] = mark.line + 1 if mark else 1
        why = getattr(error, "problem", None) or error
        document.blame((), f"is not YAML: {why}", "check encoding, indentation, quotes and brackets")
        return document
    if node is None:
        document.blame((), "is empty", "declare something or delete the file")
        return document
    if not document.mistakes:
        validate(data, model, document)
    return document


def _plain(node: yaml.Node, loc: Loc, document: Document[Any], above: tuple[yaml.Node, ...]) -> Any:
    """Plain data of a node; remembers lines, refuses duplicate keys, odd keys, aliases that loop and odd scalars."""
    document.lines.setdefault(loc, node.start_mark.line + 1)
    if len(document.lines) > MOST_VALUES:
        raise yaml.YAMLError(f"more than {MOST_VALUES} values, once its aliases are written out")
    if any(node is one for one in above):
        return document.blame(loc, "is an alias of what contains it", "write it out")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*loc, index), document, (*above, node)) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        value = _scalar(node)
        if value is None or isinstance(value, str | int | float | bool):
            return value
        return document.blame(loc, f"{node.value!r} is read as a {type(value).__name__}", "quote it")
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node)
        at = (*loc, str(key))
        first = document.lines.get(at)
        document.lines[at] = key_node.start_mark.line + 1
        if not isinstance(key, str):
            document.blame(at, f"key {key!r} is not text", "quote it")
        elif key in mapping:
            document.blame(at, f"key {key!r} is already on line {first}", "keep one of them")
        else:
            mapping[key] = _plain(value_node, at, document, (*above, node))
    return mapping


def _scalar(node: yaml.Node) -> object:
    """Value of a scalar node as safe YAML reads it; a collection (as a key) is returned as its tag."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else (node.tag,)
    except (yaml.YAMLError, ValueError):
        return (node.tag,)
    finally:
        loader.dispose()


def validate(data: object, model: type[ModelT], document: Document[ModelT]) -> None:
    """Validate plain data in strict JSON mode: text stays text, 0 is not '0', lists become tuples."""
    try:
        document.value = model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        details = error.errors()
        unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
        for detail in details:
            kind, loc = detail["type"], tuple(part for part in detail["loc"] if part not in ("[key]", WORD, MAPPING))
            name = str(loc[-1]) if loc else ""
            if kind == "extra_forbidden":
                document.blame(loc, f"unknown key {name!r}", suggest(name, _model_at(model, loc[:-1]).model_fields))
            elif kind == "missing":
                # A typo is an unknown key and a missing one; the first says both.
                if not difflib.get_close_matches(name, [str(one[-1]) for one in unknown if one[:-1] == loc[:-1]]):
                    document.blame(loc[:-1], f"key {name!r} is missing", _write("add", model, loc))
            elif kind == REFUSED:
                document.blame(loc, detail["msg"], detail["ctx"]["remedy"])
            elif kind != "too_short" or not detail["input"]:  # pydantic counts invalid items as absent
                what = detail["msg"].removeprefix("Input ").replace("should", "must")
                what = what[:1].lower() + what[1:]
                document.blame(loc, f"{what}, got {_short(detail['input'])}", _write("correct", model, loc))


def _model_at(model: type[StrictModel], loc: Loc) -> type[StrictModel]:
    """The model that holds the key after `loc`: follows fields, skips list indices and mapping keys."""
    for part in loc:
        info = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_nested(info.annotation) if info else None) or model
    return model


def _nested(annotation: object) -> type[StrictModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    return next(filter(None, map(_nested, get_args(annotation))), None)


def _write(verb: str, model: type[StrictModel], loc: Loc) -> str:
    """A remedy about a field: what to do with it, then its own documentation, which says what belongs there."""
    fields = [part for part in loc if isinstance(part, str)]
    info = _model_at(model, loc[:-1]).model_fields.get(fields[-1]) if fields else None
    meaning = " ".join((info.description or "").split()) if info else ""
    return f"{verb} {fields[-1] if fields else 'it'}{f' ({meaning})' if meaning else ''}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
