# SPDX-License-Identifier: Apache-2.0
"""Send a verdict to those that the environment names: an OpenTelemetry collector, Buildkite's Test Engine.

It is sent after the verdict is written and decides nothing: each of them has `SECONDS`, then hilgate goes on without
it, and a line says so. What is not set is not imported.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from hilgate.text import line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hilgate.report.write import Judged

SECONDS = 5.0
"""That a receiver which is away, slow or broken may cost."""
COLLECTOR, TEST_ENGINE = "OTEL_EXPORTER_OTLP_ENDPOINT", "BUILDKITE_ANALYTICS_TOKEN"


def send(judged: Judged, env: Mapping[str, str]) -> list[str]:
    """Send to each receiver whose variable is set; what became of it, a line each. Nothing is raised."""
    found = []
    for variable, receiver in ((COLLECTOR, _spans), (TEST_ENGINE, _tests)):
        if env.get(variable):
            found.append(f"{variable}: {_within(SECONDS, functools.partial(receiver, judged, env))}")
    return found


def _spans(judged: Judged, env: Mapping[str, str]) -> str:
    from hilgate.report import spans

    return spans.export(judged, env, seconds=SECONDS)


def _tests(judged: Judged, env: Mapping[str, str]) -> str:
    from hilgate.report import test_engine

    return test_engine.upload(judged, env, seconds=SECONDS)


def _within(seconds: float, work: Callable[[], str]) -> str:
    """What `work` says, or why it says nothing; a thread that is still busy then ends with the program."""
    said: list[str] = []

    def run() -> None:
        try:
            said.append(work())
        except ImportError as error:
            said.append(f"not sent: {error.name} is not installed (pip install 'hilgate[telemetry]')")
        except Exception as error:  # noqa: BLE001 - whatever a receiver or its library does, the verdict stands
            said.append(f"not sent: {type(error).__name__}: {line(str(error))[:200]}")

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    return said[0] if said else f"not sent: no answer within {seconds:g} s"
