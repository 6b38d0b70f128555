# SPDX-License-Identifier: Apache-2.0
"""Report from inside vLLM's workers: which backend served each attention layer, how often, on what memory.

vLLM logs a plugin that failed to load and carries on with another backend, so a right answer proves nothing about our
kernels. So ask the workers:

    llm = build_llm("path/to/model", dtype="float32", max_model_len=256)
    llm.generate(...)
    require_served(served_layers(llm))

or, without importing this package, with vLLM's own names:

    llm = LLM(model, worker_extension_cls="pagedkv.vllm_plugin.inspect.WorkerReport", ...)
    workers = llm.collective_rpc("pagedkv_report")  # one list per worker, one dict per attention layer
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedkv.vllm_plugin import (
    BACKEND,
    CPU_MLA_BACKEND,
    GPU_MLA_BACKEND,
    GPU_MLA_NAME,
    NAME,
    compiling,
    delta,
    routes,
    scan,
)
from pagedkv.vllm_plugin.errors import (
    BackendTakenError,
    CompiledLateError,
    NotInterpretedError,
    NotServedError,
    PoisonUnsafeError,
)
from pagedkv.vllm_plugin.settings import GDN_VARIABLE, MLA_VARIABLE, SSD_VARIABLE, enabled, packing

if TYPE_CHECKING:
    from vllm import LLM

OURS = frozenset({BACKEND, CPU_MLA_BACKEND, GPU_MLA_BACKEND})
"""Class paths of our backends."""

WORKER_EXTENSION = "pagedkv.vllm_plugin.inspect.WorkerReport"
"""Value of vLLM's `worker_extension_cls`."""

NAN_BYTE = 0xFF
"""A byte that, repeated, is NaN in float64, float32, float16, bfloat16, float8_e4m3fn and float8_e5m2."""

FNUZ_NAN_BYTE = 0x80
"""The only NaN of float8_e4m3fnuz."""


class ServedLayer(TypedDict):
    """One attention layer of one worker, as JSON."""

    layer: str
    """vLLM's layer name."""
    backend: str
    """Class path of the backend that vLLM selected for the layer."""
    impl: str
    """Class path of the object that runs it."""
    writes: int | None
    """Calls of the cache write since the engine started or `pagedkv_reset`; None where the impl is not ours."""
    attentions: int | None
    """Calls of the attention, counted as `writes` are."""
    packing: str | None
    """How K and V lie in a page (`pagedkv.layout`); None where the impl is not ours."""
    fp8_format: str | None
    """Format of the codes of a quantised cache; None where the impl is not ours."""
    route: dict[str, str | None] | None
    """Kernel of each task (None for a task that needs no kernel) and the layout; None where the router is not asked."""
    kv_shape: list[int]
    """vLLM's [blocks, head slots, tokens, content], of MLA [blocks, tokens, content]; empty before it is allocated."""
    kv_strides: list[int]
    """Strides of the same axes, in elements."""
    kv_dtype: str
    block_size: int | None
    """Tokens per block as the kernels see them."""
    rank: int
    """Global rank of the worker."""


class WorkerReport:
    """Methods that vLLM adds to its worker class; call them with `llm.collective_rpc(name)`."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def pagedkv_report(self) -> list[ServedLayer]:
        """Describe every attention layer of this worker, ours or not, in the order of the model."""
        return [_describe(name, layer, self.rank) for name, layer in _attention_layers(self).items()]

    def pagedkv_scans(self) -> int:
        """Calls of our ssd_prefill in this worker since it started or `pagedkv_reset`."""
        return scan.calls

    def pagedkv_deltas(self) -> int:
        """Steps of gated delta nets that ours computed since then; not those that graphs replay."""
        return delta.calls

    def pagedkv_watch_compiler(self) -> None:
        """Count what Triton compiles in this worker from here on."""
        compiling.begin()

    def pagedkv_compiled(self) -> dict[str, int]:
        """Module and name of kernels, and how many variants Triton has compiled since `pagedkv_watch_compiler`."""
        return dict(compiling.names)

    def pagedkv_reset(self) -> None:
        """Set the counts of all layers of ours to 0, and those of scans and delta nets."""
        scan.calls = delta.calls = 0
        for layer in _attention_layers(self).values():
            if hasattr(layer.impl, "attentions"):
                layer.impl.writes = layer.impl.attentions = 0

    def pagedkv_poison(self) -> int:
        """Fill the KV pool with NaN, and from now on every newly allocated attention block too.

        vLLM zeroes new attention blocks of a hybrid model before use, which would also hide a kernel that reads
        unwritten positions. After this call such a read meets NaN, in the block's tail as elsewhere. The pool
        is shared with the state layers: their pages are poisoned once, which vLLM must overwrite before it reads them.

        Returns:
            Bytes poisoned.

        Raises:
            PoisonUnsafeError: A request is running, or finished requests may live on in a prefix cache.
        """
        runner = self.model_runner
        requests = getattr(runner, "requests", None)  # model runner V1; V2 keeps them in req_states
        if running := len(runner.req_states.req_id_to_index if requests is None else requests):
            raise PoisonUnsafeError(f"{running} requests are running")
        if self.vllm_config.cache_config.enable_prefix_caching:
            raise PoisonUnsafeError("prefix caching may hold blocks of finished requests")
        layers = _attention_layers(self).values()
        pools = {layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache for layer in layers}
        for cache in pools.values():
            _bytes_of(cache).fill_(NAN_BYTE)
        num_blocks = runner.kv_cache_config.num_blocks
        poison = partial(
            _poison_blocks, [(_codes(layer).unflatten(0, (num_blocks, -1)), _nan(layer)) for layer in layers]
        )
        poison(list(range(num_blocks)))
        if requests is not None:
            runner._zero_block_ids = poison  # noqa: SLF001 - the one place where model runner V1 zeroes blocks
        elif runner.kv_block_zeroer is not None:  # None where the model needs no zeroing
            runner.kv_block_zeroer.zero_block_ids = poison
        return sum(cache.untyped_storage().nbytes() for cache in pools.values())


def build_llm(model: str, **arguments: Any) -> LLM:
    """Start vLLM with our backend and the report in its workers.

    Args:
        model: What vLLM's `LLM` takes as model.
        **arguments: Further arguments of `LLM`; the attention backend is set here, and `worker_extension_cls` unless it
            names a subclass of `WorkerReport`. An `attention_config` is a mapping, and keeps what else it says; so is a
            `speculative_config`, whose drafter is served by ours too unless it names another `attention_backend`
            ("auto" is vLLM's choice).

    Returns:
        The engine. Whether our backend serves it is what `require_served` checks after a request.

    Raises:
        BackendTakenError: The name of our backend is another plugin's.
        NotInterpretedError: The CPU platform without TRITON_INTERPRET=1.
        SettingError: A setting has a value that means nothing.
    """
    packing()
    ours_for_mla = enabled(MLA_VARIABLE)
    if not current_platform.is_cpu():
        load_general_plugins()
        custom = AttentionBackendEnum[NAME]
        if custom.is_overridden() and custom.get_path() != BACKEND:
            raise BackendTakenError(NAME, custom.get_path())
        arguments["attention_backend"] = NAME
        if drafts := arguments.get("speculative_config"):  # a drafter does not inherit it: vLLM would choose anew
            arguments["speculative_config"] = {"attention_backend": NAME, **drafts}
        if ours_for_mla:
            chosen = {"backend_per_kind": {"mla_attention": GPU_MLA_NAME}}
            arguments["attention_config"] = {**arguments.get("attention_config", {}), **chosen}
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise NotInterpretedError
    from vllm import LLM

    return LLM(model=model, **{"worker_extension_cls": WORKER_EXTENSION} | arguments)


def served_layers(llm: LLM) -> list[ServedLayer]:
    """Collect the reports of all workers: one entry per attention layer and worker."""
    return [row for worker in llm.collective_rpc("pagedkv_report") for row in worker]


def require_served(layers: list[ServedLayer]) -> None:
    """Check that our backend served every attention layer at least once.

    Args:
        layers: What `served_layers` returned after a request.

    Raises:
        NotServedError: There is no attention layer, another backend served one, or ours was never called.
    """
    problems = [] if layers else ["the workers report no attention layer at all"]
    for row in layers:
        where = f"{row['layer']} (rank {row['rank']})"
        if row["backend"] not in OURS:
            problems.append(f"{where}: served by {row['backend']}")
        elif not row["attentions"]:
            problems.append(f"{where}: selected pagedkv, but no attention call reached it")
    if problems:
        raise NotServedError("\n".join(f"  {problem}" for problem in problems))


def require_scans(llm: LLM) -> int:
    """Return how often workers called our ssd_prefill since the start or `pagedkv_reset`.

    Raises:
        NotServedError: A worker never did.
    """
    return _require_calls(llm, "pagedkv_scans", "prefill of Mamba-2", SSD_VARIABLE)


def require_deltas(llm: LLM) -> int:
    """Return how many steps of gated delta nets our kernels computed since the start or `pagedkv_reset`.

    Raises:
        NotServedError: A worker never did.
    """
    return _require_calls(llm, "pagedkv_deltas", "gated delta nets", GDN_VARIABLE)


def _require_calls(llm: LLM, method: str, what: str, variable: str) -> int:
    calls = llm.collective_rpc(method)
    if not all(calls):
        raise NotServedError(f"  {what}: calls by worker {calls}; {variable}=1 puts ours in its place")
    return sum(calls)


def require_warm(llm: LLM) -> dict[str, int]:
    """Check that Triton has compiled no kernel of ours since the workers began to watch (`pagedkv_watch_compiler`).

    Returns:
        Module and name of other kernels, and how many variants of each were compiled, of all workers together.

    Raises:
        CompiledLateError: It has; the message names them.
    """
    found: Counter[str] = Counter()
    for worker in llm.collective_rpc("pagedkv_compiled"):
        found.update(worker)
    ours = {name: count for name, count in found.items() if name.startswith("pagedkv.")}
    if ours:
        raise CompiledLateError(", ".join(f"{name} ({count})" for name, count in sorted(ours.items())))
    return dict(found)


def _attention_layers(worker: Any) -> dict[str, Any]:
    """Every layer with a KV cache or an attention impl; only the state (Mamba) layers are left out."""
    context = worker.vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in context.items()
        if isinstance(layer, AttentionLayerBase) and not isinstance(layer, MambaBase)
    }


def _describe(name: str, layer: Any, rank: int) -> ServedLayer:
    cache, route = layer.kv_cache, getattr(layer.impl, "route", None)
    page = getattr(layer.impl, "page", None)
    return ServedLayer(
        layer=name,
        backend=_path(layer.get_attn_backend()),
        impl=_path(type(layer.impl)),
        writes=getattr(layer.impl, "writes", None),
        attentions=getattr(layer.impl, "attentions", None),
        packing=None if page is None else page.layout.packing,
        fp8_format=None if page is None else page.format,
        route=None if route is None else routes.summary(route),
        kv_shape=list(cache.shape) if cache.numel() else [],
        kv_strides=list(cache.stride()) if cache.numel() else [],
        kv_dtype=str(cache.dtype).removeprefix("torch."),
        block_size=cache.shape[-2] if cache.dim() > 2 else None,
        rank=rank,
    )


def _path(cls: type) -> str:
    """Path of a class; of one that vLLM has made to wrap another, as for cross attention, path of the wrapped one."""
    bases = [base for base in cls.__mro__ if getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base]
    cls = next((base for base in cls.__mro__ if base.__module__.startswith("pagedkv.")), next(iter(bases), cls))
    return f"{cls.__module__}.{cls.__qualname__}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _codes(layer: Any) -> torch.Tensor:
    """A layer's pages; those of a quantised cache as bytes, whatever vLLM calls them."""
    cache: torch.Tensor = layer.kv_cache
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _nan(layer: Any) -> float:
    """Return what fills a layer's pages with NaN."""
    if layer.kv_cache.element_size() > 1:
        return float("nan")
    return FNUZ_NAN_BYTE if getattr(layer.impl, "page", None) and layer.impl.page.format == "e4m3fnuz" else NAN_BYTE


def _poison_blocks(caches: list[tuple[torch.Tensor, float]], blocks: list[int]) -> None:
    """Fill whole attention blocks.

    Args:
        caches: Per layer its pages, [num_blocks, kernel blocks per block, head slots, tokens, content], and with what.
        blocks: Block ids of the pool; may be empty.
    """
    for cache, fill in caches:
        cache[blocks] = fill
