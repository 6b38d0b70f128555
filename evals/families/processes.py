# SPDX-License-Identifier: Apache-2.0
"""Processes of their own that start engines: their environment, their start and end, and which families they drive.

It imports no vLLM: whoever waits for an engine needs none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from multiprocessing import connection, forkserver
from threading import Lock
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from families.cell import FamilyCell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess
    from pathlib import Path

GPU = torch.cuda.is_available()  # ROCm answers as CUDA

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of an engine whose core and worker share the driver's process: it starts in seconds."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles small helpers even when made to be eager; 25 s on a cold machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or each of two engines is tied to the same core, and waits for the other
    "NUMBA_NUM_THREADS": "1",  # of n-gram drafting; its threads spin on after the last draft
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "pagedkv",
    "HF_HUB_OFFLINE": "1",
} | ({} if GPU else {"TRITON_INTERPRET": "1", "PAGEDKV_INTERPRETER": "fast"})
"""Environment of every process that starts engines beside others."""

SECONDS = 1200 if GPU else 300
"""Limit for one family: ten times what it takes on two idle cores. On a GPU some engines compile, texts are longer and
rounded to 16 bits: columns of Qwen3-Next, run beside each other on an H200, took 2 to 5 minutes each."""

ENVIRONMENT = (
    QUIET
    | IN_PROCESS
    | {
        "PAGEDKV_MLA": "1",
        # Kimi's fused product and all-reduce of many ranks: here is one, and it is imported from a package of its own.
        "VLLM_KIMI_K3_GEMM_AR": "0",
        # What Dynamo traces runs as it is on CPUs; inductor's C++ would take a minute a family.
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_DISABLE_COMPILE_CACHE": "1",  # what is compiled is compiled here and now
    }
)


class Drivers:
    """Drives families, a few at a time, each in a process of its own; a crash of one ends no other.

    It starts at once; `cells` waits for a family.
    """

    def __init__(
        self, folder: Path, families: Sequence[str], spec: dict[str, Any], *, processes: int, seconds: int = SECONDS
    ) -> None:
        """Start.

        Args:
            folder: Where logs and checkpoints are written.
            families: Names, in the order in which they are begun; `granite-4.0-h+freed-block` plants a fault.
            spec: `behaviours` (names), `fuzz` (seed and examples), `backend` (its name; without it ours) and the
                `environment` of its engines, by slug `published` checkpoints, and `plants`, the
                module of planted faults.
            processes: How many at a time.
            seconds: When a family is given up.
        """
        self._folder, self._spec, self._seconds = folder, spec, seconds
        self._cells: dict[str, Future[dict[str, FamilyCell]]] = {name: Future() for name in families}
        self._waiting = iter(list(families))  # of a list: each name goes to one of the threads that ask
        pool = ThreadPoolExecutor(max_workers=processes)
        for number in range(processes):
            pool.submit(self._work, folder / f"driver{number}.log")

    def cells(self, family: str) -> dict[str, FamilyCell]:
        """The cells of a family, once it has been driven."""
        return self._cells[family].result()

    def _work(self, log: Path) -> None:
        """Drive one family after the other in one process, and go on in another where that one is lost."""
        driver: _Driver | None = None
        for name in self._waiting:
            usable = False
            try:
                driver = driver or _Driver(self._spec, self._folder, log)
                cells, usable = driver.run(name, self._seconds)
            except _DriverError as error:
                cells = dict.fromkeys(self._spec["behaviours"], FamilyCell("fail", str(error)))
            except Exception as error:  # noqa: BLE001 - whoever waits for the result must learn of it
                self._cells[name].set_exception(error)
                continue
            finally:
                if driver is not None and not usable:
                    driver.end()
                    driver = None
            self._cells[name].set_result(cells)
        if driver is not None:
            driver.end()


class _DriverError(Exception):
    """The driver ended or hung in the middle of a family."""


class _Driver:
    """A process that drives the families that it is sent by name (`families.drive`)."""

    def __init__(self, spec: dict[str, Any], folder: Path, log: Path) -> None:
        self._log = log
        self._connection, its_end = multiprocessing.Pipe()
        # A new cache: inductor chooses kernels by their time, and what another run timed under another load must not
        # decide here.
        here = {"TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".inductor"))}
        environment = ENVIRONMENT | here | spec.get("environment", {})
        self._process = start("families.drive", log, environment, spec, folder, its_end)
        its_end.close()  # so that its own end is noticed

    def run(self, family: str, seconds: int) -> tuple[dict[str, FamilyCell], bool]:
        """Drive one family.

        Returns:
            Its cells, and whether the process can drive another one: a kernel may have spoilt the GPU's context.

        Raises:
            _DriverError: The process ended, or took longer than it may.
        """
        with suppress(OSError):  # it has ended, which is what is found below
            self._connection.send(family)
        ready = connection.wait([self._connection, self._process.sentinel], timeout=seconds)
        if self._connection in ready:
            with suppress(EOFError, OSError):
                answer: tuple[dict[str, FamilyCell], bool] = self._connection.recv()
                return answer
            connection.wait([self._process.sentinel], timeout=10)  # it has closed its end, and its status comes last
        status = status_of(self._process)
        how = f"ended with status {status}" if ready else f"took longer than {seconds} s"
        raise _DriverError(f"the engine's process {how}: {self._last_words()}")

    def end(self) -> None:
        """End the process and whatever it started."""
        end_group(self._process)
        self._connection.close()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:600]


_PROCESSES = Lock()
"""Two threads that ask for the end of one process at once would take it from each other."""


def start(module: str, log: Path, environment: dict[str, str], *arguments: Any) -> BaseProcess:
    """Start `main` of a module in a process and session of its own, with its output at the end of `log`."""
    environment = os.environ | environment
    with _PROCESSES, patch.dict(os.environ, environment) if GPU else nullcontext():
        process: BaseProcess = _drivers().Process(target=_drive, args=(module, log, environment, arguments))
        process.start()
    return process


@cache
def _drivers() -> ForkServerContext | SpawnContext:
    """Drivers are forks of a process that has imported vLLM and nothing else, once for all of them.

    An import costs as much as two dozen starts of an engine. Where there is a GPU each driver imports for itself: what
    has looked for a GPU must not be forked.
    """
    if GPU:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["families.drive"])
    with patch.dict(os.environ, QUIET):  # some of it is read when a module is imported
        forkserver.ensure_running()
    return context


def _drive(module: str, log: Path, environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(environment)
    import_module(module).main(*arguments)


def status_of(process: BaseProcess) -> int | None:
    """Exit status of a process; None while it runs."""
    with _PROCESSES:
        return process.exitcode


def end_group(process: BaseProcess) -> None:
    """Kill what is left of a driver's session: engine core and workers live in it too."""
    assert process.pid, "it was started"
    process.kill()  # where it has not come to lead its session
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while status_of(process) is None:
        time.sleep(0.01)
