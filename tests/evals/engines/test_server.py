# SPDX-License-Identifier: Apache-2.0
"""The server engine against real processes: a small HTTP server that behaves, and ones that do not."""

import sys
import textwrap

import pytest

from hileval.engines.server import RequestFailedError, ServerDiedError, ServerEngine
from hilgate.errors import CannotRunHereError, Exit

SERVER = textwrap.dedent(
    """
    import json, os, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    mode, port = sys.argv[1], int(sys.argv[2])
    if mode == "dies at once":
        sys.exit("out of memory, said the GPU")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass

        def reply(self, status, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if self.path == "/health":
                self.reply(503 if mode == "never healthy" else 200, {})
            else:
                self.reply(200, {"version": "0.32.0"})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/collective_rpc":
                return self.reply(200, {"results": [[{"layer": "l0", "impl": "pagedkv.impl.X"}]]})
            if asked["prompt"] == "3":
                if mode == "dies": os._exit(9)
                if mode == "500": return self.reply(500, {"error": "CUDA error"})
                if mode == "slow": time.sleep(5)
                if mode == "empty": return self.reply(200, {"choices": []})
                if mode == "cut": return self.reply(200, b'{"choices": [{"text": " 1')
                if mode == "aborted": return self.reply(200, choice("x", [0.0], "abort"))
                if mode == "no logprobs": return self.reply(200, {"choices": [{"text": "", "finish_reason": "stop"}]})
                if mode == "nan":
                    return self.reply(200, b'{"choices":[{"text":"!","finish_reason":"length",'
                                           b'"logprobs":{"token_logprobs":[NaN,null,-0.5]}}]}')
            self.reply(200, choice(f" {asked['prompt']} {asked['temperature']}", [-0.1, -0.2], "stop"))

    def choice(text, logprobs, reason):
        return {"choices": [{"text": text, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}]}

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    started = []

    def starting(mode, **options):
        command = [sys.executable, str(script), mode, "{port}"]
        engine = ServerEngine(command, model="m", **({"start_seconds": 20, "request_seconds": 20} | options))
        started.append(engine)
        return engine

    yield starting
    for engine in started:
        engine.close()


def ask(engine, prompts="012345"):
    return engine.answer(list(prompts), max_tokens=8, stop=["Question:"])


def test_answers_come_in_the_order_of_the_prompts(start):
    engine = start("well")
    answers = ask(engine)
    assert [answer.text for answer in answers] == [f" {one} 0.0" for one in "012345"]
    assert {(a.finish_reason, a.n_tokens, a.non_finite) for a in answers} == {("stop", 2, 0)}
    assert engine.name.endswith("0.32.0")
    assert engine.attention_layers() == [{"layer": "l0", "impl": "pagedkv.impl.X"}]


def test_non_finite_and_null_log_probabilities_are_counted(start):
    assert [answer.non_finite for answer in ask(start("nan"))] == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("mode", "options", "error", "message"),
    [
        ("500", {}, RequestFailedError, "answered 500: .*CUDA error"),
        ("empty", {}, RequestFailedError, "not a completion: IndexError"),
        ("cut", {}, RequestFailedError, "not a completion: JSONDecodeError"),
        ("aborted", {}, RequestFailedError, "finish_reason 'abort'"),
        ("no logprobs", {}, RequestFailedError, "not a completion: KeyError"),
        ("slow", {"request_seconds": 0.5}, RequestFailedError, "timed out"),
        ("dies", {}, ServerDiedError, "ended with status 9"),
        ("never healthy", {"start_seconds": 1}, ServerDiedError, "not healthy after 1 s"),
    ],
)
def test_trouble_is_an_error_and_never_an_answer(start, mode, options, error, message):
    with pytest.raises(error, match=message) as caught:
        ask(start(mode, **options))
    assert caught.value.exit_status is Exit.NOTHING_RAN


def test_a_server_that_dies_before_it_is_healthy_is_quoted(start):
    with pytest.raises(ServerDiedError, match="status 1") as caught:
        start("dies at once")
    assert "out of memory, said the GPU" in caught.value.remedy


def test_a_program_that_is_not_there():
    with pytest.raises(CannotRunHereError, match="could not be started"):
        ServerEngine(["no-such-program", "{port}"], model="m")


def test_closing_ends_the_process_and_twice_is_harmless(start):
    engine = start("well")
    engine.close()
    assert engine._process.poll() is not None
    engine.close()
