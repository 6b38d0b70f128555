# SPDX-License-Identifier: Apache-2.0
"""What an exit status and its evidence mean: every rule by example."""

from __future__ import annotations

import pytest

from hilgate.model import Check, Outcome
from hilgate.run.evidence import KINDS
from hilgate.run.outcome import RULES, Facts, decide

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
    (facts(checks=[PASS, MLA, MLA, TWO_GPUS], minimum=4, **NEITHER), Outcome.PASS,
     "1 check passed, 3 cannot run here: 2: the prefix cache of MLA needs AMX; 1: two ranks need two GPUs"),
    (facts(checks=[PASS, SKIP], **NO_AMX), Outcome.DID_NOT_RUN,
     "s did not run, and it names no condition that the step may lack (may_lack): needs gfx950"),
    (facts(checks=[PASS, MLA], may_lack=AMX), Outcome.DID_NOT_RUN,
     "s did not run, and it needs cpu:amx_tile, which is here: needs gfx950"),
    (facts(checks=[PASS, MLA], lacked=frozenset({"cpu:amx_tile"})), Outcome.DID_NOT_RUN,
     "s did not run, and it needs cpu:amx_tile, which the step does not declare (may_lack)"),
    (facts(checks=[PASS, MLA, SKIP, SKIP], **NO_AMX), Outcome.DID_NOT_RUN,
     "2 checks that must run did not; the first: s did not run"),
    (facts(checks=[PASS, RAN], **NO_AMX), Outcome.FAIL,
     "p ran, and it is declared to need cpu:amx_tile, which is not here: remove the declaration"),
    (facts(checks=[RAN], may_lack=AMX), Outcome.PASS, "1 passed"),
    (facts(checks=[PASS, MLA], minimum=3, **NO_AMX), Outcome.DID_NOT_RUN,
     "1 check ran, 1 cannot run here: the prefix cache of MLA needs AMX; at least 3 must be reported"),
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
    (facts(42, last_line="boom"), Outcome.DID_NOT_RUN, "exit 42; last line: boom"),
    (facts(problem="its junit.xml is empty"), Outcome.DID_NOT_RUN, "its junit.xml is empty"),
    (facts(checks=()), Outcome.DID_NOT_RUN, "it recorded no checks"),
    (facts(checks=[SKIP, SKIP]), Outcome.DID_NOT_RUN, "none of its 2 checks ran; the first: needs gfx950"),
    (facts(minimum=2), Outcome.DID_NOT_RUN, "1 check ran; at least 2 must be reported"),
    (facts(0, [PASS, OPEN]), Outcome.INCONCLUSIVE, "o: n=50"),
    (facts(6, [PASS]), Outcome.INCONCLUSIVE, "exit 6 (inconclusive) and no check that says why"),
    (facts(6, [OPEN], minimum=2), Outcome.DID_NOT_RUN, "1 check ran; at least 2 must be reported"),
]  # fmt: skip


@pytest.mark.parametrize(("given_facts", "outcome", "why"), EXAMPLES)
def test_rules_by_example(given_facts, outcome, why):
    decision = decide(given_facts)
    assert decision.outcome is outcome
    assert decision.why.startswith(why)


def test_every_rule_decides_an_example():
    deciding = {next(rule.name for rule in RULES if rule.when(example)) for example, _, _ in EXAMPLES}
    assert deciding == {rule.name for rule in RULES}
