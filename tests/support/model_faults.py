# SPDX-License-Identifier: Apache-2.0
"""Planted faults, each of a kind that happened: which behaviour must turn red, and which stay green."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from support.planted import PlantedFault
from triton import knobs
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

from pagedkv.vllm_plugin import impl
from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from families.engine import FamilyEngine


SAID = re.compile(
    "log-probabilities are|NaN or infinite|the draft of token|"
    "compiled while serving: pagedkv.attention.kernel.attention_kernel"
)


@dataclass(frozen=True)
class ModelFault(PlantedFault):
    """A fault of one family: `fails` and `passes` are behaviours, `change` is around what is driven."""

    family: str = ""


PLANTS: dict[str, ModelFault] = {}
"""Faults by name, as `processes.py` takes it after a family's: `granite-4.0-h+freed-block`."""


def plant(name: str, fails: str, *passes: str, family: str = "granite-4.0-h") -> Callable[[Any], None]:
    """Declare a fault; of no named family it is one of a Mamba-2 hybrid."""

    def declare(function: Any) -> None:
        PLANTS[name] = ModelFault(name, contextmanager(function), SAID, fails, passes, family)

    return declare


@plant("slot-not-cleared", "reuse", "prefill")
def slot_not_cleared(_: FamilyEngine) -> Iterator[None]:
    """A request that gets a used state slot begins from what lies there."""
    used: set[int] = set()

    def claim(metadata: Any) -> Any:
        slots = [int(slot) for slot in metadata.state_indices_tensor_p.flatten()]
        taken = torch.tensor([slot in used for slot in slots], device=metadata.has_initial_states_p.device)
        used.update(slots)
        return _claimed(metadata, taken)

    with _prefills(claim):
        yield


@plant("conv-off-by-one", "chunked", "prefill")
def conv_window_off_by_one(_: FamilyEngine) -> Iterator[None]:
    """What a prompt leaves in the convolution's window lies one token too far."""
    convolve = mamba_mixer2.causal_conv1d_fn

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out = convolve(*args, **kwargs)
        states, slots = kwargs["conv_states"], kwargs["cache_indices"].long()
        states[slots] = states[slots].roll(1, dims=-1)
        return out

    with patch.object(mamba_mixer2, "causal_conv1d_fn", shifted):
        yield


@plant("stale-after-preemption", "preempt", "prefill", "chunked", "reuse")
def stale_state_after_preemption(engine: FamilyEngine) -> Iterator[None]:
    """A preempted request is computed again from its first token, on top of a state that is not empty."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    resumed: list[str] = []

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        resumed.append(request.request_id)
        return preempt(request, *args, **kwargs)

    def claim(metadata: Any) -> Any:
        fresh = ~metadata.has_initial_states_p
        if not resumed or not fresh.any():
            return metadata
        resumed.pop()
        return _claimed(metadata, fresh)

    with patch.object(scheduler, "_preempt_request", noted), _prefills(claim):
        yield


@plant("freed-block", "reuse", "prefill")
def freed_block_read(_: FamilyEngine) -> Iterator[None]:
    """Attention of a request reads the first block of the previous request at its place in the batch."""
    build = PagedKVMetadataBuilder.build
    before: dict[int, torch.Tensor] = {}

    def stale(builder: Any, common_prefix_len: int, common: Any, **kwargs: Any) -> Any:
        table = common.block_table_tensor
        last = before.get(id(builder))
        before[id(builder)] = table.clone()
        if last is not None:
            rows = min(len(last), len(table))
            table = table.clone()
            table[:rows, 0] = torch.where(last[:rows, 0] > 0, last[:rows, 0], table[:rows, 0])
        return build(builder, common_prefix_len, replace(common, block_table_tensor=table), **kwargs)

    with patch.object(PagedKVMetadataBuilder, "build", stale):
        yield


@plant("other-codes", "decode", "prefill", family="qwen3-moe-fp8")
def other_codes_in_decode(_: FamilyEngine) -> Iterator[None]:
    """Decode takes the codes of an FP8 cache for those of the other E4M3, in which they mean half or twice as much."""
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}
    with _decodes(lambda codes: replace(codes, format=other[codes.format])):
        yield


@plant("scale-ignored", "decode", "prefill", family="qwen3-moe-fp8")
def scale_ignored_in_decode(engine: FamilyEngine) -> Iterator[None]:
    """Keys are kept as halves, with the scale 2, and decode takes the scale for 1."""
    engine.llm.apply_model(lambda model: [m._k_scale.fill_(2.0) for m in model.modules() if hasattr(m, "_k_scale")])
    with _decodes(lambda codes: replace(codes, key_scale=torch.ones_like(codes.key_scale))):
        yield


@plant("head-with-other-values", "mtp", "prefill", family="qwen3.5")
def head_with_other_values(engine: FamilyEngine) -> Iterator[None]:
    """The head that drafts writes values of the other sign, four times as large; the model's own layers are right."""
    layers = engine.config.compilation_config.static_forward_context
    heads = [layer.impl for name, layer in layers.items() if name.startswith("mtp.")]

    def other(write: Any) -> Any:
        return lambda layer, key, value, *rest: write(layer, key, -4 * value, *rest)

    with ExitStack() as stack:
        for head in heads:
            stack.enter_context(patch.object(head, "do_kv_cache_update", other(head.do_kv_cache_update)))
        yield


@plant("compiled-late", "production", "prefill")
def compiled_late(engine: FamilyEngine) -> Iterator[None]:
    """Triton says at each step that it has just compiled a kernel of ours."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, kernel = scheduler.schedule, SimpleNamespace(module="pagedkv.attention.kernel", name="attention_kernel")

    def compiling(*args: Any, **kwargs: Any) -> Any:
        knobs.runtime.jit_post_compile_hook(fn=kernel, key="", compile={})
        return schedule(*args, **kwargs)

    with patch.object(scheduler, "schedule", compiling):
        yield


@contextmanager
def _decodes(change: Callable[[Any], Any]) -> Iterator[None]:
    """Change what decode takes the codes of an FP8 cache for."""
    attend = impl.paged_attention  # type: ignore[attr-defined]  # the name that the layer looks up

    def mistaken(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["max_query_len"] == 1:
            cache = replace(cache, quantisation=change(cache.quantisation))
        return attend(query, cache, *args, **kwargs)

    with patch.object(impl, "paged_attention", mistaken):
        yield


@contextmanager
def _prefills(change: Callable[[Any], Any]) -> Iterator[None]:
    """Change the metadata of every batch of Mamba-2 that has prompts in it."""
    build = Mamba2AttentionMetadataBuilder.build

    def changed(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        return change(metadata) if metadata.num_prefills else metadata

    with patch.object(Mamba2AttentionMetadataBuilder, "build", changed):
        yield


def _claimed(metadata: Any, rows: torch.Tensor) -> Any:
    """The metadata, with a state to begin from claimed for some of its prompts, [prompts] bool."""
    claimed = metadata.has_initial_states_p | rows
    return replace(metadata, has_initial_states_p=claimed, prep_initial_states=bool(claimed.any()))
