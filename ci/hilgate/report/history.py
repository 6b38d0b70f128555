# SPDX-License-Identifier: Apache-2.0
"""The history: one SQLite file of judged builds, which `hilgate history add` appends to.

A build is added in one transaction or not at all. The file keeps a write-ahead log, so a reader sees whole builds
beside a writer and after a crash. Of checks that passed only their ids are kept, once for all builds that ran the same
ones; checks that did not pass keep their message, and accuracy and times of kernels keep their numbers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import itertools
import json
import math
import os
import re
import sqlite3
import statistics
import tempfile
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from hilgate.errors import HilgateError, MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import Outcome, severity
from hilgate.plan.jobs import Times
from hilgate.plan.launched import Launches
from hilgate.run.outcome import summary
from hilgate.run.results import Attempt
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check, StepRecord
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.run.results import Recorded

FILE: Final = "history.sqlite"
"""Name of the history below `results/`, unless HILGATE_HISTORY or --history names another."""
HISTORY_VARIABLE = "HILGATE_HISTORY"
BUSY_SECONDS = 30.0
"""How long a writer waits for another one."""

LOG_BYTES = 16 * 2**20
"""What stays of the write-ahead log after a large transaction."""

_SCHEMA = (
    """create table builds (
        id integer primary key,
        digest text not null unique,  -- of plan, files and start: the same build judged again is the same
        began real not null,  -- seconds since 1970, UTC
        seconds real not null,  -- from the first start of a step to the last end
        commit_sha text not null,
        branch text not null,
        profile text not null,
        outcome text not null,
        why text not null
    )""",
    "create index builds_by_commit on builds (commit_sha, began)",
    "create index builds_by_time on builds (began)",
    """create table images (
        content text not null, build integer not null references builds, digest text not null,
        primary key (content, build)
    ) without rowid""",
    "create index images_by_build on images (build)",
    """create table test_lists (
        id integer primary key,
        digest text not null unique,
        ids blob not null  -- zlib of JSON: [ids that ran, ids that did not run]
    )""",
    """create table kernel_lists (
        id integer primary key,
        digest text not null unique,
        names blob not null  -- zlib of JSON: as in `StepRecord.kernels`
    )""",
    """create table steps (
        build integer not null references builds, key text not null, step text not null, device text not null,
        outcome text not null,
        attempts integer not null, seconds real not null, gpus integer not null,  -- seconds of all attempts
        recorded text, message text, tests integer references test_lists,  -- of the attempt that counts, if any
        queue text, ruling text, kernels integer references kernel_lists,
        job text,  -- which a sick node fails as a whole
        primary key (build, key)
    ) without rowid""",
    "create index steps_by_key on steps (key, step)",
    "create index steps_by_tests on steps (tests)",
    "create index steps_by_device on steps (step, device, build)",
    "create index steps_by_kernels on steps (kernels)",
    """create table checks (  -- those that did not simply pass
        build integer not null references builds, key text not null, id text not null,
        outcome text not null, flaky integer not null, message text not null,
        primary key (build, key, id)
    ) without rowid""",
    """create table numbers (
        build integer not null references builds, key text not null, id text not null, name text not null,
        value real not null,
        primary key (build, key, id, name)
    ) without rowid""",
    """create table test_seconds (  -- for the time-outs and the shards of later plans
        key text primary key,
        build integer not null references builds,  -- the newest that it passed in
        seconds blob not null  -- zlib of JSON: id -> seconds
    ) without rowid""",
    "create index test_seconds_by_build on test_seconds (build)",
)
FORMAT: Final = 4
"""The file's `user_version`. A file of another one is refused."""


def path_of(root: Path) -> Path:
    """Where a command that takes no --history looks for one."""
    named = os.environ.get(HISTORY_VARIABLE)
    return Path(named) if named else root / "results" / FILE


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn what SQLite says into an error of ours.

    Raises:
        MisuseError: The file cannot be opened or written.
        RecordsError: It is damaged, or no database.
    """
    if path.is_dir():
        raise MisuseError(
            "a history is a file, and this is a folder", where=str(path), remedy=f"name a file: {path / FILE}"
        )
    try:
        yield
    except sqlite3.OperationalError as error:
        raise MisuseError(
            f"the history cannot be opened or written: {error}", where=str(path), remedy="name another with --history"
        ) from None
    except (sqlite3.DatabaseError, zlib.error, ValueError) as error:
        raise RecordsError(
            f"the history is damaged: {error}", where=str(path), remedy="restore a copy of it, or move it away"
        ) from None


def _require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file of another format.

    Raises:
        RecordsError: It is of another version of hilgate, or no history.
    """
    (version,) = connection.execute("pragma user_version").fetchone()
    if version < 1:
        raise RecordsError("this is no history of hilgate", where=str(path), remedy="name another with --history")
    if version != FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise RecordsError(
            f"{age} hilgate wrote this history: its format is {version}, and this one knows {FORMAT}",
            where=str(path),
            remedy="use that version of hilgate, or name another file with --history",
        )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction on the file, which is made where there is none."""
    with _refused(path):
        if not path.exists():
            _create(path)
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            connection.isolation_level = None  # transactions begin and end where it says so below
            connection.execute(f"pragma journal_size_limit = {LOG_BYTES}")
            connection.execute("begin immediate")
            try:
                _require_format(connection, path)
                yield connection
            except BaseException:
                if connection.in_transaction:  # a full disk ends it already
                    connection.execute("rollback")
                raise
            connection.execute("commit")


def _create(path: Path) -> None:
    """Make an empty history, which appears whole: SQLite lets no two processes change a journal's mode at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            fresh = Path(folder, FILE)
            with contextlib.closing(sqlite3.connect(fresh)) as connection:
                connection.execute("pragma journal_mode = wal")
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"pragma user_version = {FORMAT}")
                connection.commit()
            with contextlib.suppress(FileExistsError):  # another writer made it meanwhile
                os.link(fresh, path)
    except OSError as error:
        raise MisuseError(
            f"the history cannot be written: {error.strerror}", where=str(path), remedy="name another with --history"
        ) from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as one moment shows it.

    Raises:
        NothingSelectedError: There is no build in it.
        MisuseError: It cannot be opened.
        RecordsError: It is damaged, of another format or no history.
    """
    none = NothingSelectedError(
        "there is no build in this history", where=str(path), remedy="add one: `hilgate history add`"
    )
    with _refused(path):
        if not path.exists():
            raise none
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)) as connection:
            connection.isolation_level = None
            _require_format(connection, path)
            connection.execute("begin")
            if connection.execute("select id from builds limit 1").fetchone() is None:
                raise none
            yield connection


# Adding a build


def add(
    path: Path, plan: Plan, recorded: Recorded, verdict: Verdict, *, branch: str = "", keep: int | None = None
) -> tuple[str, bool]:
    """Add a judged build unless it is there, however often it was judged; the newest `keep` builds stay, or all.

    Returns:
        A name for the build (when it began, and its commit), and whether it was added.

    Raises:
        RecordsError: Nothing of the build was recorded, or the verdict is of another plan or lacks a step; or the
            file is damaged, of another format or no history.
        MisuseError: The file cannot be written.
    """
    if not recorded.builds:
        raise RecordsError(
            "no job of this build left a record, so there is nothing to remember",
            remedy="name the folder of their results with --jobs",
        )
    missing = {step.key for step in plan.steps} - {step.key for step in verdict.steps}
    if verdict.commit != plan.commit or missing:
        what = f"has no answer for {min(missing)}" if missing else f"is of commit {verdict.commit[:12]}"
        raise RecordsError(f"the verdict {what}", remedy="run `hilgate judge` on these results first")
    began = min(build.started for build in recorded.builds).astimezone(dt.UTC)
    digest = hashlib.sha256(f"{verdict.plan_digest} {recorded.builds[0].tree} {began.isoformat()}".encode()).hexdigest()
    name = f"{began:%Y%m%dT%H%M%SZ}-{plan.commit[:12] or 'nocommit'}"
    with _writing(path) as connection:
        if connection.execute("select id from builds where digest = ?", (digest,)).fetchone():
            return name, False
        done = connection.execute(
            "insert into builds (digest, began, seconds, commit_sha, branch, profile, outcome, why)"
            " values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(digest, began.timestamp(), _wall_seconds(recorded), plan.commit, branch, plan.profile),
                *(verdict.outcome.value, verdict.why),
            ),
        )
        assert done.lastrowid is not None
        _add_contents(connection, done.lastrowid, plan, recorded, verdict)
        if keep is not None:
            _prune(connection, keep)
    return name, True


def _prune(connection: sqlite3.Connection, keep: int) -> None:
    """Remove all but the newest builds. The file keeps its size, and new builds take the pages that become free."""
    old = connection.execute("select id from builds order by began desc, id desc limit -1 offset ?", (keep,)).fetchall()
    for build in old:
        lists = connection.execute("select distinct tests from steps where build = ?", build).fetchall()
        kernels = connection.execute("select distinct kernels from steps where build = ?", build).fetchall()
        for table in ("images", "checks", "numbers", "steps", "test_seconds"):
            connection.execute(f"delete from {table} where build = ?", build)  # noqa: S608 - names of ours
        unused = "delete from test_lists where id = ? and not exists (select 1 from steps where tests = ?1)"
        connection.executemany(unused, lists)
        unused = "delete from kernel_lists where id = ? and not exists (select 1 from steps where kernels = ?1)"
        connection.executemany(unused, kernels)
        connection.execute("delete from builds where id = ?", build)


def _wall_seconds(recorded: Recorded) -> float:
    records = [attempt.record for attempts in recorded.attempts.values() for attempt in attempts]
    ends = [record.started + dt.timedelta(seconds=record.seconds) for record in records]
    return (max(ends) - min(record.started for record in records)).total_seconds() if records else 0.0


def _add_contents(connection: sqlite3.Connection, build: int, plan: Plan, recorded: Recorded, verdict: Verdict) -> None:
    """Everything of a build but its own row."""
    images = {content: verdict.images[name] for name, content in plan.images.items() if name in verdict.images}
    connection.executemany(
        "insert into images values (?, ?, ?)", [(content, build, digest) for content, digest in images.items()]
    )
    for step, answer, attempts in _whole_steps(plan, recorded, verdict):
        checks = attempts[-1].checks if attempts else ()
        last = (attempts[-1].record.outcome.value, attempts[-1].record.message) if attempts else (None, None)
        connection.execute(
            "insert into steps values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(build, step.key, step.step.key, step.device, answer.outcome.value, answer.attempts),
                *(math.fsum(attempt.record.seconds for attempt in attempts), step.gpus),
                *last,
                _test_list(connection, checks) if attempts else None,
                *(None if plan.local else step.queue, answer.ruling.value),
                _kernel_list(connection, attempts[-1].record)
                if attempts and not plan.dirty and step.key not in recorded.restored
                else None,
                step.job_key,
            ),
        )
        flaky = set(answer.flaky)
        red = [check for check in checks if check.outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE} or check.id in flaky]
        rows = [(build, step.key, one.id, one.outcome.value, one.id in flaky, summary(one.message)) for one in red]
        rows += [(build, step.key, one, Outcome.FAIL.value, True, "") for one in sorted(flaky - {c.id for c in red})]
        # An id that stands twice in a step counts once, as everywhere.
        connection.executemany("insert or ignore into checks values (?, ?, ?, ?, ?, ?)", rows)
        numbers = [
            (build, step.key, one.id, name, float(value))
            for one in checks
            for name, value in one.numbers.items()
            if name in _ACCURACY or _is_time(name)
        ]
        connection.executemany("insert or ignore into numbers values (?, ?, ?, ?, ?)", numbers)
        if answer.outcome is Outcome.PASS and step.step.shard_minutes:
            seconds = {one.id: max(LEAST_SECONDS, round(one.seconds, 3)) for one in checks}
            packed = zlib.compress(json.dumps(seconds).encode())
            connection.execute("insert or replace into test_seconds values (?, ?, ?)", (step.key, build, packed))


def _whole_steps(
    plan: Plan, recorded: Recorded, verdict: Verdict
) -> Iterator[tuple[PlannedStep, StepVerdict, tuple[Attempt, ...]]]:
    """Each planned step with its verdict and attempts; shards as the one step that they are together."""
    decided = {step.key: step for step in verdict.steps}
    shards: dict[str, list[PlannedStep]] = defaultdict(list)
    for step in plan.steps:
        shards[step.whole].append(step)
    for whole, steps in shards.items():
        answers = [decided[step.key] for step in steps]
        attempts = [recorded.attempts.get(step.key, ()) for step in steps]
        if len(steps) == 1:
            yield steps[0], answers[0], attempts[0]
            continue
        worst = max(answers, key=severity)
        flaky = tuple(name for answer in answers for name in answer.flaky)
        most = max(one.attempts for one in answers)
        last = [attempt[-1] for attempt in attempts if attempt]
        together: tuple[Attempt, ...] = ()
        if last:
            seconds = math.fsum(one.record.seconds for each in attempts for one in each)
            worse = max((one.record for one in last), key=severity)
            launched = {
                "kernels": _kernels_of_all(steps, recorded),
                "lacked": tuple(dict.fromkeys(name for one in last for name in one.record.lacked)),
            }
            record = worse.model_copy(update={"key": whole, "seconds": seconds, **launched})
            together = (Attempt(record, tuple(check for one in last for check in one.checks)),)
        yield (
            steps[0].model_copy(update={"shard": None}),
            worst.model_copy(update={"key": whole, "flaky": flaky, "attempts": most}),
            together,
        )


def _kernels_of_all(shards: list[PlannedStep], recorded: Recorded) -> tuple[str, ...] | None:
    """What shards launched together; None where that is not known of each."""
    found: dict[str, None] = {}
    for step in shards:
        last = recorded.last(step.key)
        if last is None or last.record.kernels is None or step.key in recorded.restored:
            return None
        found |= dict.fromkeys(last.record.kernels)
    return tuple(found)


def _test_list(connection: sqlite3.Connection, checks: Iterable[Check]) -> int:
    """The number of a list of tests; steps that ran the same ones share it."""
    ran: list[str] = []
    skipped: list[str] = []
    for check in checks:
        (skipped if check.outcome is Outcome.DID_NOT_RUN else ran).append(check.id)
    return _kept_once(connection, "test_lists", "ids", [ran, skipped])


def _kernel_list(connection: sqlite3.Connection, record: StepRecord) -> int | None:
    """The number of the list of a step's kernels; None where it did not pass or not all are known."""
    if record.outcome is not Outcome.PASS or record.kernels is None:
        return None
    if any(not condition.startswith("device:") for condition in record.lacked):
        return None  # a machine that has it would launch others
    return _kept_once(connection, "kernel_lists", "names", record.kernels)


def _kept_once(connection: sqlite3.Connection, table: str, column: str, content: object) -> int:
    """The number of a row of such a table, for what several steps have in common."""
    text = json.dumps(content).encode()
    digest = hashlib.sha256(text).hexdigest()
    found = connection.execute(f"select id from {table} where digest = ?", (digest,)).fetchone()  # noqa: S608 - names of ours
    if found:
        return int(found[0])
    insert = f"insert into {table} (digest, {column}) values (?, ?)"  # noqa: S608 - likewise
    done = connection.execute(insert, (digest, zlib.compress(text)))
    assert done.lastrowid is not None
    return done.lastrowid


_ACCURACY = frozenset({"exact_match", "ci_low", "ci_high", "n", "baseline_exact_match"})
_TIME = re.compile(r"(^|_)(us|ms)$")
_NO_TIME_OF_OURS = re.compile(r"(^|_)(peer|spread)_")
"""A peer's time is a control, and a spread no time."""


def _is_time(name: str) -> bool:
    return bool(_TIME.search(name)) and not _NO_TIME_OF_OURS.search(name)


# What reports and plans ask


@dataclass(frozen=True)
class StepThen:
    """What a step did in an earlier build: its own outcome and message, and of each check the same."""

    outcome: Outcome
    message: str
    checks: Mapping[str, tuple[Outcome, str]]


def newest_build_of(path: Path, commit: str) -> dict[str, StepThen] | None:
    """Planned key -> what the step did in the newest build of a commit; None where it has no build.

    Raises:
        NothingSelectedError: There is no build of any commit.
        MisuseError: The file cannot be opened.
        RecordsError: It is damaged, of another format or no history.
    """
    with _reading(path) as connection:
        build = connection.execute(
            "select id from builds where commit_sha = ? order by began desc limit 1", (commit,)
        ).fetchone()
        if build is None:
            return None
        checks: dict[str, dict[str, tuple[Outcome, str]]] = defaultdict(dict)
        steps = connection.execute(
            "select key, recorded, message, ids from steps left join test_lists on tests = id"
            " where build = ? and recorded is not null",
            build,
        ).fetchall()
        for key, _, _, ids in steps:
            ran, skipped = json.loads(zlib.decompress(ids))
            checks[key] |= dict.fromkeys(ran, (Outcome.PASS, ""))
            checks[key] |= dict.fromkeys(skipped, (Outcome.DID_NOT_RUN, ""))
        for key, name, outcome, message in connection.execute(
            "select key, id, outcome, message from checks where build = ?", build
        ):
            checks[key][name] = Outcome(outcome), message
        return {key: StepThen(Outcome(outcome), message, checks[key]) for key, outcome, message, _ in steps}


@dataclass(frozen=True)
class Lately:
    """What the newest builds say of each check.

    Attributes:
        failures: (planned key, check id) -> in how many of them it failed, flaky ones included.
        flaky: The same of those that failed and then passed over the same files.
        runs: Planned key -> in how many of them it ran.
    """

    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    flaky: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)


def lately(path: Path, builds: int) -> Lately:
    """Failures of the newest builds; raises as `newest_build_of`."""
    newest = "build in (select id from builds order by began desc limit ?)"
    found = Lately()
    with _reading(path) as connection:
        for key, name, failed, flaky in connection.execute(
            f"select key, id, count(*), sum(flaky) from checks where {newest} and (outcome = 'fail' or flaky)"  # noqa: S608 - a text of ours
            " group by key, id",
            (builds,),
        ):
            found.failures[key, name] = failed
            found.flaky[key, name] = flaky
        runs = connection.execute(
            f"select key, count(*) from steps where {newest} and attempts > 0 group by key",  # noqa: S608 - likewise
            (builds,),
        )
        found.runs.update(dict(runs.fetchall()))
    return found


TROUBLE_BUILDS = 50
"""How many of the newest builds say whether a queue works."""


def trouble(path: Path) -> dict[str, tuple[int, str]]:
    """Queue -> how many of its newest jobs in a row were infrastructure failures, and the time of the newest (UTC).

    Jobs of one build have no order; one that was none ends the row before those that were. Raises as
    `newest_build_of`.
    """
    found: dict[str, tuple[int, str]] = {}
    working: set[str] = set()
    with _reading(path) as connection:
        for queue, failed, began in connection.execute(
            "select queue, min(ruling = 'infra') as failed, began from steps join builds on build = builds.id"
            " where queue is not null and build in (select id from builds order by began desc limit ?)"
            " group by build, queue, coalesce(job, key) order by began desc, failed",
            (TROUBLE_BUILDS,),
        ):
            working |= set() if failed else {queue}
            if queue not in working:
                number, newest = found.get(queue, (0, f"{_moment(began):%Y-%m-%d %H:%M} UTC"))
                found[queue] = number + 1, newest
    return found


def images(path: Path, contents: Iterable[str]) -> dict[str, str]:
    """Contents of an image -> its digest in the newest build that has it; unknown where the history cannot be read."""
    found: dict[str, str] = {}
    with contextlib.suppress(HilgateError), _reading(path) as connection:
        for content in contents:
            digest = connection.execute(
                "select images.digest from images join builds on build = builds.id where content = ?"
                " order by began desc limit 1",
                (content,),
            ).fetchone()
            found |= {content: digest[0]} if digest else {}
    return found


MOST_RECORDS = 10
"""Builds that are looked at for what a step launched, the newest."""


def launches(path: Path, step: str, device: str) -> list[Launches]:
    """What a step launched on a device in builds in which it passed, the newest first; none without a history."""
    rows = []
    with contextlib.suppress(HilgateError), _reading(path) as connection:
        rows = connection.execute(
            "select commit_sha, names from steps join builds on build = builds.id"
            " join kernel_lists on kernels = kernel_lists.id"
            " where step = ? and device = ? and steps.outcome = 'pass' order by build desc limit ?",
            (step, device, MOST_RECORDS),
        ).fetchall()
    return [_launches(commit, names) for commit, names in rows]


def _launches(commit: str, names: bytes) -> Launches:
    try:
        return Launches(commit, frozenset(json.loads(zlib.decompress(names))))
    except (zlib.error, ValueError, TypeError):
        return Launches(commit, problem="is cut off")


RECENT_BUILDS, MOST_PASSES = 200, 50
"""Builds, the newest, whose passes are times, and passes of a step."""

LEAST_SECONDS = 0.001
"""Least seconds of a test: pytest-split gives all tests that take no time to one shard."""


def times(path: Path, keys: Iterable[str]) -> Times:
    """What steps took when they passed at once, and each test of these; nothing where the history cannot be read."""
    passes: dict[str, list[float]] = defaultdict(list)
    tests: dict[str, dict[str, float]] = {}
    with contextlib.suppress(HilgateError), _reading(path) as connection:
        for key, seconds in connection.execute(
            "select key, steps.seconds from steps join builds on build = builds.id"
            " where build in (select id from builds order by began desc limit ?)"
            " and steps.outcome = 'pass' and attempts = 1 order by began desc",
            (RECENT_BUILDS,),
        ):
            if len(passes[key]) < MOST_PASSES:
                passes[key].append(seconds / 60)
        for key in keys:
            found = connection.execute("select seconds from test_seconds where key = ?", (key,)).fetchone()
            tests |= {key: json.loads(zlib.decompress(found[0]))} if found else {}
    return Times(passes, tests)


# What people ask: `hilgate history show`

Metric = Literal["flakes", "times", "accuracy", "kernels"]
METRICS: tuple[Metric, ...] = get_args(Metric)
Row = dict[str, Any]
"""The same for the terminal and for --json. Values over builds are lists in the order of time."""
NEWEST: Final[dict[Metric, int]] = {"flakes": 1000, "times": 200, "accuracy": 200, "kernels": 200}
"""Builds that are read where no date is asked for: a rate needs many, and a course few."""


@dataclass(frozen=True)
class _Asked:
    """Which rows are asked for: a condition on builds and steps, and its values."""

    condition: str
    values: Mapping[str, Any]
    whole: bool
    """Whether all steps are asked for."""


def ask(
    path: Path, metrics: Iterable[Metric] = METRICS, *, step: str = "", since: dt.datetime | None = None
) -> dict[Metric, list[Row]]:
    """The rows of each metric.

    `step` is a planned key, or the key of a declared step on all its devices; empty takes all. `since` is in UTC.

    Raises:
        NothingSelectedError: There is no build in the history.
        RecordsError: It is damaged, of another format or no history.
        MisuseError: No build has that step, or the file cannot be opened.
    """
    with _reading(path) as connection:
        connection.row_factory = sqlite3.Row
        values: dict[str, Any] = {}
        condition = "began >= :since"
        if step:
            known = {row["key"]: row["step"] for row in connection.execute("select distinct key, step from steps")}
            keys = {f"key{n}": key for n, key in enumerate(known) if step in {key, known[key]}}
            if not keys:
                remedy = suggest(step, {*known, *known.values()})
                raise MisuseError(f"no build in this history has a step {step!r}", where="--step", remedy=remedy)
            values |= keys
            condition += f" and steps.key in ({', '.join(f':{name}' for name in keys)})"
        found = {}
        for metric in metrics:
            begin = since.replace(tzinfo=dt.UTC).timestamp() if since else _began_last(connection, NEWEST[metric])
            found[metric] = _ANSWERS[metric](connection, _Asked(condition, {**values, "since": begin}, whole=not step))
        return found


def _began_last(connection: sqlite3.Connection, builds: int) -> float:
    """When the first of so many newest builds began."""
    sql = "select began from builds order by began desc limit 1 offset ?"
    first = connection.execute(sql, (builds - 1,)).fetchone()
    return float(first[0]) if first else 0.0


def _flakes(connection: sqlite3.Connection, asked: _Asked) -> list[Row]:
    """Checks that failed, with the interval of the rate at which they were flaky."""
    # A cross join is done in its order: SQLite would else read the steps of all builds that the file has.
    sql = f"""
        with ran as (
            select steps.key, count(*) as builds from builds cross join steps on build = builds.id
            where {asked.condition} and attempts > 0 group by steps.key
        )
        select checks.key, checks.id, ran.builds, sum(checks.flaky) as flaky,
               sum(not checks.flaky and checks.outcome = 'fail') as failed, max(began) as last
        from checks join builds on checks.build = builds.id join ran on ran.key = checks.key
        where began >= :since and (checks.flaky or checks.outcome = 'fail')
        group by checks.key, checks.id order by flaky desc, failed desc, last desc, checks.key, checks.id
    """  # noqa: S608 - the condition is a text of ours
    rows = [dict(row) for row in connection.execute(sql, asked.values)]
    for row in rows:
        row["last"] = _moment(row["last"])
        row["low"], row["high"] = rate_interval(row["flaky"], row["builds"])
    return rows


def rate_interval(number: int, of: int) -> tuple[float, float]:
    """The 95 % score interval of a rate (E. B. Wilson, JASA 22, 1927, p. 209): what few builds cannot exclude.

    Raises:
        MisuseError: There is nothing that the rate is of.
    """
    if of < 1 or not 0 <= number <= of:
        raise MisuseError(f"{number} of {of} is no rate", remedy="count at least one build")
    z, rate = statistics.NormalDist().inv_cdf(0.975), number / of
    middle, spread = rate + z * z / (2 * of), z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


STEADY = 0.005
"""A step counts well whose flake rate is below this, by the upper end of its interval."""


@dataclass(frozen=True)
class Steadiness:
    """How often a step was flaky.

    Attributes:
        builds: In which it passed or was flaky: others say nothing about its flake rate.
        flaky: In how many of them a check of it failed and then passed over the same files.
        newest: Its outcome in the newest build that has it.
    """

    key: str
    builds: int
    flaky: int
    newest: str

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of its flake rate; of a step without builds everything."""
        return rate_interval(self.flaky, self.builds) if self.builds else (0.0, 1.0)

    @property
    def missing(self) -> int:
        """How many builds without a flake it lacks until the upper end of the interval is below `STEADY`."""
        needed = max(1, self.builds)
        while rate_interval(self.flaky, needed)[1] >= STEADY:
            needed += 1
        return needed - self.builds


def steadiness(path: Path, *, since: dt.datetime | None = None) -> list[Steadiness]:
    """The flake rate of each planned step over all builds, or those since a time (UTC); raises as `newest_build_of`."""
    begin = since.replace(tzinfo=dt.UTC).timestamp() if since else 0.0
    with _reading(path) as connection:
        flaky = set(connection.execute("select distinct build, key from checks where flaky"))
        found: dict[str, Steadiness] = {}
        for build, key, outcome in connection.execute(
            "select build, key, steps.outcome from builds cross join steps on build = builds.id"
            " where began >= ? and attempts > 0 order by began desc",
            (begin,),
        ):
            before = found.get(key, Steadiness(key, 0, 0, outcome))
            is_flaky = (build, key) in flaky
            answered = is_flaky or outcome == Outcome.PASS.value
            found[key] = Steadiness(key, before.builds + answered, before.flaky + is_flaky, before.newest)
        return [found[key] for key in sorted(found)]


def _times(connection: sqlite3.Connection, asked: _Asked) -> list[Row]:
    """Minutes of whole builds, then of each step, the slowest first: the newest against the median of those before."""
    rows = []
    if asked.whole:
        builds = connection.execute("select seconds from builds where began >= :since order by began", asked.values)
        minutes = [row["seconds"] / 60 for row in builds]
        rows = [{"key": "whole build", "gpu_hours": None} | _course(minutes)] if minutes else []
    found: dict[str, list[sqlite3.Row]] = defaultdict(list)
    for row in connection.execute(
        "select steps.key, steps.seconds, gpus from builds join steps on build = builds.id"  # noqa: S608 - likewise
        f" where {asked.condition} and attempts > 0 order by began",
        asked.values,
    ):
        found[row["key"]].append(row)
    of_steps = [
        {"key": key, "gpu_hours": math.fsum(one["seconds"] * one["gpus"] for one in runs) / 3600}
        | _course([run["seconds"] / 60 for run in runs])
        for key, runs in found.items()
    ]
    return rows + sorted(of_steps, key=_newest_first)


def _newest_first(row: Row) -> tuple[float, str]:
    return -row["last"], row["key"]


def _course(values: list[float]) -> Row:
    """Values over builds: the newest, the median of those before, and by how much it changed."""
    before = statistics.median(values[:-1]) if len(values) > 1 else None
    change = values[-1] / before - 1 if before else None
    return {"builds": len(values), "value": values, "last": values[-1], "before": before, "change": change}


def _accuracy(connection: sqlite3.Connection, asked: _Asked) -> list[Row]:
    """Scores with their interval and baseline, of checks that have all three."""
    rows = []
    for (device, key, name), numbers in _numbers(connection, asked, accuracy=True):
        known = [one for one in numbers if {"exact_match", "ci_low", "ci_high"} <= one.keys()]
        if known:
            columns = {column: [one.get(number) for one in known] for column, number in _COLUMNS.items()}
            rows.append({"key": key, "device": device, "id": name, "builds": len(known)} | columns)
    return rows


_COLUMNS = {
    "score": "exact_match",
    "low": "ci_low",
    "high": "ci_high",
    "n": "n",
    "baseline": "baseline_exact_match",
    "commit": "commit",
    "time": "time",
}


def _kernels(connection: sqlite3.Connection, asked: _Asked) -> list[Row]:
    """Times of kernels, the largest change first."""
    rows = []
    for (device, key, name), numbers in _numbers(connection, asked, accuracy=False):
        for number in dict.fromkeys(itertools.chain.from_iterable(numbers)):
            if number not in {"commit", "time"}:
                known = [one for one in numbers if number in one]
                about = {"key": key, "device": device, "id": name, "number": number}
                moments = {"commit": [one["commit"] for one in known], "time": [one["time"] for one in known]}
                rows.append(about | _course([one[number] for one in known]) | moments)
    return sorted(rows, key=_largest_change_first)


def _largest_change_first(row: Row) -> tuple[float, str, str, str]:
    return -abs(row["change"] or 0.0), row["key"], row["id"], row["number"]


def _numbers(
    connection: sqlite3.Connection, asked: _Asked, *, accuracy: bool
) -> Iterator[tuple[tuple[str, str, str], list[Row]]]:
    """(device, key, check), and for each build with numbers of it, the oldest first, these with its commit and time."""
    names = ", ".join(f"'{name}'" for name in sorted(_ACCURACY))
    sql = f"""
        select device, numbers.key, numbers.id, name, value, began, commit_sha
        from builds cross join numbers on numbers.build = builds.id
        cross join steps on steps.build = builds.id and steps.key = numbers.key
        where {asked.condition} and name {"in" if accuracy else "not in"} ({names})
        order by device, numbers.key, numbers.id, began, name
    """  # noqa: S608 - texts of ours
    for check, rows in itertools.groupby(connection.execute(sql, asked.values), key=_check_of):
        builds = []
        for began, numbers in itertools.groupby(rows, key=_began_of):
            known = list(numbers)
            moment = {"commit": known[0]["commit_sha"], "time": _moment(began)}
            builds.append({row["name"]: row["value"] for row in known} | moment)
        yield check, builds


def _check_of(row: sqlite3.Row) -> tuple[str, str, str]:
    return row["device"], row["key"], row["id"]


def _began_of(row: sqlite3.Row) -> float:
    return float(row["began"])


def _moment(began: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(began, dt.UTC)


_ANSWERS = {"flakes": _flakes, "times": _times, "accuracy": _accuracy, "kernels": _kernels}
