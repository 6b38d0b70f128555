# SPDX-License-Identifier: Apache-2.0
"""The commands that buildah and docker are given, without running either, and the pip configuration of a build."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hilgate.errors import CannotRunHereError
from hilgate.images import __main__ as command
from hilgate.images import engines
from hilgate.images.engines import Buildah, BuildRequest, Docker
from hilgate.images.pins import labels
from hilgate.images.pip_conf import pip_configuration

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def order(pins, keys, variables, tmp_path):
    def make(image: str = "rocm", *, mounts: dict | None = None) -> BuildRequest:
        named = labels(image, pins, keys[image], "c" * 40)
        log = tmp_path / "build.log"
        return BuildRequest(
            image,
            keys[image],
            f"docker/{image}.Dockerfile",
            tmp_path,
            named,
            variables,
            "[global]\n",
            mounts or {},
            log,
        )

    return make


@pytest.fixture
def built(monkeypatch):
    """The words of each build that was started."""
    builds = []
    monkeypatch.setattr(engines, "build", lambda words, *_: builds.append(words))
    return builds


@pytest.fixture(autouse=True)
def outputs(monkeypatch):
    """(words of each command that was run, what they print by a part of their last word); else nothing is found."""
    commands, answers = [], {}

    def output(words):
        commands.append(words)
        return next((answer for key, answer in answers.items() if key in words[-1]), (1, "not found"))

    monkeypatch.setattr(engines, "output", output)
    return commands, answers


@pytest.fixture
def docker(root):
    """Docker with a registry."""
    return Docker("registry/hilgate", root / "docker/docker-bake.hcl", fork=False)


def test_docker_pushes_an_image_and_the_wheels_that_are_missing(order, docker, built):
    docker.build(order())
    (words,) = built
    assert "--push" in words
    assert words[-5:] == ["rocm", "wheels-mamba", "wheels-conv1d", "wheels-aiter", "wheels-vllm"]


@pytest.mark.parametrize(("fork", "tag"), [(False, "registry/hilgate/acme:1"), (True, "hilgate-fork/acme:1")])
def test_docker_builds_an_image_that_is_its_dockerfile_alone(tmp_path, root, built, fork, tag):
    recipe = "docker/acme.Dockerfile"
    order = BuildRequest(
        "acme", "1", recipe, tmp_path, {"hilgate.content": "1"}, {}, "[global]\n", {}, tmp_path / "log"
    )
    Docker("registry/hilgate", root / "docker/docker-bake.hcl", fork=fork).build(order)
    (words,) = built
    assert words[:3] == ["docker", "buildx", "build"]
    assert words[-4:] == ["--load" if fork else "--push", f"--tag={tag}", f"--file={recipe}", "."]
    assert "--label=hilgate.content=1" in words


def test_docker_takes_a_registry_wheel_by_its_digest(outputs, order, docker, built):
    outputs[1]["wheels-aiter"] = (0, f"{DIGEST}\n")
    docker.build(order())
    (words,) = built
    (override,) = [word for word in words if word.startswith("rocm.contexts.")]
    key = order().variables["AITER_KEY"]
    assert override == f"rocm.contexts.wheels-aiter=docker-image://registry/hilgate/wheels-aiter:{key}@{DIGEST}"
    assert "wheels-aiter" not in words


@pytest.mark.parametrize("registry", ["", "registry/hilgate"])
def test_a_fork_pushes_nothing_and_exports_no_cache(order, root, registry, built):
    engine = Docker(registry, root / "docker/docker-bake.hcl", fork=True)
    engine.build(order())
    (words,) = built
    assert "--load" in words
    assert words[-1] == "rocm"
    assert not [word for word in words if "push" in word or "cache" in word or word.startswith("wheels")]
    assert engine.store == "hilgate-fork"


def test_what_a_fork_left_is_found_by_no_other_build(outputs, root):
    for registry in ("", "registry/hilgate"):
        Docker(registry, root / "docker/docker-bake.hcl", fork=False).find("rocm", "1")
    assert not [words for words in outputs[0] if "fork" in words[-1]]


def test_docker_reads_a_digest_and_nothing_else(outputs, docker):
    for answer, digest in (((0, DIGEST), DIGEST), ((0, "garbage"), None), ((0, ""), None), ((1, DIGEST), None)):
        outputs[1]["rocm"] = answer
        assert docker.find("rocm", "1") == digest


def test_docker_does_not_mount_folders_of_a_machine_into_a_build(order, docker, built):
    with pytest.raises(CannotRunHereError, match="folders or a certificate"):
        docker.build(order(mounts={"/wheels": "/run/hilgate/pip-0"}))
    assert built == []


def test_docker_runs_without_network_or_capabilities(outputs, docker):
    outputs[1]["registry/hilgate/cpu:1"] = (0, DIGEST)
    docker.run("cpu", "1", ["true"], {"/a": "/b", "/c": "/d:rw"})
    words = " ".join(outputs[0][-1])
    assert "--network none --cap-drop ALL --security-opt no-new-privileges" in words
    assert "--volume /a:/b:ro --volume /c:/d:rw" in words
    assert "--privileged" not in words


@pytest.fixture
def store(tmp_path, monkeypatch, root, built):
    """A buildah whose words are recorded; its images are those of `names`."""
    names = []
    monkeypatch.setattr(engines.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(engines.os, "geteuid", lambda: 0)

    def ask(words):
        if "images" in words:
            return json.dumps([{"names": [name], "digest": DIGEST} for name in names]) if names else "null"
        return "container\n"

    monkeypatch.setattr(engines, "answer", ask)
    monkeypatch.setattr(engines, "FREE", 0)
    return Buildah(tmp_path / "store", "bookworm", root / "docker/scripts/debootstrap.sh"), built, names


def test_buildah_builds_with_base_secret_mounts_and_labels(store, order):
    engine, built, names = store
    names.append("localhost/hilgate/base:bookworm")
    engine.build(order("cpu", mounts={"/wheels": "/run/hilgate/pip-0"}))
    (words,) = built
    for expected in (
        *("--isolation chroot", "--build-arg BASE=localhost/hilgate/base:bookworm"),
        *("--volume /wheels:/run/hilgate/pip-0:ro", f"--label=hilgate.content={order('cpu').content}"),
        "--label=org.opencontainers.image.base.name=debootstrap bookworm",
        f"--label=org.opencontainers.image.base.digest={DIGEST}",
        f"--tag localhost/hilgate/cpu:{order('cpu').content}",
    ):
        assert expected in " ".join(words)
    assert not (engine.folder / "pip.conf").exists()


def test_buildah_finds_by_name_and_makes_a_base_once(store, order):
    engine, built, names = store
    assert engine.find("cpu", "1") is None
    names.append("localhost/hilgate/cpu:1")
    assert (engine.find("cpu", "1"), engine.find("cpu", "2")) == (DIGEST, None)
    (engine.folder / "rootfs").mkdir()
    engine.build(order("cpu"))
    assert not (engine.folder / "rootfs").exists()
    assert len(built) == 1
    names.append("localhost/hilgate/base:bookworm")
    engine.build(order("cpu"))
    assert len(built) == 2


def test_buildah_keeps_the_newest_build_and_no_interrupted_one(store, order, outputs):
    engine, _, names = store
    wanted = order("cpu")
    names += ["localhost/hilgate/base:bookworm", "localhost/hilgate/cpu:1", "localhost/hilgate/other:1"]
    names.append(f"localhost/hilgate/cpu:{wanted.content}")
    engine.spool.mkdir()
    (engine.spool / "half-a-layer").touch()
    engine.build(wanted)
    assert [words[-1] for words in outputs[0] if "rmi" in words] == ["localhost/hilgate/cpu:1"]
    assert list(engine.spool.iterdir()) == []


def test_too_little_disk_is_said_before_anything_is_built(store, order, monkeypatch):
    engine, built, _ = store
    monkeypatch.setattr(engines.shutil, "disk_usage", lambda _: SimpleNamespace(free=3e9))
    monkeypatch.setattr(engines, "FREE", 12)
    with pytest.raises(CannotRunHereError, match=r"3\.0 GB of the disk are free, and a build takes 12 GB"):
        engine.build(order("cpu"))
    assert built == []


@pytest.mark.parametrize(
    ("missing", "user", "message"),
    [
        (("buildah",), 0, "buildah not installed"),
        (("buildah", "debootstrap"), 0, "apt-get install --no-install-recommends buildah debootstrap"),
        ((), 1000, "need root"),
    ],
    ids=["no-buildah", "neither", "not-root"],
)
def test_a_machine_that_cannot_build_says_what_it_lacks(tmp_path, monkeypatch, missing, user, message):
    monkeypatch.setattr(engines.shutil, "which", lambda name: None if name in missing else name)
    monkeypatch.setattr(engines.os, "geteuid", lambda: user)
    with pytest.raises(CannotRunHereError) as refusal:
        Buildah(tmp_path, "bookworm", Path("debootstrap.sh"))
    assert message in str(refusal.value)
    assert refusal.value.exit_status == 5


def test_rocm_without_buildx_is_for_another_machine(monkeypatch, capsys, root):
    monkeypatch.setattr(command, "available", lambda: False)
    monkeypatch.setattr("hilgate.images.build.unfilled", lambda _image, _pins: [])
    monkeypatch.chdir(root)
    monkeypatch.setenv("HILGATE_OUT", os.devnull + "-none")
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_args, **_kwargs: None)
    assert command.main(["build", "rocm"]) == 5
    assert "needs docker with buildx" in capsys.readouterr().err


def test_docker_without_buildx_is_no_docker(monkeypatch):
    monkeypatch.setattr(engines.shutil, "which", lambda _: "docker")
    assert engines.available() is False


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("E: Could not resolve 'deb.example'", CannotRunHereError),
        ("write: No space left on device", CannotRunHereError),
        ("error: subprocess exited with status 1", engines.BuildFailedError),
    ],
)
def test_a_failed_build_blames_the_machine_or_the_recipe(tmp_path, message, kind, capfd):
    with pytest.raises(kind) as refusal:
        engines.build([sys.executable, "-c", f"print({message!r}); raise SystemExit(3)"], tmp_path / "log", tmp_path)
    assert message in str(refusal.value)
    assert message in (tmp_path / "log").read_text()
    assert message in capfd.readouterr().err


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(CannotRunHereError, match="no-such-program is not installed"):
        engines.build(["no-such-program"], tmp_path / "log", tmp_path)
    with pytest.raises(CannotRunHereError, match="ended with 3: oh"):
        engines.answer([sys.executable, "-c", "import sys; sys.stderr.write('oh'); sys.exit(3)"])


def test_pip_is_configured_as_outside_without_machine_paths():
    listing = (
        ":env:.find-links='/srv/wheels'\nglobal.cert='/etc/ca.pem'\nglobal.index-url='https://index.example/simple'\n"
        ":env:.default-timeout='60'\nglobal.extra-index-url='\\nfile:///srv/one/simple\\nfile:///srv/two/simple'\n"
        "global.cache-dir='/var/cache/pip'\ninstall.user='true'\nglobal.break-system-packages='true'\n"
    )
    text, mounts = pip_configuration(listing)
    assert set(mounts) == {"/srv/wheels", "/etc/ca.pem", "/srv/one", "/srv/two"}
    assert [word for word in ("/srv", "/etc", "cache-dir", "user") if word in text] == []
    expected = ("timeout = 60", "index-url = https://index.example/simple", f"file://{mounts['/srv/one']}/simple")
    assert [line for line in expected if line not in text] == []
    assert pip_configuration("") == ("[global]\n", {})
