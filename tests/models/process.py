"""What a process with several engines, one after the other, must see to."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM


@contextmanager
def starting() -> Iterator[None]:
    """Around the start of an engine."""
    gc.collect()  # or what an engine that did not start has left would stay for ever
    gc.freeze()
    with _llvmlite_out_of_sight(), _modules_stay_frozen():
        yield


def shut_down(llm: LLM) -> None:
    """End an engine. Delete what refers to it, then `clean`."""
    with _modules_stay_frozen(collect=False):
        llm.llm_engine.engine_core.shutdown()


def clean() -> None:
    """Forget an engine that is gone, or that did not start: the next one would find its groups."""
    gc.collect()
    with _modules_stay_frozen(collect=False):
        cleanup_dist_env_and_memory()


@contextmanager
def _modules_stay_frozen(*, collect: bool = True) -> Iterator[None]:
    """What there was before an engine stays out of garbage collection, whatever vLLM does about it.

    vLLM freezes the heap with its engine in it, thaws it at the end, and then collects three times; each time half a
    second is spent on modules, which are no garbage. Here the engine alone is gone through, and once (`clean`).

    Args:
        collect: Whether vLLM's own collections are carried out.
    """
    skipped = ("freeze", "unfreeze") if collect else ("freeze", "unfreeze", "collect")
    with patch.multiple(gc, **dict.fromkeys(skipped, lambda *_: 0)):
        yield


@contextmanager
def _llvmlite_out_of_sight() -> Iterator[None]:
    """When an engine starts, vLLM 0.32 asks all objects of all modules for their attributes; llvmlite's has odd ones.

    N-gram drafting imports llvmlite; the next engine of the process would die of AttributeError in `_rebind_kernels`.
    """
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module
