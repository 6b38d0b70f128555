"""What may be excused and by whom: the quarantine of the merge base, and a named approval."""

from __future__ import annotations

import datetime as dt

import pytest
from support.jobs import GATHER, OTHER, TEST, Jobs, agents_plan, failed, finished, passed, undecided

from hilgate.errors import Exit
from hilgate.judge.verdict import exit_status
from hilgate.model import Loosening, Outcome, Quarantine, Quarantined, Ruling

ECC = {"healthy": False, "problems": ("uncorrectable ECC: 3",)}
HUNG = {"status": None, "stopped": "timed out after 1740 s"}


def gathered(*checks, **changes):
    return lambda jobs: jobs.job(GATHER.key, *finished(GATHER, *checks, **changes))


def both(*spoil):
    return lambda jobs: [one(jobs) for one in spoil]


def after(**changes):
    return lambda jobs: jobs.healthy(**changes)


FAILS = gathered(failed(), passed(), status=1)
F, D, P, Q = Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.PASS, Outcome.INCONCLUSIVE
R = Ruling


def entry(test=TEST, days=7, **changes):
    added = dt.date(2026, 11, 21) - dt.timedelta(days=14 - days)
    values = {"test": test, "step": "gather", "reason": "wrong lane", "owner": "kernels", "added": added,
              "expires": added + dt.timedelta(days=14)}  # fmt: skip
    return Quarantined.model_validate(values | changes)


def quarantine(*entries):
    return {"quarantine": Quarantine(tests=entries)}


QUARANTINED = {
    "only-quarantined-failures": (FAILS, [entry()], P, R.QUARANTINED, "1 passed; 1 failed in quarantine"),
    "another-failure-beside-it": (
        gathered(failed(), failed(OTHER), status=1), [entry()], F, R.REGRESSION, OTHER),
    "nothing-left-without-it": (gathered(failed(), status=1), [entry()], D, R.QUARANTINED, "it recorded no checks"),
    "on-another-device": (FAILS, [entry(devices=("gfx950",))], F, R.REGRESSION, "max_abs_err"),
    "on-this-device": (FAILS, [entry(devices=("gfx942",))], P, R.QUARANTINED, "1 failed in quarantine"),
    "of-another-step": (FAILS, [entry(step="scan")], F, R.REGRESSION, "max_abs_err"),
    "another-status-is-not-excused": (gathered(failed(), passed(), status=3), [entry()], D, R.REGRESSION, "exit 3"),
    "nor-a-kill": (gathered(failed(), passed(), status=-9), [entry()], D, R.INFRA, "SIGKILL"),
    "nor-a-timeout": (gathered(failed(), passed(), **HUNG), [entry()], D, R.INFRA, "it was ended before"),
    "nor-lost-evidence": (
        gathered(failed(), passed(), failed("(the evidence is whole)"), status=1), [entry()], F, R.REGRESSION, "whole"),
    "nor-a-sick-node": (both(FAILS, after(**ECC)), [entry()], D, R.INFRA, "its node is in doubt"),
    "nor-an-open-question": (gathered(failed(), undecided(), status=1), [entry()], Q, R.QUARANTINED, "n=50"),
    "unexpected-pass": (lambda _: None, [entry()], P, R.PASS, "2 passed"),
    "expired-and-passing": (lambda _: None, [entry(days=0)], F, R.QUARANTINED, "expired on 2026-11-21: mend it"),
    "expired-and-failing": (FAILS, [entry(days=0)], F, R.REGRESSION, "max_abs_err"),
    "on-its-last-day": (FAILS, [entry(days=1)], P, R.QUARANTINED, "1 failed in quarantine"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUARANTINED)
def test_each_case_of_the_quarantine_has_its_ruling(name, tmp_path):
    spoil, entries, outcome, ruling, why = QUARANTINED[name]
    jobs = Jobs(tmp_path)
    spoil(jobs)
    ruled = jobs.ruled(**quarantine(*entries))
    assert (ruled.outcome, ruled.ruling) == (outcome, ruling), ruled.why
    assert why in ruled.why


def test_quarantined_and_unexpected_passes_are_listed(tmp_path):
    jobs = Jobs(tmp_path)
    FAILS(jobs)
    ruled = jobs.ruled(**quarantine(entry(), entry(OTHER)))
    assert (ruled.quarantined, ruled.unexpected_passes) == ((TEST,), (OTHER,))


def test_an_expired_entry_is_red_even_where_its_step_is_not_planned(tmp_path):
    jobs = Jobs(tmp_path)
    verdict = jobs.verdict(**quarantine(entry(step="elsewhere", days=0)))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.why == f"quarantine of {TEST} expired on 2026-11-21: mend it or take it out"
    assert exit_status(verdict, jobs.plan) == Exit.FAIL


LOOSER = Loosening(path="tests/support/tolerances.py", what="fp16: 0.001 -> 0.1")
MORE = Loosening(path="evals/gates.yaml", what="deleted")


@pytest.mark.parametrize(
    ("loosened", "approved_by", "outcome", "named"),
    [
        ((LOOSER, MORE), "", Outcome.INCONCLUSIVE, ""),
        ((LOOSER,), "A. Owner", Outcome.PASS, "A. Owner"),
        ((), "nobody asked", Outcome.PASS, ""),
    ],
    ids=["not-approved", "approved", "nothing-to-approve"],
)
def test_what_is_loosened_needs_a_name(tmp_path, loosened, approved_by, outcome, named):
    jobs = Jobs(tmp_path, agents_plan(loosened=loosened))
    verdict = jobs.verdict(approved_by=approved_by)
    assert (verdict.outcome, verdict.approved_by, verdict.loosened) == (outcome, named, loosened)
    if outcome is Outcome.INCONCLUSIVE:
        assert verdict.why == "needs a named approval: tests/support/tolerances.py: fp16: 0.001 -> 0.1 (and 1 more)"
        assert exit_status(verdict, jobs.plan) == Exit.INCONCLUSIVE


def test_an_approval_excuses_no_failure(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(loosened=(LOOSER,)))
    FAILS(jobs)
    assert jobs.verdict(approved_by="A. Owner").outcome is Outcome.FAIL
    assert jobs.verdict().outcome is Outcome.FAIL


def test_a_quarantined_failure_of_an_earlier_attempt_is_no_flake(tmp_path):
    jobs = Jobs(tmp_path)
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1), *finished(GATHER, passed(TEST), passed()))
    assert jobs.ruled(**quarantine(entry())).ruling is Ruling.PASS
