# SPDX-License-Identifier: Apache-2.0
"""The key of an image changes with every file that its build sees, and with nothing else."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.images import checkout_of_images

from hilgate.declare.load import load_project
from hilgate.errors import DeclarationError
from hilgate.git import tracked_files
from hilgate.images import __main__ as command
from hilgate.images.contents import contents, copy_inputs, inputs, wheel_keys
from hilgate.images.pins import PINS_FILE, read
from hilgate.model.declaration import Image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOTH, CPU, ROCM = ("cpu", "rocm"), ("cpu",), ("rocm",)
WHEELS = ("aiter", "causal-conv1d", "mamba-ssm", "vllm")

FILES = {
    BOTH: ("docker/prove.py", "kernels/pyproject.toml", "docker/scripts/entry-points.sh"),
    CPU: ("requirements/laptop.txt", "docker/cpu.Dockerfile", "docker/scripts/apt.sh", "requirements/install.sh"),
    ROCM: (
        *("docker/rocm.Dockerfile", "docker/docker-bake.hcl", "docker/codeobjects.py", "docker/build.txt"),
        "docker/rocm.txt",
        *("docker/scripts/wheel-aiter.sh", "docker/scripts/wheel.sh", "docker/scripts/commit.sh"),
    ),
    (): (
        *("README.md", "docs/tutorial.md", "docker/build.in", "evals/gates.yaml", "kernels/pagedkv/layout.py"),
        *("pyproject.toml", "ci/hilgate/images/build.py", "ci/areas/kernels.yaml", "tests/ci/plan/test_make.py"),
        *("benchmarks/run.py", ".buildkite/pipeline.yml", "kernels/pagedkv/new.py", "new.txt"),
    ),
}
"""Images whose key a file changes -> files."""

OF_WHEELS = {
    "docker/scripts/commit.sh": ("aiter", "vllm"),
    "docker/scripts/wheel-aiter.sh": ("aiter",),
    "docker/scripts/wheel.sh": WHEELS,
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A checkout of what the keys cover and a little more."""
    return checkout_of_images(tmp_path_factory.mktemp("repository"))


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


def changed(root: Path, name: str, new: bytes | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Images, and wheels, whose key another content of a file changes."""
    images, wheels = contents(root), wheel_keys(root, read(root))
    with edited(root, name, new):
        other_images, other_wheels = contents(root), wheel_keys(root, read(root))
    return (
        tuple(sorted(image for image in images if other_images[image] != images[image])),
        tuple(sorted(wheel for wheel in wheels if other_wheels[wheel] != wheels[wheel])),
    )


def replaced(root: Path, old: str, new: str) -> bytes:
    """The pins with one difference."""
    text = (root / PINS_FILE).read_text()
    assert old in text
    return text.replace(old, new, 1).encode()


@pytest.mark.parametrize(("images", "name"), [(images, name) for images, names in FILES.items() for name in names])
def test_a_file_changes_the_keys_of_what_sees_it_and_no_other(repository, images, name):
    assert changed(repository, name) == (images, OF_WHEELS.get(name, ()))


def test_a_changed_patch_is_refused_before_there_is_a_key(repository):
    with pytest.raises(DeclarationError, match="pinned is"):
        changed(repository, "docker/patches/mamba-ssm/wave-size-of-every-arch.patch")


COMPARED_FIRST = (".patch", "docker/build.txt")
"""Inputs that the pins name contents of: with any others there is no key, but a mistake in the pins."""


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=st.binary(max_size=50))
def test_any_input_with_any_other_content_changes_the_key(repository, data, text):
    image = data.draw(st.sampled_from(BOTH))
    declared = load_project(repository).images[image]
    names = [name for name in inputs(declared, tracked_files(repository)) if not name.endswith(COMPARED_FIRST)]
    name = data.draw(st.sampled_from(names))
    same = (repository / name).read_bytes() == text
    assert (image in changed(repository, name, text)[0]) is not same


def test_a_script_that_lost_its_mode_changes_the_key(repository):
    path, before = repository / "docker/scripts/apt.sh", contents(repository)
    path.chmod(0o644)
    assert contents(repository)["cpu"] != before["cpu"]
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("old", "new", "images", "wheels"),
    [
        ('suite = "bookworm"', 'suite = "trixie"', CPU, 0),
        ('torch = "2.13.0"', 'torch = "2.11.0"', ROCM, 4),
        ('rocm = "7.2.3"', 'rocm = "7.2.4"', ROCM, 4),
        ("# Every pin", "# All pins", (), 0),
        ('commit = "de07f388', 'commit = "0e07f388', ROCM, 1),
        ('commit = "f33252ce', 'commit = "033252ce', ROCM, 1),
        ('files = ["setup.py", ', "files = [", ROCM, 0),
    ],
    ids=["cpu", "torch", "rocm", "comment", "commit", "submodule", "how-to"],
)
def test_a_pin_changes_the_keys_of_its_image_and_wheels_only(repository, old, new, images, wheels):
    found = changed(repository, PINS_FILE, replaced(repository, old, new))
    assert (found[0], len(found[1])) == (images, wheels)


def test_the_order_of_the_files_does_not_matter(repository):
    names, rocm = list(tracked_files(repository)), load_project(repository).images["rocm"]
    assert inputs(rocm, reversed(names)) == inputs(rocm, names) == tuple(sorted(inputs(rocm, names)))


def test_a_copy_elsewhere_has_the_same_keys(repository, tmp_path):
    shutil.copytree(repository, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(repository)


@pytest.mark.parametrize("image", BOTH)
def test_the_build_sees_what_the_key_covers_and_nothing_else(repository, tmp_path, image):
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "left-by-another-build").write_text("x")
    declared = load_project(repository).images[image]
    copy_inputs(image, declared, repository, tmp_path / "context")
    context = tmp_path / "context"
    found = {path.relative_to(context).as_posix() for path in context.rglob("*") if path.is_file()}
    assert found == {*inputs(declared, tracked_files(repository)), "pins.json"}
    pins = json.loads((context / "pins.json").read_text())
    assert set(pins) == ({"cpu"} if image == "cpu" else {"archs", "rocm", "sources"})


def test_no_images_have_no_keys_and_each_needs_a_recipe(tmp_path):
    assert contents(tmp_path) == {}
    with pytest.raises(DeclarationError, match="no recipe"):
        inputs(Image(recipe="docker/cpu.Dockerfile"), ("README.md",))


def test_the_command_prints_the_keys(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert command.main(["--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys["images"] == contents(repository)
    assert command.main([]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80
    assert command.main(["pins"]) == 0
    assert "cpu   every pin is read off" in capsys.readouterr().out
