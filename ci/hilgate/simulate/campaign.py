"""Many builds, what went wrong in their verdicts, and the fewest faults that show it."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilgate.errors import MisuseError
from hilgate.simulate.build import Finished, run_build
from hilgate.simulate.faults import DEFAULT_RATE, Fault, Kind, draw
from hilgate.simulate.scenarios import scenarios_of
from hilgate.simulate.score import Problem, Wrong, problems, unseen_failures

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.simulate.scenarios import Scenario, Scenarios

SHRUNK = 5
"""How many failing builds are shrunk; the others only say how to repeat them."""


@dataclass(frozen=True)
class Failing:
    """A build whose verdict is wrong.

    Attributes:
        shrunk: A list of faults of which none can be left out; empty when it was not looked for.
    """

    reproduce: str
    problem: Problem
    shrunk: tuple[Fault, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "reproduce": self.reproduce,
            "kind": self.problem.kind.value,
            "why": self.problem.why,
            "faults": [str(fault) for fault in self.shrunk],
        }


@dataclass
class Tally:
    """What a campaign found.

    Attributes:
        unseen_failures: Failures of attempts that Buildkite retried, in builds that passed.
    """

    seed: str
    rate: float
    builds: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    rulings: Counter[str] = field(default_factory=Counter)
    deserved: Counter[str] = field(default_factory=Counter)
    problems: Counter[Wrong] = field(default_factory=Counter)
    unseen_failures: int = 0
    failing: list[Failing] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether no build passed that must not, and no result was lost."""
        return not self.problems[Wrong.FALSE_PASS] and not self.problems[Wrong.LOST_RESULT]

    def as_json(self) -> dict[str, Any]:
        """For `--json`: the same names whatever happened."""
        return {
            "seed": self.seed,
            "rate": self.rate,
            "builds": self.builds,
            "steps": self.steps,
            "faults": dict(self.faults.most_common()),
            "deserved": dict(self.deserved),
            "verdicts": dict(self.verdicts.most_common()),
            "rulings": dict(self.rulings.most_common()),
            "false_passes": self.problems[Wrong.FALSE_PASS],
            "lost_results": self.problems[Wrong.LOST_RESULT],
            "false_blames": self.problems[Wrong.FALSE_BLAME],
            "needless_blocks": self.problems[Wrong.NEEDLESS_BLOCK],
            "unseen_failures": self.unseen_failures,
            "failing": [failing.as_json() for failing in self.failing],
            "seconds": round(self.seconds, 2),
        }

    def add(self, finished: Finished) -> None:
        """Count a build."""
        self.builds += 1
        self.steps += len(finished.site.plan.steps)
        self.faults.update(fault.kind.value for fault in finished.faults)
        truth = finished.truth
        self.deserved["must not pass" if truth.forbidden else "may pass" if truth.doubtful else "must pass"] += 1
        self.verdicts[_outcome(finished)] += 1
        if finished.verdict:
            self.rulings.update(step.ruling.value for step in finished.verdict.steps)
        self.unseen_failures += unseen_failures(finished)


@dataclass(frozen=True)
class Campaign:
    """A series of builds.

    Attributes:
        only: The one build of the series to run; None runs all.
        keep: Where each build's folder is kept; None keeps nothing.
        kinds: Kinds of fault that may strike.
    """

    root: Path
    builds: int
    seed: str
    rate: float = DEFAULT_RATE
    only: int | None = None
    keep: Path | None = None
    kinds: frozenset[Kind] = frozenset(Kind)

    def run(self, tick: Callable[[int], None] = lambda _: None) -> Tally:
        """Run the series; `tick` hears of each finished build.

        Raises:
            MisuseError: `keep` holds something already.
        """
        began = time.monotonic()
        scenarios = scenarios_of(self.root, self.seed)
        tally = Tally(self.seed, self.rate)
        numbers = range(self.builds) if self.only is None else (self.only,)
        with tempfile.TemporaryDirectory(prefix="hilgate-simulate-", dir=_memory()) as scratch:
            for number in numbers:
                folder = self._folder(number, Path(scratch))
                scenario, faults = self.drawn(scenarios, number)
                finished = run_build(scenario, self._name(number), faults, folder)
                tally.add(finished)
                self._look(tally, finished, number, scenario, Path(scratch))
                if self.keep is None:
                    shutil.rmtree(folder)
                tick(tally.builds)
        tally.seconds = time.monotonic() - began
        return tally

    def drawn(self, scenarios: Scenarios, number: int) -> tuple[Scenario, tuple[Fault, ...]]:
        """Plan and faults of a build of the series."""
        rng = random.Random(self._name(number))
        scenario = scenarios.draw(rng)
        return scenario, draw(rng, scenario.plan, self.rate, self.kinds)

    def _name(self, number: int) -> str:
        return f"{self.seed}:{number}"

    def _folder(self, number: int, scratch: Path) -> Path:
        folder = (self.keep or scratch) / str(number)
        if folder.exists():
            raise MisuseError(
                "a simulated build is kept here already", where=str(folder), remedy="name an empty folder with --keep"
            )
        folder.mkdir(parents=True)
        return folder

    def _look(self, tally: Tally, finished: Finished, number: int, scenario: Scenario, scratch: Path) -> None:
        """Compare a verdict with the truth, and shrink what is wrong with it."""
        for kind, problem in {problem.kind: problem for problem in problems(finished)}.items():
            tally.problems[kind] += 1
            shrunk: tuple[Fault, ...] = ()
            if len(tally.failing) < SHRUNK:
                shrunk = shrink(scenario, self._name(number), finished.faults, kind, scratch)
            rate = "" if self.rate == DEFAULT_RATE else f" --rate {self.rate:g}"
            line = f"hilgate simulate --builds 1 --seed {self._name(number)}{rate}"
            tally.failing.append(Failing(line, problem, shrunk))


def shrink(scenario: Scenario, name: str, faults: tuple[Fault, ...], kind: Wrong, scratch: Path) -> tuple[Fault, ...]:
    """Leave out one fault after the other, as long as the verdict stays wrong in the same way."""
    for fault in faults:
        fewer = tuple(other for other in faults if other != fault)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        found = problems(run_build(scenario, name, fewer, folder))
        shutil.rmtree(folder)
        if any(problem.kind is kind for problem in found):
            return shrink(scenario, name, fewer, kind, scratch)
    return faults


def _outcome(finished: Finished) -> str:
    if finished.verdict is None:
        return "no plan, so no pass" if not finished.site.ledger.planned else "no verdict"
    return finished.verdict.outcome.value


def _memory() -> Path | None:
    """A folder in memory where there is one: a build writes dozens of small files and syncs each."""
    shm = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a folder of its own in it
    return shm if shm.is_dir() else None
