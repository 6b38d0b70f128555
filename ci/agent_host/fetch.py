# SPDX-License-Identifier: Apache-2.0
r"""Download what the jobs of a plan left, each folder from its own step: `hilgate fetch --plan results/plan.json`.

With `--approved` only from the steps that ran once more, over the files that were approved.

Without naming the step, Buildkite gives the newest artifact of a name, whichever job has uploaded it: a job could leave
results of another one. And a name is no more than what the uploader says: buildkite-agent reads a `\` in it as `/` and
follows each `..`. So each step is downloaded into an empty folder outside of any checkout, of which the folder of that
one job is taken. What is not there is missing, and the verdict says so; nothing here fails for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from agent_host import collect, container, host, job
from hilgate.errors import Exit, Parser, RecordsError, ending
from hilgate.names import RECHECK_SUFFIX, approved_key, recheck_key

AT_ONCE = 8
SECONDS, ALL_SECONDS = 300.0, 480.0
"""Time for the downloads of a job, and of all: the judge has its own five minutes before its step ends after 15."""
_NOTHING = re.compile(r"no artifacts found", re.IGNORECASE)


def download(folder: str, step: str, checkout: Path, until: float) -> list[str]:
    """Download a job's folder from the step that it belongs to, `until` then (of `time.monotonic`).

    Returns what did not arrive, and why.
    """
    seconds = min(SECONDS, until - time.monotonic())
    if seconds <= 0:
        return [f"{folder}: no time was left: all jobs together have {ALL_SECONDS:g} s"]
    place = Path(tempfile.mkdtemp(prefix="hilgate-fetch-")).resolve()
    try:
        words = ("buildkite-agent", "artifact", "download", f"{folder}/**/*", f"{place}/", "--step", step)
        failure = host.run(words, seconds, cwd=place).failure
        problems = [failure] if failure and not _NOTHING.search(failure) else []
        # The agent's hooks write to the folder after what a container left was collected: their files belong here.
        problems += collect.collect(place / folder, checkout / folder, reserved=frozenset())
        problems += ["something lies outside of it, as if it were of another job"] if _others(place, folder) else []
        return [f"{folder}: {problem}" for problem in problems]
    finally:
        collect.discard(place)


def _others(place: Path, folder: str) -> bool:
    """Whether anything but one folder, and those that it lies in, was downloaded."""
    for inner in PurePosixPath(folder).parents:
        expected = PurePosixPath(folder).relative_to(inner).parts[:1]
        with contextlib.suppress(FileNotFoundError):
            if {path.name for path in (place / inner).iterdir()} - {*expected}:
                return True
    return False


def fetch(plan: Path, checkout: Path, *, approved: bool = False) -> list[str]:
    """Download the folders of all jobs of a plan and of their rechecks; returns what went wrong.

    With `approved`, the folders of the jobs that ran with the approved files, and nothing of those before.

    Raises:
        RecordsError: The plan cannot be read.
    """
    try:
        steps = json.loads(plan.read_bytes())["steps"]
        keys = [host.expect_text(job.key_of(step), "a key", container.KEY) for step in steps]
        jobs = [host.expect_text(job.job_of(step), "a job", container.KEY) for step in steps]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordsError(f"not a plan: {error}", where=str(plan), remedy="see the step `plan`") from error
    wanted = [
        (f"results/jobs/{key}", approved_key(its) if approved else its) for key, its in zip(keys, jobs, strict=True)
    ]
    wanted += [(f"results/jobs/{key}{RECHECK_SUFFIX}", recheck_key(key)) for key in keys if not approved]
    until = time.monotonic() + ALL_SECONDS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        always = itertools.repeat(checkout), itertools.repeat(until)
        problems = pool.map(download, *zip(*wanted, strict=True), *always) if wanted else ()
        return [*itertools.chain.from_iterable(problems)]


@ending
def main(words: list[str] | None = None) -> int:
    """Download, and say what went wrong; 0 also then, because what is missing is the verdict's to tell."""
    parser = Parser(prog="hilgate fetch", description="Download the results of a plan's jobs.")
    parser.add_argument("--plan", metavar="FILE", type=Path, required=True)
    parser.add_argument("--approved", action="store_true", help="of the steps that ran with the approved files")
    asked = parser.parse_args(words)
    for problem in fetch(asked.plan, Path.cwd(), approved=asked.approved):
        sys.stderr.write(f"did not arrive: {problem}\n")
    return int(Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
