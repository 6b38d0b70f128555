"""The engine that is asked how large a published checkpoint's blocks are: it must start, however small they are."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="checkpoints run in vLLM")

from families import served
from families.plans import COMMON
from families.published import Checkpoint

pytestmark = pytest.mark.engine


def test_the_engine_that_is_asked_has_room_for_what_it_is_asked_with(monkeypatch, tmp_path):
    started = []

    def engine(_checkpoint, **arguments):
        started.append(arguments)
        return nullcontext(SimpleNamespace(block_size=32))

    monkeypatch.setattr(served, "Engine", engine)
    monkeypatch.setattr(served.engine, "register", lambda _family: True)
    checkpoint = Checkpoint("c", str(tmp_path), "lfm2", "float16", 128_000, str(tmp_path))
    plans = served.Published(checkpoint).plans("cpu")
    (asked,) = started
    assert asked["max_model_len"] == served.ASKED
    assert asked["num_gpu_blocks_override"] is None, "64 blocks of 32 tokens would hold 2,048"
    reaches = {plan.arguments.get("max_model_len") for plan in plans if plan.behaviours != ("blocks",)}
    assert reaches == {COMMON["max_model_len"]}
