"""The key of an image changes with every file that its build sees, and with nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import IDENTITY

from hilgate.errors import DeclarationError
from hilgate.git import tracked_files
from hilgate.images import __main__ as command
from hilgate.images.contents import contents, copy_inputs, inputs, wheel_keys
from hilgate.images.pins import PINS_FILE, read

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEN = {
    "cpu": (
        *("docker/cpu.Dockerfile", "docker/prove.py", "docker/scripts/apt.sh", "requirements/laptop.txt"),
        *("requirements/install.sh", "pyproject.toml", "kernels/pagedkv/tuning/gfx942.toml"),
        *("ci/hilgate/plan/make.py", "evals/hileval/gates/judge.py", "evals/families/judge.py"),
    ),
    "rocm": (
        *("docker/rocm.Dockerfile", "docker/docker-bake.hcl", "docker/prove.py", "docker/codeobjects.py"),
        *("docker/build.txt", "docker/scripts/wheel-aiter.sh", "requirements/laptop.txt", "kernels/pagedkv/layout.py"),
    ),
}
UNSEEN = (
    *("README.md", "docker/README.md", "docker/build.in", "kernels/pagedkv/routing/README.md", "evals/gates.yaml"),
    *("tests/ci/plan/test_make.py", "ci/areas/kernels.yaml", "benchmarks/run.py", ".buildkite/pipeline.yml", "new.txt"),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A checkout of what the keys cover and a little more."""
    here = Path(__file__).parents[3]
    root = tmp_path_factory.mktemp("repository")
    for name in ("docker", "requirements", "ci/hilgate", "kernels/pagedkv", "evals/hileval", "evals/families"):
        shutil.copytree(here / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(here / "pyproject.toml", root)
    shutil.copy(here / "ci" / "agents.yaml", root / "ci")
    (root / ".gitignore").write_text("__pycache__/\n")
    for arguments in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "all"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


@contextmanager
def edited(root: Path, name: str, new: bytes | None = None) -> Iterator[None]:
    """One file is different, or new."""
    path = root / name
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((before or b"") + b"\n# another line\n" if new is None else new)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def changed(root: Path, name: str, new: bytes | None = None) -> set[str]:
    """Images whose key another content of a file changes."""
    before = contents(root)
    with edited(root, name, new):
        after = contents(root)
    return {image for image in before if after[image] != before[image]}


def replaced(root: Path, old: str, new: str) -> bytes:
    """The pins with one difference."""
    text = (root / PINS_FILE).read_text()
    assert old in text
    return text.replace(old, new, 1).encode()


@pytest.mark.parametrize(("image", "name"), [(image, name) for image, names in SEEN.items() for name in names])
def test_a_changed_input_changes_the_key(repository, image, name):
    assert image in changed(repository, name)


def test_a_changed_patch_is_refused_before_there_is_a_key(repository):
    with pytest.raises(DeclarationError, match="pinned is"):
        changed(repository, "docker/patches/mamba-ssm/wave-size-of-every-arch.patch")


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unrelated_file_changes_no_key(repository, name):
    assert changed(repository, name) == set()


@pytest.mark.parametrize(
    ("name", "images"),
    [("docker/rocm.Dockerfile", {"rocm"}), ("docker/scripts/apt.sh", {"cpu"}), ("docker/cpu.Dockerfile", {"cpu"}),
     ("kernels/pagedkv/new.py", {"cpu", "rocm"})],
)  # fmt: skip
def test_the_recipe_of_one_image_is_nothing_to_the_other(repository, name, images):
    assert changed(repository, name) == images


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=st.binary(max_size=50))
def test_any_input_with_any_other_content_changes_the_key(repository, data, text):
    image = data.draw(st.sampled_from(sorted(SEEN)))
    names = [name for name in inputs(image, tracked_files(repository)) if not name.endswith(".patch")]
    name = data.draw(st.sampled_from(names))
    same = (repository / name).read_bytes() == text
    assert (image in changed(repository, name, text)) is not same


def test_a_script_that_lost_its_mode_changes_the_key(repository):
    path, before = repository / "docker/scripts/apt.sh", contents(repository)
    path.chmod(0o644)
    assert contents(repository)["cpu"] != before["cpu"]
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("old", "new", "images", "wheels"),
    [
        ('suite = "bookworm"', 'suite = "trixie"', {"cpu"}, 0),
        ('torch = "2.10.0"', 'torch = "2.11.0"', {"rocm"}, 4),
        ('rocm = "7.2.4"', 'rocm = "7.2.5"', {"rocm"}, 4),
        ("# Every pin", "# All pins", set(), 0),
        ('commit = ""', f'commit = "{"0" * 40}"', {"rocm"}, 1),
        ('read_off = "git', 'read_off = "gitt', {"rocm"}, 0),
    ],
    ids=["cpu", "torch", "rocm", "comment", "commit", "how-to"],
)
def test_a_pin_changes_the_keys_of_its_image_and_wheels_only(repository, old, new, images, wheels):
    text = replaced(repository, old, new)
    assert changed(repository, PINS_FILE, text) == images
    before = wheel_keys(repository, read(repository))
    with edited(repository, PINS_FILE, text):
        after = wheel_keys(repository, read(repository))
    assert sum(before[wheel] != after[wheel] for wheel in before) == wheels


@pytest.mark.parametrize(
    ("name", "wheels"),
    [
        ("docker/scripts/wheel-aiter.sh", {"aiter"}),
        ("docker/scripts/wheel.sh", {"mamba-ssm", "causal-conv1d", "aiter", "vllm"}),
        ("kernels/pagedkv/layout.py", set()),
        ("requirements/laptop.txt", set()),
    ],
)
def test_a_wheel_is_built_again_only_when_its_bytes_may_differ(repository, name, wheels):
    before = wheel_keys(repository, read(repository))
    with edited(repository, name):
        after = wheel_keys(repository, read(repository))
    assert {wheel for wheel in before if before[wheel] != after[wheel]} == wheels


def test_the_order_of_the_files_does_not_matter(repository):
    names = list(tracked_files(repository))
    assert inputs("rocm", reversed(names)) == inputs("rocm", names) == tuple(sorted(inputs("rocm", names)))


def test_a_copy_elsewhere_has_the_same_keys(repository, tmp_path):
    shutil.copytree(repository, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(repository)


@pytest.mark.parametrize("image", SEEN)
def test_the_build_sees_what_the_key_covers_and_nothing_else(repository, tmp_path, image):
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "left-by-another-build").write_text("x")
    copy_inputs(image, repository, tmp_path / "context")
    found = {
        path.relative_to(tmp_path / "context").as_posix()
        for path in (tmp_path / "context").rglob("*")
        if path.is_file()
    }
    assert found == {*inputs(image, tracked_files(repository)), "pins.json"}
    pins = json.loads((tmp_path / "context" / "pins.json").read_text())
    assert set(pins) == ({"cpu"} if image == "cpu" else {"archs", "rocm", "sources"})


def test_a_repository_without_images_has_no_keys(tmp_path):
    assert contents(tmp_path) == {}


def test_an_image_without_a_recipe_is_refused():
    with pytest.raises(DeclarationError, match="no recipe"):
        inputs("cpu", ("README.md",))


def test_the_command_prints_the_keys(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert command.main(["--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys["images"] == contents(repository)
    assert command.main([]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80
    assert command.main(["pins"]) == 0
    assert "cpu   every pin is read off" in capsys.readouterr().out
