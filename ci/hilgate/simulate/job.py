"""A job on an agent: preflight, the step, its records and its upload, and every way in which they go wrong.

What really happens goes to the ledger first; then the files are written as real jobs write them, and damaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hilgate import results
from hilgate.errors import Exit
from hilgate.names import CPU
from hilgate.simulate import health, records, work
from hilgate.simulate.buildkite import LOST, Ended, State
from hilgate.simulate.damage import DAMAGING, damage
from hilgate.simulate.faults import Kind
from hilgate.simulate.truth import Deed

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import PlannedStep
    from hilgate.simulate.buildkite import Build, Host
    from hilgate.simulate.pipeline import Command
    from hilgate.simulate.site import Site

KILLED = 137
"""Exit status of a container whose main process got SIGKILL (128 + 9)."""

PREFLIGHT_MINUTES = 0.5
_WORTHLESS = {
    Kind.SICK_AFTERWARDS: "its node was sick by the end",
    Kind.GPU_LOST: "a GPU was gone by the end",
    Kind.PREFLIGHT_IGNORED: "its node was unfit from the start",
    Kind.HEALTH_OF_OTHER_NODE: "the health is another node's",
    Kind.OTHER_COMMIT: "of another commit",
    Kind.OTHER_PLAN: "of another plan",
    Kind.OTHER_IMAGE: "in another image",
    Kind.IMAGE_IMPOSTOR: "in another image, which it recorded as built",
    Kind.OTHER_COMMAND: "another command was run",
    Kind.OTHER_STEP: "the records are another step's",
    Kind.FALSE_CLAIM: "it claims more than it shows",
    Kind.IMAGE_OTHER_CONTENT: "the image is of other content",
    Kind.IMAGE_NOT_RECORDED: "the image is not recorded",
}
_AUTHORS = frozenset(
    {Kind.REGRESSION, Kind.FLAKY, Kind.NO_EVIDENCE, Kind.ZERO_TESTS, Kind.ALL_SKIPPED, Kind.BELOW_MINIMUM,
     Kind.FALSE_CLAIM, Kind.QUARANTINED_FAILURE, Kind.QUARANTINED_ELSEWHERE, Kind.HANG, Kind.HANG_HARD,
     Kind.OUT_OF_MEMORY, Kind.OUT_OF_MEMORY_HARD, Kind.OTHER_COMMAND, Kind.IMAGE_OTHER_CONTENT,
     Kind.IMAGE_NOT_RECORDED, Kind.SOFT_FAILED}
)  # fmt: skip
"""Kinds that a change can bring about; where one struck, blaming the author is no injustice."""


def run_job(site: Site, build: Build, command: Command, attempt: int, host: Host, minute: float) -> Ended:
    """Do one attempt of a job at a planned step; `minute` is when it begins."""
    return _Job(site, build, command, attempt, host, minute).run()


@dataclass
class _Job:
    site: Site
    build: Build
    command: Command
    attempt: int
    host: Host
    minute: float
    step: PlannedStep = field(init=False)
    struck: dict[Kind, int] = field(init=False)
    deed: Deed = field(init=False)
    folder: Path = field(init=False)
    minutes: float = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.site.steps[self.command.runs]
        self.struck = self.site.striking(self.step.key, self.attempt)
        self.deed = self.site.ledger.note(Deed(self.step.key, self.attempt, self.host.name))
        self.deed.innocent = not _AUTHORS & self.struck.keys()
        self.folder = self.site.folder / f"{self.command.folder}.{self.attempt}"
        self.folder.mkdir(parents=True)
        spread = self.site.rng("minutes", self.step.key, self.attempt).uniform(0.8, 1.5)
        self.minutes = min(self.step.minutes * spread, float(self.step.timeout_minutes))

    def run(self) -> Ended:
        if Kind.SICK_NODE in self.struck:
            return self._refuse()
        return self._cut_short() or self._work()

    def _refuse(self) -> Ended:
        """Preflight found the node unfit: the agent pauses, and the step moves elsewhere."""
        self._health("before", self.minute, trouble="uncorrectable ECC: 3")
        self.host.paused = True
        return self._ended("preflight refused the node", int(Exit.SICK_NODE), PREFLIGHT_MINUTES)

    def _cut_short(self) -> Ended | None:
        """The job ends before its step has a record; what was uploaded by then is the preflight's."""
        half = self.minutes / 2
        if Kind.AGENT_LOST in self.struck:
            self.deed.wrong.append("the agent was lost")
            return Ended(LOST, half)
        if self.struck.get(Kind.AGENT_STOPPED, 0) % 2:
            return self._ended("the agent was stopped", LOST, half, reason="agent_stop")
        self._preflight()
        if Kind.CANCELLED in self.struck:
            return self._ended("a person cancelled it", LOST, half, reason="cancel", state=State.CANCELLED)
        if Kind.HANG_HARD in self.struck:
            return self._ended("it hung", LOST, self.command.timeout_minutes, reason="cancel")
        if Kind.OUT_OF_MEMORY_HARD in self.struck:
            return self._ended("it was killed", KILLED, half)
        return None

    def _ended(
        self, wrong: str, status: int, minutes: float, *, reason: str = "none", state: State | None = None
    ) -> Ended:
        if wrong:
            self.deed.wrong.append(wrong)
        self.site.upload(self.build, self.command, self.deed, self.folder, self.minute + minutes)
        return Ended(status, minutes, signal_reason=reason, state=state)

    def _preflight(self) -> None:
        if Kind.PREFLIGHT_MISSING not in self.struck:
            trouble = "uncorrectable ECC: 3" if Kind.PREFLIGHT_IGNORED in self.struck else ""
            self._health("before", self.minute, trouble=trouble)

    def _health(self, moment: Literal["before", "after"], minute: float, *, trouble: str = "", lost: int = 0) -> None:
        host = f"{self.host.name}-other" if Kind.HEALTH_OF_OTHER_NODE in self.struck else self.host.name
        health.write(self.folder, self.step, host, moment, self.site.at(minute), trouble=trouble, lost=lost)

    def _work(self) -> Ended:
        """Run the step, leave its records, damage them."""
        if Kind.HIDDEN_SICK_NODE in self.struck and not self.site.sick:
            self.site.sick.add(self.host.name)
        self.deed.wrong += [why for kind, why in _WORTHLESS.items() if kind in self.struck]
        self.deed.other_tree = Kind.OTHER_TREE in self.struck
        if self.host.name in self.site.sick:
            self.deed.wrong.append("its node was sick")
        image = self._image()
        said = work.do(self.site, self.step, self.host, self.deed, self.struck)
        if Kind.HANG in self.struck:
            self.minutes = float(self.step.timeout_minutes)
        written = records.of_job(self.site, self.step, self.host, self.deed, said, self.struck, image, self.minute)
        path = self.folder / results.RESULTS_FILE
        results.append(path, written.lines)
        self.deed.recorded = True
        self._damage(path)
        self._look_after()
        if self.struck.get(Kind.AGENT_STOPPED, 1) % 2 == 0:
            return self._ended("the agent was stopped", LOST, self.minutes, reason="agent_stop")
        status = int(Exit.BUG) if Kind.DISK_FULL in self.struck else written.exit_status
        return self._ended("", status, self.minutes, state=State.PASSED if Kind.SOFT_FAILED in self.struck else None)

    def _image(self) -> str:
        """The digest of the image it runs in; empty on the host."""
        if self.step.image is None:
            return ""
        if self.step.image in self.site.spoilt_images:
            self.deed.wrong.append("its image is not the planned one")
        digest = self.site.images.get(self.step.image, "")
        if not digest:
            self.deed.wrong.append("its image was not built")
        foreign = self.struck.keys() & {Kind.OTHER_IMAGE, Kind.IMAGE_IMPOSTOR}
        return records.other(digest) if foreign and digest else digest

    def _damage(self, path: Path) -> None:
        whole = path.read_bytes()
        if Kind.DUPLICATED in self.struck:
            self.deed.doubtful.append("its results came twice")
            whole *= 2
        spoilt = whole
        for kind in DAMAGING - {Kind.DUPLICATED}:
            if kind in self.struck and spoilt:
                spoilt = damage(kind, self.struck[kind], spoilt)
        if spoilt != whole:
            self.deed.wrong.append("its records are damaged")
        path.write_bytes(spoilt)

    def _look_after(self) -> None:
        """Health after the step, as far as the hooks ran; a GPU step without a sound one proves nothing."""
        unseen = self.site.rng("unseen", self.host.name).random() < 0.5
        sick = Kind.SICK_AFTERWARDS in self.struck or (self.host.name in self.site.sick and not unseen)
        if Kind.PREFLIGHT_MISSING not in self.struck:
            trouble, lost = "the GPU was reset" if sick else "", int(Kind.GPU_LOST in self.struck)
            self._health("after", self.minute + self.minutes, trouble=trouble, lost=lost)
            self.deed.seen_sick = sick
        if Kind.HEALTH_MISSING in self.struck:
            health.lose(self.folder, self.struck[Kind.HEALTH_MISSING])
        if Kind.HEALTH_CORRUPT in self.struck:
            health.spoil(self.folder, self.struck[Kind.HEALTH_CORRUPT])
        if self.struck.keys() & {Kind.PREFLIGHT_MISSING, Kind.HEALTH_MISSING, Kind.HEALTH_CORRUPT}:
            reasons = self.deed.doubtful if self.step.device == CPU else self.deed.wrong
            reasons.append("the health of its node is not recorded")
            self.deed.seen_sick = False
