"""Import graph of this repository (by grimp): which Python files a step reaches.

The graph says which modules run when a declared module or test file is imported. It errs on the side of running more:
imports inside functions and under TYPE_CHECKING count, a module counts the packages it lies in, a test counts the
conftest.py files above it, and a declared package or folder counts everything below it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from hilgate.text import line, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PACKAGES = {
    "hilgate": "ci/hilgate",
    "pagedkv": "kernels/pagedkv",
    "hileval": "evals/hileval",
    "families": "evals/families",
    "tests": "tests",
    "benchmarks": "benchmarks",
}
"""Import package -> its folder. Python files elsewhere are in no graph and select by globs."""

FLAT = "tests"
"""Its folder is itself on the import path (pytest's `pythonpath`): `import pools` is tests/pools.py."""

CONFTEST = "conftest.py"
_WORD = re.compile(r"\w+")


def module_of(path: str) -> str | None:
    """The dotted module of a file below the root; None for what is no module of a package in `PACKAGES`.

    A conftest.py is none: pytest runs it for every test below it, whatever is imported.
    """
    name = PurePosixPath(path)
    return None if name.name == CONFTEST else _any_module(name)


def locate(root: Path, declared: str) -> Path | None:
    """The file or folder that an entry of `Step.imports` names; None when there is none.

    An entry is a dotted module or package, or the path of a test file or of a folder of tests.
    """
    if "/" in declared:
        path = root / declared
        ours = any(PurePosixPath(declared).is_relative_to(folder) for folder in PACKAGES.values())
        return path if ours and ".." not in path.parts and (path.is_dir() or _is_python(path)) else None
    package, *rest = declared.split(".")
    if package not in PACKAGES:
        return None
    path = root.joinpath(PACKAGES[package], *rest)
    if path.is_dir() and any(path.glob("*.py")):
        return path
    return path.with_name(f"{path.name}.py") if _is_python(path.with_name(f"{path.name}.py")) else None


def run_by(root: Path, command: Sequence[str]) -> list[str]:
    """What a command line names of ours: test files and folders, and the module after `-m`; of a package, its main."""
    named = [after for flag, after in itertools.pairwise(command) if flag == "-m"]
    modules = [main if locate(root, main := f"{module}.__main__") else module for module in named]
    paths = [word.partition("::")[0] for word in command if "/" in word]
    return [name for name in (*modules, *paths) if locate(root, name)]


def remedy(root: Path, declared: str) -> str:
    """Did-you-mean for an entry of `Step.imports` that names nothing."""
    files = [path for folder in PACKAGES.values() for path in _below(root / folder)]
    names = [path.relative_to(root).as_posix() for path in files]
    known = names if "/" in declared else [module for name in names if (module := module_of(name))]
    return suggest(declared, known)


@dataclass(frozen=True)
class Imports:
    """The import graph of one state of the files."""

    root: Path
    problem: str = ""
    """Why there is no graph; every question is then answered with "not known"."""
    graph: Any = field(default=None, repr=False)
    _reached: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def knows(self, path: str) -> bool:
        """Whether the file is a module of the graph."""
        return self.graph is not None and module_of(path) in self.graph.modules

    def reached(self, declared: Iterable[str]) -> Mapping[str, str]:
        """Module -> the first entry of `declared` that reaches it."""
        key = tuple(declared)
        if key not in self._reached:
            found: dict[str, str] = {}
            for entry in key:
                for module in self._start(entry):
                    found.setdefault(module, entry)
                    for upstream in self.graph.find_upstream_modules(module):
                        found.setdefault(upstream, entry)
            self._reached[key] = found
        return self._reached[key]

    def _start(self, entry: str) -> Iterator[str]:
        """The modules that an entry stands for; conftest files below a folder among them."""
        place = locate(self.root, entry)
        if place is None:
            return
        for path in _below(place) if place.is_dir() else [place]:
            module = _any_module(path.relative_to(self.root))
            if module and module in self.graph.modules:
                yield module


def build(root: Path) -> Imports:
    """Read every Python file of the packages below `root` (about 0.15 s for 300 files, so nothing is cached)."""
    import grimp
    from grimp.application.config import settings

    folders = {name: root / folder for name, folder in PACKAGES.items() if any(_below(root / folder))}
    if not folders:
        return Imports(root, problem="there is no Python package")

    class Below:
        """Finds packages below `root`: the interpreter's own path may lead to another checkout."""

        def determine_package_directories(self, package_name: str, file_system: object) -> set[str]:  # noqa: ARG002
            return {str(folders[package_name])}

    before = settings.PACKAGE_FINDER
    settings.configure(PACKAGE_FINDER=Below())
    try:
        for folder in folders.values():
            for path in _below(folder):
                str(path.relative_to(folder.parent)).encode()  # grimp panics at a name that is not UTF-8
        graph = grimp.build_graph(*folders, include_external_packages=True, cache_dir=None)
    except UnicodeEncodeError as error:
        return Imports(root, problem=f"a file name is not UTF-8: {line(error.object)}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what stops it, a panic of Rust too, is "not known", never "not reached"
        return Imports(root, problem=line(str(error).splitlines()[0]) if str(error) else type(error).__name__)
    finally:
        settings.configure(PACKAGE_FINDER=before)
    for importer, imported in [*_implied(graph), *_flat(graph)]:
        graph.add_import(importer=importer, imported=imported)
    return Imports(root, graph=graph)


def _implied(graph: Any) -> Iterator[tuple[str, str]]:
    """A module runs the packages it lies in; a test runs the conftest.py files beside and above it."""
    ours = [module for module in graph.modules if not graph.is_module_squashed(module)]
    for module in ours:
        parts = module.split(".")
        for size in range(1, len(parts)):
            package = ".".join(parts[:size])
            yield from ((module, other) for other in (package, f"{package}.conftest") if other in graph.modules)


def _flat(graph: Any) -> Iterator[tuple[str, str]]:
    """What is imported by a name that only the flat folder has; of a folder there, the named modules or all."""
    for name in [module for module in graph.modules if graph.is_module_squashed(module)]:
        inside = f"{FLAT}.{name}"
        if inside in graph.modules:
            below = graph.find_descendants(inside)
            for importer in graph.find_modules_that_directly_import(name):
                targets = set()
                for detail in graph.get_import_details(importer=importer, imported=name):
                    words = set(_WORD.findall(detail["line_contents"]))
                    named = {module for module in below if module.rpartition(".")[2] in words}
                    targets |= {inside, *(named or below)}
                yield from ((importer, target) for target in targets if target != importer)


def _any_module(path: PurePath) -> str | None:
    """Like `module_of`, conftest files included."""
    for package, folder in PACKAGES.items():
        if path.suffix == ".py" and path.is_relative_to(folder):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()
