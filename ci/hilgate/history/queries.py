"""What is asked of the history: SQL over the JSONL files by duckdb, in memory, without extensions, server or network.

Each question returns plain rows, the same for the terminal, for --json and for the page. Values over builds are lists
in the order of time.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from hilgate.history import store

if TYPE_CHECKING:
    from pathlib import Path

    import duckdb

Metric = Literal["accuracy", "kernels", "flakes", "minutes"]
METRICS: tuple[Metric, ...] = get_args(Metric)

Row = dict[str, Any]

_LINE = {"schema_version": "INTEGER", "build": "VARCHAR", "commit": "VARCHAR", "branch": "VARCHAR",
         "time": "TIMESTAMPTZ", "kind": "VARCHAR", "outcome": "VARCHAR"}  # fmt: skip
_COLUMNS: Final[dict[str, dict[str, str]]] = {
    store.BUILDS: _LINE | {
        "profile": "VARCHAR", "why": "VARCHAR", "steps": "INTEGER", "seconds": "DOUBLE", "step_minutes": "DOUBLE",
        "gpu_minutes": "DOUBLE", "queue_minutes": "DOUBLE",
    },
    store.STEPS: _LINE | {
        "key": "VARCHAR", "step": "VARCHAR", "area": "VARCHAR", "device": "VARCHAR", "queue": "VARCHAR",
        "node": "VARCHAR", "ruling": "VARCHAR", "passed": "INTEGER", "failed": "INTEGER", "seconds": "DOUBLE",
        "gpu_minutes": "DOUBLE", "queue_seconds": "DOUBLE", "attempts": "INTEGER", "flaky": "VARCHAR[]",
    },
    store.CHECKS: _LINE | {
        "key": "VARCHAR", "step": "VARCHAR", "device": "VARCHAR", "id": "VARCHAR", "message": "VARCHAR",
        "labels": "MAP(VARCHAR, VARCHAR)", "numbers": "MAP(VARCHAR, DOUBLE)",
    },
}  # fmt: skip
"""As in `hilgate.history.lines`, which has read every line before duckdb does."""

_ACCURACY = """
select key, device, id, count(*) as builds, list(n order by t) as n, list(score order by t) as score,
       list(low order by t) as low, list(high order by t) as high, list(baseline order by t) as baseline,
       list(outcome order by t) as outcome, list("commit" order by t) as "commit", list(t order by t) as time
from (
    select key, device, id, outcome, "commit", time as t, numbers['exact_match'] as score, numbers['ci_low'] as low,
           numbers['ci_high'] as high, numbers['n'] as n, numbers['baseline_exact_match'] as baseline
    from chosen_checks
)
where score is not null and low is not null and high is not null
group by all order by device, key, id
"""

_KERNELS = r"""
with times as (
    select key, device, id, "commit", time as t, e.key as number, e.value as value
    from (select *, unnest(map_entries(numbers)) as e from chosen_checks)
    -- A peer's time is a control and a spread no time.
    where regexp_matches(e.key, '(^|_)(us|ms)$') and not regexp_matches(e.key, '(^|_)(peer|spread)_')
)
select key, device, id, number, count(*) as builds, list(value order by t) as value,
       list("commit" order by t) as "commit", list(t order by t) as time, last(value order by t) as last,
       median(value) filter (t < newest) as before, last / nullif(before, 0) - 1 as change
from (select *, max(t) over (partition by key, device, id, number) as newest from times)
group by all order by abs(coalesce(change, 0)) desc, key, id, number
"""

_FLAKES = """
with ran as (select key, device, count(*) as builds from chosen_steps where attempts > 0 group by all),
bad as (
    select key, device, unnest(flaky) as id, time, true as flaky from chosen_steps
    union all
    select key, device, id, time, false from chosen_checks where outcome = 'fail'
),
each as (
    select key, device, id, time, bool_or(flaky) as flaky from bad group by all
)
select key, device, id, builds, count_if(flaky) as flaky, count_if(not flaky) as failed,
       count_if(flaky) / builds as rate, max(time) as last
from each join ran using (key, device)
group by key, device, id, builds order by count_if(flaky) desc, count_if(not flaky) desc, key, id
"""

_MINUTES = """
select build, time, "commit", branch, profile, outcome, steps, seconds / 60 as wall_minutes, step_minutes, gpu_minutes,
       queue_minutes, why
from chosen_builds where profile <> 'benchmarks' order by time
"""

_MINUTES_OF_STEP = """
select key, device, time, "commit", branch, outcome, ruling, seconds / 60 as step_minutes, gpu_minutes,
       queue_seconds / 60 as queue_minutes, attempts
from chosen_steps where attempts > 0 order by key, time
"""


class Questions:
    """A history loaded into duckdb, narrowed to what the reader asked for."""

    def __init__(self, folder: Path, *, step: str = "", since: dt.datetime | None = None) -> None:
        """Load and narrow.

        Args:
            folder: The history; the caller holds its lock (`store.opened`) and so knows that its lines are sound.
            step: A planned key, or the key of a declared step on all its devices; empty takes all.
            since: Only builds that began then or later.
        """
        import duckdb

        self._step = step
        self._connection = duckdb.connect(
            ":memory:", config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
        )
        self._connection.execute("set timezone = 'UTC'")
        for name, columns in _COLUMNS.items():
            _load(self._connection, folder / name, name.removesuffix(".jsonl"), columns)
        self._connection.execute("set enable_external_access = false")
        values = {"since": since or dt.datetime(1970, 1, 1, tzinfo=dt.UTC), "step": step}
        for table in ("builds", "steps", "checks"):
            # Lines of a build that was not added whole do not count; opened() has said so.
            named = "" if table == "builds" else " and ($step = '' or key = $step or step = $step)"
            self._connection.execute(
                f"create table chosen_{table} as from {table} where time >= $since "  # noqa: S608 - names of ours
                f"and build in (select build from builds){named}",
                {name: value for name, value in values.items() if f"${name}" in named + "$since"},
            )

    def ask(self, metric: Metric) -> list[Row]:
        """The rows of one metric."""
        minutes = _MINUTES_OF_STEP if self._step else _MINUTES
        sql = {"accuracy": _ACCURACY, "kernels": _KERNELS, "flakes": _FLAKES, "minutes": minutes}[metric]
        found = self._connection.execute(sql)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _load(connection: duckdb.DuckDBPyConnection, path: Path, table: str, columns: dict[str, str]) -> None:
    declared = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    connection.execute(f"create table {table} ({declared})")
    if path.exists() and path.stat().st_size:
        kinds = "{" + ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items()) + "}"
        # The one line that is no JSON is an end that was not written whole; opened() has said so.
        connection.execute(
            f"insert into {table} by name from read_json(?, format = 'newline_delimited', columns = {kinds}, "
            "ignore_errors = true)",
            [str(path)],
        )


def plain(value: object) -> str:
    """What JSON has no form for: times as ISO 8601."""
    if isinstance(value, dt.datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in a row")
