"""Who served attention: an accuracy figure counts only for the backend that produced it.

vLLM logs and ignores a plugin that fails to load, and its CPU platform ignores a backend it does not know. A gate that
trusted the command line would then pass on the engine's own attention. So the worker is asked after the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.model import Check, Number, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hileval.engines import Engine

REMEDY = {
    "pagedkv": "without a GPU the plugin needs TRITON_INTERPRET=1 before Python starts, and VLLM_PLUGINS unset",
    "vllm": "set VLLM_PLUGINS= (empty) so that no plugin replaces the engine's attention",
}


def served_by(gate: str, required: str | None, engine: Engine | None) -> Check | None:
    """Who served attention, of an engine that can say; None where nothing is required of it."""
    if required is None:
        return None
    return check_served(gate, required, (engine.attention_layers() or []) if engine else [])


def check_served(gate: str, required: str, layers: Sequence[Mapping[str, object]]) -> Check:
    """Whether `required` served every attention layer of the run, and was called.

    Args:
        gate: The gate's key.
        required: `pagedkv`, or `vllm` for any backend of the engine itself.
        layers: The worker's report, one mapping per attention layer: `layer`, `backend` and `impl` (class paths), and
            where the backend counts them `writes` (of the KV cache) and `attentions` (calls); `block_size` is shown.
    """
    check_id = f"{gate}/served-by-{required}"
    if not layers:
        return _did_not_run(check_id, required, "the engine reports no attention layer")
    ours = [layer for layer in layers if str(layer.get("impl", "")).startswith("pagedkv.")]
    wrong = [layer for layer in layers if (layer in ours) != (required == "pagedkv")]
    backends = ", ".join(sorted({_name(layer.get("backend")) for layer in layers}))
    if wrong:
        names = ", ".join(f"{layer.get('layer')} by {_name(layer.get('backend'))}" for layer in wrong[:3])
        return _did_not_run(
            check_id, required, f"{len(wrong)} of {len(layers)} layers served by another backend: {names}"
        )
    writes, attentions = _total(ours, "writes"), _total(ours, "attentions")
    idle = [str(layer.get("layer")) for layer in ours if not (_count(layer, "writes") and _count(layer, "attentions"))]
    if idle:
        return _did_not_run(check_id, required, f"never called for {', '.join(idle[:3])}")
    calls = f", {writes} cache writes, {attentions} attentions" if ours else ""
    blocks = ", ".join(sorted({str(layer.get("block_size")) for layer in layers}))
    numbers: dict[str, Number] = {"layers": len(layers)}
    if ours:
        numbers |= {"writes": writes, "attentions": attentions}
    return Check(
        id=check_id,
        outcome=Outcome.PASS,
        message=f"{len(layers)} attention layers by {backends}, block_size {blocks}{calls}",
        labels={"backend": backends, "block_size": blocks},
        numbers=numbers,
    )


def _name(path: object) -> str:
    return str(path).rsplit(".", 1)[-1]


def _count(layer: Mapping[str, object], name: str) -> int:
    value = layer.get(name, 0)
    return value if isinstance(value, int) else 0


def _total(layers: Sequence[Mapping[str, object]], name: str) -> int:
    return sum(_count(layer, name) for layer in layers)


def _did_not_run(check_id: str, required: str, why: str) -> Check:
    remedy = REMEDY.get(required, "")
    return Check(id=check_id, outcome=Outcome.DID_NOT_RUN, message=f"{why}; {remedy}" if remedy else why)
