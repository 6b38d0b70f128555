# SPDX-License-Identifier: Apache-2.0
"""Choose the writer, the readers and the gather of a layer, with the reason for each and against each other one.

The cache has one layout, the request's. Every kernel is checked against it, and a `Route` checks again when it is made,
so that a cache is never written by one layout and read by another (vLLM PRs 38502 and 39192 repair such pairs).

The size of a batch is no input. A kernel that changes with it is chosen only where each kernel it changes to serves the
request; otherwise the same prompt would be answered differently in a larger batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.arch import limits as arch_limits
from pagedkv.errors import CommandError

from .candidates import PROVIDERS, Kernel, Preferred, load
from .features import FEATURES, READERS, TASKS, Task
from .request import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from .request import CacheLayout, Request

_PHASES = {"decode": (), "extend": ("extend",), "prefill": ("prefill",), "mixed": ("extend", "prefill")}
"""What a request's phase asks of the reader of the task `prefill`."""


class LayoutConflictError(CommandError):
    """A route would write and read one cache by two layouts."""


@dataclass(frozen=True)
class Mismatch:
    """One feature that a kernel does not serve."""

    feature: str
    asked: str
    takes: str
    source: str

    def __str__(self) -> str:
        return f"{self.asked}, takes {self.takes} ({self.source})"


@dataclass(frozen=True)
class Rejection:
    """A kernel that does the task and cannot serve the layer."""

    kernel: str
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        more = len(self.mismatches) - 1
        return f"{self.kernel}: {self.mismatches[0]}" + (f"; and {more} more" if more else "")


class NoKernelError(CommandError):
    """No kernel does one of the tasks of a layer.

    Attributes:
        task: `decode`, `prefill`, `write` or `gather`.
        rejected: Every kernel that was looked at, with what it lacks.
        missing: Features that none of them serves, whatever else is asked.
    """

    def __init__(self, task: str, rejected: tuple[Rejection, ...]) -> None:
        self.task, self.rejected = task, rejected
        lacks = [{mismatch.feature for mismatch in rejection.mismatches} for rejection in rejected]
        self.missing = tuple(sorted(set.intersection(*lacks))) if lacks else ()
        if not rejected:
            summary = "no provider has one. Add a provider."
        elif self.missing:
            summary = f"none serves {', '.join(self.missing)}. Change that of the layer, or add a provider."
        else:
            summary = "each lacks something else. Change one feature below, or add a provider."
        lines = "".join(f"\n  {rejection}" for rejection in rejected)
        super().__init__(f"{task}: no kernel serves this layer: {summary}{lines}")


@dataclass(frozen=True)
class Choice:
    """The answer for one task."""

    task: Task
    kernel: str | None
    """None where the layer needs no kernel for the task."""
    basis: str
    """What its place in the order rests on: `policy` or `measured on <GPU>`; `need` where no kernel is needed."""
    why: str
    also: tuple[str, ...] = ()
    """Kernels that could serve it too, and come later in the order."""
    rejected: tuple[Rejection, ...] = ()
    """Kernels that do the task and cannot serve this layer, in the order of preference."""


@dataclass(frozen=True)
class Route:
    """What serves one layer.

    Raises:
        LayoutConflictError: a kernel does not take the layout.
    """

    request: Request
    layout: CacheLayout
    decode: Choice
    prefill: Choice
    write: Choice
    gather: Choice

    def __post_init__(self) -> None:
        kernels = {
            preferred.kernel.name: preferred.kernel for task in TASKS for preferred in load()[self.request.arch][task]
        }
        for choice in self.choices:
            if choice.kernel is None:
                continue
            for key in ("packing", "sides", "block_size"):
                limit = kernels[choice.kernel].limits[key]
                if not limit.admits(getattr(self.layout, key)):
                    raise LayoutConflictError(
                        f"{choice.task}: {choice.kernel} takes {key} {limit}, and the cache of this route is "
                        f"{self.layout}. Writer and readers of a cache must all serve its one layout."
                    )

    @property
    def choices(self) -> tuple[Choice, Choice, Choice, Choice]:
        """Every task, in the order of `features.TASKS`."""
        return self.decode, self.prefill, self.write, self.gather


def route(request: Request, providers: Collection[str]) -> Route:
    """Choose the kernels of a layer.

    Args:
        request: The layer.
        providers: Packages that are there, of `PROVIDERS`.

    Raises:
        RequestError: a provider is not known.
        NoKernelError: a task that the layer needs is done by no kernel of these providers.
    """
    if unknown := sorted(set(providers) - set(PROVIDERS)):
        raise RequestError("providers", got=unknown, expected=f"some of {', '.join(PROVIDERS)}")
    phase = request.phase
    if phase in {"decode", "mixed"}:
        decode = _choose(request, providers, "decode")
    else:
        decode = Choice("decode", None, "need", f"phase {phase} has no decode step")
    if phase == "decode":
        prefill = Choice("prefill", None, "need", "phase decode has no longer queries")
        gather = Choice("gather", None, "need", "phase decode gathers nothing")
    else:
        prefill = _choose(request, providers, "prefill")
        gather = _gather(request, providers, prefill)
    write = _choose(request, providers, "write")
    return Route(request, request.layout, decode, prefill, write, gather)


def mismatches(kernel: Kernel, request: Request, task: Task) -> tuple[Mismatch, ...]:
    """Return every feature of a request that a kernel does not serve in a task."""
    found = [
        Mismatch(
            feature.key, feature.describe(request), str(kernel.limits[feature.key]), kernel.limits[feature.key].source
        )
        for feature in FEATURES
        if task in feature.tasks and not kernel.limits[feature.key].admits(feature.value(request, task))
    ]
    if task == "prefill" and (phases := [p for p in _PHASES[request.phase] if p not in kernel.serves]):
        takes = f"{' and '.join(kernel.serves)} only"
        found.append(Mismatch("phase", f"phase {' and '.join(phases)}", takes, kernel.summary))
    if task in READERS:
        found += _branch_mismatches(kernel, request, task)
    return tuple(found)


def _branch_mismatches(kernel: Kernel, request: Request, task: Task) -> list[Mismatch]:
    """What the kernels lack between which this one changes by the size of the batch."""
    limit = kernel.limits["batch_size"]
    kernels = {preferred.kernel.name: preferred.kernel for preferred in load()[request.arch][task]}
    found = []
    for branch in limit.branches:
        if lacks := mismatches(kernels[branch], request, task):
            asked = f"any batch size (it changes kernel above {_change(kernel, request)} sequences)"
            found.append(Mismatch("batch_size", asked, f"not all: {Rejection(branch, lacks)}", limit.source))
    return found


def _change(kernel: Kernel, request: Request) -> int:
    """Sequences of a decode batch above which a kernel with branches changes."""
    rows = kernel.limits["batch_size"].rows_per_compute_unit * arch_limits(request.arch).compute_units
    return rows // request.num_q_heads


def _choose(request: Request, providers: Collection[str], task: Task) -> Choice:
    """Take the most preferred kernel that serves the request.

    Raises:
        NoKernelError: none does.
    """
    able: list[Preferred] = []
    rejected: list[Rejection] = []
    for preferred in load()[request.arch][task]:
        if preferred.kernel.provider not in providers:
            continue
        lacks = mismatches(preferred.kernel, request, task)
        if not lacks and task == "prefill":
            lacks = _gather_mismatch(preferred.kernel, request, providers)
        if lacks:
            rejected.append(Rejection(preferred.kernel.name, lacks))
        else:
            able.append(preferred)
    if not able:
        raise NoKernelError(task, tuple(rejected))
    first, *others = able
    why = first.why
    if task in READERS and first.kernel.limits["batch_size"].branches:
        change = _change(first.kernel, request)
        crosses = "does" if request.max_num_seqs > change else "does not"
        why += (
            f" It changes kernel above {change} sequences, which max_num_seqs {request.max_num_seqs} {crosses} reach; "
            "each of them serves this layer, so the batch size does not matter."
        )
    also = tuple(preferred.kernel.name for preferred in others)
    return Choice(task, first.kernel.name, first.reason, why, also, tuple(rejected))


def _needs_gather(kernel: Kernel, request: Request) -> bool:
    return kernel.reads == "dense" and "extend" in _PHASES[request.phase]


def _gather_mismatch(kernel: Kernel, request: Request, providers: Collection[str]) -> tuple[Mismatch, ...]:
    """Say that no kernel gathers for a reader of dense keys and values."""
    if _needs_gather(kernel, request):
        try:
            _choose(request, providers, "gather")
        except NoKernelError as error:
            why = str(error.rejected[0]) if error.rejected else "no provider has one"
            return (Mismatch("gather", "phase extend", "gathered keys only", f"and no kernel gathers: {why}"),)
    return ()


def _gather(request: Request, providers: Collection[str], reader: Choice) -> Choice:
    """Choose who gathers the context for the reader of longer queries, if that needs it."""
    (kernel,) = [
        preferred.kernel for preferred in load()[request.arch]["prefill"] if preferred.kernel.name == reader.kernel
    ]
    if _needs_gather(kernel, request):
        return _choose(request, providers, "gather")
    why = f"{kernel.name} reads the cache itself" if kernel.reads == "cache" else "phase prefill has no context"
    return Choice("gather", None, "need", why)
