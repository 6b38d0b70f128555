# SPDX-License-Identifier: Apache-2.0
"""Watch the scheduler of an engine: preemptions, mixed steps, and which blocks went from one request to another.

A behaviour that was not driven proves nothing, so each one demands evidence from here. Engines run in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0), where the scheduler can be watched.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

NULL_BLOCK = 0
"""Stands in a block table where a request needs none."""


@dataclass(frozen=True)
class Verified:
    """Drafts of one request that the model has verified in one step."""

    prompt: tuple[int, ...]
    """Prompt of the request."""
    answered: int
    """Tokens that it had got before."""
    drafts: int
    taken: int


@dataclass
class ProbeCounts:
    """Since the last `Probe.restart`."""

    steps: int = 0
    mixed: int = 0
    """Steps in which one request was in its prompt and another in its answer."""
    batch: int = 0
    """Most requests of one step."""
    preemptions: int = 0
    drafted: int = 0
    """Tokens proposed by a drafter and verified."""
    verified: list[Verified] = field(default_factory=list)
    """Counts for each request of each step, once the answer has come."""
    blocks: int = 0
    """Most blocks that one request held."""
    owners: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Requests that held a state block; of a model without states, an attention block."""

    @property
    def reused(self) -> int:
        """How many times a block went to another request."""
        return sum(len(requests) - 1 for requests in self.owners.values())


class EngineProbe:
    """Watches the scheduler of an engine from its start on."""

    def __init__(self, llm: LLM) -> None:
        self.counts = ProbeCounts()
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        states = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        self._groups = states or list(range(len(groups)))
        schedule, preempt = self._scheduler.schedule, self._scheduler._preempt_request
        update = self._scheduler.update_from_output

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._note(output)
            return output

        def watched_preempt(*args: Any, **kwargs: Any) -> Any:
            self.counts.preemptions += 1
            return preempt(*args, **kwargs)

        def watched_update(scheduled: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_verified(scheduled, made)
            return update(scheduled, made, *args, **kwargs)

        self._scheduler.schedule = watched_schedule
        self._scheduler.update_from_output = watched_update
        self._scheduler._preempt_request = watched_preempt

    def restart(self) -> None:
        """Forget what was seen."""
        self.counts = ProbeCounts()

    @contextmanager
    def crowded(self, free: int) -> Iterator[None]:
        """Leave so many blocks of the pool to requests. The others are held as if a request had them."""
        pool = self._scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - free))
        try:
            yield
        finally:
            pool.free_blocks(held)

    def _note(self, output: Any) -> None:
        if not output.num_scheduled_tokens:
            return
        seen, requests = self.counts, self._scheduler.requests
        seen.steps += 1
        seen.batch = max(seen.batch, len(output.num_scheduled_tokens))
        seen.drafted += sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        in_prompt = {before[name] < requests[name].num_prompt_tokens for name in before if name in requests}
        seen.mixed += len(in_prompt) == 2
        for name in output.num_scheduled_tokens:
            blocks = self._scheduler.kv_cache_manager.get_block_ids(name)
            seen.blocks = max(seen.blocks, sum(block != NULL_BLOCK for group in blocks for block in group))
            for group in self._groups:
                for block in blocks[group]:
                    if block != NULL_BLOCK:
                        seen.owners[block].add(name)

    def _note_verified(self, scheduled: Any, made: Any) -> None:
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            request = self._scheduler.requests.get(name)
            if request is None or request.is_finished() or not made.sampled_token_ids:
                continue
            if got := made.sampled_token_ids[made.req_id_to_index[name]]:
                whose = tuple(request.prompt_token_ids)
                self.counts.verified.append(Verified(whose, request.num_output_tokens, len(drafts), len(got) - 1))
