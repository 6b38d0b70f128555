# SPDX-License-Identifier: Apache-2.0
"""Run families in processes of their own, a few at a time; one that crashes takes no other along."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from families.cell import Cell, read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GPU = torch.cuda.is_available()  # ROCm answers as CUDA

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of an engine whose core and worker share the driver's process: it starts in seconds."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles small helpers even when told to be eager; 25 s on a cold machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or each of two engines is tied to the same core, and waits for the other
    "NUMBA_NUM_THREADS": "1",  # of n-gram drafting; its threads spin on after the last draft
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "pagedkv",
    "HF_HUB_OFFLINE": "1",
} | ({} if GPU else {"TRITON_INTERPRET": "1"})
"""Environment of every process that starts engines beside others."""

SPENT = "spent"
"""Ending of the file that says that a driver is of no use after a family."""

SECONDS = 300
"""Of one family; ten times what it takes on two idle cores."""

ENVIRONMENT = (
    QUIET
    | IN_PROCESS
    | {
        "PAGEDKV_MLA": "1",
        # Kimi's fused product and all-reduce of many ranks: here is one, and it is imported from a package of its own.
        "VLLM_KIMI_K3_GEMM_AR": "0",
    }
)


class Fleet:
    """Starts at once; results are waited for."""

    def __init__(
        self, folder: Path, families: Sequence[str], spec: dict[str, Any], *, processes: int, seconds: int = SECONDS
    ) -> None:
        """Start.

        Args:
            folder: Where specs, logs and results are written.
            families: Names, in the order in which they are begun; `granite-4.0-h+freed-block` plants a fault.
            spec: `behaviours` (names), `fuzz` (seed and examples) and, by slug, `published` checkpoints.
            processes: How many drivers at a time.
            seconds: When a family is given up.
        """
        self._folder, self._seconds, self._behaviours = folder, seconds, tuple(spec["behaviours"])
        self._spec = folder / "spec.json"
        self._spec.write_text(json.dumps(spec))
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: dict[str, Future[dict[str, Cell]]] = {}
        for name in families:
            self._results[name] = Future()
            self._queue.put(name)
        self._pool = ThreadPoolExecutor(max_workers=processes)
        for number in range(processes):
            self._pool.submit(self._drive, number)

    def cells(self, family: str) -> dict[str, Cell]:
        """The cells of a family, once it has been driven."""
        return self._results[family].result()

    def _drive(self, number: int) -> None:
        driver: _Driver | None = None
        try:
            while True:
                name = self._queue.get_nowait()
                try:
                    if driver is None:
                        driver = _Driver(self._spec, self._folder, self._folder / f"driver{number}.log", self._seconds)
                    cells = driver.run(name)
                    if driver.spent(name):
                        driver.end()
                        driver = None
                except _DriverError as error:
                    driver = None
                    cells = dict.fromkeys(self._behaviours, Cell("fail", str(error)))
                except Exception as error:  # noqa: BLE001 - whoever waits for the result must learn of it
                    self._results[name].set_exception(error)
                    continue
                self._results[name].set_result(cells)
        except queue.Empty:
            pass
        finally:
            if driver is not None:
                driver.end()


class _DriverError(Exception):
    """The driver ended or hung in the middle of a family."""


class _Driver:
    """A process that runs one family after the other."""

    def __init__(self, spec: Path, folder: Path, log: Path, seconds: int) -> None:
        self._folder, self._log, self._seconds = folder, log, seconds
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "families.drive", str(spec), str(folder)],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def run(self, family: str) -> dict[str, Cell]:
        """Drive one family.

        Raises:
            _DriverError: The process ended, or took longer than it may; it is gone then.
        """
        result, deadline = self._folder / f"{family}.json", time.monotonic() + self._seconds
        with suppress(BrokenPipeError):  # it has ended, which is what the loop finds
            print(family, file=self._process.stdin, flush=True)
        while not result.exists():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                how = f"took longer than {self._seconds} s" if status is None else f"ended with status {status}"
                self.end()
                raise _DriverError(f"the engine's process {how}: {self._last_words()}")
            time.sleep(0.05)
        return read(result)

    def spent(self, family: str) -> bool:
        """Whether the process is of no use after this family: a kernel of it has spoilt the GPU's context."""
        return (self._folder / f"{family}.{SPENT}").exists()

    def end(self) -> None:
        """End the process and whatever it started."""
        end_group(self._process)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:600]


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of a driver's session: engine core and workers live in it too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
