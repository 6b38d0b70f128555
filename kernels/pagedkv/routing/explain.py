# SPDX-License-Identifier: Apache-2.0
"""Explain the routes of all layers of a model, from its config: for a person in 80 columns, and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pagedkv.arch import ARCHES, limits
from pagedkv.errors import MisuseError
from pagedkv.launch import GDN_HEAD_SIZES, tuning

from .candidates import GPU_ARCHES, MEASURED, POLICY
from .model_config import hybrid_block_size, layer_kinds, recurrent_state
from .request import ELEMENT_BYTES, Dtype, KvCacheDtype, KvScales, Phase, Request, Sides
from .router import Choice, NoKernelError, Route, route

if TYPE_CHECKING:
    from pagedkv.layout import Packing

    from .model_config import Config, Kind, State
    from .router import Rejection

ENGINE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""What an engine calls the dtype of its cache (vLLM's `--kv-cache-dtype`)."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the model's config does not say."""

    arch: str
    """A name that is not in `ARCHES` has no routes."""
    providers: tuple[str, ...]
    phase: Phase = "mixed"
    tp: int = 1
    """Ranks that share the heads of a layer."""
    dtype: str | None = None
    """None is the config's."""
    ssm_dtype: str | None = None
    """Dtype of recurrent states; None takes that of the config."""
    kv_cache_dtype: str = "auto"
    """One of `ENGINE_DTYPES`."""
    kv_scales: KvScales = "tensor"
    """Scales of an FP8 cache."""
    block_size: int = 16
    """Tokens; a model with recurrent layers gets at least what their state needs."""
    packing: Packing = "rows"
    sides: Sides | None = None
    """None is what the model needs: interleaved with recurrent layers, else planes."""
    q_len: int = 1
    max_num_seqs: int = 256
    max_seq_len: int | None = None
    """None is the model's own bound."""
    num_blocks: int | None = None
    drafts: int = 0
    """Tokens that are drafted a step, which recurrent layers keep states of."""


@dataclass(frozen=True)
class Explained:
    """One kind of layer, and who serves it."""

    kind: Kind
    request: Request | None = None
    """None where the layer has no paged cache."""
    answer: Route | NoKernelError | None = None
    note: str = ""
    """Who serves a layer that has no paged cache."""
    scan: Choice | None = None
    """Kernel of a recurrent layer that ours can replace in vLLM: of Mamba-2 the last step of its prefill."""


@dataclass(frozen=True)
class Explanation:
    """All layers of a model."""

    model_type: str
    deployment: Deployment
    dtype: str
    block_size: int
    block_reason: str
    layers: tuple[Explained, ...]

    @property
    def served(self) -> bool:
        """Whether every layer with a paged cache has a route, and every latent one a kernel."""
        latent = any(layer.kind.keeps == "latent" for layer in self.layers)
        routed = not any(isinstance(layer.answer, NoKernelError) for layer in self.layers)
        return routed and not (latent and _lacks_mla(self.deployment.arch))


def explain(config: Config, deployment: Deployment) -> Explanation:
    """Route every kind of layer.

    Raises:
        InvalidFileError: the config does not say what its layers are.
        MisuseError: the deployment contradicts the model.
        RequestError: it has a value that no layer has.
    """
    dtype = deployment.dtype or config_dtype(config)
    found = layer_kinds(config)
    state = shared_state(config, found, deployment, dtype)
    cached = next((kind for kind in found if kind.keeps in {"cache", "latent"}), None)
    tokens, reason = deployment.block_size, "as asked"
    if state and cached:
        tokens, reason = _hybrid_block(state, cached, deployment, dtype)
    sides = _sides(deployment, shared=bool(state and cached))
    return Explanation(
        model_type=config.model_type,
        deployment=deployment,
        dtype=dtype,
        block_size=tokens,
        block_reason=reason,
        layers=tuple(
            replace(_explain(kind, deployment, dtype, tokens, sides, state), scan=_scan(kind, state, deployment))
            for kind in found
        ),
    )


def _explain(
    kind: Kind, deployment: Deployment, dtype: str, block_size: int, sides: Sides, state: State | None
) -> Explained:
    if kind.keeps == "state":
        assert state
        what = " and ".join(str(list(shape)) for shape in state.shapes)
        note = f"Not attention: keeps {what} of each sequence, {state.bytes} bytes."
        return Explained(replace(kind, name=state.name), note=note)
    if kind.keeps == "nothing":
        return Explained(kind, note="Keeps no cache: attention over the source alone, not routed here.")
    heads, kv_heads = _shared(kind, deployment.tp)
    undescribed = f"Which kernel serves it is not described here for arch {deployment.arch}."
    if kind.keeps == "latent":
        note = (
            f"Decode by pagedkv.mla_decode: {heads} heads over one latent, [num_blocks, block_size, {kind.head_size}]."
        )
        if _lacks_mla(deployment.arch):
            note = f"Not served: pagedkv.mla_decode does not run on {deployment.arch}."
        return Explained(kind, note=note if deployment.arch in ARCHES else undescribed)
    kv_cache_dtype = kv_format(deployment.kv_cache_dtype, deployment.arch, dtype)
    longest = deployment.max_seq_len or kind.max_seq_len
    if longest is None:
        raise MisuseError("--max-model-len: the config names no longest sequence; give one.")
    asked = _common(kind) | _common(deployment)
    asked |= {
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_scales": "none" if kv_cache_dtype == "auto" else deployment.kv_scales,
        "block_size": block_size,
        "sides": sides,
        "max_seq_len": longest,
    }
    if deployment.arch not in ARCHES:
        return Explained(kind, note=undescribed)
    request = Request(**asked)
    try:
        return Explained(kind, request, route(request, deployment.providers))
    except NoKernelError as error:
        return Explained(kind, request, error)


def _lacks_mla(arch: str) -> bool:
    """Return whether the launch data of an arch has none for MLA decode."""
    return arch in ARCHES and tuning(arch).mla is None


def _scan(kind: Kind, state: State | None, deployment: Deployment) -> Choice | None:
    """Return the kernel of a recurrent layer that ours can replace; None for other layers and arches."""
    if kind.keeps != "state" or state is None or deployment.arch not in ARCHES:
        return None
    if state.name in VLLM_DELTA:
        return _delta(state)
    if state.name != "Mamba-2":
        return None
    theirs, (_, head_size, size) = "vllm._mamba_chunk_scan_combined_fwd", state.shapes[1]
    data = tuning(deployment.arch).scan_of(head_size, size, element_bytes=2)
    measured = deployment.arch == GPU_ARCHES["H200"]  # a time of it says nothing about another arch
    why = (
        f"with PAGEDKV_SSD=1 ({data.block_d} channels a program, tiles of {data.block_t} tokens, {data.waves} waves): "
        "one walk, or two where heads are few, in the place of vLLM's five kernels"
        + ("; 0.97 to 2.93 times as fast as vLLM's on an H200 (benchmarks/results/h200.md)" if measured else "")
        + ". It compiles where vLLM's do not: "
        "Triton 3.6.0 for AMD, once a sequence goes on from a state. Unset, or where vLLM's takes other arguments than "
        "those of 0.32, it stays vLLM's."
    )
    reason = f"{MEASURED}H200" if measured else POLICY
    return Choice("prefill", "pagedkv.ssd_prefill", reason, why, also=(theirs,))


VLLM_DELTA = {
    "gated delta net": "vllm.chunk_gated_delta_rule",
    "Kimi delta attention": "vllm.chunk_kda_with_fused_gate",
}
"""Delta rule -> vLLM's prefill of it."""


def _delta(state: State) -> Choice:
    """Return the kernels that compute a layer of the delta rule: ours, or vLLM's where ours take no such heads."""
    theirs, (_, values, keys) = VLLM_DELTA[state.name], state.shapes[1]
    if not {keys, values} <= set(GDN_HEAD_SIZES):
        sizes = " and ".join(map(str, GDN_HEAD_SIZES))
        return Choice("prefill", theirs, POLICY, f"ours take heads of {sizes}, not {keys} keys and {values} values.")
    why = (
        "with PAGEDKV_GDN=1 prefill, decode and drafts of Qwen3-Next, Qwen3.5 and Kimi-Linear, on states where they "
        "lie in vLLM's pool. Unset, in other models' layers, or where vLLM's take other arguments than those of 0.32, "
        "it stays vLLM's."
    )
    return Choice("prefill", "pagedkv.gdn_prefill and pagedkv.gdn_decode", POLICY, why, also=(theirs,))


def _common(source: Kind | Deployment) -> dict[str, Any]:
    """The fields that a request has by the same names."""
    return {field.name: getattr(source, field.name) for field in fields(Request) if hasattr(source, field.name)}


def kv_format(name: str, arch: str, dtype: str) -> KvCacheDtype:
    """Return the format that an engine's name of a cache dtype means on an arch.

    Raises:
        MisuseError: it is no such name, or another unquantised dtype than the model's.
    """
    if name in {"auto", dtype}:
        return "auto"
    if name in {"fp8", "fp8_e4m3"}:
        return "e4m3fnuz" if arch in ARCHES and limits(arch).native_fp8 == "e4m3fnuz" else "e4m3fn"
    if name == "fp8_e5m2":
        return "e5m2"
    if name in ELEMENT_BYTES:
        raise MisuseError(f"--kv-cache-dtype: got {name}; expected auto, {dtype} or an fp8: keys are not converted.")
    raise MisuseError(f"--kv-cache-dtype: got {name}; expected one of {', '.join(ENGINE_DTYPES)}.")


def config_dtype(config: Config) -> Dtype:
    """Return the dtype that a config names.

    Raises:
        MisuseError: It names none.
        InvalidFileError: It names one that no kernel takes.
    """
    found = config.keys.get("dtype") or config.keys.get("torch_dtype")
    if found is None:
        raise MisuseError(f"--dtype: {config.path} names none; give one of {', '.join(ELEMENT_BYTES)}.")
    if found not in ELEMENT_BYTES:
        raise config.error(f"dtype: got {found!r}; expected one of {', '.join(ELEMENT_BYTES)}")
    return found  # type: ignore[return-value]


def _shared(kind: Kind, tp: int) -> tuple[int, int]:
    """Query and KV heads of one rank; KV heads are repeated where there are fewer than ranks."""
    if kind.num_q_heads % tp or (kind.num_kv_heads % tp and tp % kind.num_kv_heads):
        raise MisuseError(
            f"--tp: got {tp}; expected what divides {kind.num_q_heads} query and {kind.num_kv_heads} KV heads."
        )
    return kind.num_q_heads // tp, max(1, kind.num_kv_heads // tp)


def shared_state(config: Config, kinds: tuple[Kind, ...], deployment: Deployment, dtype: str) -> State | None:
    """Return what a recurrent layer of one rank keeps of a sequence; None where no layer is recurrent.

    Raises:
        InvalidFileError: the config names no recurrence that is described here.
        MisuseError: it cannot be shared by the ranks.
    """
    if not any(kind.keeps == "state" for kind in kinds):
        return None
    return recurrent_state(
        config, tp=deployment.tp, dtype=dtype, ssm_dtype=deployment.ssm_dtype, drafts=deployment.drafts
    )


def token_bytes(kind: Kind, deployment: Deployment, dtype: str) -> int:
    """Return the bytes that one attention layer of one rank keeps of a token.

    Raises:
        MisuseError: the ranks cannot share its heads.
    """
    quantised = kv_format(deployment.kv_cache_dtype, deployment.arch, dtype) != "auto"
    element = 1 if quantised else ELEMENT_BYTES[dtype]
    if kind.keeps == "latent":
        return kind.head_size * element
    _, heads = _shared(kind, deployment.tp)
    scales = ELEMENT_BYTES["float32"] if quantised and deployment.kv_scales == "token" else 0
    return 2 * heads * (kind.head_size * element + scales)


def _hybrid_block(state: State, kind: Kind, deployment: Deployment, dtype: str) -> tuple[int, str]:
    token = token_bytes(kind, deployment, dtype)
    latent = kind.keeps == "latent"
    return hybrid_block_size(state.bytes, token, asked=deployment.block_size, latent=latent), (
        f"so that a block of {token} bytes a token holds the state of a {state.name} layer, {state.bytes} bytes "
        f"(asked: {deployment.block_size})"
    )


def _sides(deployment: Deployment, *, shared: bool) -> Sides:
    if shared and deployment.sides == "planes":
        raise MisuseError(
            "--layout: got planes; expected interleaved: attention and recurrent layers share a pool, in which K and V "
            "of a block lie side by side."
        )
    return deployment.sides or ("interleaved" if shared else "planes")


WIDTH = 80


def format_text(explanation: Explanation) -> str:
    """Return what a person reads."""
    deployment = explanation.deployment
    scales = f" with scales: {deployment.kv_scales}" if deployment.kv_cache_dtype.startswith("fp8") else ""
    lines = [f"{explanation.model_type} on {deployment.arch}, kernels of {', '.join(deployment.providers)}"]
    lines += wrap(
        f"{explanation.dtype}, cache {deployment.kv_cache_dtype}{scales}, at most {deployment.max_num_seqs} sequences, "
        f"num_blocks {deployment.num_blocks or 'not given'}",
        2,
    )
    lines += wrap(f"block_size {explanation.block_size}: {explanation.block_reason}", 2)
    for layer in explanation.layers:
        lines += ["", *_layer(layer)]
    return "\n".join(lines) + "\n"


def as_data(explanation: Explanation) -> dict[str, object]:
    """Return the same for JSON."""
    return {
        "model_type": explanation.model_type,
        "deployment": asdict(explanation.deployment),
        "dtype": explanation.dtype,
        "block_size": explanation.block_size,
        "served": explanation.served,
        "layers": [_layer_data(layer) for layer in explanation.layers],
    }


def _layer_data(layer: Explained) -> dict[str, object]:
    data: dict[str, object] = {"kind": asdict(layer.kind), "note": layer.note}
    if layer.scan:
        data["scan"] = asdict(layer.scan)
    if layer.request:
        data["request"] = asdict(layer.request)
    if isinstance(layer.answer, NoKernelError):
        rejected = [asdict(rejection) for rejection in layer.answer.rejected]
        data["no_kernel"] = {"task": layer.answer.task, "missing": layer.answer.missing, "rejected": rejected}
    elif layer.answer:
        native = layer.answer.layout.has_native_kv_cache_layout
        data["layout"] = {**asdict(layer.answer.layout), "has_native_kv_cache_layout": native}
        data["route"] = {choice.task: asdict(choice) for choice in layer.answer.choices}
    return data


def _layer(layer: Explained) -> list[str]:
    kind = layer.kind
    lines = wrap(f"{kind.count} x {kind.name}" + (f": {_asked(layer.request)}" if layer.request else ""), 0)
    if layer.note:
        lines += wrap(layer.note, 2)
    lines += _choice(layer.scan) if layer.scan else []
    if isinstance(layer.answer, NoKernelError):
        head, *_ = str(layer.answer).splitlines()
        lines += [*wrap(f"NOT SERVED. {head}", 2), *_rejections(layer.answer.rejected)]
    elif layer.answer:
        native = "native blocks" if layer.answer.layout.has_native_kv_cache_layout else "no native blocks"
        lines += wrap(f"cache    {layer.answer.layout}; {native}", 2, hang=9)
        for choice in layer.answer.choices:
            lines += _choice(choice)
    return lines


def _asked(request: Request) -> str:
    """What a layer asks for, in words."""
    words = [f"{request.num_q_heads} heads on {request.num_kv_heads}, head size {request.head_size}"]
    words += [f"window {request.window}"] if request.window else []
    words += [f"soft cap {request.softcap:g}"] if request.softcap else []
    words += ["ALiBi"] if request.alibi else []
    words += ["sinks"] if request.sinks else []
    words += [f"scale {request.custom_scale:g}"] if request.custom_scale else []
    words += [] if request.causal else ["not causal"]
    return ", ".join([*words, f"up to {request.max_seq_len} tokens"])


def _choice(choice: Choice) -> list[str]:
    if choice.kernel is None:
        return wrap(f"{choice.task:<8} no kernel: {choice.why}", 2, hang=9)
    lines = wrap(f"{choice.task:<8} {choice.kernel}", 2, hang=9)
    lines += wrap(f"{choice.basis}: {choice.why}", 6)
    lines += wrap(f"able too: {', '.join(choice.also)}", 6) if choice.also else []
    return [*lines, *_rejections(choice.rejected)]


def _rejections(rejected: tuple[Rejection, ...]) -> list[str]:
    return [line for rejection in rejected for line in wrap(f"- {rejection}", 6, hang=2)]


def wrap(text: str, indent: int, hang: int = 0) -> list[str]:
    """Return lines of at most `WIDTH` characters, indented, and all but the first by `hang` more."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
