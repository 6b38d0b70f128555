# SPDX-License-Identifier: Apache-2.0
"""An evaluation: its answers, the stored ones it may be compared with, and the backend that served attention. Pure.

An accuracy figure counts only for the backend that produced it. vLLM logs and ignores a plugin that fails to load, and
its CPU platform ignores a backend it does not know. A gate that trusted the command line would then pass on the
engine's own attention. So the worker is asked after the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hileval.gates.rule import order
from hileval.records.baseline import NOBODY, BaselineError
from hileval.records.records import Identity, Run, Sample, json_lines
from hilgate.errors import RecordsError
from hilgate.model import FINDINGS_FILE
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hileval.engines import Engine
    from hileval.gates import statistics
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.baseline import Baseline
    from hileval.records.records import Filter


UNKNOWN = Identity(
    model="unknown",
    weights="0" * 64,
    tokenizer="0" * 64,
    chat_template="0" * 64,
    task="0" * 64,
    num_fewshot=0,
    generation="{}",
    lm_eval="unknown",
)
"""Of stored answers: it was compared when they were asked."""


class IdentityMismatchError(RecordsError):
    """The baseline was recorded with another model, tokenizer, prompt or generation: nothing to compare."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked and answered.

    Attributes:
        ids: Questions of the plan, in the order of asking; each run holds answers to the first of them.
        runs: All but the last are complete.
        base: Stored outcomes [K, questions] of `ids`; None without a baseline.
        changed: What else than the attention differs from the baseline's runs: engine, arguments, device, packages.
    """

    ids: tuple[int, ...]
    runs: tuple[Run, ...]
    base: statistics.Outcomes | None
    changed: tuple[str, ...] = ()

    @property
    def samples(self) -> list[Sample]:
        """Every answer."""
        return [sample for run in self.runs for sample in run.samples]

    @property
    def seconds(self) -> float:
        """Wall time of all runs."""
        return sum(run.seconds for run in self.runs)

    def outcomes(self, which: Filter) -> list[statistics.Outcomes]:
        """Per run, which answers are right under a filter."""
        return [np.array([s.correct(which) for s in run.samples], dtype=bool) for run in self.runs]


def stored_outcomes(baseline: Baseline, which: Filter, identity: Identity, ids: Sequence[int]) -> statistics.Outcomes:
    """Outcomes [K, n] of the questions `ids`, in that order, once it is sure that they are of the same thing.

    Raises:
        BaselineError: Nobody accepted it.
        IdentityMismatchError: An identity field differs, or a question is not in the baseline.
    """
    if baseline.accepted_by == NOBODY:
        raise BaselineError(
            "a proposal that nobody has accepted is no baseline",
            where=f"baseline of {baseline.gate}, recorded {baseline.recorded}",
            remedy="look at it, then: python -m hileval baseline accept <gate> --by NAME",
        )
    if differences := identity.differences(baseline.identity):
        raise _mismatch(baseline, f"not the model the baseline was recorded with: {'; '.join(differences)}")
    hashes = {question.doc_id: question.doc_hash for question in baseline.questions}
    if missing := [one for one in ids if one not in hashes]:
        raise _mismatch(
            baseline, f"{len(missing)} of {len(ids)} questions are not in it, the first is question {missing[0]}"
        )
    return baseline.outcomes(which, [hashes[one] for one in ids])


def require_same_prompts(baseline: Baseline, samples: Sequence[Sample]) -> None:
    """Refuse answers to something else than the stored runs were asked.

    Raises:
        IdentityMismatchError: A question or its prompt differs.
    """
    stored = {question.doc_id: question for question in baseline.questions}
    for sample in samples:
        question = stored.get(sample.doc_id)
        if question is None or question.doc_hash != sample.doc_hash:
            raise _mismatch(baseline, f"question {sample.doc_id} ({sample.doc_hash[:12]}) is not in the baseline")
        if question.prompt_hash != sample.prompt_hash:
            raise _mismatch(baseline, f"question {sample.doc_id} was asked with another prompt")


def read_evaluation(folder: Path, gate: ResolvedGate, limit: int | None) -> tuple[Evaluation, Check | None]:
    """The stored answers of a gate, and the finding of who served them.

    Raises:
        RecordsError: They cannot be read, hold a question twice in a run, or are not what the baseline was asked.
    """
    declared, baseline = gate.declared, gate.baseline
    number, file = 0, folder / "samples.jsonl"
    try:
        samples, checks = [], []
        for number, line in json_lines(file):  # noqa: B007 - the error names it
            samples.append(Sample.model_validate_json(line))
        number, file = 0, folder / FINDINGS_FILE
        for number, line in json_lines(file):  # noqa: B007 - the error names it
            checks.append(Check.model_validate_json(line))
    except (OSError, ValueError) as error:
        raise RecordsError(
            f"not the answers of a gate: {type(error).__name__}: {str(error).splitlines()[0]}",
            where=f"{file}:{number}" if number else str(folder),
            remedy="name the folder that `gate` wrote",
        ) from error
    served = next((check for check in checks if f"/served-by-{declared.attention_backend}" in check.id), None)
    if declared.attention_backend is not None and served is None:
        raise RecordsError("nobody says who served it", where=str(folder), remedy="run the gate again")
    runs: list[list[Sample]] = []
    for sample in samples:
        if not runs or sample.doc_id == runs[0][0].doc_id:
            runs.append([])
        runs[-1].append(sample)
    if not runs:
        raise RecordsError("no answer", where=str(folder), remedy="run the gate again")
    ids = tuple(one.doc_id for one in runs[0])
    base = None
    if baseline is not None:
        require_same_prompts(baseline, samples)
        ids = order(gate.rule, baseline.n)[:limit]
        base = stored_outcomes(baseline, declared.filter, baseline.identity, ids)
    if any(tuple(one.doc_id for one in run) != ids[: len(run)] for run in runs):
        raise RecordsError(
            "answers to other questions than the rule asks, or in another order",
            where=str(folder),
            remedy="name --when and --limit as they were when it was asked",
        )
    identity = baseline.identity if baseline else UNKNOWN
    return Evaluation(ids, tuple(Run(identity=identity, samples=tuple(run), seconds=0) for run in runs), base), served


def _mismatch(baseline: Baseline, what: str) -> IdentityMismatchError:
    return IdentityMismatchError(
        what,
        where=f"baseline of {baseline.gate}, recorded {baseline.recorded}",
        remedy="undo the change, or record a new baseline on purpose: python -m hileval baseline record <gate> ...",
    )


PACKING, MLA = "PAGEDKV_PACKING", "PAGEDKV_MLA"
"""Variables of a gate's environment that say which of our paths must serve it."""
REMEDY = {
    "pagedkv": "without a GPU the plugin needs TRITON_INTERPRET=1 before Python starts, and VLLM_PLUGINS unset",
    "vllm": "set VLLM_PLUGINS= (empty) so that no plugin replaces the engine's attention",
}


def check_backend(gate: ResolvedGate, engine: Engine | None) -> Check | None:
    """Who served attention, of an engine that can say; None where nothing is required of it."""
    required, env = gate.declared.attention_backend, gate.declared.env
    if required is None:
        return None
    layers = (engine.attention_layers() or []) if engine else []
    return check_layers(gate.name, required, layers, packing=env.get(PACKING), latent=env.get(MLA) == "1")


def check_layers(
    gate: str,
    required: str,
    layers: Sequence[Mapping[str, object]],
    *,
    packing: str | None = None,
    latent: bool = False,
) -> Check:
    """Whether `required` served every attention layer of the run, and was called.

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
    """What was not as required; empty where all was."""
    if not layers:
        return "the engine reports no attention layer"
    wrong = [layer for layer in layers if (layer in ours) != (required == "pagedkv")]
    if required not in {"pagedkv", "vllm"}:
        wrong = [
            layer
            for layer in layers
            if required not in (found if isinstance(found := layer.get("names"), list) else [])
        ]
    if wrong:
        names = ", ".join(f"{layer.get('layer')} by {_name(layer.get('backend'))}" for layer in wrong[:3])
        return f"{len(wrong)} of {len(layers)} layers served by another backend: {names}"
    called = [layer for layer in ours if _count(layer, "writes") and _count(layer, "attentions")]
    if idle := [str(layer.get("layer")) for layer in ours if layer not in called]:
        return f"never called for {', '.join(idle[:3])}"
    if packing and any(layer.get("packing") != packing for layer in ours):
        found = ", ".join(sorted({str(layer.get("packing")) for layer in ours}))
        return f"ours served it, in the packing {found} instead of {packing}"
    if ours and latent and not all("MLA" in _name(layer.get("impl")) for layer in ours):
        return "ours served it, without MLA"
    return ""


def _stored(layer: Mapping[str, object]) -> str:
    """How K and V lie: packing and FP8 format; MLA's latent rows have neither."""
    packing, codes = layer.get("packing"), layer.get("fp8_format")
    return f"{packing or 'rows'}{f' of {codes}' if codes else ''}"


def _name(path: object) -> str:
    return str(path).rsplit(".", 1)[-1]


def _count(layer: Mapping[str, object], name: str) -> int:
    value = layer.get(name, 0)
    return value if isinstance(value, int) else 0
