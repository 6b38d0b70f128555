# SPDX-License-Identifier: Apache-2.0
"""Run cases through vLLM's ROCm backends with every operator under its contract; a line of JSON for each.

    python -m operators.drive --arch gfx942 [CASE ...]

The process serves nothing else: the platform of vLLM is decided once (`stand_in.take_place`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ROCM_USE_AITER", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from operators import stand_in
from operators.calls import Broken, Layer, UnknownCallError, aliases, disagreements
from operators.cases import BATCHES, CASES, Case

BACKENDS = {
    "ROCM_ATTN": "vllm.v1.attention.backends.rocm_attn:RocmAttentionBackend",
    "ROCM_AITER_FA": "vllm.v1.attention.backends.rocm_aiter_fa:AiterFlashAttentionBackend",
    "ROCM_AITER_UNIFIED_ATTN": "vllm.v1.attention.backends.rocm_aiter_unified_attn:RocmAiterUnifiedAttentionBackend",
    "ROCM_AITER_MLA": "vllm.v1.attention.backends.mla.rocm_aiter_mla:AiterMLABackend",
}

NOPE, VALUE = 128, 128
"""Channels of a head of MLA without position, and of its values."""
SCALES = {"_k_scale": 0.5, "_v_scale": 0.25, "_q_scale": 1.0}


@dataclass
class Attention:
    """A layer with its page of the pool, its metadata builder and its name."""

    name: str
    layer: Any
    impl: Any
    builder: Any
    spec: Any
    cache: torch.Tensor
    kernel_block: int
    facts: Layer


def backend_of(name: str) -> Any:
    """A backend of vLLM, where it is expected.

    Raises:
        UnknownCallError: It moved.
    """
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownCallError(
            f"vLLM has no {BACKENDS[name]} ({error}): the backend {name} moved, so correct BACKENDS in "
            "tests/operators/drive.py and write the contracts of what it calls now"
        ) from error


def configuration(case: Case) -> Any:
    """What backends read of vLLM's configuration."""
    from vllm.config import CUDAGraphMode

    most = max(new + cached for batch in case.batches for new, cached in BATCHES[batch])
    width = sum(case.latent) if case.backend == "ROCM_AITER_MLA" else case.head_size
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=getattr(torch, case.dtype),
            max_model_len=most + 1,
            get_num_attention_heads=lambda _: case.heads,
            get_num_kv_heads=lambda _: case.kv_heads,
            get_head_size=lambda: width,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        cache_config=SimpleNamespace(
            cache_dtype=case.cache, block_size=case.block_size, num_gpu_blocks=None, kv_cache_layout=None
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        compilation_config=SimpleNamespace(static_forward_context={}, cudagraph_mode=CUDAGraphMode.NONE),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=None,
        kv_transfer_config=None,
    )


def spec_of(case: Case, backend: Any, *, cross: bool = False) -> Any:
    """The page of a layer as vLLM plans it, with the backend's own wishes."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1 import kv_cache_interface as interface

    dtype = kv_cache_dtype_str_to_dtype(case.cache, SimpleNamespace(dtype=getattr(torch, case.dtype)))
    common = {
        "block_size": case.block_size,
        "dtype": dtype,
        "kv_quant_mode": interface.get_kv_quant_mode(case.cache),
    }
    if case.backend == "ROCM_AITER_MLA":
        latent = {"num_kv_heads": 1, "head_size": sum(case.latent), "cache_dtype_str": case.cache}
        spec = interface.MLAAttentionSpec(**common, **latent)
    else:
        made = interface.CrossAttentionSpec if cross else interface.FullAttentionSpec
        spec = made(**common, num_kv_heads=case.kv_heads, head_size=case.head_size)
    return backend.customize_spec(spec)


def pool(
    case: Case, backends: list[Any], specs: list[Any], device: str, config: Any
) -> tuple[list[Any], list[int], int]:
    """One allocation for all layers, as vLLM lays it out: caches, their kernels' block sizes, blocks."""
    import dataclasses

    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.worker.utils import select_common_block_size

    beside = []
    if case.packed:
        # The bigger page of another group, a state: pages are padded to its size.
        padded = -(-specs[0].page_size_bytes * 9 // 8 // 256) * 256
        specs = [dataclasses.replace(spec, page_size_padded=padded) for spec in specs]
        beside = [SimpleNamespace(has_layer_views=True, num_heads=1, num_states=1, page_size_bytes=padded)]
    supported = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    layout = resolve_kv_cache_layout(config, [supported], [*specs, *beside])
    tokens = max(sum(-(-(new + cached) // case.block_size) for new, cached in BATCHES[batch]) for batch in case.batches)
    blocks = 2 * tokens + 2
    size = max(spec.page_size_bytes for spec in specs) * blocks
    raw = torch.zeros(size, dtype=torch.int8, device=device)
    caches, kernels = [], []
    for backend, spec in zip(backends, specs, strict=True):
        kernel_block = select_common_block_size(case.block_size, [backend], [spec])
        layer_stride, block_stride = interface.compute_layout_strides(spec, blocks, 1, layout)[:2]
        strides = {"layer_stride": layer_stride, "block_stride": block_stride}
        tensor = interface.KVCacheTensor(size=size, layers=["layer"], **strides)
        (view,) = interface.create_kv_cache_views(raw, spec, blocks, layout, tensor, kernel_block)
        caches.append(view)
        kernels.append(kernel_block)
    return caches, kernels, blocks


def make(case: Case, device: str) -> tuple[list[Attention], int]:
    """The layers of a case."""
    from vllm._aiter_ops import rocm_aiter_ops

    os.environ["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"] = "1" if case.shuffle else "0"
    rocm_aiter_ops.refresh_env_variables()
    config = configuration(case)
    backends = [backend_of(case.backend)]
    if case.cross:
        from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

        backends.append(create_cross_attention_backend(backend_of(case.cross)))
    specs = [spec_of(case, backend, cross=bool(place)) for place, backend in enumerate(backends)]
    caches, kernels, blocks = pool(case, backends, specs, device, config)
    layers = [
        _layer(case, backend, spec, cache, kernel_block, config, device, cross=bool(place))
        for place, (backend, spec, cache, kernel_block) in enumerate(zip(backends, specs, caches, kernels, strict=True))
    ]
    return layers, blocks


def _layer(
    case: Case, backend: Any, spec: Any, cache: Any, kernel_block: int, config: Any, device: str, *, cross: bool
) -> Attention:
    import dataclasses

    from vllm.model_executor.layers import attention

    name = "cross-attention" if cross else "attention"
    layer = attention.Attention.__new__(attention.Attention)
    torch.nn.Module.__init__(layer)
    for scale, number in SCALES.items():
        setattr(layer, scale, torch.tensor(number if case.cache.startswith("fp8") else 1.0, device=device))
        setattr(layer, f"{scale}_cpu", torch.tensor(number))
        setattr(layer, f"{scale}_float", number)
    layer.kv_sharing_target_layer_name = None
    layer.layer_name = name  # vLLM 0.33 asks for this, and whether the model writes the cache itself
    layer.kv_cache_update_bypass = False
    layer.num_kv_heads, layer.head_size, layer.kv_cache = case.kv_heads, case.head_size, cache
    config.compilation_config.static_forward_context[name] = layer
    scale = 0.1 if case.backend == "ROCM_AITER_MLA" else case.head_size**-0.5
    constants = {
        "num_heads": case.heads,
        "head_size": case.head_size,
        "scale": scale,
        "num_kv_heads": case.kv_heads,
        "alibi_slopes": None,
        "sliding_window": case.window,
        "kv_cache_dtype": case.cache,
        "logits_soft_cap": case.softcap or None,
        "attn_type": "encoder_decoder" if cross else "decoder",
        "kv_sharing_target_layer_name": None,
    }
    if case.backend == "ROCM_AITER_MLA":
        impl = _latent_impl(case, backend, constants, layer, config, device)
    else:
        sinks = {"sinks": torch.zeros(case.heads, dtype=torch.float32, device=device)} if case.sinks else {}
        impl = backend.get_impl_cls()(**constants, **sinks)
    layer.impl = impl
    kernel_spec = dataclasses.replace(spec, block_size=kernel_block)
    builder = backend.get_builder_cls()(kernel_spec, [name], config, torch.device(device))
    facts = Layer(
        name, case.heads, case.kv_heads, case.head_size, scale, case.softcap, case.window, case.sinks, case.cache
    )
    return Attention(name, layer, impl, builder, spec, cache, kernel_block, facts)


def _latent_impl(case: Case, backend: Any, constants: dict[str, Any], layer: Any, config: Any, device: str) -> Any:
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill.aiter_flash_attn import AiterFlashAttnPrefillBackend
    from vllm.v1.worker import workspace

    rank, rope = case.latent
    widths = {
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": rope,
        "v_head_dim": VALUE,
    }
    for name, width in widths.items():
        setattr(layer, name, width)
    mla_attention.get_current_vllm_config = lambda: config
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device(device))

    def project(latent: torch.Tensor) -> tuple[torch.Tensor]:
        return (latent.new_zeros((latent.shape[0], case.heads * (NOPE + VALUE)), dtype=getattr(torch, case.dtype)),)

    project.weight = torch.zeros(1, dtype=getattr(torch, case.dtype))  # type: ignore[attr-defined]
    constants = constants | {"head_size": rank + rope, "num_kv_heads": 1}
    impl = backend.get_impl_cls()(**constants, **widths, qk_head_dim=NOPE + rope, kv_b_proj=project)
    shared = {name: widths[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    layer.prefill_backend = AiterFlashAttnPrefillBackend(
        num_heads=case.heads, scale=constants["scale"], vllm_config=config, **shared
    )
    return impl


def batch_of(case: Case, layer: Attention, batch: str, device: str, blocks: int, *, first: int) -> Any:
    """vLLM's metadata of a step, blocks numbered from `first` on."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    rows = BATCHES[batch]
    ratio = case.block_size // layer.kernel_block
    tables, slots, free = [], [], first
    for new, cached in rows:
        needed = -(-(new + cached) // case.block_size)
        table = [(free + each) * ratio + part for each in range(needed) for part in range(ratio)]
        free += needed
        tables.append(table)
        size = layer.kernel_block
        slots += [table[token // size] * size + token % size for token in range(cached, cached + new)]
    assert free <= blocks, f"{free} of {blocks} blocks"
    width = max(len(table) for table in tables)
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32, device=device)
    starts = [0]
    for new, _ in rows:
        starts.append(starts[-1] + new)
    lens = torch.tensor([new + cached for new, cached in rows], dtype=torch.int32)
    offsets = torch.tensor(starts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=offsets.to(device),
        query_start_loc_cpu=offsets,
        seq_lens=lens.to(device),
        num_reqs=len(rows),
        num_actual_tokens=starts[-1],
        max_query_len=max(new for new, _ in rows),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        causal=True,
        encoder_seq_lens=lens.to(device),
        encoder_seq_lens_cpu=lens.numpy(),
        seq_lens_cpu_upper_bound=lens.clone(),
    )


def step(case: Case, layer: Attention, batch: str, device: str, blocks: int, *, first: int = 1) -> None:
    """Write and attend as vLLM's layers do it."""
    watch = stand_in.WATCH
    watch.layer = layer.facts
    common = batch_of(case, layer, batch, device, blocks, first=first)
    metadata = layer.builder.build(0, common)
    if case.backend == "ROCM_AITER_MLA":
        _latent_step(case, layer, common, metadata, device)
        return
    dtype = getattr(torch, case.dtype)
    tokens = common.num_actual_tokens
    query = torch.zeros((tokens, case.heads, case.head_size), dtype=dtype, device=device)
    slots = metadata.slot_mapping
    rows = max(tokens, len(slots))
    key, value = torch.zeros((2, rows, case.kv_heads, case.head_size), dtype=dtype, device=device).unbind(0)
    if case.fused:
        rotary = torch.zeros((4096, case.head_size), dtype=dtype, device=device)
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        update = layer.impl.do_rope_and_kv_cache_update
        update(layer.layer, query, key, value, positions, rotary, True, layer.cache, slots)
    else:
        layer.impl.do_kv_cache_update(layer.layer, key, value, layer.cache, slots)
    watch.step()
    given = (None, None) if case.cross and layer.name != "attention" and batch == "decode" else (key, value)
    layer.impl.forward(layer.layer, query, *given, layer.cache, metadata, torch.empty_like(query))


def _latent_step(case: Case, layer: Attention, common: Any, metadata: Any, device: str) -> None:
    from vllm.platforms import current_platform

    rank, rope = case.latent
    dtype, tokens = getattr(torch, case.dtype), common.num_actual_tokens
    cache = layer.cache.squeeze(1)
    latent = torch.zeros((tokens, rank), dtype=dtype, device=device)
    position = torch.zeros((tokens, 1, rope), dtype=dtype, device=device)
    update = layer.impl.do_kv_cache_update
    update(latent, position, cache, common.slot_mapping, case.cache, layer.layer._k_scale)
    quantised = case.cache.startswith("fp8")
    if quantised:
        cache = cache.view(current_platform.fp8_dtype())
    stand_in.WATCH.step()
    decoded = metadata.num_decode_tokens
    if tokens > decoded:
        query = torch.zeros((tokens - decoded, case.heads, NOPE + rope), dtype=dtype, device=device)
        out = torch.zeros((tokens - decoded, case.heads * VALUE), dtype=dtype, device=device)
        new = (latent[decoded:], position[decoded:])
        layer.impl.forward_mha(query, *new, cache, metadata, layer.layer._k_scale, output=out)
    if decoded:
        kind = current_platform.fp8_dtype() if quantised else dtype
        whole = torch.zeros((decoded, case.heads, rank + rope), dtype=torch.float32, device=device).to(kind)
        query = whole if quantised else whole.split([rank, rope], dim=-1)
        layer.impl.forward_mqa(query, cache, metadata, layer.layer)


def run(case: Case, device: str) -> dict[str, Any]:
    """Serve a case; what its operators got, and which promises were broken."""
    watch = stand_in.fresh()
    record: dict[str, Any] = {"case": case.id, "outcome": "ran", "why": ""}
    try:
        layers, blocks = make(case, device)
        for batch in case.batches:
            used = sum(-(-(new + cached) // case.block_size) for new, cached in BATCHES[batch])
            for place, layer in enumerate(layers):
                step(case, layer, batch, device, blocks, first=1 + place * used)
    except UnknownCallError as error:
        record |= {"outcome": "did not run", "why": str(error)}
    except ImportError as error:
        record |= {"outcome": "did not run", "why": f"vLLM asks for an operator: {error}"}
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises of itself is what a user of it would see
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.name}"
        watch.broken.append(Broken(where, "raises", f"{type(error).__name__}: {error}".split("\n")[0]))
    broken = list(watch.broken)
    for name, accesses in watch.accesses.items():
        broken += disagreements(accesses, name)
    if case.cross:
        broken += aliases(watch.accesses)
    unique = {(each.operator, each.promise): each for each in reversed(broken)}  # the first of a kind says enough
    record["calls"] = sorted(set(watch.calls))
    record["broken"] = [vars(each) for each in unique.values()]
    return record


def main() -> None:
    """Run the cases of an arch; one line of JSON each."""
    parser = argparse.ArgumentParser(description="Run vLLM's ROCm backends with every operator under its contract.")
    parser.add_argument("--arch", choices=sorted(stand_in.CAPABILITY), required=True)
    parser.add_argument("cases", nargs="*")
    asked = parser.parse_args()
    said = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    try:
        device = stand_in.take_place(asked.arch)
    except UnknownCallError as error:
        print(json.dumps({"case": "", "outcome": "did not run", "why": str(error)}), file=said)
        return
    for case in CASES:
        if case.arch == asked.arch and (not asked.cases or case.id in asked.cases):
            print(json.dumps(run(case, device)), file=said, flush=True)


if __name__ == "__main__":
    main()
