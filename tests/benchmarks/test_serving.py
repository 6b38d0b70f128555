# SPDX-License-Identifier: Apache-2.0
"""When two engines' answers count as the same, what a rate is, and what is refused. No engine, no device."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import transformers

from benchmarks.serving import judge, models
from benchmarks.serving.engine import Drive, prompts

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "serving" / "h200.jsonl"
WANT = {token: -0.5 * token for token in range(1, 21)}
EXACTLY = judge.Distances(half=0.0, most=0.0, sequences=10)


def rows(*offsets: float) -> list[dict[int, float]]:
    return [{token: value + offset for token, value in WANT.items()} for offset in offsets]


def drive(*steps: float, requests: int = 4) -> Drive:
    return Drive(((1, 2, 3),) * requests, 2.0, steps)


def speed() -> judge.Speed:
    rates = (judge.Rate.of([200.0, 220.0]), judge.Rate.of([100.0, 101.0]))
    return judge.Speed("4 x 100", rates, rates, 4, 3)


def verdict(ours: float, rounding: float, control: float, lead: float = 0.0) -> judge.ServingVerdict:
    kinds = (judge.Distances(value, value, 10) for value in (ours, rounding, control))
    return judge.ServingVerdict("m", "all", 16, *kinds, lead)


@pytest.mark.parametrize(("one", "other", "place"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((4, 2), (1, 2), 0)])
def test_answers_part_at_their_first_difference(one, other, place):
    assert judge.parting(one, other) == place


@pytest.mark.parametrize(("one", "other"), [((), ()), ((1, 2), (1,))])
def test_a_lost_answer_is_no_agreement(one, other):
    with pytest.raises(ValueError, match="tokens"):
        judge.parting(one, other)


def test_distance_is_that_of_the_likeliest_tokens():
    assert judge.distance(WANT, WANT) == 0
    assert judge.distance(WANT | {2: -1.25}, WANT) == pytest.approx(0.25)
    assert judge.distance(WANT | {20: -60.0}, WANT) == 0  # not among the five likeliest


def test_a_token_that_an_engine_does_not_name_is_at_least_as_far_off_as_its_last():
    got = {token: value for token, value in WANT.items() if token != 1}
    assert judge.distance(got, WANT) == pytest.approx(9.5)


def test_rounding_explains_twice_itself_and_no_more():
    rounding = judge.Distances.between(rows(*[0.1] * 10), rows(*[0.0] * 10))
    assert judge.Distances.between(rows(*[0.19] * 10), rows(*[0.0] * 10)).within(rounding)
    assert not judge.Distances.between(rows(*[0.21] * 10), rows(*[0.0] * 10)).within(rounding)
    assert not judge.Distances.between(rows(*[0.0] * 8, 0.9, 0.9), rows(*[0.0] * 10)).within(rounding)


def test_nan_is_infinitely_far_wherever_it_stands():
    for token in WANT:
        assert judge.distance(WANT | {token: math.nan}, WANT) == math.inf
        assert judge.distance(WANT, WANT | {token: math.nan}) == math.inf
    assert judge.lead({1: math.nan, 2: -1.0}, 1, 2) == math.inf
    assert not verdict(0.1, math.inf, math.inf).right
    assert not judge.Distances(math.nan, math.nan, 10).within(judge.Distances(1.0, 1.0, 10))


def test_float32_is_not_held_against_equal_bits():
    assert judge.Distances(6e-6, 6e-6, 5).within(EXACTLY)
    assert not judge.Distances(3e-5, 3e-5, 5).within(EXACTLY)


def test_too_little_to_compare_is_refused():
    with pytest.raises(ValueError, match="only 1 of 4"):
        judge.Distances.between([rows(0.0)[0], None, None, None], rows(*[0.0] * 4))


def test_a_comparison_that_misses_a_lost_block_is_not_right():
    assert verdict(0.1, 0.1, 2.0).right
    assert not verdict(0.1, 0.1, 0.15).right
    assert not verdict(0.3, 0.1, 2.0).right


def test_a_token_that_rounding_cannot_have_chosen_is_not_right():
    """Decode that reads a wrong block writes such a token, and may still read its own answer rightly."""
    assert judge.lead(WANT, 2, 1) == 0.5
    assert judge.lead(WANT, 99, 1) == math.inf
    assert verdict(0.1, 0.1, 2.0, lead=0.39).right
    assert not verdict(0.1, 0.1, 2.0, lead=0.41).right
    assert not verdict(0.1, 0.1, 2.0, lead=math.inf).right


def test_a_model_that_is_not_right_has_no_rates():
    wrong = judge.records(verdict(0.3, 0.1, 2.0), [speed()], {"commit": "c"})
    assert [(row["decode"], row["prefill"], row["right"]) for row in wrong] == [(None, None, False)]
    assert "not right" in judge.table(wrong)
    right = judge.records(verdict(0.1, 0.1, 2.0), [speed()], {"commit": "c"})
    assert "| m | 4 x 100 | 210 (20) | 100 (1) | 2.09 | 2.09 | 3 of 4 |" in judge.table(right)


def test_the_recorded_run_is_what_the_judge_says_of_its_own_figures_and_stands_on_the_page():
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for row in recorded:
        kinds = (judge.Distances(**row[kind]) for kind in ("ours", "rounding", "control"))
        found = judge.ServingVerdict(row["model"], row["layers"], row["block_size"], *kinds, row["lead"])
        rates = ([judge.Rate(**rate) for rate in row[name]] for name in ("decode", "prefill"))
        timed = judge.Speed(row["case"], *rates, row["requests"], row["same"])
        facts = {name: row[name] for name in ("hardware", "versions", "commit")}
        assert judge.records(found, [timed], facts) == [row]
        assert row["right"]
    assert {row["case"] for row in recorded} == {case.name for case in models.CASES}
    assert judge.table(recorded) in (RECORDED.with_suffix(".md")).read_text()


def test_a_ratio_of_a_rate_that_is_not_steady_is_not_shown():
    rates = (judge.Rate.of([8000.0, 24000.0]), judge.Rate.of([14000.0, 14100.0]))
    shown = judge.records(verdict(0.1, 0.1, 2.0), [dataclasses.replace(speed(), prefill=rates)], {})
    assert "| 2.09 | - | 3 of 4 |" in judge.table(shown)


def test_a_rate_is_that_of_the_median_step_and_its_spread_that_of_the_drives():
    rate = judge.decode([drive(0.1, 0.1, 9.0), drive(0.2, 0.2, 0.2)])
    assert (rate.median, rate.spread) == (pytest.approx(30.0), pytest.approx(20.0))
    assert judge.prefill([drive(0.1)], 400).median == 200


def test_requests_that_never_decode_together_have_no_rate():
    with pytest.raises(ValueError, match="never decoded all at once"):
        judge.decode([drive(0.1), drive()])


def test_prompts_hold_no_special_tokens_and_are_the_same_again():
    case = models.ServingCase(3, 50)
    asked = prompts(case, 512, 7)
    assert asked == prompts(case, 512, 7) != prompts(case, 512, 8)
    assert {len(prompt) for prompt in asked} == {50}
    assert min(map(min, asked)) >= 3
    assert max(map(max, asked)) < 512


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("tiny", [True, False])
def test_every_config_is_one_of_transformers(name, tiny):
    folder = models.MODELS[name].folder(tiny=tiny)
    declared = json.loads((folder / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    sizes = {key for key, value in declared.items() if isinstance(value, int | float) and key in config}
    assert {key: config[key] for key in sizes} == {key: declared[key] for key in sizes}
    assert sizes >= {"hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    assert config["architectures"] == declared["architectures"]
    kinds = config.get("layer_types") or ["attention"] * config["num_hidden_layers"]
    assert len(kinds) == config["num_hidden_layers"]
