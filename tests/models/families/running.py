"""One vLLM engine in this process, driven request by request and step by step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from models.families.answers import answer_of, as_vllm
from models.families.probe import Probe
from models.process import clean, shut_down, starting
from vllm import LLM, SamplingParams, envs
from vllm.platforms import current_platform

from pagedkv.vllm_plugin.inspect import WORKER_EXTENSION, ServedLayer, build_llm, served_layers

if TYPE_CHECKING:
    from pathlib import Path

    from models.families.answers import Answer
    from models.families.schedule import Schedule
    from vllm import RequestOutput

MOST_STEPS = 2000
"""Of one schedule; more is an engine that makes no progress."""


class StuckError(Exception):
    """The engine went on stepping without finishing its requests."""


class Engine:
    """An engine that is watched. Use as a context manager: the next engine needs this one to be gone."""

    def __init__(
        self, model: Path, *, ours: bool = True, poison: bool = True, best: int | None = None, **arguments: Any
    ) -> None:
        """Start it.

        Args:
            model: Folder of the checkpoint.
            ours: Whether our plugin shall serve.
            poison: Whether the KV pool holds NaN at the start.
            best: How many tokens of a distribution come back; None for all. Of a large vocabulary all are too many.
            **arguments: Of vLLM's `LLM`.
        """
        self._best = best
        envs.disable_envs_cache()  # an engine before this one has frozen what vLLM reads from the environment
        os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
        try:
            with starting():
                self.llm = _start(model, ours=ours, **arguments)
        except BaseException:
            clean()
            raise
        self.probe = Probe(self.llm)
        self._bad = torch.zeros((), dtype=torch.int64)
        self.llm.apply_model(self._watch_logits)
        if poison and self.layers():
            self.llm.collective_rpc("pagedkv_poison")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        shut_down(self.llm)
        del self.llm, self.probe
        clean()

    @property
    def config(self) -> Any:
        """vLLM's configuration, as it has become."""
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
        if self.config.model_config.enforce_eager:
            self.llm.collective_rpc("pagedkv_reset")

    def ask(
        self, schedule: Schedule, *, prompt_rows: bool = False, rows: bool = True, preempt_at: int | None = None
    ) -> list[Answer]:
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
        try:
            got = self._drive(schedule, internal, prompt_rows=prompt_rows, rows=rows, preempt_at=preempt_at)
        except Exception:
            self.llm.llm_engine.abort_request(list(internal.values()), internal=True)  # or they haunt the next schedule
            raise
        return [answer_of(got[str(index)], rows=rows, best=self._best) for index in range(len(schedule))]

    def _drive(
        self,
        schedule: Schedule,
        internal: dict[str, str],
        *,
        prompt_rows: bool,
        rows: bool,
        preempt_at: int | None,
    ) -> dict[str, RequestOutput]:
        """Add, step and abort; `internal` gets vLLM's own names of the requests."""
        asked = -1 if self._best is None else self._best
        engine = self.llm.llm_engine
        waiting = sorted(range(len(schedule)), key=lambda index: schedule[index].arrives)
        got: dict[str, RequestOutput] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            if waiting and not engine.has_unfinished_requests():
                step = max(step, schedule[waiting[0]].arrives)
            while waiting and schedule[waiting[0]].arrives <= step:
                index = waiting.pop(0)
                params = SamplingParams(
                    temperature=0,
                    max_tokens=schedule[index].answers,
                    ignore_eos=True,
                    logprobs=asked if rows else 2,
                    prompt_logprobs=asked if prompt_rows else None,
                    detokenize=False,
                )
                internal[str(index)] = engine.add_request(str(index), as_vllm(schedule[index]), params)
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


def _start(model: Path, *, ours: bool, **arguments: Any) -> LLM:
    if ours:
        return build_llm(str(model), **arguments)
    # The CPU platform takes no choice; on GPUs this backend is in every build of vLLM, whatever libraries it has.
    backend = {} if current_platform.is_cpu() else {"attention_backend": "TRITON_ATTN"}
    return LLM(str(model), worker_extension_cls=WORKER_EXTENSION, **backend, **arguments)
