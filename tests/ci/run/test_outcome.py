# SPDX-License-Identifier: Apache-2.0
"""What an exit status and its evidence mean: every rule by example."""

from __future__ import annotations

import pytest

from hilgate.model import Check, Outcome
from hilgate.run.evidence import KINDS
from hilgate.run.outcome import RULES, Facts, decide, said, summary

PASS = Check(id="p", outcome=Outcome.PASS)
FAIL = Check(id="f", outcome=Outcome.FAIL, message="max_abs_err 0.5 > 0.001\nmore")
SKIP = Check(id="s", outcome=Outcome.DID_NOT_RUN, message="needs gfx950")
OPEN = Check(id="o", outcome=Outcome.INCONCLUSIVE, message="n=50")
MLA = SKIP.model_copy(update={"labels": {"needs": "cpu:amx_tile"}})
RAN = PASS.model_copy(update={"labels": {"needs": "cpu:amx_tile"}})
TWO_GPUS = SKIP.model_copy(update={"id": "t", "labels": {"needs": "package:vllm gpus:2"}})
AMX = {"cpu:amx_tile": "the prefix cache of MLA needs AMX", "gpus:2": "two ranks need two GPUs"}
NO_AMX = {"may_lack": AMX, "lacked": frozenset({"cpu:amx_tile"})}
NEITHER = {"may_lack": AMX, "lacked": frozenset(AMX)}


def facts(exit_status=0, checks=(PASS,), *, evidence="findings", minimum=1, **more):
    return Facts(KINDS[evidence], minimum, exit_status, tuple(checks), **more)


EXAMPLES = [
    (facts(), Outcome.PASS, "1 passed"),
    # A check that was skipped: its step did not run, unless what it needs is declared and not here.
    (facts(checks=[PASS, MLA], **NO_AMX), Outcome.PASS, "1 check passed, 1 cannot run here: the prefix cache of MLA n"),
    (
        facts(checks=[PASS, MLA, MLA, TWO_GPUS], minimum=4, **NEITHER),
        Outcome.PASS,
        "1 check passed, 3 cannot run here: 2: the prefix cache of MLA needs AMX; 1: two ranks need two GPUs",
    ),
    (
        facts(checks=[PASS, SKIP], **NO_AMX),
        Outcome.DID_NOT_RUN,
        "s did not run, and it names no condition that the step may lack (may_lack): needs gfx950",
    ),
    (
        facts(checks=[PASS, MLA], may_lack=AMX),
        Outcome.DID_NOT_RUN,
        "s did not run, and it needs cpu:amx_tile, which is here: needs gfx950",
    ),
    (
        facts(checks=[PASS, MLA], lacked=frozenset({"cpu:amx_tile"})),
        Outcome.DID_NOT_RUN,
        "s did not run, and it needs cpu:amx_tile, which the step does not declare (may_lack)",
    ),
    (
        facts(checks=[PASS, MLA, SKIP, SKIP], **NO_AMX),
        Outcome.DID_NOT_RUN,
        "2 checks that must run did not; the first: s did not run",
    ),
    (
        facts(checks=[PASS, RAN], **NO_AMX),
        Outcome.FAIL,
        "p ran, and it is declared to need cpu:amx_tile, which is not here: remove the declaration",
    ),
    (facts(checks=[RAN], may_lack=AMX), Outcome.PASS, "1 passed"),
    (
        facts(checks=[PASS, MLA], minimum=3, **NO_AMX),
        Outcome.DID_NOT_RUN,
        "1 check ran, 1 cannot run here: the prefix cache of MLA needs AMX; at least 3 must be reported",
    ),
    (facts(0, [PASS, FAIL]), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(1, [PASS, FAIL]), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(None, [FAIL], stopped="timed out after 60 s"), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(1), Outcome.FAIL, "exit 1 and no failing check"),
    (facts(None, stopped="timed out after 60 s"), Outcome.DID_NOT_RUN, "timed out after 60 s"),
    (facts(2), Outcome.DID_NOT_RUN, "exit 2 (misuse of the command line)"),
    (facts(3, evidence="junit"), Outcome.DID_NOT_RUN, "exit 3 (pytest met an internal error)"),
    (facts(5, (), evidence="junit"), Outcome.DID_NOT_RUN, "exit 5 (no tests were collected)"),
    (facts(-9), Outcome.DID_NOT_RUN, "killed by SIGKILL"),
    (facts(-200), Outcome.DID_NOT_RUN, "killed by signal 200"),
    (facts(42, said="boom"), Outcome.DID_NOT_RUN, "exit 42; it said: boom"),
    (facts(problem="its junit.xml is empty"), Outcome.DID_NOT_RUN, "its junit.xml is empty"),
    (facts(checks=()), Outcome.DID_NOT_RUN, "it recorded no checks"),
    (facts(checks=[SKIP, SKIP]), Outcome.DID_NOT_RUN, "none of its 2 checks ran; the first: needs gfx950"),
    (facts(minimum=2), Outcome.DID_NOT_RUN, "1 check ran; at least 2 must be reported"),
    (facts(0, [PASS, OPEN]), Outcome.INCONCLUSIVE, "o: n=50"),
    (facts(6, [PASS]), Outcome.INCONCLUSIVE, "exit 6 (inconclusive) and no check that says why"),
    (facts(6, [OPEN], minimum=2), Outcome.DID_NOT_RUN, "1 check ran; at least 2 must be reported"),
]


@pytest.mark.parametrize(("given_facts", "outcome", "why"), EXAMPLES)
def test_rules_by_example(given_facts, outcome, why):
    decision = decide(given_facts)
    assert decision.outcome is outcome
    assert decision.why.startswith(why)


def test_every_rule_decides_an_example():
    deciding = {next(rule.name for rule in RULES if rule.when(example)) for example, _, _ in EXAMPLES}
    assert deciding == {rule.name for rule in RULES}


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
  File "/work/kernels/kernel.py", line 172 in load_value_tile
  File "/venv/lib/python3.11/site-packages/triton/interpreter.py", line 1490 in __call__
  File "/work/kernels/kernel.py", line 269 in attend_tile
  File "/work/kernels/kernel.py", line 692 in kernel
  File "/work/kernels/launch.py", line 30 in attend
  File "/work/tests/t.py", line 47 in test_it
  File "<frozen runpy>", line 88 in _run_code

Thread 0x00007fa5 (most recent call first):
  File "/work/tests/other.py", line 3 in test_other

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
def test_what_a_failed_program_said_is_its_error_and_not_its_remedy(name):
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
