# SPDX-License-Identifier: Apache-2.0
"""What a collector and the Test Engine get of a verdict; neither changes one: away, slow, broken or not installed."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support import plans
from support.builds import NOW, built
from support.jobs import failed, passed, undecided
from support.loopback import served
from support.plans import COMMIT, step

from hilgate.agent import trust
from hilgate.errors import Exit
from hilgate.model.record import Check, Outcome
from hilgate.report import telemetry
from hilgate.report.write import Judged

BUILD = {
    "BUILDKITE_PIPELINE_SLUG": "rocm",
    "BUILDKITE_BUILD_ID": "0193-build",
    "BUILDKITE_BUILD_URL": "https://builds.invalid/7",
    "BUILDKITE_BRANCH": "mine",
    "BUILDKITE_PULL_REQUEST": "7",
}
OK, ERROR, UNSET = 1, 2, 0


class Receiver:
    """Keeps what it is sent, and answers with a status, after a while where it is `slow`."""

    address: str

    def __init__(self):
        self.status, self.got, self.slow, self.end = 200, [], False, threading.Event()

    def spans(self):
        requests = [ExportTraceServiceRequest.FromString(body) for path, _, body in self.got if path == "/v1/traces"]
        scopes = [scope for one in requests for resource in one.resource_spans for scope in resource.scope_spans]
        return {span.name: span for scope in scopes for span in scope.spans}

    def uploads(self):
        return [json.loads(body) for path, _, body in self.got if path == "/uploads"]

    def answer(self, asked):
        self.got.append((asked.path, asked.headers, asked.body))
        if self.slow:
            self.end.wait(30)
        return self.status, "", {}


@pytest.fixture
def receiver():
    made = Receiver()
    with served(made.answer) as made.address:
        yield made
        made.end.set()


@pytest.fixture
def env(receiver, monkeypatch):
    """Both are named; OpenTelemetry reads its variables itself."""
    names = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
        "BUILDKITE_ANALYTICS_TOKEN": "s3cret",
        "BUILDKITE_ANALYTICS_API_URL": receiver.address,
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return {**names, **BUILD}


def judged():
    skip = Check(id="tests/t.py::test_gpu", outcome=Outcome.DID_NOT_RUN, message="needs a GPU", labels={"needs": "x"})
    checks = [passed("tests/t.py::test_a"), failed("tests/t.py::test_b", "off by 0.5\nmore"), undecided(), skip]
    build = built((step("good", "x"), [passed("fine")]), (step("bad", "x"), checks), (step("lost", "x"), None))
    return Judged(*build, report=None)


def attributes(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_span_for_the_build_each_step_and_each_test(receiver, env):
    said = telemetry.send(judged(), env)
    assert said[0] == "OTEL_EXPORTER_OTLP_ENDPOINT: 9 spans sent"
    spans = receiver.spans()
    build = spans["RUN rocm"]
    parents = {name: span.parent_span_id for name, span in spans.items()}
    assert parents["RUN rocm"] == b""
    assert {parents[name] for name in ("good-cpu", "bad-cpu", "lost-cpu")} == {build.span_id}
    assert parents["fine"] == spans["good-cpu"].span_id
    assert parents["tests/t.py::test_b"] == spans["bad-cpu"].span_id
    assert {span.trace_id for span in spans.values()} == {build.trace_id}
    statuses = {name: span.status.code for name, span in spans.items()}
    assert {statuses[name] for name in ("good-cpu", "fine", "tests/t.py::test_a")} == {OK}
    red = {"RUN rocm", "bad-cpu", "lost-cpu", "tests/t.py::test_b"}
    assert red <= {name for name, code in statuses.items() if code == ERROR}
    assert statuses["tests/t.py::test_gpu"] == UNSET
    assert spans["tests/t.py::test_b"].status.message == "fail: off by 0.5"


def test_a_span_is_named_by_the_conventions(receiver, env):
    telemetry.send(judged(), env)
    spans = receiver.spans()
    build = attributes(spans["RUN rocm"])
    assert build["cicd.pipeline.name"] == "rocm"
    assert build["cicd.pipeline.result"] == "failure"
    assert build["cicd.pipeline.run.id"] == "0193-build"
    assert build["cicd.pipeline.run.url.full"] == "https://builds.invalid/7"
    assert (build["vcs.ref.head.revision"], build["vcs.change.id"]) == (COMMIT, "7")
    results = {
        key: attributes(spans[key])["cicd.pipeline.task.run.result"] for key in ("good-cpu", "bad-cpu", "lost-cpu")
    }
    assert results == {"good-cpu": "success", "bad-cpu": "failure", "lost-cpu": "error"}
    assert attributes(spans["good-cpu"])["test.suite.run.status"] == "success"
    assert attributes(spans["tests/t.py::test_a"])["test.case.result.status"] == "pass"
    assert "test.case.result.status" not in attributes(spans["tests/t.py::test_gpu"])
    step_span = spans["good-cpu"]
    assert (step_span.end_time_unix_nano - step_span.start_time_unix_nano) / 1e9 == pytest.approx(90.0)
    assert step_span.start_time_unix_nano == int(NOW.timestamp()) * 10**9


def test_the_test_engine_gets_each_check_once(receiver, env):
    said = telemetry.send(judged(), env)
    assert said[1] == "BUILDKITE_ANALYTICS_TOKEN: 5 tests uploaded"
    (upload,) = receiver.uploads()
    assert upload["format"] == "json"
    assert upload["run_env"] == {
        "CI": "buildkite",
        "key": "0193-build",
        "url": "https://builds.invalid/7",
        "branch": "mine",
        "commit_sha": COMMIT,
    }
    results = {one["name"]: one["result"] for one in upload["data"]}
    assert results == {
        "fine": "passed",
        "tests/t.py::test_a": "passed",
        "tests/t.py::test_b": "failed",
        undecided().id: "unknown",
        "tests/t.py::test_gpu": "skipped",
    }
    (bad,) = [one for one in upload["data"] if one["result"] == "failed"]
    assert (bad["scope"], bad["file_name"], bad["failure_reason"]) == ("bad-cpu", "tests/t.py", "off by 0.5")
    assert len({one["id"] for one in upload["data"]}) == 5
    (headers,) = [headers for path, headers, _ in receiver.got if path == "/uploads"]
    assert headers["Authorization"] == 'Token token="s3cret"'


def test_many_tests_go_in_several_requests(receiver, env):
    many = Judged(*built((step("a", "x"), [passed(f"test-{n}") for n in range(2500)])), report=None)
    assert telemetry.send(many, env) == [
        "OTEL_EXPORTER_OTLP_ENDPOINT: 2502 spans sent",
        "BUILDKITE_ANALYTICS_TOKEN: 2500 tests uploaded",
    ]
    assert [len(one["data"]) for one in receiver.uploads()] == [1000, 1000, 500]
    assert len(receiver.spans()) == 2502


def test_nobody_is_named_and_nothing_is_sent_or_imported(monkeypatch):
    for name in ("opentelemetry", "hilgate.report.spans", "hilgate.report.test_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    assert telemetry.send(judged(), BUILD) == []


def test_a_distribution_that_is_not_installed_is_a_line(env, monkeypatch):
    monkeypatch.delitem(sys.modules, "hilgate.report.spans", raising=False)
    monkeypatch.delattr("hilgate.report.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    said = telemetry.send(judged(), env)
    assert said[0].endswith("not sent: opentelemetry is not installed (pip install 'hilgate[telemetry]')")
    assert said[1].endswith("5 tests uploaded"), "one receiver less says nothing about the other"


@contextlib.contextmanager
def timed(seconds):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("trouble", ["500", "401", "slow", "away"])
def test_a_receiver_in_trouble_costs_seconds_and_no_verdict(tmp_path, receiver, env, monkeypatch, trouble):
    monkeypatch.setattr(telemetry, "SECONDS", 1.0)
    names = {name: env[name] for name in list(env)[:3]}
    if trouble == "away":
        names["OTEL_EXPORTER_OTLP_ENDPOINT"] = names["BUILDKITE_ANALYTICS_API_URL"] = "http://127.0.0.1:9"
    receiver.slow, receiver.status = (
        trouble == "slow",
        200 if trouble == "slow" else int(trouble if trouble.isdigit() else 500),
    )
    root = plans.write_repository(tmp_path, {"good": plans.writes_findings(plans.passing())})
    plans.hilgate(root, "gate", "--all", OTEL_EXPORTER_OTLP_ENDPOINT="", BUILDKITE_ANALYTICS_TOKEN="")
    with timed(12):
        done = plans.hilgate(root, "judge", **names)
    assert done.returncode == Exit.PASS, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("OTEL_EXPORTER", "BUILDKITE_ANALYTICS"))]
    assert len(lines) == 2
    assert all("not sent: " in line for line in lines), lines
    assert "Traceback" not in done.stderr
    assert "s3cret" not in done.stderr + done.stdout
    assert json.loads((root / "results/verdict.json").read_text())["outcome"] == "pass"


def test_a_red_verdict_stays_red_where_all_was_sent(tmp_path, receiver, env):
    root = plans.write_repository(tmp_path, {"bad": plans.writes_findings(plans.failing(), status=1)})
    done = plans.hilgate(root, "gate", "--all", **{name: env[name] for name in list(env)[:3]})
    assert done.returncode == Exit.FAIL
    assert "OTEL_EXPORTER_OTLP_ENDPOINT: 3 spans sent" in done.stderr
    assert [one["name"] for one in receiver.uploads()[0]["data"]] == ["it breaks"]


def test_a_forks_job_sees_neither_variable():
    fork = {"BUILDKITE": "true", "BUILDKITE_PULL_REQUEST": "7", "BUILDKITE_REPO": "https://forge.invalid/ours/it"}
    fork |= {"BUILDKITE_PULL_REQUEST_REPO": "https://forge.invalid/theirs/it"}
    named = {telemetry.COLLECTOR: "x", telemetry.TEST_ENGINE: "x", "OTEL_EXPORTER_OTLP_HEADERS": "x"}
    assert named.keys() <= set(trust.withheld(fork | named))
