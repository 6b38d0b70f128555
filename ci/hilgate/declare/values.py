"""A file of values as a flat table, dotted path to value, so that two versions can be compared one by one. Pure."""

from __future__ import annotations

import ast
import json
import math
import operator
import tomllib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTITIES = ("key", "id", "test", "area", "row", "name")
"""Keys that name an entry of a list, tried in this order; the position of an entry says nothing."""

CODE = "(code)"
"""Path of everything in a Python file that is no constant and no docstring."""

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}


def read_values(name: str, content: bytes) -> dict[str, object]:
    """The values of a file.

    Args:
        name: Its path; the suffix says what it is.
        content: Its bytes.

    Raises:
        ValueError: It cannot be read as values.
    """
    suffix = PurePosixPath(name).suffix
    try:
        text = content.decode()
        if suffix == ".py":
            return _constants(text)
        if suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif suffix == ".json":
            data = json.loads(text)
        elif suffix in {".yaml", ".yml"}:
            data = yaml.safe_load(text)
        else:
            raise ValueError(f"{suffix or 'no suffix'}: not a file of values")
    except (yaml.YAMLError, SyntaxError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    found: dict[str, object] = {}
    _flatten(data, "", found)
    return found


def name_of(path: str) -> str:
    """The last name of a path, without the item it selects: `minimum` of `steps[a].minimum`, `paths` of `paths[x]`."""
    outside, depth = [], 0
    for character in path:
        depth += character == "["
        outside += [character] if depth == 0 else []
        depth -= character == "]" and depth > 0
    return "".join(outside).rsplit(".", 1)[-1]


def _flatten(value: object, path: str, found: dict[str, object]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            named = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            plain = path == "" or not isinstance(key, tuple)
            _flatten(inner, f"{path}.{named}".lstrip(".") if plain else f"{path}[{named}]", found)
    elif isinstance(value, list | tuple) and value:
        _flatten_list(list(value), path, found)
    else:
        found[path] = value


def _flatten_list(items: list[Any], path: str, found: dict[str, object]) -> None:
    if all(isinstance(item, dict) for item in items):
        identity = next((name for name in IDENTITIES if all(name in item for item in items)), None)
        names = [_identity(item, identity) for item in items] if identity else []
        if len(set(names)) == len(items):
            for name, item in zip(names, items, strict=True):
                _flatten(item, f"{path}[{name}]", found)
            return
    # The order of globs with exclusions has a meaning, and so may that of anything nested.
    nested = any(isinstance(item, dict | list | tuple) or str(item).startswith("!") for item in items)
    if nested or len(set(map(str, items))) < len(items):
        found[path] = json.dumps(items, default=str)
    else:
        found.update({f"{path}[{item}]": True for item in items})


def _identity(item: dict[str, Any], key: str) -> str:
    """What an entry is called; two quarantine entries of one test differ by their step and devices."""
    others = ("step", "devices") if key == "test" else ("triton",) if key == "row" else ()
    return ", ".join(str(item[name]) for name in (key, *others) if name in item)


def _constants(text: str) -> dict[str, object]:
    """Module constants of numbers, text and tables of them; the rest as one text, without comments and docstrings."""
    tree = ast.parse(text)
    known: dict[str, Any] = {}
    rest: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        target = statement.target if isinstance(statement, ast.AnnAssign) else targets[0] if len(targets) == 1 else None
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and statement.value:
            try:
                known[target.id] = _evaluate(statement.value, known)
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                pass
            else:
                continue
        rest.append(ast.unparse(statement))
    found: dict[str, object] = {}
    _flatten(known, "", found)
    return found | {CODE: "\n".join(rest)}


def _evaluate(node: ast.expr, known: dict[str, Any]) -> Any:
    """Value of a constant expression; KeyError, TypeError or ValueError for anything else."""
    value: Any
    match node:
        case ast.Constant(value=int() | float() | str() | None):
            value = node.value
        case ast.Name():
            value = known[node.id]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            value = {_evaluate(key, known): _evaluate(inner, known) for key, inner in pairs if key is not None}
        case ast.Tuple(elts=items) | ast.List(elts=items):
            value = tuple(_evaluate(item, known) for item in items)
        case ast.Subscript(value=table, slice=index):
            value = _evaluate(table, known)[_evaluate(index, known)]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand, known)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left, known), _evaluate(right, known))
        case _:
            raise ValueError(f"not a constant: {ast.unparse(node)}")
    return value
