# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server that the harness starts, watches and ends: prompts in, answers out.

Trouble is never an answer. A request that fails, times out or is cut short, a server that dies or says something else
than the protocol does: each stops the run with its own words, and nothing is scored.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from hileval.engines import Answer, EngineError, Prompt, require_text
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_SECONDS = 1800.0
"""Until a server must be healthy: 400 GB of weights from a network disk take most of it."""
REQUEST_SECONDS = 900.0
"""Until an answer must be there; with hundreds of requests queued, the last one waits for all the others."""
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.2
DYING_SECONDS = 5.0
"""How long a lost connection may precede the end of the process that held it."""

LOG_LINES = 12


class ServerDiedError(EngineError):
    """The server ended, or never became healthy."""


class RequestFailedError(EngineError):
    """A request was not answered, or not as the protocol says."""


class ServerEngine:
    """A server process and a client for its completions endpoint."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        model: str,
        env: Mapping[str, str] | None = None,
        report: str = "pagedkv_report",
        concurrency: int = 64,
        start_seconds: float = START_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Start the server and wait until it is healthy.

        Args:
            command: What starts it; `{port}` is replaced by a free port of the loopback interface.
            model: Name under which it serves.
            env: Added to the environment.
            report: The workers' method that says who served attention.
            concurrency: Requests in flight.
            start_seconds: Until `/health` must answer.
            request_seconds: Until a completion must be there.

        Raises:
            CannotRunHereError: The program is not there.
            ServerDiedError: It ended or did not become healthy.
        """
        port = _free_port()
        self._command = [word.replace("{port}", str(port)) for word in command]
        self._model, self._concurrency, self._request_seconds = model, concurrency, request_seconds
        self._quoted, self._report = False, report
        self._log = Path(tempfile.mkstemp(prefix="hileval-server-", suffix=".log")[1])
        self.url = f"http://127.0.0.1:{port}"
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise CannotRunHereError(
                f"the server could not be started: {error.strerror}", where=self._command[0], remedy="install it"
            ) from error
        try:
            self._wait_until_healthy(start_seconds)
            self.name = self._ask_version()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server and everything it started; its log stays only where it has something to tell."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(GRACE_SECONDS)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        if not self._quoted:
            self._log.unlink(missing_ok=True)

    def answer(self, prompts: Sequence[str | Prompt], *, max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        """Answer every prompt greedily; the answers are in the order of the prompts.

        Raises:
            EngineError: A prompt is not text alone; vLLM in this process takes those.
            RequestFailedError: A request was refused, timed out or answered with something else.
            ServerDiedError: The server ended meanwhile.
        """
        texts = require_text(prompts)
        with (
            httpx.Client(base_url=self.url, timeout=self._request_seconds, trust_env=False) as client,
            ThreadPoolExecutor(self._concurrency) as pool,
        ):
            futures = [pool.submit(self._complete, client, prompt, max_tokens, list(stop)) for prompt in texts]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def attention_layers(self) -> list[dict[str, Any]] | None:
        """Who served each attention layer, from the workers (vLLM's development endpoint); [] where it does not say."""
        try:
            reply = httpx.post(
                f"{self.url}/collective_rpc", json={"method": self._report}, timeout=60.0, trust_env=False
            )
            results = reply.json()["results"] if reply.status_code == httpx.codes.OK else []
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []
        return [dict(row) for worker in results if isinstance(worker, list) for row in worker if isinstance(row, dict)]

    def _complete(self, client: httpx.Client, prompt: str, max_tokens: int, stop: list[str]) -> Answer:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "seed": 0,
            "stop": stop, "logprobs": 1,
        }  # fmt: skip
        try:
            reply = client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            late = isinstance(error, httpx.TimeoutException)
            self._require_alive(patience=0.0 if late else DYING_SECONDS)
            what = "timed out" if late else f"failed: {type(error).__name__}"
            raise RequestFailedError(
                f"a request {what}", where=self.url, remedy="this is no answer; see the server's log"
            ) from error
        if reply.status_code != httpx.codes.OK:
            raise RequestFailedError(
                f"the server answered {reply.status_code}: {reply.text[:200]}",
                where=self.url,
                remedy="this is no answer; see the server's log",
            )
        return _read(reply.text, self.url)

    def _wait_until_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._require_alive()
            try:
                reply = httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False)
            except httpx.HTTPError:
                time.sleep(POLL_SECONDS)
                continue
            if reply.status_code == httpx.codes.OK:
                return
            time.sleep(POLL_SECONDS)
        raise ServerDiedError(
            f"not healthy after {seconds:g} s", where=" ".join(self._command), remedy=self._last_words()
        )

    def _require_alive(self, *, patience: float = 0.0) -> None:
        try:
            status = self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            return
        raise ServerDiedError(
            f"the server ended with status {status}", where=" ".join(self._command), remedy=self._last_words()
        )

    def _last_words(self) -> str:
        self._quoted = True
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "read its log (" + str(self._log) + "): " + " | ".join(line.strip() for line in lines if line.strip())

    def _ask_version(self) -> str:
        try:
            version = httpx.get(f"{self.url}/version", timeout=10.0, trust_env=False).json().get("version", "?")
        except (httpx.HTTPError, ValueError, AttributeError):
            version = "?"
        return f"server {Path(self._command[0]).name} {version}"


def _read(text: str, where: str) -> Answer:
    """One completion. A missing, null or non-finite log-probability of a written token is non-finite output."""
    try:
        choice = json.loads(text)["choices"][0]
        values = choice["logprobs"]["token_logprobs"]
        finite = [isinstance(value, int | float) and math.isfinite(value) for value in values]
        written, reason = choice["text"], choice["finish_reason"]
        if not isinstance(written, str) or reason not in {"stop", "length"}:
            raise ValueError(f"finish_reason {reason!r}")  # noqa: TRY301 - one place words what is wrong with a reply
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestFailedError(
            f"not a completion: {type(error).__name__}: {error}: {text[:120]!r}",
            where=where,
            remedy="the endpoint must be OpenAI's /v1/completions with logprobs",
        ) from error
    return Answer(written, reason, len(values), finite.count(False))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
