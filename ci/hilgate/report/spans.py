# SPDX-License-Identifier: Apache-2.0
"""A verdict as a trace of OpenTelemetry: a span for the build, one for each step, below it one for each test.

Names of attributes are those of the semantic conventions for CI/CD, version control and tests; what these have no name
for begins with `hilgate.`. Of a test only its duration is known: tests stand one behind the other in their step.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

import hilgate
from hilgate.model.record import Outcome
from hilgate.run.outcome import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Tracer

    from hilgate.model.plan import PlannedStep
    from hilgate.model.record import Check
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.report.write import Judged
    from hilgate.run.results import Attempt

BATCH = 500
"""Spans of one request."""
PIPELINE = {
    Outcome.PASS: "success",
    Outcome.FAIL: "failure",
    Outcome.INCONCLUSIVE: "failure",
    Outcome.DID_NOT_RUN: "error",
}
"""Outcome -> `cicd.pipeline.result` and `cicd.pipeline.task.run.result`."""
SUITE = {
    Outcome.PASS: "success",
    Outcome.FAIL: "failure",
    Outcome.INCONCLUSIVE: "failure",
    Outcome.DID_NOT_RUN: "aborted",
}
"""Outcome -> `test.suite.run.status`."""
CASE = {Outcome.PASS: "pass", Outcome.FAIL: "fail"}
"""Outcome -> `test.case.result.status`; the conventions know no other."""


def export(judged: Judged, env: Mapping[str, str], *, seconds: float) -> str:
    """Send the trace to the collector that OpenTelemetry's own variables name; what became of it."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line says it, and that is ours
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": env.get("OTEL_SERVICE_NAME", "hilgate")}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    record(judged, env, provider.get_tracer("hilgate", hilgate.__version__))
    spans = kept.get_finished_spans()
    sender = OTLPSpanExporter(timeout=seconds)
    for first in range(0, len(spans), BATCH):
        if sender.export(spans[first : first + BATCH]) is not SpanExportResult.SUCCESS:
            return f"not sent: the collector took {first} of {len(spans)} spans"
    return f"{len(spans)} spans sent"


def record(judged: Judged, env: Mapping[str, str], tracer: Tracer) -> None:
    """Make the spans of a verdict."""
    plan, recorded, verdict = judged.plan, judged.recorded, judged.verdict
    began = min((build.started for build in recorded.builds), default=verdict.decided)
    name = env.get("BUILDKITE_PIPELINE_SLUG", "hilgate")
    build = tracer.start_span(
        f"RUN {name}", kind=SpanKind.SERVER, start_time=_ns(began), attributes=_build(verdict, env, name)
    )
    steps = {step.key: step for step in plan.steps}
    for decided in verdict.steps:
        _step(tracer, build, steps[decided.key], decided, recorded.last(decided.key), verdict.decided)
    _end(build, verdict.outcome, verdict.why, max(verdict.decided, began))


def _build(verdict: Verdict, env: Mapping[str, str], name: str) -> dict[str, Any]:
    pull = env.get("BUILDKITE_PULL_REQUEST", "false")
    known = {
        "cicd.pipeline.run.id": env.get("BUILDKITE_BUILD_ID"),
        "cicd.pipeline.run.url.full": env.get("BUILDKITE_BUILD_URL"),
        "vcs.ref.head.name": env.get("BUILDKITE_BRANCH"),
        "vcs.ref.head.revision": verdict.commit,
        "vcs.change.id": pull if pull != "false" else None,
        "hilgate.profile": verdict.profile,
        "hilgate.plan.digest": verdict.plan_digest,
    }
    result = {"cicd.pipeline.name": name, "cicd.pipeline.action.name": "RUN"}
    result["cicd.pipeline.result"] = PIPELINE[verdict.outcome]
    return result | {key: value for key, value in known.items() if value}


def _step(
    tracer: Tracer,
    build: Span,
    planned: PlannedStep,
    decided: StepVerdict,
    attempt: Attempt | None,
    otherwise: dt.datetime,
) -> None:
    """The span of a step and those of its tests; a step that left nothing stands at the time of the verdict."""
    began = attempt.record.started if attempt else otherwise
    seconds = attempt.record.seconds if attempt else 0.0
    attributes = {
        "cicd.pipeline.task.name": decided.key,
        "cicd.pipeline.task.type": "test",
        "cicd.pipeline.task.run.result": PIPELINE[decided.outcome],
        "cicd.worker.name": decided.node,
        "test.suite.name": decided.key,
        "test.suite.run.status": SUITE[decided.outcome],
        "hilgate.outcome": decided.outcome.value,
        "hilgate.ruling": decided.ruling.value,
        "hilgate.device": planned.device,
        "hilgate.queue": planned.queue,
        "hilgate.gpus": planned.gpus,
        "hilgate.attempts": decided.attempts,
    }
    known = {key: value for key, value in attributes.items() if value not in {"", None}}
    context = trace.set_span_in_context(build)
    span = tracer.start_span(decided.key, context=context, start_time=_ns(began), attributes=known)
    if decided.outcome is not Outcome.PASS:
        span.set_attribute("error.type", decided.ruling.value)
    at, inside = began, trace.set_span_in_context(span)
    for check in attempt.checks if attempt else ():
        at = _test(tracer, inside, check, decided, at)
    _end(span, decided.outcome, decided.why, max(at, began + dt.timedelta(seconds=seconds)))


def _test(tracer: Tracer, inside: Any, check: Check, decided: StepVerdict, began: dt.datetime) -> dt.datetime:
    """The span of a test; when it ended. One that was not run is no error of its own: the step says what that means."""
    attributes = {"test.case.name": check.id, "test.suite.name": decided.key, "hilgate.outcome": check.outcome.value}
    if check.outcome in CASE:
        attributes["test.case.result.status"] = CASE[check.outcome]
    if check.id in decided.flaky:
        attributes["hilgate.flaky"] = "true"
    span = tracer.start_span(check.id, context=inside, start_time=_ns(began), attributes=attributes)
    ended = began + dt.timedelta(seconds=check.seconds)
    if check.outcome is Outcome.DID_NOT_RUN:
        span.end(_ns(ended))
    else:
        _end(span, check.outcome, first_line(check.message), ended)
    return ended


def _end(span: Span, outcome: Outcome, why: str, when: dt.datetime) -> None:
    """End a span: what is not a pass is an error, as everywhere here."""
    passed = outcome is Outcome.PASS
    span.set_status(Status(StatusCode.OK) if passed else Status(StatusCode.ERROR, f"{outcome.value}: {why}"[:500]))
    span.end(_ns(when))


def _ns(when: dt.datetime) -> int:
    return int(when.timestamp() * 1_000_000) * 1000
