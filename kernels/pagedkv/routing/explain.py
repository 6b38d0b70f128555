"""The routes of all layers of a model, from its config: one request for each kind of attention layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import hybrid, layers
from .errors import MisuseError, NoKernelError
from .features import HARDWARE_FP8
from .request import ELEMENT_BYTES, Dtype, KvCacheDtype, KvScales, Phase, Request, Sides
from .router import Route, route

if TYPE_CHECKING:
    from ..layout import Packing
    from .hybrid import State
    from .layers import Kind
    from .model_config import Config

ENGINE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""What an engine calls the dtype of its cache (vLLM's `--kv-cache-dtype`)."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the model's config does not say."""

    arch: str
    providers: tuple[str, ...]
    phase: Phase = "mixed"
    tp: int = 1
    """Ranks that share the heads of a layer."""
    dtype: str | None = None
    """None is the config's."""
    ssm_dtype: str | None = None
    """Of recurrent states; None is the config's."""
    kv_cache_dtype: str = "auto"
    """One of `ENGINE_DTYPES`."""
    kv_scales: KvScales = "tensor"
    """Of an fp8 cache."""
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


@dataclass(frozen=True)
class Explained:
    """One kind of layer, and who serves it."""

    kind: Kind
    request: Request | None = None
    """None where the layer has no paged cache."""
    answer: Route | NoKernelError | None = None
    note: str = ""
    """Who serves a layer that has no paged cache."""


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
        """Whether every layer with a paged cache has a route."""
        return not any(isinstance(layer.answer, NoKernelError) for layer in self.layers)


def explain(config: Config, deployment: Deployment) -> Explanation:
    """Route every kind of layer.

    Raises:
        ConfigError: the config does not say what its layers are.
        MisuseError: the deployment contradicts the model.
        RequestError: it has a value that no layer has.
    """
    dtype = deployment.dtype or _dtype(config)
    found = layers.kinds(config)
    state = None
    if any(kind.keeps == "state" for kind in found):
        state = hybrid.state(config, tp=deployment.tp, dtype=dtype, ssm_dtype=deployment.ssm_dtype)
    cached = next((kind for kind in found if kind.keeps == "cache"), None)
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
        layers=tuple(_explain(kind, deployment, dtype, tokens, sides, state) for kind in found),
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
    if kind.keeps == "latent":
        heads, _ = _shared(kind, deployment.tp)
        cache = f"[num_blocks, block_size, {kind.head_size}]"
        return Explained(kind, note=f"Decode by pagedkv.mla_decode: {heads} heads over one latent, {cache}.")
    heads, kv_heads = _shared(kind, deployment.tp)
    kv_cache_dtype = kv_format(deployment.kv_cache_dtype, deployment.arch, dtype)
    longest = deployment.max_seq_len or kind.max_seq_len
    if longest is None:
        raise MisuseError("--max-model-len: the config names no longest sequence; give one.")
    request = Request(
        arch=deployment.arch,
        phase=deployment.phase,
        head_size=kind.head_size,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        dtype=dtype,  # type: ignore[arg-type]  # Request refuses another word
        kv_cache_dtype=kv_cache_dtype,
        kv_scales="none" if kv_cache_dtype == "auto" else deployment.kv_scales,
        block_size=block_size,
        packing=deployment.packing,
        sides=sides,
        window=kind.window,
        softcap=kind.softcap,
        alibi=kind.alibi,
        sinks=kind.sinks,
        scale=kind.scale,
        q_len=deployment.q_len,
        causal=kind.causal,
        attn_type=kind.attn_type,
        max_num_seqs=deployment.max_num_seqs,
        max_seq_len=longest,
        num_blocks=deployment.num_blocks,
    )
    try:
        return Explained(kind, request, route(request, deployment.providers))
    except NoKernelError as error:
        return Explained(kind, request, error)


def kv_format(name: str, arch: str, dtype: str) -> KvCacheDtype:
    """Return the format that an engine's name of a cache dtype means on an arch.

    Raises:
        MisuseError: it is no such name, or another unquantised dtype than the model's.
    """
    if name in {"auto", dtype}:
        return "auto"
    if name in {"fp8", "fp8_e4m3"}:
        return "e4m3fnuz" if HARDWARE_FP8.get(arch) == "e4m3fnuz" else "e4m3fn"
    if name == "fp8_e5m2":
        return "e5m2"
    if name in ELEMENT_BYTES:
        raise MisuseError(f"--kv-cache-dtype: got {name}; expected auto, {dtype} or an fp8: keys are not converted.")
    raise MisuseError(f"--kv-cache-dtype: got {name}; expected one of {', '.join(ENGINE_DTYPES)}.")


def _dtype(config: Config) -> Dtype:
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


def _hybrid_block(state: State, kind: Kind, deployment: Deployment, dtype: str) -> tuple[int, str]:
    _, heads = _shared(kind, deployment.tp)
    quantised = kv_format(deployment.kv_cache_dtype, deployment.arch, dtype) != "auto"
    token = 2 * heads * kind.head_size * (1 if quantised else ELEMENT_BYTES[dtype])
    if quantised and deployment.kv_scales == "token":
        token += 2 * heads * ELEMENT_BYTES["float32"]
    tokens = hybrid.block_size(state.bytes, token, asked=deployment.block_size)
    reason = (
        f"so that a block of {token} bytes a token holds the state of a {state.name} layer, {state.bytes} bytes "
        f"(asked: {deployment.block_size})"
    )
    return tokens, reason


def _sides(deployment: Deployment, *, shared: bool) -> Sides:
    if shared and deployment.sides == "planes":
        raise MisuseError(
            "--layout: got planes; expected interleaved: attention and recurrent layers share a pool, in which K and V "
            "of a block lie side by side."
        )
    return deployment.sides or ("interleaved" if shared else "planes")
