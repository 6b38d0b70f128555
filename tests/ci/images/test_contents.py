"""The key of an image changes with every file that its build sees, and with nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import IDENTITY

from hilgate.errors import DeclarationError
from hilgate.images import __main__ as command
from hilgate.images.contents import contents, copy_inputs, inputs, wheel_keys
from hilgate.images.pins import PINS_FILE, read

SEEN = {
    "cpu": (
        "docker/cpu.Dockerfile",
        "docker/prove.py",
        "docker/scripts/apt.sh",
        "requirements/laptop.txt",
        "requirements/install.sh",
        "pyproject.toml",
        "kernels/pagedkv/tuning/gfx942.toml",
        "ci/hilgate/plan/make.py",
        "evals/hileval/gates/judge.py",
        "evals/families/judge.py",
    ),
    "rocm": (
        "docker/rocm.Dockerfile",
        "docker/docker-bake.hcl",
        "docker/prove.py",
        "docker/codeobjects.py",
        "docker/build.txt",
        "docker/scripts/wheel-aiter.sh",
        "docker/patches/mamba-ssm/wave-size-of-every-arch.patch",
        "requirements/laptop.txt",
        "kernels/pagedkv/layout.py",
    ),
}
UNSEEN = (
    "README.md",
    "docker/README.md",
    "docker/build.in",
    "kernels/pagedkv/routing/README.md",
    "tests/ci/plan/test_make.py",
    "evals/gates.yaml",
    "ci/areas/kernels.yaml",
    "benchmarks/run.py",
    ".buildkite/pipeline.yml",
    "new-file.txt",
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


def changed(root: Path, name: str, new: bytes | None = None, mode: int | None = None) -> dict[str, str]:
    """Keys while one file is different."""
    path = root / name
    before, mode_before = (path.read_bytes(), path.stat().st_mode) if path.exists() else (None, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((before or b"") + b"\n# another line\n" if new is None else new)
    if mode is not None:
        path.chmod(mode)
    try:
        return contents(root)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
            path.chmod(mode_before)


@pytest.mark.parametrize(("image", "name"), [(image, name) for image, names in SEEN.items() for name in names])
def test_a_changed_input_changes_the_key(repository, image, name):
    # A patch is pinned: a change to it is refused before there is a key.
    if name.endswith(".patch"):
        with pytest.raises(DeclarationError, match="pinned is"):
            changed(repository, name)
    else:
        assert changed(repository, name)[image] != contents(repository)[image]


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unrelated_file_changes_no_key(repository, name):
    assert changed(repository, name) == contents(repository)


@pytest.mark.parametrize(
    ("name", "image"),
    [("docker/rocm.Dockerfile", "cpu"), ("docker/scripts/apt.sh", "rocm"), ("docker/cpu.Dockerfile", "rocm")],
)
def test_the_recipe_of_one_image_is_nothing_to_the_other(repository, name, image):
    assert changed(repository, name)[image] == contents(repository)[image]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=st.binary(max_size=50))
def test_any_input_with_any_other_content_changes_the_key(repository, data, text):
    image = data.draw(st.sampled_from(sorted(SEEN)))
    names = [name for name in inputs(image, _tracked(repository)) if not name.endswith((".patch",))]
    name = data.draw(st.sampled_from(names))
    same = (repository / name).read_bytes() == text
    assert (changed(repository, name, text)[image] == contents(repository)[image]) is same


def test_an_added_and_a_removed_file_change_the_key(repository):
    before = contents(repository)
    added = changed(repository, "kernels/pagedkv/new.py", b"")
    assert {image for image in before if added[image] != before[image]} == {"cpu", "rocm"}


def test_a_script_that_lost_its_mode_changes_the_key(repository):
    assert changed(
        repository, "docker/scripts/apt.sh", (repository / "docker/scripts/apt.sh").read_bytes(), 0o644
    ) != contents(repository)


@pytest.mark.parametrize(
    ("old", "new", "cpu", "rocm"),
    [
        ('suite = "bookworm"', 'suite = "trixie"', True, False),
        ('torch = "2.10.0"', 'torch = "2.11.0"', False, True),
        ("# Every pin", "# All pins", False, False),
        ('commit = ""', f'commit = "{"0" * 40}"', False, True),
    ],
    ids=["cpu", "rocm", "comment", "commit"],
)
def test_a_pin_changes_the_key_of_its_image_only(repository, old, new, cpu, rocm):
    before = contents(repository)
    after = changed(repository, PINS_FILE, (repository / PINS_FILE).read_text().replace(old, new, 1).encode())
    assert (after["cpu"] != before["cpu"], after["rocm"] != before["rocm"]) == (cpu, rocm)


def test_the_order_of_the_files_does_not_matter(repository):
    names = _tracked(repository)
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
    assert found == {*inputs(image, _tracked(repository)), "pins.json"}
    pins = json.loads((tmp_path / "context" / "pins.json").read_text())
    assert set(pins) == ({"cpu"} if image == "cpu" else {"archs", "rocm", "sources"})


def test_a_repository_without_images_has_no_keys(tmp_path):
    assert contents(tmp_path) == {}


def test_an_image_without_a_recipe_is_refused():
    with pytest.raises(DeclarationError, match="no recipe"):
        inputs("cpu", ("README.md",))


WHEEL_CHANGES = [
    ("docker/scripts/wheel-aiter.sh", {"aiter"}),
    ("docker/scripts/wheel.sh", {"mamba-ssm", "causal-conv1d", "aiter", "vllm"}),
    ("kernels/pagedkv/layout.py", set()),
    ("requirements/laptop.txt", set()),
]


@pytest.mark.parametrize(("name", "which"), WHEEL_CHANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wheel_is_built_again_only_when_its_bytes_may_differ(repository, name, which):
    before = wheel_keys(repository, read(repository))
    path = repository / name
    text = path.read_bytes()
    path.write_bytes(text + b"\n# more\n")
    try:
        after = wheel_keys(repository, read(repository))
    finally:
        path.write_bytes(text)
    assert {wheel for wheel in before if before[wheel] != after[wheel]} == which


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [
        ('rocm = "7.2.4"', 'rocm = "7.2.5"', 4),
        ('torch = "2.10.0"', 'torch = "2.11.0"', 4),
        ('read_off = "tar', 'read_off = "gtar', 0),
        ('suite = "bookworm"', 'suite = "trixie"', 0),
    ],
    ids=["rocm", "torch", "how-to", "cpu"],
)
def test_a_pin_changes_the_keys_of_its_wheels(repository, old, new, which):
    before = wheel_keys(repository, read(repository))
    path = repository / PINS_FILE
    text = path.read_text()
    path.write_text(text.replace(old, new))
    try:
        after = wheel_keys(repository, read(repository))
    finally:
        path.write_text(text)
    assert sum(before[wheel] != after[wheel] for wheel in before) == which


def test_the_command_prints_the_keys(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert command.main(["--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys["images"] == contents(repository)
    assert command.main([]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80
    assert command.main(["pins"]) == 0
    assert "cpu   every pin is read off" in capsys.readouterr().out


def _tracked(root: Path) -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
