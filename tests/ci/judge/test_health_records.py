"""Health of a node: what counts as trouble, and what is only shown."""

from __future__ import annotations

import pytest
from support.jobs import ELSEWHERE, GATHER, NODE, health

from hilgate.judge import step
from hilgate.run import results

GPU = health("before").gpus[0]


def gpu(**changes):
    return GPU.model_copy(update=changes)


def pair(before=None, after=None):
    return health("before", **(before or {})), health("after", **(after or {}))


TROUBLE = {
    "fit": (pair(), ()),
    "nothing-known": ((), ()),
    "problems-though-healthy": (
        pair(before={"problems": ("3 zombies hold the GPU",)}), ("unfit before: 3 zombies hold the GPU",)),
    "unhealthy-without-a-word": (pair(after={"healthy": False}), ("unfit after: the hook does not say why",)),
    "other-node": (
        pair(after={"host": ELSEWHERE}), (f"the health after is of {ELSEWHERE}, the results are of {NODE}",)),
    "too-few-from-the-start": (
        pair(before={"gpus": ()}, after={"gpus": ()}), ("0 of 1 GPUs before", "0 of 1 GPUs after")),
    "another-gpu-in-its-place": (
        pair(after={"gpus": (gpu(bdf="0000:06:00.0"),)}), ("GPU 0000:05:00.0 was gone afterwards",)),
    "new-memory-errors": (
        pair(before={"gpus": (gpu(ecc_uncorrectable=1),)}, after={"gpus": (gpu(ecc_uncorrectable=4),)}),
        ("GPU 0000:05:00.0: 3 new uncorrectable memory errors",)),
    "old-memory-errors": (
        pair(before={"gpus": (gpu(ecc_uncorrectable=4),)}, after={"gpus": (gpu(ecc_uncorrectable=4),)}), ()),
    "kernel-log-from-before": (pair(before={"dmesg": ("old",)}), ()),
    "unhealthy-for-its-kernel-log": (
        pair(before={"healthy": False, "dmesg": ("GPU reset",)}), ("kernel log: GPU reset",)),
    "kernel-log-is-cut": (
        pair(after={"dmesg": tuple("abcdefg")}), tuple(f"kernel log: {letter}" for letter in "abcde")),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble(name):
    records, found = TROUBLE[name]
    assert step.trouble(records, NODE, 1) == found


def test_the_lines_show_memory_and_what_was_left_running():
    other = gpu(bdf="0000:06:00.0", name="")
    after = {"gpus": (gpu(vram_used_mib=9000),), "ended": ("python 4711",)}
    records = pair(before={"gpus": (GPU, other)}, after=after)
    assert step.lines(records) == (
        "GPU 0000:05:00.0 MI300X: 285 MiB before, 9,000 MiB after, of 196,592 MiB",
        "GPU 0000:06:00.0: 285 MiB before, not there after, of 196,592 MiB",
        "left running, and ended: python 4711",
    )


@pytest.mark.parametrize(
    ("changes", "profile", "demanded"),
    [
        ({}, "pr", True),
        ({}, "nightly", True),
        ({}, "gate", False),
        ({"queue": None}, "pr", False),
        ({"device": "cpu"}, "pr", False),
    ],
    ids=["pr", "nightly", "desk", "no-queue", "cpu"],
)
def test_where_it_is_demanded(changes, profile, demanded):
    assert step.is_demanded(GATHER.model_copy(update=changes), profile) is demanded


def test_a_missing_file_is_missing_and_not_wrong(tmp_path):
    assert results.read_health(tmp_path, GATHER.key) == ((), "")
    assert step.missing(()) == "before, after"
    (tmp_path / "health-before.json").symlink_to(tmp_path / "nowhere")
    assert "health-before.json: not a health record" in results.read_health(tmp_path, GATHER.key)[1]
