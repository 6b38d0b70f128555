# SPDX-License-Identifier: Apache-2.0
"""Facts about agents and their machine as text files for Prometheus' node exporter (`--collector.textfile.directory`).

A file for each agent, written by its hooks, and one for the machine, written by the reaper. Without a folder
(`HILGATE_TEXTFILE`) nothing is written, and a folder that cannot be written never costs a job.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import host

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


FOLDER = "HILGATE_TEXTFILE"
"""Of the agent: the exporter's folder of text files."""

METRICS = {
    "hilgate_node_fit": ("gauge", "Whether the last look found the agent's node fit (1) or not (0)."),
    "hilgate_node_unfit_info": ("gauge", "Why a node is unfit, one line for each problem."),
    "hilgate_jobs_total": ("counter", "Jobs that ended on this agent, by how."),
    "hilgate_job_retries_total": ("counter", "Jobs of this agent that were a retry of another attempt."),
    "hilgate_fast_endings": ("gauge", "Fast endings without a verdict in a row; the agent goes out at 3."),
    "hilgate_last_job_timestamp_seconds": ("gauge", "When the last job of this agent began or ended."),
    "hilgate_disk_free_bytes": ("gauge", "Free space of the disk that a folder lies on."),
    "hilgate_reaped_last_run": ("gauge", "What the last run of the reaper ended or removed, by verb."),
    "hilgate_reaper_problems": ("gauge", "What the last run of the reaper could not do."),
    "hilgate_reaper_timestamp_seconds": ("gauge", "When the reaper ran last."),
}
"""Each metric: its type and what it says."""

Sample = tuple[str, dict[str, str], float]
"""Metric, labels, value."""


def render(samples: Iterable[Sample]) -> str:
    """Samples in Prometheus' text format, each metric with its words once; `samples` may be in any order."""
    lines: dict[str, list[str]] = {}
    for metric, labels, value in samples:
        inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        lines.setdefault(metric, []).append(
            f"{metric}{{{inner}}} {value:.17g}\n" if inner else f"{metric} {value:.17g}\n"
        )
    text = ""
    for metric, (kind, says) in METRICS.items():
        if found := lines.pop(metric, None):
            text += f"# HELP {metric} {says}\n# TYPE {metric} {kind}\n{''.join(found)}"
    assert not lines, f"no such metric: {sorted(lines)}"
    return text


def _escaped(text: str) -> str:
    return host.printable(text).replace("\\", "\\\\").replace('"', '\\"')


def write(env: Mapping[str, str], name: str, samples: Iterable[Sample]) -> None:
    """Write one file of the exporter's folder in one step; where that fails, say so in the log and go on."""
    if not env.get(FOLDER):
        return
    path = Path(env[FOLDER]) / f"hilgate-{re.sub(r'[^A-Za-z0-9-]', '-', name)}.prom"
    try:
        host.write_whole(path, render(samples))
        path.chmod(0o644)  # the exporter is another user
    except OSError as error:
        sys.stderr.write(f"note: {path} cannot be written: {error.strerror}\n")


def write_host(
    env: Mapping[str, str],
    disks: Mapping[str, Path],
    ended: Sequence[str],
    removed: Sequence[str],
    problems: Sequence[str],
) -> None:
    """What the reaper has seen and done."""
    samples: list[Sample] = []
    for what, path in disks.items():
        with contextlib.suppress(OSError):
            free = float(shutil.disk_usage(path).free)
            samples.append(("hilgate_disk_free_bytes", {"for": what, "folder": str(path)}, free))
    for verb, lines in (("ended", ended), ("removed", removed)):
        samples.append(("hilgate_reaped_last_run", {"verb": verb}, float(len(lines))))
    samples.append(("hilgate_reaper_problems", {}, float(len(problems))))
    samples.append(("hilgate_reaper_timestamp_seconds", {}, time.time()))
    write(env, "host", samples)
