# SPDX-License-Identifier: Apache-2.0
"""What a program said, and what a failed comparison says."""

from __future__ import annotations

import pytest
from support.jobs import failed, passed

from hilgate.model.record import Outcome
from hilgate.run.outcome import leading, said, summary

ENGINE = """
ERROR 11-23 05:00:12 [core.py:866] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-23 05:00:12 [core.py:866] AttributeError: no attribute 'init_cpu_memory_env'
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
error: ours ended with status 1
  where: pocket-hybrid
  to do: read what it says above
"""


CAUSE = "(EngineCore pid=77) ERROR 11-23 05:00:12 [core.py:866] AttributeError: no attribute 'init_cpu_memory_env'"
COLLECTION = """E   ModuleNotFoundError: No module named 'x'
=== short test summary info ===
ERROR tests/t.py - ModuleNotFoundError: No module named 'x'
!!! Interrupted: 1 error during collection !!!
1 error in 2.00s"""
CRASH = """tests/t.py ...FFatal Python error: Segmentation fault

Current thread 0x00007fa4 (most recent call first):
  File "/venv/lib/python3.11/site-packages/triton/interpreter.py", line 454 in create_masked_load
  File "/checkout/kernels/kernel.py", line 172 in load_value_tile
  File "/venv/lib/python3.11/site-packages/triton/interpreter.py", line 1490 in __call__
  File "/checkout/kernels/kernel.py", line 269 in attend_tile
  File "/checkout/kernels/kernel.py", line 692 in kernel
  File "/checkout/kernels/launch.py", line 30 in attend
  File "/checkout/tests/t.py", line 47 in test_it
  File "<frozen runpy>", line 88 in _run_code

Thread 0x00007fa5 (most recent call first):
  File "/checkout/tests/other.py", line 3 in test_other

Extension modules: numpy, torch (total: 2)
"""
CRASHED = (
    "Fatal Python error: Segmentation fault in load_value_tile (kernel.py:172) < attend_tile (kernel.py:269) < "
    "kernel (kernel.py:692) < test_it (t.py:47)"
)
SAID = {
    "crash": (CRASH, CRASHED),
    "crash without calls": ("Fatal Python error: Aborted\n\nExtension modules: x", "Fatal Python error: Aborted"),
    "ours": ("one\nerror: no such gate\n  where: x\n  to do: name another\n", "error: no such gate"),
    "engine": (ENGINE, CAUSE),
    "no cause": ("error: ours ended with status 1\n  to do: read what it says", "error: ours ended with status 1"),
    "traceback": ("Traceback (most recent call last):\n  File x\na.b.BadError: it is off\n", "a.b.BadError: it is off"),
    "git": ("fatal: not a git repository\nleft\n", "fatal: not a git repository"),
    "pytest": ("ERROR: file not found: t.py\n\nno tests ran in 0.00s", "ERROR: file not found: t.py"),
    "collection": (COLLECTION, "ERROR tests/t.py - ModuleNotFoundError: No module named 'x'"),
    "one of pytest's": ("E   OSError: no room\n2 errors in 2.00s", "E   OSError: no room"),
    "no error": ("the errors: none\nall is well\n\n", "all is well"),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("name", SAID)
def test_a_failed_programs_words_are_its_error_not_its_remedy(name):
    printed, quoted = SAID[name]
    assert said(printed.splitlines()) == quoted


TORCH = """AssertionError: Tensor-likes are not close!

Mismatched elements: 12 / 640 (1.9%)
Greatest absolute difference: 0.5 at index (3, 1) (up to 1e-05 allowed)
Greatest relative difference: inf at index (3, 1) (up to 0.1 allowed)
and more"""
NUMPY = """AssertionError:
Not equal to tolerance rtol=1e-07, atol=0

Mismatched elements: 1 / 3 (33.3%)
Max absolute difference among violations: 1.
 ACTUAL: array([1.])"""
SCALAR = """AssertionError: Scalars are not close!

Expected 0.5 but got 0.0.
Absolute difference: 0.5 (up to 1e-05 allowed)
Relative difference: 1.0 (up to 1.3e-06 allowed)"""
COMPARED = {
    "torch": (TORCH, "; ".join(TORCH.replace("\n\n", "\n").splitlines()[:4])),
    "numpy": (NUMPY, "; ".join(NUMPY.replace("\n\n", "\n").splitlines()[:4])),
    "scalar": (SCALAR, "; ".join(SCALAR.replace("\n\n", "\n").splitlines())),
    "ours": ("12 rows are off\nMismatched elements: 3", "12 rows are off"),
    "empty": ("\n", ""),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_that_failed_is_reported_with_its_numbers(name):
    message, words = COMPARED[name]
    assert summary(message) == words


def test_leading_check_is_of_the_place_where_most_fail():
    checks = [failed(name, f"assert x\nt.py:{line}: AssertionError") for name, line in (("a", 3), ("b", 9), ("c", 9))]
    assert leading([passed("d"), *checks], Outcome.FAIL).id == "b"
    assert leading([failed("e", "no place"), failed("f", "nor here")], Outcome.FAIL).id == "e"
    assert leading([passed("d")], Outcome.FAIL) is None
