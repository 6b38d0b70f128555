# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine driven request by request and step by step, in a process that starts several, one after the other."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm import LLM, SamplingParams, envs
from vllm.config.vllm import default_breakable_cudagraph_architectures
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

from families.backends import PLUGIN
from families.probe import EngineProbe
from families.schedule import FamilyAnswer
from pagedkv.vllm_plugin.inspect import WORKER_EXTENSION, ServedLayer, build_llm, served_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm import RequestOutput

    from families.schedule import Schedule, ScheduledRequest


COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 37,  # divides neither the block nor the prompts
    "enable_prefix_caching": False,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 64,
    "seed": 0,
}
"""Arguments of every engine that is driven step by step: a small model, and chunks that end in odd places."""


def start(model: Path, *, ours: bool, backend: str = "TRITON_ATTN", **arguments: Any) -> LLM:
    """Start an engine.

    Args:
        model: Folder of the checkpoint.
        ours: Whether our plugin shall serve; else vLLM's own attention.
        backend: Which of vLLM's own. TRITON_ATTN is in every build of vLLM for GPUs, whatever libraries it has.
        **arguments: Of vLLM's `LLM`.
    """
    gc.collect()  # or what an engine that did not start has left would stay for ever
    gc.freeze()
    with _kernels_replaced_once(), _modules_stay_frozen():
        if ours:
            return build_llm(str(model), **arguments)
        if not current_platform.is_cpu():  # which takes no choice
            arguments["attention_backend"] = backend
            if drafts := arguments.get("speculative_config"):  # a drafter does not inherit it
                arguments["speculative_config"] = {"attention_backend": backend, **drafts}
        return LLM(str(model), worker_extension_cls=WORKER_EXTENSION, **arguments)


def shut_down(llm: LLM) -> None:
    """End an engine. Delete what refers to it, then `clean`."""
    with _modules_stay_frozen(collect=False):
        llm.llm_engine.engine_core.shutdown()


def clean() -> None:
    """Forget an engine that is gone, or that did not start: the next one would find its groups and its pool of graphs.

    torch frees that pool with the last graph in it, and captures no graph in a pool that it has freed.
    """
    gc.collect()
    type(current_platform)._global_graph_pool = None
    with _modules_stay_frozen(collect=False):
        cleanup_dist_env_and_memory()


@contextmanager
def _modules_stay_frozen(*, collect: bool = True) -> Iterator[None]:
    """Keep older objects frozen while vLLM collects garbage.

    vLLM freezes the heap with its engine in it, thaws it at the end, and then collects three times; each time half a
    second is spent on modules, which are no garbage. Here the engine alone is gone through, and once (`clean`).

    Args:
        collect: Whether vLLM's own collections are carried out.
    """
    skipped = ("freeze", "unfreeze") if collect else ("freeze", "unfreeze", "collect")
    nothing: dict[str, Any] = dict.fromkeys(skipped, lambda *_: 0)
    with patch.multiple(gc, **nothing):
        yield


@contextmanager
def _kernels_replaced_once() -> Iterator[None]:
    """On the CPU vLLM 0.32 replaces its Triton kernels at each start of an engine, those that it put there before too.

    For that it asks all objects of all modules for their attributes, an eighth of the time of the models' tests; those
    of llvmlite, which N-gram drafting imports, answer with AttributeError.
    """
    register: Callable[[dict[str, Any]], None] = dispatcher.register_kernels

    def once(overrides: dict[str, Any]) -> None:
        if not overrides.keys() <= dispatcher._registry.keys():
            register(overrides)

    with patch.object(dispatcher, "register_kernels", once):
        yield


def register(architecture: str) -> bool:
    """Replace the registry's promise of a model class by the class itself; call it before the engine starts.

    vLLM inspects a class of its registry in a process of its own, so as not to initialise CUDA in the parent; that
    costs 11 s on a machine that has not done it before. A driver that runs the engine itself has nothing to protect.

    Returns:
        Whether vLLM knows the architecture. Where it does not, starting the engine says so in vLLM's words.

    Raises:
        ImportError: vLLM's module of the class needs a package that is missing.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is None:
        return False
    # It is decorated when it is imported, if vLLM's configuration, which comes later here, lets graphs break off in it.
    breaks = architecture in default_breakable_cudagraph_architectures()
    with patch.dict(os.environ, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if breaks else {}):
        ModelRegistry.register_model(architecture, known.load_model_cls())
    return True


def end_with_parent() -> None:
    """From now on kill this process group, engine core and workers too, once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def as_vllm(request: ScheduledRequest) -> dict[str, Any]:
    """A request as vLLM takes it."""
    if request.speech is None:
        return {"prompt_token_ids": list(request.prompt)}
    from families.speech import SAMPLING_RATE, audio

    sound = {"prompt": "", "multi_modal_data": {"audio": (audio(request.speech), SAMPLING_RATE)}}
    return {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": list(request.prompt)}}


def sampling(request: ScheduledRequest, *, rows: bool, prompt_rows: bool, best: int | None = None) -> SamplingParams:
    """Greedy answers; with `rows` the `best` tokens of each distribution (None: all), else the two best."""
    count = -1 if best is None else best
    return SamplingParams(
        temperature=0,
        max_tokens=request.answers,
        ignore_eos=True,
        logprobs=count if rows else 2,
        prompt_logprobs=count if prompt_rows else None,
        detokenize=False,
    )


def answer_of(output: RequestOutput, *, rows: bool, best: int | None) -> FamilyAnswer:
    """What vLLM's output says; `rows` and `best` as they were asked for."""
    made = output.outputs[0]
    table = [*(output.prompt_logprobs or [None])[1:], *made.logprobs]
    both = [sorted((entry.logprob for entry in row.values()), reverse=True)[:2] for row in made.logprobs]
    kept = ids = None
    if rows:
        # vLLM gives the best ones, and beside them the prompt's own token where it is none of them.
        order = [range(len(row)) if best is None else sorted(row, key=lambda t: row[t].rank)[:best] for row in table]
        kept = torch.tensor(
            [[row[t].logprob for t in tokens] for row, tokens in zip(table, order, strict=True)]
        ).double()
        ids = None if best is None else torch.tensor(order)
    return FamilyAnswer(
        tokens=tuple(made.token_ids),
        rows=kept,
        gaps=tuple(first - second for first, second in both),
        cached=output.num_cached_tokens or 0,
        ids=ids,
    )


MOST_STEPS = 2000
"""Most steps of one schedule; more is an engine that makes no progress."""


class StuckError(Exception):
    """The engine went on stepping without finishing its requests."""


class FamilyEngine:
    """An engine that is watched. Use as a context manager: the next engine needs this one to be gone."""

    def __init__(
        self, model: Path, *, backend: str = PLUGIN, poison: bool = True, best: int | None = None, **arguments: Any
    ) -> None:
        """Start the engine.

        Args:
            model: Folder of the checkpoint.
            backend: Of `backends.yaml`.
            poison: Whether the KV pool holds NaN at the start. Where vLLM's own backend serves, it holds what vLLM puts
                there: zeros, which vLLM's kernels may read.
            best: How many tokens of a distribution come back; None for all. Of a large vocabulary all are too many.
            **arguments: Of vLLM's `LLM`.
        """
        self._best = best
        self.asked = arguments
        """What vLLM was given, which may settle on something else (`config`)."""
        envs.disable_envs_cache()  # an engine before this one has frozen what vLLM reads from the environment
        os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
        try:
            self.llm = start(model, ours=backend == PLUGIN, backend=backend, **arguments)
        except BaseException:
            clean()
            raise
        self.probe = EngineProbe(self.llm)
        self._bad = torch.zeros((), dtype=torch.int64)
        self.llm.apply_model(self._watch_logits)
        if poison and backend == PLUGIN and self.layers():
            self.llm.collective_rpc("pagedkv_poison")
        self.llm.collective_rpc("pagedkv_watch_compiler")

    def __enter__(self) -> FamilyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        shut_down(self.llm)
        del self.llm, self.probe
        clean()

    @property
    def config(self) -> Any:
        """The configuration as vLLM has settled it."""
        return self.llm.llm_engine.vllm_config

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, as inflated by vLLM."""
        return self.config.cache_config.block_size

    def layers(self) -> list[ServedLayer]:
        """What the workers say about each attention layer."""
        return served_layers(self.llm)

    def non_finite(self) -> int:
        """Logits since the start that were NaN or infinite."""
        return int(self._bad)

    def restart(self) -> None:
        """Count from here on. Where graphs are replayed, calls were counted when they were captured, and are kept."""
        self.probe.restart()
        self.llm.collective_rpc("pagedkv_watch_compiler")
        if self.config.model_config.enforce_eager:
            self.llm.collective_rpc("pagedkv_reset")

    def ask(
        self, schedule: Schedule, *, prompt_rows: bool = False, rows: bool = True, preempt_at: int | None = None
    ) -> list[FamilyAnswer]:
        """Drive a schedule to its end.

        Args:
            schedule: Requests, in any order of arrival.
            prompt_rows: Whether to return the distributions after each prompt token too. An encoder-decoder gives none.
            rows: Whether to return distributions at all; without them the two best tokens are asked for.
            preempt_at: Engine step before which everybody who runs is preempted; None leaves that to the scheduler.

        Returns:
            The answers in the order of the schedule.

        Raises:
            StuckError: It took more than MOST_STEPS steps.
        """
        internal: dict[str, str] = {}
        """vLLM's own names of the requests."""

        def add(index: int) -> None:
            params = sampling(schedule[index], rows=rows, prompt_rows=prompt_rows, best=self._best)
            internal[str(index)] = engine.add_request(str(index), as_vllm(schedule[index]), params)

        engine = self.llm.llm_engine
        try:
            got = self._drive(schedule, internal, add, preempt_at)
        except Exception:
            engine.abort_request(list(internal.values()), internal=True)  # or they haunt the next schedule
            raise
        return [answer_of(got[str(index)], rows=rows, best=self._best) for index in range(len(schedule))]

    def _drive(
        self, schedule: Schedule, internal: dict[str, str], add: Callable[[int], None], preempt_at: int | None
    ) -> dict[str, RequestOutput]:
        """Add, step and abort."""
        engine = self.llm.llm_engine
        waiting = sorted(range(len(schedule)), key=lambda index: schedule[index].arrives)
        got: dict[str, RequestOutput] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            if waiting and not engine.has_unfinished_requests():
                step = max(step, schedule[waiting[0]].arrives)
            while waiting and schedule[waiting[0]].arrives <= step:
                add(waiting.pop(0))
            if step == preempt_at:
                engine.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                got[output.request_id] = output
                leaves = schedule[int(output.request_id)].leaves
                if leaves and not output.finished and len(output.outputs[0].token_ids) >= leaves:
                    engine.abort_request([internal[output.request_id]], internal=True)
            step += 1
            if step > MOST_STEPS:
                raise StuckError(
                    f"{engine.get_num_unfinished_requests()} of {len(schedule)} requests unfinished after {step} steps"
                )
        return got

    def _watch_logits(self, model: Any) -> None:
        compute = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None:
                # Counted where the logits are: asking the device at each step would change the timing.
                self._bad = self._bad.to(logits.device) + (~torch.isfinite(logits)).sum()
            return logits

        model.compute_logits = watched
