# SPDX-License-Identifier: Apache-2.0
"""Wheels of a release: the same bytes twice, usable where nothing else of ours is, and bound to the build."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest
from hatchling.build import build_wheel
from support.bundles import built, edited, first_problem, forge
from support.jobs import passed

from hilgate.errors import MisuseError, RecordsError
from hilgate.model.record import Outcome
from hilgate.release import bundle, verify, wheels

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "sample"
version = "0.1.0"
license = "Apache-2.0"
requires-python = ">=3.11"
description = "A sample"
classifiers = ["Typing :: Typed"]
readme = {content-type = "text/markdown", text = "# sample"}
"""
HOOK = """[tool.hatch.build.hooks.custom]
"""
BUILD_HOOK = """
import pathlib
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Placed(BuildHookInterface):
    def initialize(self, version, build_data):
        pathlib.Path(self.root, "sample/built.py").write_text(f"WHERE = {self.root!r}")
"""
NAME = "sample-0.1.0-py3-none-any.whl"
SAMPLE = {
    "pyproject.toml": ABOUT,
    "LICENSE": "Apache License\n",
    "sample/__init__.py": '__version__ = "0.1.0"\n',
    "ci/agents.yaml": "devices: {cpu: {}}\n",
}


def distribution(folder: Path, **changes: str) -> Path:
    """A repository with one small distribution."""
    root = folder / "root"
    for name, text in (SAMPLE | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def made(folder: Path, out: Path | None = None, **changes: str) -> Path:
    """A wheel of such a distribution, made by its build backend in this process; pip costs half a second."""
    target = (out or folder) / "dist"
    with contextlib.chdir(distribution(folder, **changes)):
        return target / build_wheel(str(target))


def run(root: Path, monkeypatch: pytest.MonkeyPatch, *folders: str) -> tuple[int, dict[str, dict[str, object]], Path]:
    out = root.parent / "out"
    monkeypatch.setenv("HILGATE_OUT", str(out))
    monkeypatch.chdir(root)
    status = wheels.main([*(folders or (".",))])
    lines = (out / "findings.jsonl").read_text().splitlines() if (out / "findings.jsonl").exists() else []
    return status, {check["id"].partition(" ")[2]: check for check in map(json.loads, lines)}, out


def test_a_sound_wheel_is_built_twice_and_tried(tmp_path, monkeypatch):
    status, found, out = run(distribution(tmp_path), monkeypatch)
    assert (status, {check["outcome"] for check in found.values()}) == (0, {"pass"})
    assert set(found) == {"is built twice", "works where nothing else of ours is"}
    digest = f"sha256:{bundle.sha256(out / 'wheels' / NAME)}"
    assert [check["labels"] for check in found.values()] == [{"wheel": NAME, "sha256": digest}] * 2


def test_a_wheel_that_holds_where_it_was_built_is_found(tmp_path, monkeypatch):
    root = distribution(tmp_path, **{"pyproject.toml": ABOUT + HOOK, "hatch_build.py": BUILD_HOOK})
    status, found, _ = run(root, monkeypatch)
    assert status == 1
    assert found["is built twice"]["outcome"] == "fail"
    assert "sample/built.py" in found["is built twice"]["message"]


PROGRAM = f'{ABOUT}[project.scripts]\nsample = "sample.main:main"\n'
UNUSABLE = {
    "another version": ({"sample/__init__.py": '__version__ = "0.2.0"\n'}, "fails"),
    "an import": ({"sample/__init__.py": "import none_such_module\n"}, "No module named 'none_such_module'"),
    "an undeclared package": ({"sample/__init__.py": "import rich\n"}, "No module named 'rich'"),
    "another license": ({"pyproject.toml": ABOUT.replace("Apache-2.0", "MIT")}, "its license is MIT, not Apache-2.0"),
    "no license": ({"LICENSE": "x", "pyproject.toml": f"{ABOUT}license-files = []\n"}, "it holds no LICENSE"),
    "no changelog": (
        {"pyproject.toml": ABOUT.replace("# sample", "`sample/NEWS.md` in the wheel")},
        "it holds no sample/NEWS.md",
    ),
    "no description": ({"pyproject.toml": ABOUT.replace("# sample", "")}, "its description is 0 characters"),
    "plain text": ({"pyproject.toml": ABOUT.replace("text/markdown", "text/plain")}, "of text/plain, not Markdown"),
    "a relative link": (
        {"pyproject.toml": ABOUT.replace("# sample", "[page](ci/README.md)")},
        "links to ci/README.md",
    ),
    "no classifier": ({"pyproject.toml": ABOUT.replace("classifiers", "keywords")}, "its metadata has no Classifier"),
    "its program": (
        {"sample/main.py": "def main():\n    return 3\n", "pyproject.toml": PROGRAM},
        "`sample --help` fails",
    ),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_wheel_that_does_not_work_is_found(tmp_path, fault):
    changes, words = UNUSABLE[fault]
    check = wheels.tried(made(tmp_path, **changes), tmp_path / "tried")
    assert check.outcome is Outcome.FAIL
    assert words in check.message


def test_a_wheel_is_tried_beside_those_that_it_requires(tmp_path):
    """Its command may need them; a distribution that it does not declare is missing there."""
    command = '[project.scripts]\nsample = "sample.main:main"\n'
    program = {"sample/main.py": "import other\n\ndef main():\n    return 0\n"}
    other = {"pyproject.toml": ABOUT.replace('"sample"', '"other"'), "other/__init__.py": '__version__ = "0.1.0"\n'}
    for folder, declared, outcome in (("a", 'dependencies = ["other>=0.1"]\n', "pass"), ("b", "", "fail")):
        made(tmp_path / folder / "other", tmp_path / folder, **other)
        wheel = made(tmp_path / folder, **program, **{"pyproject.toml": f"{ABOUT}{declared}{command}"})
        check = wheels.tried(wheel, tmp_path / folder / "tried")
        assert check.outcome == outcome, check
    assert "No module named 'other'" in check.message


def test_a_step_tries_each_wheel_and_is_red_where_one_fails(tmp_path, monkeypatch):
    changes = {
        "pyproject.toml": f'{ABOUT}dependencies = ["other>=0.1"]\n',
        "sample/__init__.py": "import other\n__version__ = '0.1.0'\n",
        "other/pyproject.toml": ABOUT.replace('"sample"', '"other"'),
        "other/LICENSE": "Apache License\n",
        "other/other/__init__.py": '__version__ = "0.2.0"\n',
    }
    status, _, out = run(distribution(tmp_path, **changes), monkeypatch, ".", "other")
    checks = map(json.loads, (out / "findings.jsonl").read_text().splitlines())
    outcomes = {check["id"].replace("-0.1.0-py3-none-any.whl", ""): check["outcome"] for check in checks}
    assert status == 1
    assert outcomes == {
        "other is built twice": "pass",
        "sample is built twice": "pass",
        "other works where nothing else of ours is": "fail",
        "sample works where nothing else of ours is": "pass",
    }


def test_what_cannot_be_built_is_reported_with_the_words_of_pip(tmp_path, monkeypatch, capsys):
    status, found, _ = run(
        distribution(tmp_path, **{"pyproject.toml": ABOUT.replace("version", "vision")}), monkeypatch
    )
    assert (status, found) == (3, {})
    assert "no wheel could be built" in capsys.readouterr().err
    assert run(distribution(tmp_path), monkeypatch, "none")[0] == MisuseError.exit_status


def test_a_difference_in_order_alone_is_one(tmp_path):
    for name, members in (("a", ("x", "y")), ("b", ("y", "x"))):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "s.whl", "w") as file:
            for member in members:
                file.writestr(zipfile.ZipInfo(member), member)
    (only,) = wheels.compared(tmp_path / "a", tmp_path / "b")
    assert (only.outcome, only.message) == (Outcome.FAIL, "differs in the order or the compression of its members")
    shutil.rmtree(tmp_path / "b")
    (only,) = wheels.compared(tmp_path / "a", tmp_path / "b")
    assert only.message == "only the first of two builds made it"


def bundled(folder: Path, *labels: dict[str, str], content: bytes = b"a wheel") -> Path:
    """A bundle of a build that left a wheel, with a check for each of these labels."""
    checks = [passed(f"t.py::{number}", labels=one) for number, one in enumerate(labels)]
    root, out = built(folder, checks=checks or [passed("t.py::a")])
    (out / "steps/mla-cpu/wheels").mkdir()
    (out / "steps/mla-cpu/wheels" / NAME).write_bytes(content)
    bundle.write_bundle(root, out, folder / "e.tar", committed=1)
    return folder / "e.tar"


def about(content: bytes = b"a wheel", name: str = NAME) -> dict[str, str]:
    return {"wheel": name, "sha256": f"sha256:{bundle.sha256(content)}"}


def test_a_wheel_is_bound_to_the_build_by_what_checks_say_of_it(tmp_path):
    file = bundled(tmp_path, about(), about())
    assert verify.verify(file).sound
    place = f"results/steps/mla-cpu/wheels/{NAME}"
    other = forge(file, tmp_path / "f.tar", edited(place, b"a wheel", b"another"))
    assert first_problem(other).startswith(f"wheels: of the wheel {NAME} no check says that it is")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([], "no check says"),
        ([about(), about(b"other bytes")], "mla-cpu tried sample-0.1.0-py3-none-any.whl of sha256:"),
        ([about(), about(name="other-1-py3-none-any.whl")], "what was built is none of this name"),
    ],
    ids=["no check", "other bytes were tried", "another wheel was tried"],
)
def test_no_bundle_of_an_untried_wheel_or_other_bytes(tmp_path, labels, words):
    with pytest.raises(RecordsError, match=words):
        bundled(tmp_path, *labels)


def test_a_step_that_tries_a_wheel_is_bundled_without_one(tmp_path):
    root, out = built(tmp_path, checks=[passed("t.py::a", labels=about())])
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=1)
    assert verify.verify(tmp_path / "e.tar").sound
