# SPDX-License-Identifier: Apache-2.0
"""Work out how a hybrid fits the memory of its GPUs in vLLM: blocks, states, sequences, and what a prefix cache hits.

The arithmetic is vLLM 0.32's (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`); tests hold it against the
numbers that the installed vLLM computes. A state and a block of attention are one page; layers form groups of equal
size, and one block of the pool holds a page for each layer of a group.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pagedkv.arch import ARCHES
from pagedkv.errors import InvalidFileError, MisuseError

from .explain import Explanation, as_data, config_dtype, explain, shared_state, token_bytes, wrap
from .model_config import layer_kinds

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from .explain import Deployment
    from .model_config import Config, Kind, State

GIB = 1 << 30

GPUS: dict[str, tuple[str, float | None]] = {
    "MI100": ("gfx908", 32.0),
    "MI250X": ("gfx90a", 64.0),
    "MI210": ("gfx90a", 64.0),
    "MI300X": ("gfx942", 192.0),
    "MI308X": ("gfx942", 192.0),
    "MI325X": ("gfx942", 256.0),
    "MI300A": ("gfx942", None),
    "MI355X": ("gfx950", 288.0),
    "MI350X": ("gfx950", 288.0),
    "RX 6900 XT": ("gfx1030", 16.0),
    "RX 7900 XTX": ("gfx1100", 24.0),
    "RX 7900 XT": ("gfx1100", 20.0),
    "PRO W7900": ("gfx1100", 48.0),
    "RX 7800 XT": ("gfx1101", 16.0),
    "RX 7600": ("gfx1102", 8.0),
    "780M": ("gfx1103", None),
    "890M": ("gfx1150", None),
    "8060S": ("gfx1151", None),
    "RX 9060 XT": ("gfx1200", 16.0),
    "RX 9070 XT": ("gfx1201", 16.0),
    "AI PRO R9700": ("gfx1201", 32.0),
    "H200": ("sm_90", 139.8),
    "H100": ("sm_90", 79.1),
}
"""GPU model: arch, and GiB of memory of one device (vendor data sheets; of an MI250X one die; NVIDIA's as the driver
gives them). None is an APU, whose GPU has as much as firmware and driver give it. The first of an arch is what `--arch`
alone means."""

ANY = "any"
"""Name of no arch: the arithmetic alone, for a memory size."""

UTILIZATION = 0.92
"""vLLM's default `gpu_memory_utilization`."""

SHARED = (512, 1024, 2048, 4096, 8192, 32768)
"""Tokens that two prompts share, of the table of hits."""


class NotAHybridError(InvalidFileError):
    """No recurrent layer that is described here: nothing of the model is decided by the size of a state."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            f"{config.path}: model type {config.model_type} has no recurrent layer that is described here, so "
            "its blocks are as large as asked for and max_num_seqs has no limit but memory; fit is for hybrids. "
            "Which kernel serves it: python -m pagedkv.routing explain --help"
        )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How the engine is started, beyond what `Deployment` says."""

    gpu: str
    """Name in `GPUS`, or of its arch."""
    memory: float
    """GiB of one GPU."""
    weights: float
    """GiB of the weights of the whole model."""
    utilization: float = UTILIZATION
    reserve: float = 4.0
    """GiB of a GPU for activations and graphs. vLLM measures them when it starts; this is an assumption."""
    prefix_cache: bool | None = None
    """Whether prefixes are cached, in vLLM's `mamba_cache_mode` "align" ("none" without); None is vLLM's default: of
    models with attention alone."""
    max_num_seqs: int | None = None
    """None is vLLM's default for a server."""

    @property
    def sequences(self) -> int:
        """Sequences at once that the engine is started for."""
        return self.max_num_seqs or (1024 if self.memory >= 70 else 256)


@dataclass(frozen=True)
class FitProblem:
    """Why the engine would not start, and what to set."""

    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Pages:
    """How vLLM lays the layers of a hybrid into one pool, on one rank."""

    block_size: int
    """Tokens of a block of attention."""
    token_bytes: int
    """Bytes of a token in one attention layer; 0 where there is none."""
    state_bytes: int
    """Bytes of one sequence in one recurrent layer."""
    page_bytes: int
    """Bytes of one layer in one block of the pool."""
    group_layers: int
    """Most layers of a group."""
    attention_groups: int
    state_groups: int
    states: int
    """Blocks that a sequence holds in each group of recurrent layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool: a page of each layer of a group."""
        return self.page_bytes * self.group_layers

    @property
    def sequence_state_bytes(self) -> int:
        """What the recurrent layers of one rank keep of one sequence, copies for the prefix cache and drafts too."""
        return self.states * self.state_groups * self.block_bytes

    def held(self, tokens: int) -> int:
        """Blocks of the pool that a sequence of so many tokens holds."""
        return self.states * self.state_groups + self.attention_groups * -(-tokens // self.block_size)


@dataclass(frozen=True)
class Fit:
    """What becomes of a hybrid on such GPUs."""

    explanation: Explanation
    service: Budget
    pages: Pages
    cache_bytes: int
    """Bytes of the pool on each GPU."""
    num_blocks: int
    """Blocks of the pool; vLLM keeps one of them back."""
    max_model_len: int
    prefix_unit: int | None
    """Tokens of which a prefix cache hits whole multiples; None without one."""
    problems: tuple[FitProblem, ...] = ()

    @property
    def full_sequences(self) -> float:
        """Sequences of `max_model_len` tokens that the pool holds at once, as vLLM reports its concurrency."""
        return self.num_blocks / self.pages.held(self.max_model_len)

    def running(self, tokens: int) -> int:
        """Sequences of so many tokens that run at once without one being preempted."""
        return max(0, self.num_blocks - 1) // self.pages.held(tokens)

    def hit(self, shared: int) -> int:
        """Tokens that a prompt takes from the cache, of `shared` that it begins with like an earlier one.

        The last token of a prompt is always computed, so a prompt that is an earlier one again shares one less.
        """
        return shared // self.prefix_unit * self.prefix_unit if self.prefix_unit else 0


def fit(config: Config, deployment: Deployment, service: Budget) -> Fit:
    """Work out how a hybrid fits.

    Args:
        config: Of the model.
        deployment: Its ranks and dtypes; `max_num_seqs` and `num_blocks` are worked out here.
        service: Memory, and how the engine is started.

    Raises:
        NotAHybridError: The model has no recurrent layer that is described here.
        InvalidFileError: The config does not say what its layers are.
        MisuseError: The deployment contradicts the model.
    """
    kinds = layer_kinds(config)
    dtype = deployment.dtype or config_dtype(config)
    state = shared_state(config, kinds, deployment, dtype)
    if state is None:
        raise NotAHybridError(config)
    deployment = replace(deployment, max_num_seqs=service.sequences)
    explanation = explain(config, deployment)
    attending = [kind for kind in kinds if kind.keeps in {"cache", "latent"}]
    if len(attending) > 1 or any(kind.window for kind in attending):
        raise config.error("windowed layers or several kinds of attention beside recurrent layers are not described")
    bytes_of_a_token = token_bytes(attending[0], deployment, dtype) if attending else 0
    caches = bool(attending) if service.prefix_cache is None else service.prefix_cache
    pages = lay_out(explanation.block_size, bytes_of_a_token, state, kinds, drafts=deployment.drafts, align=caches)
    left = service.memory * service.utilization - service.weights / deployment.tp - service.reserve
    cache = max(0, int(left * GIB))
    num_blocks = cache // pages.block_bytes
    longest = _longest(config, attending, deployment)
    if num_blocks:
        explanation = explain(config, replace(deployment, num_blocks=num_blocks))
    unit = pages.block_size if caches else None
    made = Fit(explanation, service, pages, cache, num_blocks, longest, unit)
    return replace(made, problems=tuple(_problems(made)))


def lay_out(
    block_size: int, bytes_of_a_token: int, state: State, kinds: tuple[Kind, ...], *, drafts: int, align: bool
) -> Pages:
    """Lay the layers of a hybrid into one pool.

    Args:
        block_size: Tokens of a block of attention.
        bytes_of_a_token: In one attention layer of one rank; 0 without attention.
        state: Of one recurrent layer of one rank.
        kinds: The model's layers.
        drafts: Tokens that are drafted a step.
        align: Whether states are cached at the edges of blocks (`mamba_cache_mode` "align").
    """
    states = sum(kind.count for kind in kinds if kind.keeps == "state")
    attention = sum(kind.count for kind in kinds if kind.keeps in {"cache", "latent"})
    counts = [count for count in (attention, states) if count]
    # The larger kind is cut into groups of the smaller one's size, unless hardly larger: then that one is padded.
    group = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = {count: -(-count // group) for count in counts}
    # Beside a running state: the one that it goes on from and, of Mamba-2, one at the last edge of a block of a prompt.
    copies = (1 + (state.name in CHECKPOINTED)) if align else 0
    return Pages(
        block_size=block_size,
        token_bytes=bytes_of_a_token,
        state_bytes=state.bytes,
        page_bytes=max(state.bytes, bytes_of_a_token * block_size),
        group_layers=max(-(-count // groups[count]) for count in counts),
        attention_groups=groups.get(attention, 0),
        state_groups=groups[states],
        states=1 + copies + drafts,
    )


CHECKPOINTED = {"Mamba-2"}
"""Recurrences of which vLLM 0.32 saves a state in the middle of a prompt."""


def weights_of(folder: Path) -> float | None:
    """Return the GiB of the safetensors files of a model's folder; None where it holds none."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    return sum(sizes) / GIB if sizes else None


def gpu_of(arch: str, name: str | None, memory: float | None) -> tuple[str, str, float]:
    """Return an arch, a GPU model of it (the arch itself where only the memory is known), and its GiB.

    Args:
        arch: A gfx or sm name, or `ANY`.
        name: GPU model in any spelling, or None.
        memory: GiB that the caller gives, or None.

    Raises:
        MisuseError: There is no such arch or GPU, they contradict each other, or nothing says how much memory it has.
    """
    arches = dict.fromkeys([ANY, *(of for of, _ in GPUS.values()), *ARCHES])
    if arch not in arches:
        raise MisuseError(f"--arch: got {arch}; expected one of {', '.join(arches)} (any with --memory GIB).")
    names = {_spelt(gpu): gpu for gpu in GPUS}
    if name is not None and _spelt(name) not in names:
        raise MisuseError(f"--gpu: got {name}; expected one of {', '.join(GPUS)}, or --memory GIB.")
    if name is None and memory is not None:
        return arch, "GPU" if arch == ANY else arch, memory
    known = [gpu for gpu, (of, _) in GPUS.items() if of == arch]
    if name is None and not known:
        of_arch = "" if arch == ANY else f", and no GPU model of {arch} is known here"
        raise MisuseError(f"neither --gpu nor --memory is given{of_arch}", remedy="give --gpu NAME or --memory GIB")
    chosen = known[0] if name is None else names[_spelt(name)]
    of, size = GPUS[chosen]
    if arch not in {ANY, of}:
        raise MisuseError(f"--gpu: got {chosen}, which is {of}; expected one of {arch}: {', '.join(known) or 'none'}.")
    if memory is not None and size is not None:
        raise MisuseError(f"--memory: got one beside --gpu {chosen}, which has {size:g} GiB; expected one of the two.")
    found = size if memory is None else memory
    if found is None:
        raise MisuseError(
            f"--memory: the GPU of an APU ({chosen}) has as much memory as firmware and driver give it; give "
            "--memory GIB, as torch.cuda.mem_get_info() says."
        )
    return of, chosen, found


def _spelt(name: str) -> str:
    return name.replace(" ", "").replace("-", "").lower()


def _longest(config: Config, attending: list[Kind], deployment: Deployment) -> int:
    own = attending[0].max_seq_len if attending else None
    found = deployment.max_seq_len or own
    if found is None:
        found = config.integer("max_position_embeddings", "model_max_length", default=0) if attending else 0
    if not found:
        raise MisuseError("--max-model-len: the config names no longest sequence; give one.")
    return found


def _problems(made: Fit) -> Iterator[FitProblem]:
    """What stops the engine, each with what to set."""
    service, pages, tp = made.service, made.pages, made.explanation.deployment.tp
    usable = made.num_blocks - 1
    if usable < pages.held(1):
        yield FitProblem(
            f"{service.weights / tp:.1f} GiB of weights a rank and {service.reserve:.1f} GiB of reserve leave "
            f"{made.cache_bytes / GIB:.1f} GiB of {service.memory * service.utilization:.1f} for the pool, and one "
            f"sequence needs {(pages.held(1) + 1) * pages.block_bytes / GIB:.3f}",
            "more ranks (--tp), a GPU with more memory, or --gpu-memory-utilization nearer to 1",
        )
        return
    if pages.held(made.max_model_len) > usable:
        tokens = (usable - pages.states * pages.state_groups) // max(1, pages.attention_groups) * pages.block_size
        yield FitProblem(
            f"a sequence of {made.max_model_len} tokens needs {pages.held(made.max_model_len)} blocks, and the pool "
            f"has {usable}",
            f"--max-model-len {tokens} at most, or more memory",
        )
    if service.sequences > made.num_blocks:
        yield FitProblem(
            f"max_num_seqs ({service.sequences}) exceeds available Mamba cache blocks ({made.num_blocks}), which vLLM "
            "refuses where it captures full graphs",
            f"--max-num-seqs {made.num_blocks} at most; {made.running(pages.block_size)} run at once while each has up "
            f"to {pages.block_size} tokens",
        )


def fit_data(made: Fit) -> dict[str, object]:
    """Return the fit for JSON."""
    pages = made.pages
    lengths = sorted({pages.block_size, *(n for n in SHARED if n <= made.max_model_len), made.max_model_len})
    return {
        **as_data(made.explanation),
        "service": asdict(made.service),
        "fits": not made.problems,
        "problems": [asdict(problem) for problem in made.problems],
        "pages": {
            **asdict(pages),
            "block_bytes": pages.block_bytes,
            "sequence_state_bytes": pages.sequence_state_bytes,
        },
        "cache_bytes": made.cache_bytes,
        "num_blocks": made.num_blocks,
        "greatest_max_num_seqs": made.num_blocks,
        "max_model_len": made.max_model_len,
        "full_sequences": made.full_sequences,
        "running": {str(tokens): made.running(tokens) for tokens in lengths},
        "prefix_unit": made.prefix_unit,
        "hits": {str(tokens): made.hit(tokens) for tokens in SHARED},
    }


def format_fit(made: Fit, path: str | os.PathLike[str]) -> str:
    """Return what a person reads."""
    service, pages, explanation = made.service, made.pages, made.explanation
    tp = explanation.deployment.tp
    data = fit_data(made)
    lines = wrap(f"{explanation.model_type} ({path}) on {tp} x {service.gpu}, {service.memory:g} GiB each", 0)
    lines += _row("attention block", f"{pages.block_size} tokens: {explanation.block_reason}")
    lines += _row(
        "states",
        f"{pages.state_bytes} bytes of a sequence in each recurrent layer; {pages.sequence_state_bytes} in all, as "
        f"{pages.states} x {pages.state_groups} blocks of the pool",
    )
    lines += _row(
        "pool",
        f"{made.cache_bytes / GIB:.1f} GiB = {service.memory:g} x {service.utilization:g} - {service.weights / tp:.1f} "
        f"of weights - {service.reserve:g} for activations and graphs (--reserve, an assumption; vLLM measures them)",
    )
    lines += _row(
        "Mamba blocks",
        f"{made.num_blocks} of {pages.block_bytes} bytes, each a page of {pages.group_layers} layers: a sequence holds "
        f"{pages.attention_groups} for each {pages.block_size} tokens of attention",
    )
    lines += _row("max_num_seqs", f"{made.num_blocks} at most; asked for: {service.sequences}")
    running = ", ".join(f"{count} of {tokens} tokens" for tokens, count in data["running"].items())  # type: ignore[attr-defined]
    lines += _row("run at once", running)
    if made.prefix_unit:
        hits = ", ".join(f"{shared} -> {made.hit(shared)}" for shared in SHARED)
        lines += _row(
            "prefix cache",
            f"hits multiples of {made.prefix_unit} tokens. Of tokens shared with an earlier prompt: {hits}",
        )
    else:
        lines += _row("prefix cache", "off")
    lines.append("")
    for layer in explanation.layers:
        served = layer.note
        if layer.answer and hasattr(layer.answer, "choices"):
            served = "; ".join(f"{choice.task} {choice.kernel or 'no kernel'}" for choice in layer.answer.choices)
        elif layer.answer:
            served = f"NOT SERVED. {str(layer.answer).splitlines()[0]}"
        lines += _row(f"{layer.kind.count} x {layer.kind.name}", served)
    for problem in made.problems:
        lines += ["", *wrap(f"DOES NOT FIT: {problem.what}.", 0), *wrap(f"Set {problem.remedy}.", 2)]
    return "\n".join(lines) + "\n"


def _row(name: str, text: str) -> list[str]:
    return wrap(f"{name:<17} {text}", 2, hang=18)
