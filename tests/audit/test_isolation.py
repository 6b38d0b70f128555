# SPDX-License-Identifier: Apache-2.0
"""A child that dies, hangs or raises becomes an answer, and its neighbours are not disturbed."""

import os
import sys
import time
from functools import partial

from pagedkv.audit.isolation import Crash, run_isolated


def _abort():
    os.write(2, b"Assertion `rank < 5' failed.\n")
    os.abort()


def _leave():
    sys.stdout.flush()
    os._exit(3)


def _raise():
    raise ValueError("no such layout")


def answers(*calls, jobs=2, timeout=30.0):
    return {index: result for index, result, _ in run_isolated(calls, jobs=jobs, timeout=timeout)}


def test_results_come_back_whatever_the_neighbours_do():
    got = answers(partial(pow, 2, 10), _abort, _leave, _raise, partial(pow, 3, 3))
    assert (got[0], got[4]) == (1024, 27)
    assert isinstance(got[1], Crash)
    assert "SIGABRT" in got[1].message
    assert "rank < 5" in got[1].message
    assert isinstance(got[2], Crash)
    assert "exit status 3" in got[2].message
    assert isinstance(got[3], ValueError)
    assert str(got[3]) == "no such layout"


def test_a_hanging_child_is_killed():
    started = time.monotonic()
    got = answers(partial(time.sleep, 60), partial(pow, 2, 3), timeout=0.5)
    assert got[0].timed_out
    assert got[1] == 8
    assert time.monotonic() - started < 20


def _complain():
    os.write(2, b"Assertion `earlier' failed.\n")
    return os.getpid()


def test_a_worker_goes_on_and_keeps_outputs_apart():
    got = answers(_complain, _complain, _abort, os.getpid, jobs=1)
    assert got[0] == got[1]
    assert "rank < 5" in got[2].message
    assert "earlier" not in got[2].message
    assert got[3] not in {got[0], os.getpid()}
