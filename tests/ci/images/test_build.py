# SPDX-License-Identifier: Apache-2.0
"""What is found by its content is not built, and image.json exists only when every promise of an image holds."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hilgate.errors import CannotRunHereError, DeclarationError, MisuseError
from hilgate.evidence import KINDS
from hilgate.images import engines
from hilgate.images.build import ImageBuild, build
from hilgate.images.contents import contents
from hilgate.images.engines import BuildFailedError
from hilgate.images.pins import labels, read
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = "sha256:" + "ab" * 32
PROOF = json.dumps({"versions": {"torch": "2.13.0", "triton": "3.6.0"}, "problems": []})


class FakeEngine:
    """A store in memory."""

    store = "hilgate"

    def __init__(self, root: Path, **spoiled: object) -> None:
        self.root = root
        self.images: dict[tuple[str, str], str] = {}
        self.spoiled = spoiled
        self.orders = []
        self.runs = []

    def with_base(self, labels):
        return labels

    def find(self, image, content):
        return self.images.get((image, content))

    def build(self, order):
        self.orders.append(order)
        if "build" in self.spoiled:
            raise self.spoiled["build"]
        if not self.spoiled.get("vanishes"):
            self.images[order.image, order.content] = DIGEST

    def labels(self, image, content):
        return labels(image, read(self.root), content, "c" * 40) | self.spoiled.get("labels", {})

    def size(self, _image, _content):
        return self.spoiled.get("size", (5.5, 7))

    def run(self, _image, _content, words, mounts):
        self.runs.append((words, mounts))
        return self.spoiled.get("proof", (0, PROOF)) if words[0] == "cat" else self.spoiled.get("gate", (0, "ok"))


@pytest.fixture
def job(root, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "answer", lambda _words: "global.find-links='/srv /no/such/folder'")

    def make(image: str = "cpu") -> ImageBuild:
        return ImageBuild(image, root, tmp_path / "out", tmp_path / "scratch", "c" * 40)

    return make


def outcomes(checks):
    return {check.id: check.outcome for check in checks}


def test_a_first_build_and_a_second(job, root):
    engine = FakeEngine(root)
    first = build(job(), lambda _: engine)
    record = json.loads((job().out / "image.json").read_text())
    assert record == {"image": "cpu", "content": contents(root)["cpu"], "digest": DIGEST, "reused": False}
    promises = ("built", "labels match the pins", "size", "the image proved itself", "the gate passes inside")
    assert outcomes(first) == dict.fromkeys(promises, Outcome.PASS)
    collected = KINDS["findings"].collect(job().out, root)
    assert (len(collected.checks), collected.problem) == (5, ""), "the findings are evidence that the runner reads"

    build(job(), lambda _: engine)
    assert json.loads((job().out / "image.json").read_text())["reused"] is True
    (order,) = engine.orders
    assert order.content == contents(root)["cpu"]
    assert (order.context / "docker/cpu.Dockerfile").read_bytes() == (root / "docker/cpu.Dockerfile").read_bytes()
    assert not (order.context / "README.md").exists()
    assert order.mounts == {"/srv": "/run/hilgate/pip-0"}


def test_the_gate_inside_sees_the_checkout_read_only(job, root):
    engine = FakeEngine(root)
    build(job(), lambda _: engine)
    (words, mounts) = engine.runs[-1]
    assert "hilgate run kernels-cache" in words[-1]
    assert mounts[str(root)] == "/checkout"
    assert [inside for inside in mounts.values() if inside.endswith(":rw")] == ["/results:rw"]


@pytest.mark.parametrize(
    ("check", "spoiled", "message"),
    [
        ("built", {"build": BuildFailedError("buildah ended with 1")}, "buildah ended with 1"),
        ("built", {"vanishes": True}, "no image under its content"),
        ("size", {"size": (9.2, 7)}, "9.2 GB in 7 layers, at most 8 GB"),
        ("labels match the pins", {"labels": {"hilgate.pins.suite": "trixie"}}, "'trixie', the pins say 'bookworm'"),
        ("labels match the pins", {"labels": {"hilgate.content": "0"}}, "hilgate.content is '0'"),
        ("the image proved itself", {"proof": (0, '{"versions": {}, "problems": ["import vllm"]}')}, "import vllm"),
        ("the image proved itself", {"proof": (1, "cat: no such file")}, "cannot be read"),
        ("the image proved itself", {"proof": (0, "")}, "cannot be read"),
        ("the image proved itself", {"proof": (0, "[]")}, "cannot be read"),
        ("the gate passes inside", {"gate": (1, "verdict: fail")}, "exit status 1\nverdict: fail"),
        ("the gate passes inside", {"gate": (5, "no torch")}, "exit status 5"),
    ],
)
def test_a_broken_promise_is_a_failing_check_and_no_image_json(job, root, check, spoiled, message):
    job().out.mkdir()
    (job().out / "image.json").write_text("{}")
    found = {one.id: one for one in build(job(), lambda _: FakeEngine(root, **spoiled))}
    assert found[check].outcome is Outcome.FAIL
    assert message in found[check].message
    assert not (job().out / "image.json").exists()


def test_an_image_found_by_its_content_is_checked_as_well(job, root):
    engine = FakeEngine(root, labels={"hilgate.pins.suite": "trixie"})
    engine.images["cpu", contents(root)["cpu"]] = DIGEST
    assert outcomes(build(job(), lambda _: engine))["labels match the pins"] is Outcome.FAIL


def test_what_main_runs_in_is_built_even_where_one_exists(job, root):
    poisoned, engine = "sha256:" + "e" * 64, FakeEngine(root)
    engine.images["cpu", contents(root)["cpu"]] = poisoned
    build(job(), lambda _: engine)
    assert (json.loads((job().out / "image.json").read_text())["digest"], engine.orders) == (poisoned, [])
    build(replace(job(), fresh=True), lambda _: engine)
    assert json.loads((job().out / "image.json").read_text())["digest"] == DIGEST
    assert len(engine.orders) == 1


def test_another_revision_is_no_other_image(job, root):
    engine = FakeEngine(root, labels={"org.opencontainers.image.revision": "d" * 40})
    assert set(outcomes(build(job(), lambda _: engine)).values()) == {Outcome.PASS}


@pytest.mark.parametrize("error", [CannotRunHereError("no network"), KeyboardInterrupt()], ids=["machine", "interrupt"])
def test_a_stopped_build_leaves_nothing_that_counts(job, root, error):
    with pytest.raises(type(error)):
        build(job(), lambda _: FakeEngine(root, build=error))
    assert not (job().out / "image.json").exists()
    assert not (job().out / "findings.jsonl").exists()
    assert set(outcomes(build(job(), lambda _: FakeEngine(root))).values()) == {Outcome.PASS}


def test_an_empty_pin_stops_the_build_before_anything_else(job, monkeypatch):
    empty = [("sources.aiter.git.commit", "git ls-remote https://forge.example/a/b"), ("rocm.base.digest", "docker x")]
    monkeypatch.setattr("hilgate.images.build.unfilled", lambda _image, _pins: empty)

    def never(_pins):
        raise AssertionError("no engine is asked for")

    with pytest.raises(DeclarationError) as refusal:
        build(job("rocm"), never)
    assert "2 pin(s) of image 'rocm' are not read off yet" in str(refusal.value)
    assert "git ls-remote https://forge.example/a/b" in str(refusal.value)
    assert "run `make lock-image`" in str(refusal.value)


def test_another_patch_version_of_the_base_is_in_the_finding(job, root):
    base = [{"name": "torch", "found": "2.13.1", "pinned": "2.13.0", "differs": "another patch version", "refused": ""}]
    proof = json.dumps({"versions": {"torch": "2.13.1", "triton": "3.8.0"}, "base": base, "problems": []})
    found = {one.id: one for one in build(job(), lambda _: FakeEngine(root, proof=(0, proof)))}
    assert found["the image proved itself"].outcome is Outcome.PASS
    assert found["the image proved itself"].message == "torch 2.13.1 (pinned 2.13.0), triton 3.8.0"


def test_an_unknown_image_names_the_known(job, root):
    with pytest.raises(MisuseError, match="rocn") as refusal:
        build(job("rocn"), lambda _: FakeEngine(root))
    assert "did you mean 'rocm'?" in str(refusal.value)


def test_two_builds_do_not_share_a_store(job, root):
    job().scratch.mkdir()
    with (job().scratch / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CannotRunHereError, match="another build"):
            build(job(), lambda _: FakeEngine(root))
