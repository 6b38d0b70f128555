# SPDX-License-Identifier: Apache-2.0
"""Write the declarations and pipeline files that another repository needs to use hilgate: `hilgate init`."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import jinja2

from hilgate import git
from hilgate.declare import imports
from hilgate.declare.load import load
from hilgate.declare.protected import UNREADABLE_CODE
from hilgate.errors import MisuseError
from hilgate.model.declaration import POSTED_BY
from hilgate.names import stays_inside

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hilgate.declare.load import Declarations
    from hilgate.model import Key

DECLARATIONS = {
    "ci/project.yaml": "project.yaml",
    "ci/agents.yaml": "agents.yaml",
    "ci/areas/kernels.yaml": "area.yaml",
    "ci/protected.yaml": "protected.yaml",
    ".gitignore": "gitignore",
}
"""File -> its template."""

BY_DECLARATIONS = (".buildkite/pipeline.yml", ".buildkite/approve.yml")
"""Files that say what the declarations say; each has a template of its name."""

PACKAGES = ("torch", "triton", "vllm", "numpy")
"""Packages whose absence means that a step cannot run on a machine, not that it fails there."""

STEPS = 20
"""Most test files that get a step each; where there are more, their folders do."""


def init(root: Path) -> dict[str, bool]:
    """Write what is not there yet; nothing is overwritten. Returns file -> whether it was written.

    Raises:
        MisuseError: `root` is not the top of a git checkout, or holds no test.
        InvalidDeclarationsError: A file that was there does not fit the others.
        CannotRunHereError: There is no git.
    """
    if not (root / ".git").exists():
        raise MisuseError("not the top folder of a git checkout", where=str(root), remedy="git init, or --root DIR")
    if not git.tracked_files(root):
        raise MisuseError("git lists no file", where=str(root), remedy="write a test first")
    facts = _facts(root, git.tracked_files(root))
    if not facts["steps"]:
        raise MisuseError("there is no test (test_*.py)", where=str(root), remedy="write one first")
    written = {path: _write(root / path, _render(name, facts)) for path, name in DECLARATIONS.items()}
    declarations = load(root)
    return written | {
        path: _write(root / path, flow(PurePosixPath(path).name, declarations)) for path in BY_DECLARATIONS
    }


def flow(name: str, declarations: Declarations) -> str:
    """One of `BY_DECLARATIONS`, by its name without folders, for what is declared."""
    tables = [step.matrix.file for _, step in declarations.steps() if step.matrix and step.profiles != ("gate",)]
    queue, posted_by = declarations.gate_queue(), POSTED_BY.replace(" || ", "\n          || ")
    facts: dict[str, object] = {
        "project": declarations.project,
        "queue": queue,
        "tables": tables,
        "posted_by": posted_by,
    }
    return _render(name, facts)


def _render(name: str, facts: dict[str, object]) -> str:
    loader = jinja2.PackageLoader("hilgate.declare")
    plain = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    return plain.get_template(f"{name}.j2").render(facts)


def _write(path: Path, text: str) -> bool:
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def _facts(root: Path, files: Iterable[str]) -> dict[str, object]:
    """What the declarations say of these files."""
    paths = [path for path in map(PurePosixPath, files) if not path.parts[0].startswith(".")]
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    parents = {str(folder.parent) for folder in packages if folder.parent not in packages and len(folder.parts) <= 2}
    tops = sorted({path.parts[0] for path in paths if len(path.parts) > 1} - {"ci", "results"})
    tests = [path for path in paths if path.name.startswith("test_") and path.suffix == ".py" and len(path.parts) > 1]
    if len(tests) > STEPS:
        tests = list(dict.fromkeys(path.parent for path in tests))
    keys: dict[str, PurePosixPath] = {}
    for path in tests:
        keys[_key(path) if _key(path) not in keys else f"{_key(path)}-{len(keys)}"] = path
    python_path = [*sorted(parents - {"."}), "."]
    graph = imports.build(root, python_path)
    needed = {key: ["pytest", *(one for one in PACKAGES if _uses(graph, path, one))] for key, path in keys.items()}
    recipe = next((str(path) for path in paths if {"dockerfile", "rocm"} <= set(_words(path.name))), "")
    return {
        "python_path": python_path,
        "folders": [f"{top}/" for top in tops],
        "inside": [f"{top}/" for top in tops if stays_inside(f"{top}/file", [f"{top}/"]) and f"{top}/" not in recipe],
        "steps": [(key, path, needed[key]) for key, path in keys.items()],
        "recipe": recipe,
        "unreadable": UNREADABLE_CODE,
        "image": "-".join(word for word in _words(PurePosixPath(recipe).name) if word != "dockerfile"),
    }


def _uses(graph: imports.Imports, path: PurePosixPath, package: str) -> bool:
    """Whether a test, or what it imports, imports a package; false where the import graph is not known."""
    return not graph.problem and any(name.partition(".")[0] == package for name in graph.reached([str(path)]))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _key(path: PurePosixPath) -> Key:
    """`tests/kernels/test_paged.py` -> `kernels-paged`."""
    words = _words(str(path.with_suffix("")).removeprefix("tests/"))
    return "-".join(word for word in words if word != "test") or "tests"
