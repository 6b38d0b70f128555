# SPDX-License-Identifier: Apache-2.0
"""Divergences, what rounding explains of them, and seventeen faults of attention that exact match mostly misses."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from support.gates import declared, resolved
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hileval.ask import loop, sides
from hileval.distances import ASKED, FLOOR, divergence
from hileval.engines import EngineError
from hileval.engines.transformers_engine import TransformersEngine
from hileval.gates.drift import SLACKS, Compared, Drift, compare_sides, judge_drift
from hileval.gates.judge import judge
from hileval.gates.resolve import resolve
from hileval.records.answers import Side
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome

DECLARED = declared()
DRIFT, GATE = DECLARED.drifts["pocket-window-drift"], DECLARED.gates["pocket-packed"]


def flat(kl):
    return Drift(kl, kl, kl, 10)


def test_divergence_is_kl_where_every_token_is_named():
    rng = np.random.default_rng(1)
    want, got = log_softmax(rng.standard_normal((2, 20)), axis=-1)
    expected = float((np.exp(want) * (want - got)).sum())
    assert divergence(dict(enumerate(got)), dict(enumerate(want))) == pytest.approx(expected, abs=1e-6)
    assert divergence(dict(enumerate(want)), dict(enumerate(want))) == 0
    named = {token: value for token, value in enumerate(got) if token != int(want.argmax())}
    assert divergence(named, dict(enumerate(want))) > 0.05, (
        "a token that is not named is at least as far off as the last"
    )


def row_of(logits, prompt=None):
    """The ASKED likeliest tokens, and the prompt's own as vLLM adds it."""
    named = {*np.argsort(-logits)[:ASKED].tolist(), *([] if prompt is None else [prompt])}
    return {token: float(logits[token]) for token in named}


@pytest.mark.parametrize("noise", [0.1, 0.01, 0.003])
def test_an_unlikely_token_of_the_prompt_does_not_count(noise):
    """A token that rounding moves from rank 20 to 21 is as likely as the 20th, and not as the prompt's own."""
    rng, found = np.random.default_rng(1), []
    for _ in range(50):
        logits = 3 * rng.standard_normal(20_000)
        want, got = log_softmax(logits), log_softmax(logits + noise * rng.standard_normal(20_000))
        prompt = int(want.argmin())
        found.append(divergence(row_of(got, prompt), row_of(want, prompt)))
        assert found[-1] == divergence(row_of(got), row_of(want))
        assert found[-1] <= float((np.exp(want) * (want - got)).sum())
    assert max(found) < noise**2
    swapped = dict.fromkeys(range(ASKED + 1), -4.0)
    for prompt in ({}, {99: -15.0}):
        one, other = ({k: v for k, v in swapped.items() if k != lost} | prompt for lost in (ASKED, 0))
        assert divergence(one, other) == pytest.approx(0, abs=1e-9)


def test_rows_without_a_token_in_common_are_far():
    """All their tokens together are no bucket: what the one names, the other leaves no room for."""
    for count in (1, 5, ASKED):
        share = math.log(0.999 / count)
        one, other = ({first + token: share for token in range(count)} for first in (0, 100))
        assert divergence(one, other) > 0.5, count


@pytest.mark.parametrize("row", [{}, {0: math.nan, 1: -1.0}, {0: -math.inf, 1: 0.0}])
def test_what_is_no_distribution_is_infinitely_far(row):
    good = {0: -0.7, 1: -0.7}
    assert divergence(row, good) == divergence(good, row) == math.inf
    assert not Drift.between([[row, good]], [[good, good]]).within(flat(1.0))


def test_other_places_are_no_comparison():
    for got in ([], [[]], [[{0: 0.0}]]):
        with pytest.raises(RecordsError):
            Drift.between(got, [[{0: 0.0}, {0: 0.0}]] if got else [])


@pytest.mark.parametrize(
    ("reading", "writing", "control", "outcomes"),
    [
        (5.9e-2, 5.9e-4, 1.0, "pass pass pass"),
        (6.1e-2, 5.9e-4, 1.0, "pass fail pass"),
        (5.9e-2, 6.1e-4, 1.0, "pass pass fail"),
        (5.9e-2, math.inf, 1.0, "pass pass fail"),
        (5.9e-2, 5.9e-4, 5.9e-2, "inconclusive inconclusive pass"),
        (5.9e-2, 5.9e-4, 5.9e-4, "inconclusive inconclusive inconclusive"),
    ],
    ids=["rounding", "more, reading", "more, writing", "NaN", "a lost block is like reading", "and like writing"],
)
def test_each_reading_has_its_rounding_and_the_control_trips(reading, writing, control, outcomes):
    """Reading rounds by 1e-2 nats here and writing by 1e-4: the larger does not excuse a fault of decode."""
    compared = Compared(flat(reading), flat(1e-2)), Compared(flat(writing), flat(1e-4))
    checks = judge_drift("g", *compared, flat(control), FLOOR)
    assert [check.id for check in checks] == ["g/control", "g/reading", "g/writing"]
    assert " ".join(check.outcome.value for check in checks) == outcomes


def test_the_worst_place_may_be_farther_from_rounding():
    rounding = flat(1e-4)
    assert Drift(*(0.99e-4 * slack for slack in SLACKS), 9).within(rounding)
    for figure, slack in zip(("half", "most", "worst"), SLACKS, strict=True):
        assert not replace(flat(1e-4), **{figure: 1.01e-4 * slack}).within(rounding)


def test_one_sequence_in_fifty_is_seen_by_the_worst_place_alone():
    good, bad = {0: math.log(0.9), 1: math.log(0.1)}, {0: math.log(0.1), 1: math.log(0.9)}
    found = Drift.between([[bad] if i == 7 else [good] for i in range(50)], [[good]] * 50)
    assert found.half == found.most == 0
    assert not found.within(flat(1e-3))


def test_equal_bits_are_no_measure_of_rounding():
    good, other = {0: math.log(0.9), 1: math.log(0.1)}, {0: math.log(0.8), 1: math.log(0.2)}
    mostly = [[other] if i == 7 else [good] for i in range(50)]
    assert Drift.rounding(mostly, [[good]] * 50) == Drift.between([[other]], [[good]])
    assert Drift.rounding([[good]] * 50, [[good]] * 50).worst == 0


def unseen(fault, queries, n, mask):
    """Which keys a query does not read, [..., queries, n]: later ones, those that the model masks, and what is lost."""
    hidden = torch.ones(queries, n, dtype=torch.bool).triu(n - queries + 1)
    if mask is not None:
        hidden = hidden | (~mask[..., :n] if mask.dtype == torch.bool else mask[..., :n] < 0)
    lost = torch.zeros(queries, n, dtype=torch.bool)
    late = torch.arange(4, n)
    if fault.get("lost") == "first":
        lost[late, 0] = True
    if fault.get("lost") == "recent":
        lost[late, late - 2] = True
    return hidden | lost


def damaged(fault, key, value):
    n = key.shape[-2]
    if "stale" in fault:
        key, value = key.clone(), value.clone()
        for side in (key, value)[fault["stale"] :]:
            side[..., n // 2, :] = side[..., 1, :]
    if fault.get("codes"):
        key, value = (side.to(torch.float8_e4m3fn).to(side.dtype) for side in (key, value))
    if fault.get("block"):
        key, value = (torch.cat([one[..., :16, :], one[..., :16, :], one[..., 32:, :]], -2) for one in (key, value))
    return key, value * fault.get("values", 1.0)


def faulty(fault, rng):
    """Attention in float32 with one fault; [sequences, heads, tokens, channels]."""

    def attention(_, query, key, value, attention_mask, scaling, softcap=None, **__):
        repeat = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(repeat, 1) for side in damaged(fault, key, value))
        scores = query @ key.mT * scaling * fault.get("scale", 1.0)
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        hidden = unseen(fault, query.shape[-2], key.shape[-2], attention_mask)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if fault.get("weights"):
            weights = weights.to(torch.float8_e4m3fn).to(weights.dtype)
        out = weights @ value
        if noise := fault.get("noise"):
            out = out + noise * out.std() * torch.as_tensor(rng.standard_normal(out.shape), dtype=out.dtype)
        return out.transpose(1, 2).contiguous(), weights

    return attention


FAULTS = {
    "softmax scale x1.01": {"scale": 1.01},
    "softmax scale x1.05": {"scale": 1.05},
    "softmax scale x1.25": {"scale": 1.25},
    "V scale x1.02": {"values": 1.02},
    "V scale x1.10": {"values": 1.1},
    "V scale x2": {"values": 2.0},
    "noise 3 % of sd": {"noise": 0.03},
    "noise 10 %": {"noise": 0.1},
    "noise 30 %": {"noise": 0.3},
    "P in FP8": {"weights": True},
    "KV in FP8, undeclared": {"codes": True},
    "first token not read": {"lost": "first"},
    "one slot stale, K and V": {"stale": 0},
    "one slot stale, V": {"stale": 1},
    "one key in the last 4 skipped": {"lost": "recent"},
    "block of 16 overwritten": {"block": True},
    "block of 16 overwritten, 1 of 50 sequences": {"block": True, "every": 50},
}


@pytest.fixture(scope="module")
def asked():
    """A pocket model on transformers with an attention that a fault is planted in, and what it says without one."""
    engine = TransformersEngine(GATE.path(GATE.model))
    sequences = sides.sequences_of(resolved(GATE), DRIFT.model_copy(update={"lengths": {0: 50}}))

    def read(fault, some=range(50)):
        planted, right = faulty(fault, np.random.default_rng(1)), faulty({}, None)
        every, rows = fault.get("every", 1), []
        for i in some:
            served = planted if i % every == every - 1 else right
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", served)
                rows += engine.read([sequences[i]])
        return rows

    engine.model.set_attn_implementation("eager")
    own = engine.read(sequences)
    engine.model.set_attn_implementation("sdpa")
    return read, own


def test_right_attention_by_other_arithmetic_is_rounding(asked):
    """Attention with another order of sums than transformers' own."""
    read, own = asked
    assert Drift.between(read({}), own).within(flat(0.0))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_of_seventeen_faults_is_seen(asked, fault, record_property):
    read, own = asked
    some = range(50) if "every" in FAULTS[fault] else range(1)
    found = Drift.between(read(FAULTS[fault], some), [own[i] for i in some])
    record_property("worst_nats", f"{found.worst:.2g}")
    assert not found.within(flat(0.0)), f"{fault}: {found}"


@pytest.fixture(scope="module")
def coded():
    """The sequences of the packed gate, and what its peer says of them: FP8 codes in float32 arithmetic."""
    gate, drift = DECLARED.gates["pocket-packed"], DECLARED.drifts["pocket-packed-drift"]
    sequences = sides.sequences_of(resolved(gate), drift)
    peer = TransformersEngine(gate.path(gate.model), kv_cache_dtype=str(gate.engine_args["kv_cache_dtype"]))
    return sequences, peer.read(sequences), drift.floor


BESIDE_CODES = {name: fault for name, fault in FAULTS.items() if "codes" not in fault and "every" not in fault}


@pytest.mark.parametrize("fault", ["none", *BESIDE_CODES])
def test_a_peer_with_the_same_codes_sees_each_fault_beside_them(coded, monkeypatch, fault):
    sequences, own, floor = coded
    engine = TransformersEngine(GATE.path(GATE.model))
    planted = faulty(BESIDE_CODES.get(fault, {}) | {"codes": True}, np.random.default_rng(1))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", planted)
    engine.model.set_attn_implementation("sdpa")
    found = Drift.between(engine.read(sequences), own)
    assert found.within(flat(0.0), floor) == (fault == "none"), found


def test_codes_that_the_peer_does_not_know_are_refused():
    with pytest.raises(EngineError, match="fp8_e5m2"):
        TransformersEngine(GATE.path(GATE.model), kv_cache_dtype="fp8_e5m2")


def test_the_sides_are_fixed_sequences_and_a_replaced_block():
    found = sides.sequences_of(resolved(GATE), DRIFT)
    lengths = Counter(map(len, found))
    assert lengths[140] == DRIFT.lengths[140]
    assert found == sides.sequences_of(resolved(GATE), DRIFT)
    tokens, after = sides.changed(found[0], found[1])
    differ = [i for i, (a, b) in enumerate(zip(tokens, found[0], strict=True)) if a != b]
    assert 0 < len(differ) <= 16 > after - 1 - differ[-1] >= 0


def test_another_backend_on_either_side_did_not_run():
    good = a_side({0: math.log(0.9), 1: math.log(0.1)})
    assert {check.outcome for check in compared(good, good)} == {Outcome.PASS}
    bad = good.model_copy(update={"served": good.served.model_copy(update={"outcome": Outcome.DID_NOT_RUN})})
    for pair in ((bad, good), (good, bad)):
        checks = compared(*pair)
        assert {check.outcome for check in checks[2:]} == {Outcome.DID_NOT_RUN}


def compared(ours, peer, second=None):
    sides = {"ours": ours, "peer": peer} | ({} if second is None else {"second": second})
    return compare_sides("g", FLOOR, sides)


def a_side(row, name="x"):
    rows = [[row] * 5] * 2
    changed = [[{0: math.log(0.1), 1: math.log(0.9)}] * 2] * 2
    served = Check(id=f"g/served-by-{name}", outcome=Outcome.PASS, message="m", labels={"backend": name})
    return Side(
        name=name,
        served=served,
        read=rows,
        wrote=rows,
        asked=[[1]] * 2,
        written=[[2]] * 2,
        read_again=dict.fromkeys(("ours", "second", "peer"), rows),
        read_alone=rows,
        changed=changed,
    )


def test_what_a_second_trusted_attention_differs_is_rounding():
    near, far, farther = ({0: math.log(p), 1: math.log(1 - p)} for p in (0.9, 0.89, 0.8))
    peer, ours = a_side(near), a_side(far)
    alone = {check.id: check.outcome for check in compared(ours, peer)}
    assert alone["g/reading"] is Outcome.FAIL
    beside = {check.id: check.outcome for check in compared(ours, peer, a_side(far, "B"))}
    assert set(beside.values()) == {Outcome.PASS}
    assert "g/served-by-B" in beside
    itself = {check.id: check.outcome for check in compared(ours, peer, a_side(far))}
    assert itself["g/second"] is Outcome.INCONCLUSIVE, "the second attention is the peer's own"
    checks = compared(a_side(farther), peer, a_side(far, "B"))
    assert {check.id: check.outcome for check in checks}["g/reading"] is Outcome.FAIL


def test_each_side_is_a_process_and_one_that_dies_is_no_answer(monkeypatch, tmp_path):
    gate = resolve("granite-4.0-h-small-drift", DECLARED)
    asked, dies = [], ""

    def process(command, **_):
        which = command[5]
        asked.append((which, [word.partition("=")[0] for word in command[8:] if "=" in word]))
        if which != dies:
            a_side({0: math.log(0.9), 1: math.log(0.1)}, which).pack(Path(command[7]))
        return mock.Mock(returncode=int(which == dies))

    monkeypatch.setattr(loop.subprocess, "run", process)
    loop.ask(gate, tmp_path)
    assert asked == [("ours", []), ("second", []), ("peer", ["ours", "second"])]
    checks, flips = judge(gate, tmp_path)
    assert ({check.outcome for check in checks}, flips) == ({Outcome.PASS}, "")
    dies = "second"
    with pytest.raises(EngineError, match="second ended with status 1"):
        loop.ask(gate, tmp_path)
    with pytest.raises(RecordsError, match="not the answers of a drift gate"):
        judge(gate, tmp_path)
    (tmp_path / "second.json.gz").write_bytes(b"x")
    with pytest.raises(RecordsError, match="not the answers of a drift gate"):
        judge(gate, tmp_path)


def test_hub_gates_name_two_attentions_and_fit_in_memory():
    """A batch's log-probabilities take 6 bytes for each token and word, beside what vLLM measures for its cache."""
    hubs = {name: drift for name, drift in DECLARED.drifts.items() if DECLARED.gates[drift.of].weights == "hub"}
    assert len(hubs) == 14
    for name, drift in hubs.items():
        assert drift.second not in (None, drift.peer), name
        assert drift.peer not in ("vllm", "transformers"), f"{name}: vLLM may choose the second one"
        assert int(drift.engine_args["max_num_batched_tokens"]) * 200_000 * 6 < 2.5e9, name
