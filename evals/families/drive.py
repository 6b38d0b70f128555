# SPDX-License-Identifier: Apache-2.0
"""Fill a row of the table: which engines a model is served by, what each of them drives, and what came of it.

It runs in a process of its own (`processes.py`), because the environment decides whether Triton interprets, and because
an engine that crashes takes only its process along.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._dynamo
from vllm.config import CompilationMode
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from families import behaviours, checkpoints, layers, mla_prefill, mtp, stand_ins
from families.backends import BACKENDS, PLUGIN, OtherBackendError, require_backend
from families.behaviours import Bench, NotDrivenError, NotHereError, require_codes
from families.cell import FamilyCell, Outcome, settled, worse
from families.engine import COMMON, FamilyEngine, StuckError, end_with_parent, register
from families.family import FAMILIES, TINY_ALONE, another_platform
from families.judge import WrongAnswerError
from families.mtp import WrongDraftError
from families.oracle import Oracle, PublishedOracle
from families.published import Checkpoint
from families.schedule import CompanyError
from families.scripted import DRAFTS
from pagedkv import prepared
from pagedkv.errors import ArgumentError
from pagedkv.vllm_plugin import delta, scan
from pagedkv.vllm_plugin.errors import CompiledLateError, NotServedError, PluginError
from pagedkv.vllm_plugin.inspect import require_deltas, require_scans, require_served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from families.backends import Backend
    from families.family import Family

GRAPHS: dict[str, Any] = {
    # Decode runs as captured graphs, prompts run eagerly; without torch.compile, which would take minutes a family.
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
"""Arguments of every engine on GPUs. Three requests are padded to four."""

PRODUCTION: dict[str, Any] = {
    # None leaves a choice to vLLM: torch.compile, graphs, a prefix cache where layers attend, its max_num_seqs.
    "enforce_eager": False,
    "compilation_config": None,
    "enable_prefix_caching": None,
    "max_num_seqs": None,
}
"""Arguments of an engine as it is started in production."""

NGRAMS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,  # or of a text without repetition nothing is drafted
    "prompt_lookup_max": 3,
}
"""Drafts: what followed the last few tokens when they came before."""

PREDICTED = 2
"""Drafts of a step by a checkpoint's own head. The second is drafted from what the head itself has made."""

LONG: dict[str, Any] = {"max_model_len": 512}
"""Arguments for scripted drafts beside states: two blocks as an FP8 cache gets them."""

SCRIPT = "families.scripted.ScriptedDrafter"

STEP = {"cpu": 256, "cuda": 1024, "rocm": 1024}
"""Tokens of one step in production: no fewer than vLLM's own max_num_seqs, so that vLLM starts."""

INFLATED = (544, 784, 1056, 1152)
"""Tokens of a block that vLLM chooses for Qwen3-Next with bfloat16 states, a 48-head GDN with float32 states,
Qwen3.5-35B, and Qwen3-Next on CPUs: kernels.md gives the arithmetic. None is a power of two."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its arguments, and the behaviours that it drives, in this order."""

    behaviours: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    poison: bool = True
    """Whether the KV pool holds NaN at the start. A prefix cache must not be poisoned."""
    compiled: bool = False
    """Whether torch.compile is at work."""


def tiny_plans(family: Family, platform: str, sizes: Sequence[int] = ()) -> tuple[EnginePlan, ...]:
    """The engines of the tiny model of a family.

    Args:
        family: Which one.
        platform: "cpu", "cuda" or "rocm".
        sizes: Tokens of the blocks to try. Without any they are those that its models get; on GPUs all of INFLATED too.
    """
    cache = {"enable_prefix_caching": True}
    # One engine for both, where a prefix cache is known to work beside everything else.
    second = (
        (EnginePlan(("again", "prefix"), cache, poison=False),)
        if family.attention == "paged"
        else (EnginePlan(("again",)), EnginePlan(("prefix",), cache, poison=False))
    )
    # Of one engine where there are graphs.
    together = (("production",), ("graphs",)) if platform == "cpu" else (("production", "graphs"),)
    sizes = sizes or (family.blocks if platform == "cpu" else sorted({*family.blocks, *INFLATED}))
    script = {"speculative_config": {"method": "custom_class", "model": SCRIPT, "num_speculative_tokens": DRAFTS}}
    drafting = {"spec": {"speculative_config": NGRAMS}, "mtp": predicting(platform)}
    # Without attention and without a prefix cache a block is as long as a request, and has no edges.
    edges = cache if not family.states else LONG if family.attention else LONG | cache
    drafting |= {"verify": edges | script}
    # States of drafts are kept otherwise where a prefix cache wants them.
    beside = ("verify",) if platform == "cpu" else ("spec", "mtp")
    return (
        EnginePlan(("prefill", "decode", "chunked", "mixed", "preempt", "reuse", "fuzz")),
        *second,
        *(EnginePlan((name,), given, poison="enable_prefix_caching" not in given) for name, given in drafting.items()),
        *(
            EnginePlan((name,), drafting[name] | cache, poison=False)
            for name in beside
            if family.gdn and "enable_prefix_caching" not in drafting[name]
        ),
        *(EnginePlan(("blocks",), inflated(size)) for size in sizes),
        EnginePlan(("state",), {"mamba_ssm_cache_dtype": state_dtype(family, platform)}),
        EnginePlan(("padded",)),
        *(EnginePlan(columns, production(family, platform), poison=False, compiled=True) for columns in together),
    )


def state_dtype(family: Family, platform: str) -> str:
    """Dtype of states, where a cell asks for another one than the model's.

    Not bfloat16 on CPUs where a kernel of ours has them: Triton's interpreter computes it wrongly, so ours refuse it.
    """
    return "float16" if (family.ssd or family.gdn) and platform == "cpu" else "bfloat16"


def published_plans(family: Family, platform: str, block: int) -> tuple[EnginePlan, ...]:
    """The engines of a published checkpoint.

    Args:
        family: Its family.
        platform: "cpu", "cuda" or "rocm".
        block: Tokens of its KV block, as vLLM inflates it. Requests reach across two edges of it; a chunk is two thirds
            of it, so that chunks end at other places than blocks.
    """
    reach = {"max_model_len": max(COMMON["max_model_len"], 2 * block + 64)}
    reach |= {"max_num_batched_tokens": max(COMMON["max_num_batched_tokens"], 2 * block // 3 | 1)}
    wide = max(block, INFLATED[0])  # where its states do not make it so large, the least that those of another make
    return tuple(
        replace(plan, arguments=plan.arguments if plan.behaviours == ("blocks",) else reach | plan.arguments)
        for plan in tiny_plans(family, platform, (wide,))
        if plan.behaviours[0] not in TINY_ALONE
    )


def predicting(platform: str) -> dict[str, Any]:
    """Arguments of an engine that drafts with the checkpoint's own head; on GPUs four requests fit a graph."""
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": PREDICTED}}
    if platform == "cpu":
        return drafts
    sizes = [*GRAPHS["compilation_config"]["cudagraph_capture_sizes"], COMMON["max_num_seqs"] * (1 + PREDICTED)]
    return drafts | {"compilation_config": GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": sizes}}


def inflated(size: int) -> dict[str, Any]:
    """Arguments of an engine with blocks of `size` tokens, and prompts that cross from one into the next."""
    return {
        "block_size": size,
        "num_gpu_blocks_override": 10 + 4 * (64 // size),
        "max_model_len": size + 64,
        "max_num_batched_tokens": 256,
    }


def production(family: Family, platform: str) -> dict[str, Any]:
    """Arguments of an engine as in production, but for its size."""
    step = STEP[platform]
    # On CPUs the scan of Mamba-2 gives no states within a step; where a step goes beyond a block vLLM reads past the
    # end of what it gives (IndexError). There a block is as long as a step.
    here: dict[str, Any] = {"block_size": step} if platform == "cpu" else {}
    if platform == "cpu" and family.attention in ("cross", "latent"):
        here = {}  # its context is no longer than a step, and must hold several blocks
    return (
        PRODUCTION
        | here
        | {
            "max_num_batched_tokens": step,
            # vLLM chunks no prompt of MLA on CPUs.
            "max_model_len": step if platform == "cpu" and family.attention == "latent" else 2 * step + 64,
            "num_gpu_blocks_override": step + 128,  # a block for each sequence, or vLLM captures no full graphs
        }
    )


def not_here(platform: str, family: Family, behaviour: str) -> str | None:
    """Why there is no engine to start for a behaviour; None where there is."""
    if platform == "cpu" and behaviour == "padded":
        return "vLLM's CPU platform captures no graphs, so no batch is padded"
    if platform != "cpu" and behaviour == "verify":
        return "drafts are scripted in model runner V1 on the CPU; GPUs draft by n-grams (spec)"
    if platform == "cpu" and behaviour == "graphs":
        return "vLLM's CPU platform captures no graphs: a step is compiled and run"
    if family.attention == "cross" and behaviour == "prefix":
        return "vLLM caches no prefixes of encoder-decoders: CrossAttentionManager does not support caching"
    return None


BEST = 20
"""Tokens of each distribution that are compared of a published checkpoint: all words of a position would be up to 262
thousand Python objects."""

ASKED = 8192
"""Longest request of the engine that is asked for its block: vLLM makes none that is longer than a request."""

SCANNED = 256
"""Tokens that Mamba-2's scan takes at once in published models."""


class TinyModel:
    """The tiny model of a family; every word of a distribution is compared."""

    best: int | None = None
    measured = True
    """Whether what is declared of vLLM's limits was measured on this very model."""

    def __init__(self, family: Family, folder: Path) -> None:
        """`folder` is where its checkpoint is written."""
        self.family, self._folder = family, folder

    @cached_property
    def checkpoint(self) -> Path:
        """Its folder."""
        register(self.family.architecture)
        register(self.family.drafter)
        folder = self._folder / f"{self.family.name}-model"
        checkpoints.save(self.family, folder, self.dtype)
        return folder

    @cached_property
    def oracle(self) -> Oracle:
        """What transformers computes with it."""
        return Oracle.load(self.family, self.checkpoint, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations. GPUs multiply float32 in TF32, which has fewer bits than the oracle."""
        return torch.float32 if current_platform.is_cpu() else torch.float16

    @cached_property
    def heads(self) -> tuple[mtp.Head, mtp.Head]:
        """What its own head drafts (MTP) in transformers, in float64 and in its dtype."""
        models, attention = (self.oracle.exact, self.oracle.working), self.oracle.attention
        exact, working = (mtp.Head.read(self.family, model, self.checkpoint, attention) for model in models)
        return exact, working

    def labels(self, engine: FamilyEngine) -> dict[str, str]:  # noqa: ARG002 - of others it matters which engine
        """What a cell says of it beside who served."""
        return {}

    def plans(self, platform: str) -> tuple[EnginePlan, ...]:
        """Plans of its engines."""
        return tiny_plans(self.family, platform)

    def arguments(self, platform: str, own: dict[str, Any]) -> dict[str, Any]:
        """Arguments of vLLM's `LLM`; `own` are those of the plan."""
        memory = {"kv_cache_memory_bytes": 1 << 28}  # given, not measured, so that engines can share a GPU
        here = {} if platform == "cpu" else GRAPHS | {"gpu_memory_utilization": 0.1, "mamba_ssm_cache_dtype": "float32"}
        kind = {"dtype": str(self.dtype).removeprefix("torch.")}
        return COMMON | memory | kind | here | own | self.family.arguments(platform)


class PublishedModel(TinyModel):
    """A published checkpoint; the BEST words of each distribution are compared."""

    best: int | None = BEST
    measured = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(FAMILIES[checkpoint.family], Path(checkpoint.folder))
        self._published = checkpoint

    @cached_property
    def checkpoint(self) -> Path:
        """Its folder."""
        register(self.family.architecture)
        return self._folder

    @cached_property
    def oracle(self) -> Oracle:
        """What transformers computes with it."""
        device = "cpu" if current_platform.is_cpu() else "cuda"
        return PublishedOracle.read(Path(self._published.judged_by), self.dtype, best=BEST, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Its own; where that is not served, the nearest that is.

        Triton's interpreter computes bfloat16 wrongly: float32 there. GPUs compute float32 as `TinyModel.dtype` says:
        bfloat16 there, which has the same range.
        """
        own, cpu = getattr(torch, self._published.dtype), current_platform.is_cpu()
        instead = {(torch.bfloat16, True): torch.float32, (torch.float32, False): torch.bfloat16}
        return instead.get((own, cpu), own)

    def labels(self, engine: FamilyEngine) -> dict[str, str]:
        """Its dtype, the block that vLLM has made, and the commit that it was fetched at."""
        found = {"dtype": str(self.dtype).removeprefix("torch."), "block_size": str(engine.block_size)}
        return found | ({"revision": self._published.revision} if self._published.revision else {})

    def plans(self, platform: str) -> tuple[EnginePlan, ...]:
        """Plans of its engines. Only an engine knows how large the blocks are, so one is started to ask.

        Without attention a block is as long as a request may be; edges are then those of the scan's chunk.

        Raises:
            Exception: Whatever vLLM raises when it cannot start it.
        """
        if not self.family.attention:
            return published_plans(self.family, platform, SCANNED)
        reach: dict[str, Any] = {"max_model_len": min(self._published.positions or ASKED, ASKED)}
        reach["num_gpu_blocks_override"] = None  # as many as such a request takes, however small they are
        with FamilyEngine(self.checkpoint, poison=False, **self.arguments(platform, reach)) as engine:
            block = engine.block_size
        return published_plans(self.family, platform, block)

    def arguments(self, platform: str, own: dict[str, Any]) -> dict[str, Any]:
        """Arguments of vLLM's `LLM`: a pool for real pages, and states in float32 unless the plan says otherwise."""
        room = {"kv_cache_memory_bytes": 1 << (30 if platform == "cpu" else 34), "mamba_ssm_cache_dtype": "float32"}
        return super().arguments(platform, room | own)


WRONG = (WrongAnswerError, WrongDraftError, CompanyError, StuckError, NotServedError, CompiledLateError, NotDrivenError)
"""What a cell fails of in words of ours; of anything else the class belongs to the reason."""

OURS = (ArgumentError, PluginError)
"""Modules of kernels and plugin: what they raise is never declared to be a limit of vLLM."""


def main(spec: dict[str, Any], folder: Path, parent: Connection) -> None:
    """Drive the families that the parent names, and answer each with its cells, until the process is ended."""
    end_with_parent()
    stand_ins.supply()
    mla_prefill.register()
    plants = import_module(spec["plants"]).PLANTS if "plants" in spec else {}
    gc.freeze()  # what has been imported lives as long as the process; vLLM collects garbage several times an engine
    usable = True
    while usable:
        name, _, plant = parent.recv().partition("+")
        if plant:
            fault = plants[plant]
            chosen, planted = (*fault.passes, fault.fails), fault.change
        else:
            chosen, planted = tuple(spec["behaviours"]), _nothing_planted
        published = spec.get("published", {}).get(name)
        backend = BACKENDS[spec.get("backend", PLUGIN)]
        tiny = TinyModel(backend.fitted(FAMILIES[name]), folder) if not published else None
        model = tiny or PublishedModel(Checkpoint(**published))
        cells = ModelRun(model, chosen, planted, spec["fuzz"], backend).cells()
        usable = not gpu_is_lost()
        parent.send((cells, usable))


def _nothing_planted(_: FamilyEngine) -> AbstractContextManager[None]:
    return nullcontext()


def gpu_is_lost() -> bool:
    """Whether a kernel has left this process's GPU context unusable: whatever came next would fail of it too."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any answer but none means that it is
        return True
    return False


@dataclass
class ModelRun:
    """One model, and which of its behaviours."""

    model: TinyModel
    behaviours: tuple[str, ...]
    planted: Callable[[FamilyEngine], AbstractContextManager[None]]
    """A fault to plant while they are driven."""
    fuzz: dict[str, int]
    backend: Backend = BACKENDS[PLUGIN]
    _hopeless: FamilyCell | None = field(default=None, init=False)
    """What every cell is where no engine of this model starts here."""

    def cells(self) -> dict[str, FamilyCell]:
        """Drive the cells; the next engine starts when the one before has ended."""
        platform = "cpu" if current_platform.is_cpu() else "rocm" if current_platform.is_rocm() else "cuda"
        family, started = self.model.family, time.monotonic()
        made: dict[str, FamilyCell] = {}
        if platform not in self.backend.platforms:
            reason = f"{self.backend.name} is a backend of {' and '.join(self.backend.platforms)}"
            return dict.fromkeys(self.behaviours, FamilyCell("did not run", reason, needs=self.backend.condition))
        try:
            plans = self.model.plans(platform)
        except Exception as error:  # noqa: BLE001 - as where an engine of the plans does not start
            return dict.fromkeys(self.behaviours, self._not_started(error, platform, started))
        for plan in plans:
            chosen = tuple(name for name in plan.behaviours if name in self.behaviours and family.has(name))
            if chosen and self._hopeless:
                made |= dict.fromkeys(chosen, replace(self._hopeless, seconds=0.0))
            elif chosen:
                for name, cell in self._engine(plan, chosen, platform).items():
                    held = settled(
                        cell, family.limit(platform, name), measured=self.model.measured and self.backend.ours
                    )
                    made[name] = worse(made.get(name), held)
        return made

    def _engine(self, plan: EnginePlan, chosen: tuple[str, ...], platform: str) -> dict[str, FamilyCell]:
        model = self.model
        if (reason := not_here(platform, model.family, chosen[0])) is not None:
            return dict.fromkeys(chosen, FamilyCell("did not run", reason, needs=another_platform(platform)))
        started = time.monotonic()
        with our_kernels(model.family), compiling(wanted=plan.compiled):
            try:
                if plan.compiled:
                    prepared.clear()  # what earlier engines compiled is no merit of this one's warm-up
                arguments = model.arguments(platform, plan.arguments)
                how: dict[str, Any] = {"backend": self.backend.name, "poison": plan.poison, "best": model.best}
                engine = FamilyEngine(model.checkpoint, **how, **arguments)
            except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the reason of these cells
                return dict.fromkeys(chosen, self._not_started(error, platform, started))
            return self._driven(engine, chosen)

    def _driven(self, engine: FamilyEngine, chosen: tuple[str, ...]) -> dict[str, FamilyCell]:
        model = self.model
        with engine, self.planted(engine):
            fuzz = self.fuzz
            bench = Bench(engine, model.oracle, model.family, fuzz["seed"], fuzz["examples"], heads=lambda: model.heads)
            return {name: run_cell(name, bench, model.labels(engine), self.backend) for name in chosen}

    def _not_started(self, error: Exception, platform: str, started: float) -> FamilyCell:
        traceback.print_exception(error)
        failed = FamilyCell("fail", _words(error), time.monotonic() - started, ours=isinstance(error, OURS))
        failed = settled(failed, self.model.family.limit(platform))
        if package := lacking_package(error):
            failed = replace(failed, outcome="did not run", needs=f"package:{package}")
        if failed.outcome == "did not run":
            self._hopeless = failed  # of every engine of the family
        return failed


@contextmanager
def our_kernels(family: Family) -> Iterator[None]:
    """Kernels of ours for the states of a family, where it declares them."""
    with scan.claim() if family.ssd else nullcontext(), delta.claim() if family.gdn else nullcontext():
        yield


@contextmanager
def compiling(*, wanted: bool) -> Iterator[None]:
    """Whether torch.compile works; drivers start with it off, which saves its time where it is not the matter."""
    switch = {"TORCHDYNAMO_DISABLE": "0" if wanted else "1"}
    with patch.dict(os.environ, switch), torch._dynamo.config.patch(disable=not wanted):
        yield


def lacking_package(error: Exception) -> str:
    """The package without which an engine did not start, of those that vLLM imports for a model; empty for none."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name in {"pagedkv", "families", "vllm"} else name


def run_cell(name: str, bench: Bench, labels: dict[str, str], backend: Backend = BACKENDS[PLUGIN]) -> FamilyCell:
    """Drive one behaviour, and ask the workers who served it.

    Answers of another backend of vLLM's than the one asked for say nothing about it: that cell did not run.
    """
    engine, started = bench.engine, time.monotonic()
    before = engine.non_finite()
    engine.restart()
    stand_ins.forget()  # what has stood in for a family before is no label of this one
    numbers: dict[str, float] = {}
    try:
        if not backend.ours:
            require_backend(backend, AttentionBackendEnum[backend.name].get_path(), engine.layers())
        numbers = behaviours.DRIVEN[name](bench)
        if bench.family.attention and backend.ours:
            require_served(engine.layers())
            require_codes(bench.family, engine.layers())
        if bench.family.ssd:
            numbers["scans"] = require_scans(engine.llm)
        if bench.family.gdn:
            numbers["deltas"] = require_deltas(engine.llm)
        reason, ours = "", False
    except (NotHereError, OtherBackendError) as error:
        return FamilyCell("did not run", str(error), time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the reason of this cell
        traceback.print_exc()
        reason, ours = _words(error) + _where(error, bench), isinstance(error, OURS)
    if bad := engine.non_finite() - before:
        reason = f"{bad} logits were NaN or infinite" + (f"; {reason}" if reason else "")
    outcome: Outcome = "fail" if reason else "pass"
    return FamilyCell(outcome, reason, time.monotonic() - started, numbers, labels | _labels(bench), ours=ours)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:600]
    return text if isinstance(error, WRONG) else f"{type(error).__name__}: {text}"


def _where(error: Exception, bench: Bench) -> str:
    """The first layer that is wrong, where a wrong distribution can be traced to one."""
    tokens = getattr(error, "tokens", ())
    if not tokens or bench.family.attention == "cross":
        return ""
    try:
        found = layers.first_diverging(bench.engine.llm, bench.family, bench.oracle, list(tokens))
    except Exception as trouble:  # noqa: BLE001 - the reason that is known must not be lost over one that is not
        traceback.print_exc()
        return f"; the layers could not be compared: {_words(trouble)}"
    if found is None and bench.engine.config.compilation_config.mode != CompilationMode.NONE:
        return (
            "; the same tokens as a prompt alone are right after every layer of the model uncompiled: what is "
            "compiled or captured is wrong, or what is carried between steps"
        )
    if found is None:
        return "; the same tokens as a prompt alone are right after every layer: what is carried between steps is wrong"
    return f"; the first wrong layer is {found.index} ({found.kind}), off by {found.error:.2g} of {found.tolerance:.2g}"


def _labels(bench: Bench) -> dict[str, str]:
    found: dict[str, str] = {}
    for layer in bench.engine.layers():
        found |= {key: str(layer[key]) for key in ("backend", "packing", "fp8_format") if layer[key] is not None}
        found |= {key: kernel for key, kernel in (layer["route"] or {}).items() if kernel is not None}
    if bench.family.ssd:
        found["ssd"] = f"{bench.family.ssd}.ssd_prefill"
    if bench.family.gdn:
        found["gdn"] = f"{bench.family.gdn}.gdn_prefill, gdn_decode"
    if used := stand_ins.used():
        found["stand_in"] = ", ".join(used)
    return found
