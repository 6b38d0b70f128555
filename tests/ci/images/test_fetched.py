# SPDX-License-Identifier: Apache-2.0
"""`build IMAGE --check` names what would be fetched, asks nobody, and refuses what a pin or a hash is missing of."""

from __future__ import annotations

import shutil

import pytest
from support.images import checkout_of_images

from hilgate.images import __main__ as command
from hilgate.images.pins import PINS_FILE, read


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of what the images are made of, on a machine with git alone."""
    checkout_of_images(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_whole_recipe_lists_each_input_with_what_it_must_be(checkout, capsys):
    assert command.main(["build", "rocm", "--check"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    pins = read(checkout)
    found = {tuple(line.split()[:2]): line.split()[-1] for line in lines}
    assert found["base", pins.rocm.base.reference] == pins.rocm.base.digest
    operators, triton = pins.sources["aiter"].git, pins.sources["vllm"].parts["triton_kernels"]
    assert (found["git", operators.repository], found["git", triton.repository]) == (operators.commit, triton.commit)
    (kernels,) = operators.submodules.values()
    assert found["submodule", kernels.repository] == kernels.commit
    for name in ("mamba-ssm", "causal-conv1d", "vllm"):
        assert found["sdist", name] == f"sha256:{pins.sources[name].sdist}"
    assert {("python", "docker/rocm.txt:"), ("python", "docker/build.txt:")} <= set(found)
    assert last.startswith(f"complete: image 'rocm' fetches these {len(lines)} inputs")
    assert command.main(["build", "cpu", "--check"]) == 0
    assert "signed by the suite" in capsys.readouterr().out
    assert not (checkout / ".images").exists()
    assert not (checkout / "results").exists()


INCOMPLETE = {
    "digest": (
        PINS_FILE,
        'digest = "sha256:3cead535c32c11c59b222bbaa502076b9c737fb969b70b7bc9bb8ce77da5698e"',
        'digest = ""',
        ["rocm.base.digest", "docker buildx imagetools inspect", "make lock-image"],
    ),
    "commit": (
        PINS_FILE,
        'commit = "de07f3885ee5f2030ba72b6cc5940d674fd457cf"',
        'commit = ""',
        ["sources.aiter.git.commit", "git ls-remote", "make lock-image"],
    ),
    "hash": ("docker/build.txt", "packaging==", "wheel2==1\npackaging==", ["docker/build.txt", "docker/lock.sh"]),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_is_missing_is_named_with_what_fills_it(checkout, capsys, what):
    name, old, new, said = INCOMPLETE[what]
    text = (checkout / name).read_text()
    assert text.count(old) == 1
    (checkout / name).write_text(text.replace(old, new))
    assert command.main(["build", "rocm", "--check"]) == 3
    printed = capsys.readouterr()
    assert [part for part in said if part not in printed.err] == []
    assert ("MISSING" in printed.out) == (what in {"digest", "commit", "hash"})
    assert "complete" not in printed.out


@pytest.mark.usefixtures("checkout")
def test_an_unknown_image_names_the_known(capsys):
    assert command.main(["build", "rocn", "--check"]) == 2
    assert "did you mean 'rocm'?" in capsys.readouterr().err
