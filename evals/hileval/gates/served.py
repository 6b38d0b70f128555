# SPDX-License-Identifier: Apache-2.0
"""Check that the attention which a gate demands served its run.

An accuracy figure counts only for the backend that produced it. vLLM logs and ignores a plugin that fails to load, and
its CPU platform ignores a backend it does not know. A gate that trusted the command line would then pass on the
engine's own attention. So the workers are asked after the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hileval.engines import Engine
    from hileval.gates.resolve import ResolvedGate

PACKING, MLA = "PAGEDKV_PACKING", "PAGEDKV_MLA"
"""Variables of a gate's environment that say which of our paths must serve it."""
REMEDY = {
    "pagedkv": "unset VLLM_PLUGINS, and without a GPU set TRITON_INTERPRET=1 before Python starts",
    "vllm": "set VLLM_PLUGINS= (empty) so that no plugin replaces the engine's attention",
}


def check_backend(gate: ResolvedGate, engine: Engine) -> Check | None:
    """The check of who served attention, as the engine reports it; None where the gate requires nothing."""
    required, env = gate.declared.attention_backend, gate.declared.env
    if required is None:
        return None
    layers = engine.attention_layers() or []
    return check_layers(gate.name, required, layers, packing=env.get(PACKING), latent=env.get(MLA) == "1")


def check_layers(
    gate: str,
    required: str,
    layers: Sequence[Mapping[str, object]],
    *,
    packing: str | None = None,
    latent: bool = False,
) -> Check:
    """Check that `required` served every attention layer of the run, and was called.

    Args:
        gate: The gate's key.
        required: `pagedkv`, vLLM's name of a backend, or `vllm` for any backend of the engine itself.
        layers: The worker's report, one mapping per attention layer: `layer`, `backend` and `impl` (class paths), and
            where the backend counts them `writes` (of the KV cache) and `attentions` (calls); `block_size` is shown.
        packing: How K and V must lie in the pages of layers that are ours; None requires nothing.
        latent: Whether layers that are ours must be MLA's.
    """
    check_id = f"{gate}/served-by-{required}"
    ours = [layer for layer in layers if str(layer.get("impl", "")).startswith("pagedkv.")]
    if trouble := _other_service(required, layers, ours, packing=packing, latent=latent):
        message = f"{trouble}; {REMEDY[required]}" if required in REMEDY else trouble
        return Check(id=check_id, outcome=Outcome.DID_NOT_RUN, message=message)
    backends = ", ".join(sorted({_name(layer.get("backend")) for layer in layers}))
    blocks = ", ".join(sorted({str(layer.get("block_size")) for layer in layers}))
    stored = "".join(f", {kind}" for kind in sorted({_stored(layer) for layer in ours} - {"rows"}))
    counts = {name: sum(_count(layer, name) for layer in ours) for name in ("writes", "attentions")} if ours else {}
    calls = ", {writes} cache writes, {attentions} attentions".format_map(counts) if ours else ""
    return Check(
        id=check_id,
        outcome=Outcome.PASS,
        message=f"{len(layers)} attention layers by {backends}, block_size {blocks}{stored}{calls}",
        labels={"backend": backends, "block_size": blocks},
        numbers={"layers": len(layers), **counts},
    )


def _other_service(
    required: str,
    layers: Sequence[Mapping[str, object]],
    ours: Sequence[Mapping[str, object]],
    *,
    packing: str | None,
    latent: bool,
) -> str:
    """Say what differs from what is required; empty where nothing does."""
    if not layers:
        return "the engine reports no attention layer"
    wrong = [layer for layer in layers if (layer in ours) != (required == "pagedkv")]
    if required not in {"pagedkv", "vllm"}:
        wrong = [layer for layer in layers if required not in _names(layer)]
    if wrong:
        names = ", ".join(f"{layer.get('layer')} by {_name(layer.get('backend'))}" for layer in wrong[:3])
        return f"{len(wrong)} of {len(layers)} layers served by another backend: {names}"
    called = [layer for layer in ours if _count(layer, "writes") and _count(layer, "attentions")]
    if idle := [str(layer.get("layer")) for layer in ours if layer not in called]:
        return f"never called for {', '.join(idle[:3])}"
    if packing and any(layer.get("packing") != packing for layer in ours):
        packings = ", ".join(sorted({str(layer.get("packing")) for layer in ours}))
        return f"ours served it, in the packing {packings} instead of {packing}"
    if ours and latent and not all("MLA" in _name(layer.get("impl")) for layer in ours):
        return "ours served it, without MLA"
    return ""


def _stored(layer: Mapping[str, object]) -> str:
    """Packing and FP8 format of K and V; MLA's latent rows have neither."""
    packing, codes = layer.get("packing"), layer.get("fp8_format")
    return f"{packing or 'rows'}{f' of {codes}' if codes else ''}"


def _names(layer: Mapping[str, object]) -> list[object]:
    """Backends that a layer reports; none where the report is not a list."""
    names = layer.get("names")
    return names if isinstance(names, list) else []


def _name(path: object) -> str:
    return str(path).rsplit(".", 1)[-1]


def _count(layer: Mapping[str, object], name: str) -> int:
    value = layer.get(name, 0)
    return value if isinstance(value, int) else 0
