# SPDX-License-Identifier: Apache-2.0
"""What imports reach what, over small repositories: awkward imports first."""

import os
from pathlib import Path
from unittest import mock

import grimp
import pytest

from hilgate.declare.imports import build, find

REPOSITORY = Path(__file__).resolve().parents[3]
PATH = ("ci", "kernels", "evals", ".")
FILES = {
    "kernels/pagedkv/__init__.py": "",
    "kernels/pagedkv/leaf.py": "",
    "kernels/pagedkv/middle.py": "from pagedkv import leaf",
    "kernels/pagedkv/lazy.py": "def f():\n    import pagedkv.leaf",
    "kernels/pagedkv/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pagedkv.leaf import X",
    "kernels/pagedkv/relative.py": "from .leaf import X",
    "kernels/pagedkv/alone.py": "",
    "kernels/pagedkv/tool/__init__.py": "from pagedkv import middle",
    "kernels/pagedkv/tool/__main__.py": "",
    "kernels/pagedkv/tool/inside.py": "",
    "tests/pools.py": "import pagedkv.leaf",
    "tests/conftest.py": "",
    "tests/kernels/conftest.py": "import pagedkv.alone",
    "tests/kernels/test_flat.py": "from pools import batch",
    "tests/kernels/test_nothing.py": "",
    "tests/models/engine.py": "import pagedkv.leaf",
    "tests/models/test_engine.py": "from models import engine",
}


@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_linked_folder_of_the_path_is_followed(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "other" / "kernels" / "shared").mkdir(parents=True)
    (tmp_path / "other" / "kernels" / "shared" / "__init__.py").touch()
    (tmp_path / "root" / "kernels").symlink_to("../other/kernels")
    assert find(tmp_path / "root", ["kernels", "."]).folders == {"shared": "kernels/shared"}


@pytest.mark.parametrize(
    ("declared", "module", "reached"),
    [
        ("pagedkv.leaf", "pagedkv.leaf", True),
        ("pagedkv.middle", "pagedkv.leaf", True),
        ("pagedkv.lazy", "pagedkv.leaf", True),
        ("pagedkv.typed", "pagedkv.leaf", True),
        ("pagedkv.relative", "pagedkv.leaf", True),
        ("pagedkv.alone", "pagedkv.leaf", False),
        ("pagedkv.leaf", "pagedkv.middle", False),
        ("pagedkv.alone", "pagedkv", True),
        ("pagedkv.tool.inside", "pagedkv.leaf", True),
        ("pagedkv.tool", "pagedkv.tool.__main__", True),
        ("pagedkv.tool", "pagedkv.tool.inside", True),
        ("pagedkv", "pagedkv.alone", True),
        ("tests/kernels/test_flat.py", "pagedkv.leaf", True),
        ("tests/kernels/test_flat.py", "tests.pools", True),
        ("tests/kernels/test_nothing.py", "pagedkv.alone", True),
        ("tests/kernels/test_nothing.py", "pagedkv.leaf", False),
        ("tests/models/test_engine.py", "pagedkv.leaf", True),
        ("tests/models", "tests.models.engine", True),
        ("tests/models", "pagedkv.alone", False),
    ],
    ids=str,
)
def test_reached(repository, declared, module, reached):
    graph = build(repository, PATH)
    assert graph.problem == ""
    assert (module in graph.reached([declared])) is reached


def test_first_entry_that_reaches_a_module_is_named(repository):
    reached = build(repository, PATH).reached(["pagedkv.alone", "tests/kernels/test_flat.py"])
    assert reached["pagedkv.leaf"] == "tests/kernels/test_flat.py"


def test_graph_is_of_the_given_root_whatever_is_installed(repository):
    assert build(repository, PATH).knows("kernels/pagedkv/leaf.py")
    assert not build(repository, PATH).knows("kernels/pagedkv/layout.py")
    assert build(REPOSITORY, PATH).knows("kernels/pagedkv/layout.py")


def test_an_unparsable_file_is_a_problem_and_no_exception(repository):
    (repository / "kernels/pagedkv/broken.py").write_text("def (")
    graph = build(repository, PATH)
    assert "broken.py" in graph.problem
    assert not graph.knows("kernels/pagedkv/leaf.py")


def test_a_non_utf8_name_and_a_native_panic_are_problems(repository, monkeypatch):
    (repository / "kernels/pagedkv" / os.fsdecode(b"bad\xff.py")).write_text("")
    assert build(repository, PATH).problem == r"a file name is not UTF-8: pagedkv/bad\xff.py"

    class PanicException(BaseException):
        """What pyo3 raises, which is no Exception."""

    def panic(*_, **__):
        raise PanicException("called `Option::unwrap()`\nstack backtrace:")

    monkeypatch.setattr(Path, "rglob", lambda self, _: iter([self / "a.py"]))
    monkeypatch.setattr(grimp, "build_graph", panic)
    assert build(repository, PATH).problem == "called `Option::unwrap()`"
    monkeypatch.setattr(grimp, "build_graph", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(repository, PATH)


def test_root_without_packages_is_a_problem(tmp_path):
    assert build(tmp_path, PATH).problem == "there is no Python package"


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("ci/hilgate/cli/app.py", "hilgate.cli.app"),
        ("kernels/pagedkv/__init__.py", "pagedkv"),
        ("tests/kernels/test_a.py", "tests.kernels.test_a"),
        ("tests/kernels/conftest.py", None),
        ("kernels/pagedkv/tuning/gfx942.toml", None),
        ("docker/check.py", None),
        ("setup.py", None),
    ],
)
def test_module_of_a_file(path, module):
    assert find(REPOSITORY, PATH).module_of(path) == module


@pytest.mark.parametrize(
    "declared",
    ["pagedkv.nothing", "pagedkv.leaf.X", "torch", "tests/kernels/test_none.py", "tests/../secret.py", "docs/a.py", ""],
)
def test_nothing_is_located_where_there_is_none(repository, declared):
    assert find(repository, PATH).locate(declared) is None


def test_remedy_names_what_was_probably_meant(repository):
    assert "'pagedkv.middle'" in find(repository, PATH).remedy("pagedkv.midle")
    assert "'tests/kernels/test_flat.py'" in find(repository, PATH).remedy("tests/kernels/test_falt.py")


def test_what_a_command_names(repository):
    words = ["python", "-m", "pytest", "-k", "x", "tests/kernels/test_flat.py::test_a", "tests/models", "no/such.py"]
    assert find(repository, PATH).run_by(words) == ["tests/kernels/test_flat.py", "tests/models"]
    assert find(repository, PATH).run_by(["python", "-m", "pagedkv.middle", "--out", "results/x"]) == ["pagedkv.middle"]
    assert find(repository, PATH).run_by(["python", "-m", "pagedkv.tool"]) == ["pagedkv.tool.__main__"]
