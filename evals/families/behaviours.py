# SPDX-License-Identifier: Apache-2.0
"""Behaviours of a scheduler: what drives each one, and what shows that the engine did it. The columns of the table.

Each takes the bench of one family and returns what it measured. It raises WrongAnswerError or CompanyError when the
answers are wrong, NotDrivenError when the engine did not do what the column is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode, CUDAGraphMode

from families import judge, mtp, stand_ins
from families.plain_attention import E4M3
from families.schedule import Schedule, ScheduledRequest, ScheduleLimits, awkward_lengths, prompt, search, spoken
from families.scripted import DRAFTS, ScriptedDrafter
from pagedkv.vllm_plugin.inspect import require_warm

if TYPE_CHECKING:
    from collections.abc import Callable

    from families.engine import FamilyEngine
    from families.family import Family
    from families.oracle import Oracle
    from families.schedule import FamilyAnswer
    from pagedkv.vllm_plugin.inspect import ServedLayer


Numbers = dict[str, float]


class NotDrivenError(Exception):
    """The engine answered, but did not do what the behaviour is about."""


class NotHereError(Exception):
    """This platform cannot do it; the message says why."""


@dataclass
class Bench:
    """One engine of one family, the oracle, and what has been asked of the engine before."""

    engine: FamilyEngine
    oracle: Oracle
    family: Family
    seed: int
    examples: int
    heads: Callable[[], tuple[mtp.Head, mtp.Head]]
    """The checkpoint's own head, for who asks: it is read then."""
    _alone: dict[ScheduledRequest, FamilyAnswer] = field(default_factory=dict)

    def request(self, length: int, answers: int, *, seed: int = 1, arrives: int = 0) -> ScheduledRequest:
        """A request of the text `seed`."""
        return self.asked(prompt(length, seed, self.vocabulary), answers, seed=seed, arrives=arrives)

    def asked(self, text: tuple[int, ...], answers: int, *, seed: int, arrives: int = 0) -> ScheduledRequest:
        """A request of this text; of an encoder-decoder beside the sound `seed`."""
        if self.family.attention == "cross":
            return spoken(ScheduledRequest(text, answers, arrives, speech=seed))
        return ScheduledRequest(text, answers, arrives)

    def compare(self, schedule: Schedule, *, prompt_rows: bool = False, preempt_at: int | None = None) -> Numbers:
        """Ask the engine, and compare its answers with the oracle's."""
        listens = self.family.attention == "cross"  # an encoder-decoder gives no distributions of its prompt
        answers = self.engine.ask(schedule, prompt_rows=prompt_rows and not listens, preempt_at=preempt_at)
        return judge.compare(schedule, answers, self.oracle).numbers

    def alone(self, request: ScheduledRequest) -> FamilyAnswer:
        """What a request gets without company, with as many answers as any schedule asks for."""
        key = ScheduledRequest(request.prompt, ScheduleLimits.answers, speech=request.speech)
        if key not in self._alone:
            self._alone[key] = self.engine.ask((key,), rows=False)[0]
        return self._alone[key]

    def blocks(self, length: int) -> int:
        """Blocks of all kinds that a prompt holds; counting starts anew."""
        self.engine.probe.restart()
        self.engine.ask((self.request(length, 1),), rows=False)
        held = self.engine.probe.counts.blocks
        self.engine.probe.restart()
        return held

    @property
    def vocabulary(self) -> int:
        """Number of words, whether or not they are in a tokenizer."""
        return self.engine.config.model_config.get_vocab_size()

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answers together."""
        return self.engine.config.model_config.max_model_len

    @property
    def chunk(self) -> int:
        """Most tokens of one engine step."""
        return self.engine.config.scheduler_config.max_num_batched_tokens


def require_codes(family: Family, layers: list[ServedLayer]) -> None:
    """The workers must say that the cache holds what the family asks for: FP8 codes of this device's format, or none.

    Raises:
        NotDrivenError: A layer's cache holds something else.
    """
    for layer in layers:
        kind, form = layer["kv_dtype"], layer["fp8_format"]
        wanted = E4M3 if family.fp8_cache else None
        right = form == wanted and (getattr(torch, kind).itemsize == 1) == family.fp8_cache
        require(right, f"the cache of {layer['layer']} holds {kind} as {form}; asked for was {wanted or 'none of FP8'}")


def require(driven: bool, what: str) -> None:
    """Raise NotDrivenError unless the engine did what the behaviour is about."""
    if not driven:
        raise NotDrivenError(what)


def prefill(bench: Bench) -> Numbers:
    """A prompt in one step."""
    answers = 2 if bench.family.attention == "latent" else 1  # of MLA, ours serves decode alone
    numbers = bench.compare((bench.request(29, answers),), prompt_rows=True)
    steps = bench.engine.probe.counts.steps
    require(steps == answers, f"a prompt of 29 tokens and {answers} answers took {steps} steps")
    return numbers


def decode(bench: Bench) -> Numbers:
    """A short prompt and many answers: each step reads what the one before has written."""
    numbers = bench.compare((bench.request(5, 20),))
    require(bench.engine.probe.counts.steps == 20, f"20 answers took {bench.engine.probe.counts.steps} steps")
    return numbers


def chunked(bench: Bench) -> Numbers:
    """Prompts that end one token before, at and after the end of a chunk, and a chunk of a single token."""
    if not bench.engine.config.scheduler_config.enable_chunked_prefill:
        raise NotHereError("vLLM does not chunk prompts of this attention here")
    chunk, numbers = bench.chunk, {"max_abs_err": 0.0}
    lengths = [
        length for length in (chunk - 1, chunk + 1, 2 * chunk + 1, 3 * chunk + 20) if length + 3 <= bench.longest
    ]
    for seed, length in enumerate(lengths, start=1):
        bench.engine.probe.restart()
        one = bench.compare((bench.request(length, 3, seed=seed),), prompt_rows=True)
        chunks, steps = -(-length // chunk), bench.engine.probe.counts.steps
        require(steps == chunks + 2, f"{length} tokens in chunks of {chunk} and 3 answers took {steps} steps")
        numbers = one | {"max_abs_err": max(numbers["max_abs_err"], one["max_abs_err"])}
    return numbers


def mixed(bench: Bench) -> Numbers:
    """Requests of unlike length at once: some are in their prompt while others are in their answer."""
    lengths = [min(length, bench.longest - 8) for length in (3, 47, 96, 20)]
    numbers = bench.compare(tuple(bench.request(n, 8, seed=n, arrives=i) for i, n in enumerate(lengths)))
    seen = bench.engine.probe.counts
    require(seen.mixed > 0, f"none of {seen.steps} steps mixed prompts and answers")
    return numbers | {"mixed_steps": seen.mixed, "batch": seen.batch}


def fuzzed(bench: Bench, share: int = 1) -> Numbers:
    """Random schedules against the same requests alone; one in `share` of those that were asked for."""
    lengths = awkward_lengths(bench.engine.block_size, bench.chunk, bench.longest - ScheduleLimits.answers)
    limits = ScheduleLimits(lengths, bench.vocabulary, speech=bench.family.attention == "cross")
    examples = max(1, bench.examples // share)
    longest = bench.blocks(lengths[-1] + ScheduleLimits.answers - 1)
    free = longest + max(2, longest // 2)  # the longest request and a short one: the others wait, or preempt

    def ask(schedule: Schedule) -> list[FamilyAnswer]:
        with bench.engine.probe.crowded(free):
            return bench.engine.ask(schedule, rows=False)

    requests = search(
        limits,
        seed=bench.seed,
        examples=examples,
        ask=ask,
        alone=bench.alone,
        tie=2 * bench.oracle.tolerance(list(bench.request(bench.longest // 2, 1).prompt), audio=1).widest,
    )
    seen = bench.engine.probe.counts
    require(seen.batch > 1, f"{examples} schedules never had two requests in one step")
    return {"schedules": examples, "requests": requests, "preemptions": seen.preemptions}


def preempted_by_force(bench: Bench, schedule: Schedule, *, at: int) -> Numbers:
    """Make the scheduler preempt at a step. States do not grow, so no pool is short in the middle of an answer."""
    numbers = bench.compare(schedule, preempt_at=at)
    preemptions = bench.engine.probe.counts.preemptions
    require(preemptions > 0, "no request was preempted though the scheduler was made to")
    return numbers | {"preemptions": preemptions}


def preempted(bench: Bench) -> Numbers:
    """A pool in which two prompts fit, and one block: who wants to go on takes the other's blocks and states."""
    block = bench.engine.block_size
    if not bench.family.attention:
        return preempted_by_force(bench, tuple(bench.request(40, 6, seed=seed) for seed in (1, 2, 3)), at=5)
    length = block * max(1, bench.longest // 2 // block)
    held = bench.blocks(length)
    with bench.engine.probe.crowded(2 * held + 1):
        numbers = bench.compare(tuple(bench.request(length, 6, seed=seed) for seed in (1, 2, 3)))
    preemptions = bench.engine.probe.counts.preemptions
    require(
        preemptions > 0, f"3 prompts of {length} tokens ({held} blocks each) in {2 * held + 1} blocks: nobody preempted"
    )
    return numbers | {"preemptions": preemptions}


def reused(bench: Bench) -> Numbers:
    """One request after the other in a small pool, until state slots come back: none may see what lay there before."""
    numbers: Numbers = {"max_abs_err": 0.0}
    with bench.engine.probe.crowded(bench.blocks(24) + 1):
        for seed in range(1, 13):
            one = bench.compare((bench.request(20 + seed % 3, 2, seed=seed),))
            numbers = one | {"max_abs_err": max(numbers["max_abs_err"], one["max_abs_err"])}
            if bench.engine.probe.counts.reused >= 3:
                break
    reuses = bench.engine.probe.counts.reused
    require(reuses >= 3, f"after {seed} requests only {reuses} slots had come back")
    return numbers | {"reuses": reuses}


def prefixes(bench: Bench) -> Numbers:
    """Prompts that begin alike, one after the other and at once, then random schedules over shared prefixes."""
    if not bench.engine.config.cache_config.enable_prefix_caching:
        raise NotHereError("vLLM turns the prefix cache off here")
    block = bench.engine.block_size
    length = min(2 * block + 5, bench.longest - 12)
    first = bench.request(length, 3)
    numbers = bench.compare((first,))
    cached = 0
    for schedule in (
        (bench.request(length + 7, 3), bench.request(length, 4, arrives=1)),
        (bench.request(length, 3), bench.request(length - 3, 3, seed=2), bench.request(length + 3, 3, arrives=2)),
    ):
        answers = bench.engine.ask(schedule)
        judge.compare(schedule, answers, bench.oracle)
        cached += sum(answer.cached for answer in answers)
    require(cached >= block, f"of prompts that share {length} tokens the cache had {cached}, a block is {block}")
    return numbers | {"cached_tokens": cached} | fuzzed(bench, share=2)


def again(bench: Bench) -> Numbers:
    """The second engine of a process answers as the first did."""
    return bench.compare((bench.request(29, 1),), prompt_rows=True) | bench.compare((bench.request(5, 8, seed=2),))


def long_blocks(bench: Bench) -> Numbers:
    """Blocks as large as vLLM makes them for big states: a request that crosses from one into the next."""
    block = bench.engine.block_size
    return bench.compare((bench.request(block - 3, 6), bench.request(20, 6, seed=2))) | {"block_size": block}


def drafted(bench: Bench) -> Numbers:
    """N-gram speculative decoding: drafts are taken or thrown away, and states go back to the last accepted token."""
    words = prompt(6, 1, bench.vocabulary)
    numbers = bench.compare(
        (bench.asked((words * 8)[: bench.longest - 24], 20, seed=1), bench.request(23, 12, seed=2, arrives=2))
    )
    seen = bench.engine.probe.counts
    require(seen.drafted > 0, "nothing was drafted")
    taken = sum(one.taken for one in seen.verified)
    return numbers | {"drafted": seen.drafted, "taken": taken, "steps": seen.steps}


def verified(bench: Bench) -> Numbers:
    """Scripted drafts: 2 to 8 tokens are verified across the edges of blocks, with right and wrong drafts, twice.

    Each request is first answered without drafts, which writes the script. With a prefix cache the second turn begins
    from cached blocks.
    """
    block, answers = bench.engine.block_size, 14
    lengths = [block - 3, block, block + 1, 2 * block - 7]
    schedule = tuple(bench.request(length, answers, seed=51 + number) for number, length in enumerate(lengths))
    ScriptedDrafter.texts, ScriptedDrafter.verified = [], set()
    plain = bench.engine.ask(schedule)
    judge.compare(schedule, plain, bench.oracle)
    ScriptedDrafter.texts = [(*one.prompt, *got.tokens) for one, got in zip(schedule, plain, strict=True)]
    bench.engine.probe.restart()
    numbers: Numbers = {"cached_tokens": 0}
    for _ in range(2):
        got = bench.engine.ask(schedule)
        numbers |= judge.compare(schedule, got, bench.oracle).numbers
        numbers["cached_tokens"] += sum(one.cached for one in got)
    seen = ScriptedDrafter.verified
    require(
        {count for count, _ in seen} == set(range(1, DRAFTS + 1)), f"numbers of drafts and right ones: {sorted(seen)}"
    )
    require(any(0 < right < count for count, right in seen), "no draft was taken and the next thrown away")
    require(bench.engine.probe.counts.drafted > 0, "nothing was drafted")
    if bench.engine.config.cache_config.enable_prefix_caching:
        require(numbers["cached_tokens"] >= block, f"the cache had {numbers['cached_tokens']} tokens")
    return numbers | {"drafted": bench.engine.probe.counts.drafted, "steps": bench.engine.probe.counts.steps}


def predicted(bench: Bench) -> Numbers:
    """Drafts of the checkpoint's own head (MTP), whose attention layer has pages in the model's pool.

    The answers must be the model's, whatever was drafted. What was taken and what was thrown away must be what
    transformers drafts with the same head: a layer of it that read wrong pages would draft something else.
    """
    schedule = tuple(
        ScheduledRequest(prompt(length, seed, bench.vocabulary), mtp.ANSWERS, arrives)
        for arrives, (length, seed) in enumerate((*mtp.LEARNT, (47, 3)))
    )
    answers = bench.engine.ask(schedule)
    seen = bench.engine.probe.counts.verified
    numbers = judge.compare(schedule, answers, bench.oracle).numbers
    names = [layer["layer"] for layer in bench.engine.layers()]
    require(any("mtp" in name for name in names), f"no attention layer of a drafter is among {', '.join(names)}")
    texts = {one.prompt: [*one.prompt, *got.tokens] for one, got in zip(schedule, answers, strict=True)}
    numbers |= mtp.compare(bench.oracle, bench.heads(), texts, seen)
    require(numbers["taken"] > 0, f"none of {numbers['drafted']} drafts was taken")
    require(numbers["parted"] > 0, "no draft was taken and the next thrown away")
    return numbers


def state_dtype(bench: Bench) -> Numbers:
    """Keep states in the dtype that was asked for."""
    asked = bench.engine.asked["mamba_ssm_cache_dtype"]
    got = str(bench.engine.config.cache_config.mamba_ssm_cache_dtype)
    if got != asked:
        raise NotHereError(f"vLLM keeps states in {got} here, {asked} was asked for")
    request = bench.request(bench.chunk - 5, 8)  # one step, so that states are rounded where the oracle rounds them
    answers = bench.engine.ask((request,))
    tokens = [*request.prompt, *answers[0].tokens[:-1]]
    # Our stand-in for the update of states rounds; vLLM's own may cut the lower bits off instead.
    vllm_updates = stand_ins.UPDATE not in stand_ins.used()
    cut = "ssm" in bench.family.states and vllm_updates and stand_ins.states_are_cut()
    slack = bench.oracle.state_rounding(tokens, len(request.prompt), asked, cut=cut)
    return judge.compare((request,), answers, bench.oracle, slack=slack).numbers


def padded(bench: Bench) -> Numbers:
    """Three requests in a graph that was captured for four."""
    sizes: Any = bench.engine.config.compilation_config.cudagraph_capture_sizes
    if not sizes:
        raise NotHereError("this platform captures no graphs, so no batch is padded")
    require(4 in sizes and 3 not in sizes, f"graphs were captured for {sizes}")
    return bench.compare(tuple(bench.request(20, 12, seed=seed) for seed in (1, 2, 3))) | {
        "batch": bench.engine.probe.counts.batch
    }


def production(bench: Bench) -> Numbers:
    """An engine as in production: compiled, with vLLM's own max_num_seqs and prefix cache.

    Prompts end exactly with a block or a chunk, come again, share a prefix with others, and are under way when others
    are preempted. The second time a prompt hits its whole blocks but for its last token, as `pagedkv.routing` says; a
    prefix that several share is hit by the third who has it.
    """
    config, block, chunk = bench.engine.config, bench.engine.block_size, bench.chunk
    compiled = config.compilation_config.mode != CompilationMode.NONE
    # Some classes, as Kimi-Linear's, vLLM does not compile: it captures graphs that break off where a layer attends.
    broken_off = is_breakable_cudagraph_enabled()
    require(compiled != config.model_config.enforce_eager or broken_off, "the model is not compiled")
    sequences = config.scheduler_config.max_num_seqs
    require(sequences >= min(256, chunk), f"max_num_seqs is {sequences}, which is not vLLM's own")
    cached = config.cache_config.enable_prefix_caching
    if cached and bench.family.states:
        require(config.cache_config.mamba_cache_mode == "align", f"states: {config.cache_config.mamba_cache_mode}")
    numbers: Numbers = {"hits": 0, "compiled": compiled}
    if bench.family.attention == "cross":
        # vLLM traces a decoder beside an encoder at its first decode step, and of a step of one token torch makes a
        # graph for one token. vLLM 0.32 then gives it larger steps too: with its own attention a CPU never answers.
        bench.compare(tuple(bench.request(12, 6, seed=seed) for seed in (51, 52, 53)))
    asked: list[ScheduledRequest] = []
    collected: list[FamilyAnswer] = []
    lengths = sorted({block, 2 * block, 3 * block, 3 * block + 1, chunk, 2 * chunk})
    for seed, length in enumerate((n for n in lengths if n + 3 <= bench.longest), start=11):
        for turn in range(2):
            asked.append(bench.request(length, 3, seed=seed))
            answers = bench.engine.ask((asked[-1],))
            collected += answers
            if cached:
                expected = (length - 1) // block * block * turn
                require(
                    answers[0].cached == expected,
                    f"turn {turn} of {length} tokens in blocks of {block} hit {answers[0].cached}; expected {expected}",
                )
                numbers["hits"] += expected
    # All requests are compared at once: the median of one request's three rows would be too unsteady.
    numbers |= judge.compare(tuple(asked), collected, bench.oracle).numbers
    return numbers | preempted_under_way(bench) | compiled_late(bench)


def compiled_late(bench: Bench) -> Numbers:
    """Demand that no kernel of ours was compiled while the engine served; returns variants of others' by name."""
    return {f"late {name.rpartition('.')[2]}": count for name, count in require_warm(bench.engine.llm).items()}


def preempted_under_way(bench: Bench) -> Numbers:
    """Three prompts that go on into another block, in the largest pool in which one of them is preempted."""
    if not bench.family.attention:
        schedule = tuple(bench.request(40, 6, seed=seed, arrives=seed - 31) for seed in (31, 32, 33))
        return preempted_by_force(bench, schedule, at=4)
    block = bench.engine.block_size
    length = max(block - 3, block * (bench.longest // 2 // block) - 3)  # its answers go on into a block more
    held = bench.blocks(length + 7)
    for text, free in enumerate(range(3 * held - 1, held - 1, -1)):  # it holds one of them to its end
        schedule = tuple(bench.request(length, 8, seed=31 + 3 * text + number) for number in range(3))  # none is cached
        with bench.engine.probe.crowded(free):
            numbers = bench.compare(schedule)
        if bench.engine.probe.counts.preemptions:
            return numbers | {"preemptions": bench.engine.probe.counts.preemptions, "pool": free}
    raise NotDrivenError(f"3 prompts of {length} tokens, {held} blocks each: in no pool was one preempted")


def graphs(bench: Bench) -> Numbers:
    """The graphs that vLLM captures by itself: whole ones of decode steps, pieces of all others."""
    compilation = bench.engine.config.compilation_config
    mode = compilation.cudagraph_mode
    compiled = compilation.mode == CompilationMode.VLLM_COMPILE
    require(compiled or is_breakable_cudagraph_enabled(), f"compiled as {compilation.mode}")
    # Of an encoder-decoder vLLM 0.32 captures decode steps alone, whatever it is asked for (config/vllm.py: "do not
    # support FULL_AND_PIECEWISE"). Any other mode there, or here, is a choice that was lost.
    whole = bench.family.attention == "cross"
    wanted = CUDAGraphMode.FULL_DECODE_ONLY if whole else CUDAGraphMode.FULL_AND_PIECEWISE
    require(mode == wanted, f"vLLM resolved its graphs to {mode}, not {wanted.name}")
    return mixed(bench) | {"captured": len(compilation.cudagraph_capture_sizes)} | compiled_late(bench)


DRIVEN: dict[str, Callable[[Bench], Numbers]] = {
    "prefill": prefill,
    "decode": decode,
    "chunked": chunked,
    "mixed": mixed,
    "fuzz": fuzzed,
    "preempt": preempted,
    "reuse": reused,
    "prefix": prefixes,
    "again": again,
    "padded": padded,
    "blocks": long_blocks,
    "state": state_dtype,
    "spec": drafted,
    "verify": verified,
    "mtp": predicted,
    "production": production,
    "graphs": graphs,
}
"""Columns of the table."""
