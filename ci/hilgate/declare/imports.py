# SPDX-License-Identifier: Apache-2.0
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

from hilgate.text import line, shorten, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

CONFTEST = "conftest.py"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Packages:
    """The import packages of a repository: those that lie in the folders of its `python_path`.

    A package has an `__init__.py`, or holds tests. Python files elsewhere are in no graph and select by globs.
    """

    root: Path
    folders: Mapping[str, str]
    """Import package -> its folder below the root."""

    def module_of(self, path: str) -> str | None:
        """The dotted module of a file below the root; None for what is no module of a package.

        A conftest.py is none: pytest runs it for every test below it, whatever is imported.
        """
        name = PurePosixPath(path)
        return None if name.name == CONFTEST else self.any_module(name)

    def any_module(self, path: PurePath) -> str | None:
        """Like `module_of`, conftest files included."""
        name = path.as_posix()
        for package, folder in self.folders.items() if path.suffix == ".py" else ():
            if name.startswith(f"{folder}/"):
                parts = (package, *name.removeprefix(f"{folder}/").removesuffix(".py").split("/"))
                return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return None

    def locate(self, declared: str) -> Path | None:
        """The file or folder that an entry of `Step.imports` names; None when there is none.

        An entry is a dotted module or package, or the path of a test file or of a folder of tests.
        """
        if "/" in declared:
            path = self.root / declared
            ours = any(PurePosixPath(declared).is_relative_to(folder) for folder in self.folders.values())
            return path if ours and ".." not in path.parts and (path.is_dir() or _is_python(path)) else None
        package, *rest = declared.split(".")
        if package not in self.folders:
            return None
        path = self.root.joinpath(self.folders[package], *rest)
        if path.is_dir() and any(path.glob("*.py")):
            return path
        return path.with_name(f"{path.name}.py") if _is_python(path.with_name(f"{path.name}.py")) else None

    def run_by(self, command: Sequence[str]) -> list[str]:
        """What a command line names of ours: test files, folders, and the module after `-m`; of a package, its main."""
        named = [after for flag, after in itertools.pairwise(command) if flag == "-m"]
        mains = [f"{module}.__main__" for module in named]
        modules = [main if self.locate(main) else module for main, module in zip(mains, named, strict=True)]
        paths = [word.partition("::")[0] for word in command if "/" in word]
        return [name for name in (*modules, *paths) if self.locate(name)]

    def remedy(self, declared: str) -> str:
        """Did-you-mean for an entry of `Step.imports` that names nothing."""
        files = [path for folder in self.folders.values() for path in _below(self.root / folder)]
        names = [path.relative_to(self.root).as_posix() for path in files]
        known = names if "/" in declared else filter(None, map(self.module_of, names))
        return suggest(declared, known)


def find(root: Path, python_path: Iterable[str]) -> Packages:
    """The packages below `root`, as an interpreter with this path finds them: the first of a name counts."""
    entries = [root / entry for entry in python_path]
    ends = [entry.resolve() for entry in entries]
    found: dict[str, str] = {}
    for entry in entries:
        for folder in sorted(entry.iterdir()) if entry.is_dir() else []:
            holds_entry = any(end.is_relative_to(folder.resolve()) for end in ends)
            if folder.is_dir() and folder.name.isidentifier() and not holds_entry and _is_package(folder):
                below = folder.relative_to(root) if folder.is_relative_to(root) else folder
                found.setdefault(folder.name, below.as_posix())
    return Packages(root, found)


def _is_package(folder: Path) -> bool:
    """Whether it is imported from; an environment and what ignores itself are not looked into."""
    if (folder / "__init__.py").is_file():
        return True
    foreign = (folder / "pyvenv.cfg").exists() or (folder / ".gitignore").exists()
    return not foreign and next(folder.rglob("test_*.py"), None) is not None


@dataclass(frozen=True)
class Imports:
    """The import graph of one state of the files."""

    packages: Packages
    problem: str = ""
    """Why there is no graph; every question is then answered with "not known"."""
    graph: Any = field(default=None, repr=False)
    _reached: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _used: dict[tuple[str, ...], set[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def knows(self, path: str) -> bool:
        """Whether the file is a module of the graph."""
        return self.graph is not None and self.packages.module_of(path) in self.graph.modules

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

    def uses(self, declared: Iterable[str], package: str) -> bool:
        """Whether one of `declared` reaches a module that lies in this package, at any depth."""
        key = tuple(declared)
        if key not in self._used:
            parts = [module.split(".") for module in self.reached(key)]
            self._used[key] = {".".join(names[:size]) for names in parts for size in range(1, len(names))}
        return package in self._used[key]

    def _start(self, entry: str) -> Iterator[str]:
        """The modules that an entry stands for; conftest files below a folder among them."""
        place = self.packages.locate(entry)
        if place is None:
            return
        for path in _below(place) if place.is_dir() else [place]:
            module = self.packages.any_module(path.relative_to(self.packages.root))
            if module and module in self.graph.modules:
                yield module


def build(root: Path, python_path: Iterable[str]) -> Imports:
    """Read every Python file of the packages that `find` names (about 0.15 s for 300 files, so nothing is cached)."""
    import grimp
    from grimp.application.config import settings

    packages = find(root, python_path)
    folders = {name: packages.root / folder for name, folder in packages.folders.items()}
    if not folders:
        return Imports(packages, problem="there is no Python package")

    class Below:
        """Finds packages of the repository: the interpreter's own path may lead to another checkout."""

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
        return Imports(packages, problem=f"a file name is not UTF-8: {line(error.object)}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what stops it, a panic of Rust too, is "not known", never "not reached"
        # It quotes the line that it could not read, and each step would repeat it.
        return Imports(packages, problem=shorten(line(f"{error}\n".splitlines()[0]), 300) or type(error).__name__)
    finally:
        settings.configure(PACKAGE_FINDER=before)
    for importer, imported in [*_implied(graph), *_flat(graph, packages)]:
        graph.add_import(importer=importer, imported=imported)
    return Imports(packages, graph=graph)


def _implied(graph: Any) -> Iterator[tuple[str, str]]:
    """A module runs the packages it lies in; a test runs the conftest.py files beside and above it."""
    ours = [module for module in graph.modules if not graph.is_module_squashed(module)]
    for module in ours:
        parts = module.split(".")
        for size in range(1, len(parts)):
            package = ".".join(parts[:size])
            yield from ((module, other) for other in (package, f"{package}.conftest") if other in graph.modules)


def _flat(graph: Any, packages: Packages) -> Iterator[tuple[str, str]]:
    """What pytest makes importable by its bare name: beside the importing test, or at the top of a folder of tests.

    Of a folder there, the named modules or all.
    """
    flat = [name for name, folder in packages.folders.items() if not (packages.root / folder / "__init__.py").exists()]
    for name in [module for module in graph.modules if graph.is_module_squashed(module)]:
        for importer in graph.find_modules_that_directly_import(name):
            for inside in {f"{place}.{name}" for place in (importer.rpartition(".")[0], *flat)} & graph.modules:
                below, targets = graph.find_descendants(inside), {inside}
                for detail in graph.get_import_details(importer=importer, imported=name):
                    words = set(_WORD.findall(detail["line_contents"]))
                    targets |= {module for module in below if module.rpartition(".")[2] in words} or below
                yield from ((importer, target) for target in targets if target != importer)


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()
