# SPDX-License-Identifier: Apache-2.0
"""Questions to the history: SQL by duckdb over the builds, in memory, without extensions, server or network.

Each answer is plain rows, the same for the terminal, for --json and for the page. Values over builds are lists in the
order of time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import statistics
from typing import TYPE_CHECKING, Any, Literal, get_args

from hilgate.errors import HilgateError, MisuseError, RecordsError
from hilgate.history import store
from hilgate.model import PLAN_FILE, VERDICT_FILE
from hilgate.run.outcome import first_line
from hilgate.run.results import RESULTS_FILE
from hilgate.text import duration, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import duckdb

Metric = Literal["grid", "accuracy", "kernels", "flakes", "waiting", "hours", "minutes"]
METRICS: tuple[Metric, ...] = get_args(Metric)

Row = dict[str, Any]

_TABLES = """
set timezone = 'UTC';
create table lines as
select parse_path(filename)[-2] as build, json->>'$.kind' as kind, json
from read_ndjson_objects($results, filename = true);
create table plans as
select parse_path(filename)[-2] as build, json from read_json_objects($plans, filename = true);
create table verdicts as
select parse_path(filename)[-2] as build, json from read_json_objects($verdicts, filename = true);

create table planned as
select build, s->>'$.step.key' as step, s->>'$.device' as device, step || '-' || device as key,
       s->>'$.queue' as queue,
       if(device = 'cpu', 0, (s->>'$.step.gpus')::int) as gpus, (s->'$.depends_on')::varchar[] as needs,
       (json->>'$.created')::timestamptz as created
from (select build, json, unnest((json->'$.steps')::json[]) as s from plans);
create table ends as
select build, json->>'$.key' as key, (json->>'$.started')::timestamptz as started,
       (json->>'$.seconds')::double as seconds, started + to_seconds(seconds) as ended
from lines where kind = 'step';
create table waits as  -- until all that a step needs had ended, or the plan was made
select p.build, p.key, max(greatest(p.created, need.ended)) as ready
from (select build, key, created, unnest(list_append(needs, '')) as needed from planned) p
left join (select build, key, min(ended) as ended from ends group by all) need
     on need.build = p.build and need.key = needed
group by all;

create table builds as
select build, time, p.json->>'$.commit' as "commit", branch, p.json->>'$.profile' as profile,
       v.json->>'$.outcome' as outcome, v.json->>'$.why' as why, json_array_length(p.json, '$.steps') as steps
from plans p join verdicts v using (build)
join (select build, json->>'$.branch' as branch from lines where kind = 'branch') using (build)
join (select build, min((json->>'$.started')::timestamptz) as time from lines where kind = 'build' group by all)
     using (build);
create table chosen_steps as
select build, time, "commit", branch, key, step, device, v->>'$.outcome' as outcome, v->>'$.ruling' as ruling,
       (v->>'$.attempts')::int as attempts, (v->'$.flaky')::varchar[] as flaky,
       coalesce((v->>'$.seconds')::double, 0) as seconds, coalesce(used, 0) as used_seconds,
       coalesce(used, 0) * gpus / 60 as gpu_minutes,
       coalesce(greatest(0, epoch(began) - epoch(ready)), 0) as queue_seconds, queue, began is not null as started
from builds join (select build, unnest((json->'$.steps')::json[]) as v, v->>'$.key' as key from verdicts) using (build)
join planned using (build, key) join waits using (build, key)
left join (select build, key, sum(seconds) as used, min(started) as began from ends where seconds > 0 group by all)
     using (build, key)
where time >= $since and ($step = '' or key = $step or step = $step);
create table chosen_builds as
select b.*, coalesce(epoch(ended) - epoch(began), 0) as seconds, coalesce(run, 0) / 60 as step_minutes,
       coalesce(gpu_minutes, 0) as gpu_minutes, coalesce(queued, 0) / 60 as queue_minutes
from builds b
left join (select build, min(started) as began, max(ended) as ended, sum(seconds) as run from ends group by all)
     using (build)
left join (select build, sum(gpu_minutes) as gpu_minutes, sum(queue_seconds) as queued from chosen_steps group by all)
     using (build)
where time >= $since;
create table chosen_checks as
select build, time, "commit", key, device, l.json->>'$.check.id' as id, l.json->>'$.check.outcome' as outcome,
       (l.json->'$.check.numbers')::map(varchar, double) as numbers
from chosen_steps
join (select build, json->>'$.step' as key, json from lines where kind = 'check') l using (build, key);
set enable_external_access = false
"""

_GRID = """
with cell as (
    select "commit", key, max(time) as time,
           count(distinct outcome) > 1 or bool_or(coalesce(len(flaky), 0) > 0) as differs,
           if(differs, 'mixed', any_value(outcome)) as outcome
    from chosen_steps group by "commit", key
)
select "commit", max(time) as time, map_from_entries(list((key, outcome) order by key)) as cells
from cell group by "commit" order by time desc, "commit"
"""
"""Outcome of each step at each commit, the newest first; `mixed` where builds differ or a check was flaky."""

_HOURS = """
select date_trunc('week', time)::date as week, key, device, count(*) as runs, sum(used_seconds) / 60 as minutes,
       sum(gpu_minutes) / 60 as gpu_hours
from chosen_steps where attempts > 0
group by all order by week desc, gpu_hours desc, minutes desc, key
"""
"""Of all attempts; a week begins on a Monday."""

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

_WAITING = """
with jobs as (
    select *, row_number() over (partition by queue order by time desc, key) as newest
    from chosen_steps where queue is not null and (started or attempts = 0 and ruling = 'infra')
)
select queue, count_if(started) as jobs, median(queue_seconds) filter (started) / 60 as half,
       quantile_cont(queue_seconds, 0.9) filter (started) / 60 as nine_of_ten,
       max(queue_seconds) filter (started) / 60 as longest, count_if(not started) as never,
       list(queue_seconds / 60 order by time, key) filter (started) as course, max(time) as last
from jobs where newest <= 50 group by queue order by nine_of_ten desc nulls first, queue
"""
"""Of the last 50 jobs of each queue: what comes next is like what was lately."""

_MINUTES = """
select build, time, "commit", branch, profile, outcome, steps, seconds / 60 as wall_minutes, step_minutes, gpu_minutes,
       queue_minutes, why
from chosen_builds order by time
"""

_MINUTES_OF_STEP = """
select key, device, time, "commit", branch, outcome, ruling, seconds / 60 as step_minutes, gpu_minutes,
       queue_seconds / 60 as queue_minutes, attempts
from chosen_steps where attempts > 0 order by key, time
"""

_SQL: dict[str, str] = {
    "grid": _GRID,
    "accuracy": _ACCURACY,
    "kernels": _KERNELS,
    "flakes": _FLAKES,
    "waiting": _WAITING,
    "hours": _HOURS,
}


def rate_interval(number: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate: what few builds cannot exclude.

    Raises:
        MisuseError: There is nothing that the rate is of.
    """
    if of < 1 or not 0 <= number <= of:
        raise MisuseError(f"{number} of {of} is no rate", remedy="count at least one build")
    z, rate = statistics.NormalDist().inv_cdf(0.975), number / of
    middle, spread = rate + z * z / (2 * of), z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def ask(
    history: Path, metrics: Iterable[Metric] = METRICS, *, step: str = "", since: dt.datetime | None = None
) -> dict[Metric, list[Row]]:
    """The rows of each metric.

    `step` is a planned key, or the key of a declared step on all its devices; empty takes all. `since` is in UTC.

    Raises:
        NothingSelectedError: There is no build in the history.
        RecordsError: A build is damaged.
        MisuseError: No build has that step.
    """
    with connect(history, step=step, since=since) as connection:
        if step:
            names = {
                name
                for (name,) in connection.execute("select key from planned union select step from planned").fetchall()
            }
            if step not in names:
                raise MisuseError(
                    f"no build in this history has a step {step!r}", where="--step", remedy=suggest(step, names)
                )
        minutes = {"minutes": _MINUTES_OF_STEP if step else _MINUTES}
        found = {metric: _rows(connection, (_SQL | minutes)[metric]) for metric in metrics}
    for row in found.get("flakes", ()):
        row["low"], row["high"] = rate_interval(row["flaky"], row["builds"])
    return found


def forecast(history: Path, queues: Iterable[str]) -> list[str]:
    """`amd_mi300_1: a job waits 3 min 00 s as a rule, 1 of 10 over 41 min 00 s`, a sentence for each known queue.

    A history without a build, or with a damaged one, forecasts nothing.
    """
    try:
        rows = ask(history, ("waiting",))["waiting"]
    except HilgateError:
        return []
    found = []
    for row in sorted((row for row in rows if row["queue"] in set(queues)), key=lambda row: str(row["queue"])):
        never = f"; {row['never']} of the last {row['jobs'] + row['never']} never began" if row["never"] else ""
        times = [duration(60 * row[name]) if row[name] is not None else "" for name in ("half", "nine_of_ten")]
        usual = f"a job waits {times[0]} as a rule, 1 of 10 over {times[1]}" if row["jobs"] else "no job has begun"
        found.append(f"{row['queue']}: {usual}{never}")
    return found


@contextlib.contextmanager
def connect(history: Path, *, step: str = "", since: dt.datetime | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """The builds as tables, in a connection that can read nothing else; for `ask`, and to explore in Python."""
    import duckdb

    connection = duckdb.connect(
        ":memory:", config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
    values: dict[str, object] = {"since": (since or dt.datetime(1970, 1, 1)).replace(tzinfo=dt.UTC), "step": step}
    for parameter, name in (("plans", PLAN_FILE), ("verdicts", VERDICT_FILE), ("results", RESULTS_FILE)):
        values[parameter] = [str(build / name) for build in store.builds(history)]
    try:
        for statement in _TABLES.split(";\n"):
            used = {name: value for name, value in values.items() if f"${name}" in statement}
            connection.execute(statement, used or None)
        yield connection
    except duckdb.Error as error:
        raise RecordsError(
            f"the history cannot be read: {first_line(str(error))}", where=str(history), remedy=store.REMEDY
        ) from None


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> list[Row]:
    found = connection.execute(sql)
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
