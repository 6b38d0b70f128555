"""Layouts and packings are vLLM's and ours to choose, and no answer may depend on them: see matrix.py for what runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="the plugin is about vLLM")

from models import matrix, tiny_decoders, tiny_hybrid, tiny_sinks
from transformers import AutoTokenizer

from families import plain_attention, speech

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(2 * matrix.SECONDS + 120)]

EXACT = [model for model in matrix.LAYOUTS if model != "pocket"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    return matrix.run(folders, tmp_path_factory.mktemp("logs"))


def answers(runs, run):
    return runs[run]["batches"]["only"]["answers"]


@pytest.fixture(scope="module")
def oracle(folders):
    """A function: log-probabilities that transformers computes for an answer, and how far rounding moves them."""
    hybrid = tiny_hybrid.Oracle.load(folders["hybrid"], matrix.DTYPE)

    def compute(model, prompt, answer):
        if model == "hybrid":
            ways = [hybrid.log_probs(prompt + answer[:-1], exact=exact) for exact in (True, False)]
        elif model == "speech":
            ways = [speech.log_probs(folders[model], prompt, answer, d) for d in (torch.float64, matrix.DTYPE)]
        elif model == "sinks":
            ways = [
                tiny_sinks.log_probs(folders[model], prompt + answer[:-1], d) for d in (torch.float64, matrix.DTYPE)
            ]
        else:
            chosen = [(torch.float64, "eager"), (matrix.DTYPE, "eager")]
            if model.startswith("fp8"):
                chosen = [
                    *((torch.float64, f"{model}{nudge}") for nudge in ("", " up", " down")),
                    (matrix.DTYPE, model),
                ]
            ways = [tiny_decoders.log_probs(folders[model], prompt + answer[:-1], *way) for way in chosen]
        exact, *rounded = ways
        return exact, max((exact - other).abs().max().item() for other in rounded)

    return compute


@pytest.fixture(scope="module")
def golden(runs, oracle):
    """Of each model: per request prompt, answer, log-probabilities; and twice the largest effect of rounding."""
    found = {}
    for model in EXACT:
        run = next(run for run in matrix.RUNS if run[0] == model)
        prompts = matrix.BATCHES[model]["prompts"]
        tokens = [answer["tokens"] for answer in answers(runs, run)]
        pairs = [oracle(model, prompt, answer) for prompt, answer in zip(prompts, tokens, strict=True)]
        found[model] = (prompts, tokens, [exact for exact, _ in pairs], 2 * max(rounding for _, rounding in pairs))
    return found


@pytest.mark.parametrize("run", [run for run in matrix.RUNS if run[0] in EXACT], ids="-".join)
def test_log_probabilities_equal_transformers(run, runs, golden, record_property):
    _, tokens, exact, tolerance = golden[run[0]]
    for want_tokens, want, answer in zip(tokens, exact, answers(runs, run), strict=True):
        assert answer["tokens"] == want_tokens
        got = torch.tensor(answer["log_probs"]).double()
        assert got.shape == want.shape
        record_property("max_abs_err", (got - want).abs().max().item())
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("run", matrix.RUNS, ids="-".join)
def test_it_was_us_and_in_this_packing(run, runs):
    model, packing, _ = run
    result = runs[run]
    assert result["refusal"] == ""
    for row in result["batches"]["only"]["layers"]:
        assert row["packing"] == packing
        assert row["fp8_format"] == (plain_attention.E4M3 if model.startswith("fp8") else None)
        if packing != "rows":
            assert row["kv_shape"][1] == 2, "two parts, K and V"


@pytest.mark.parametrize("packing", matrix.PACKINGS)
@pytest.mark.parametrize("model", ["decoder", "pocket"])
def test_layouts_really_differ(model, packing, runs):
    """Else the comparison of layouts compares nothing: vLLM would have ignored the choice."""
    mine = [run for run in matrix.RUNS if run[:2] == (model, packing)]
    strides = {tuple(runs[run]["batches"]["only"]["layers"][0]["kv_strides"]) for run in mine}
    assert len(strides) == len(mine) > 1


def test_pocket_answers_do_not_depend_on_layout_or_packing(runs, folders):
    mine = {run: [answer["tokens"] for answer in answers(runs, run)] for run in matrix.RUNS if run[0] == "pocket"}
    first = next(iter(mine.values()))
    for run, tokens in mine.items():
        assert tokens == first, f"{run} answers otherwise"
    tokenizer = AutoTokenizer.from_pretrained(folders["pocket"])
    got = [matrix.number(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in first]
    wrong = [p["question"] for p, n in zip(matrix.problems(), got, strict=True) if n != matrix.number(p["answer"])]
    assert len(wrong) <= matrix.QUESTIONS // 20, wrong


@pytest.mark.parametrize("model", ["fp8", "fp8 per token"])
def test_tolerance_resolves_a_cache_that_is_not_quantised(model, golden, folders):
    prompts, tokens, exact, tolerance = golden[model]
    for prompt, answer, want in zip(prompts, tokens, exact, strict=True):
        plain = tiny_decoders.log_probs(folders[model], prompt + answer[:-1], torch.float64)
        assert (plain - want).abs().max() > 4 * tolerance


def test_tolerance_resolves_another_audio(golden, folders):
    """The comparison would notice cross attention to another request's encoder."""
    prompts, tokens, exact, tolerance = golden["speech"]
    other = {"audio": prompts[1]["audio"], "tokens": prompts[0]["tokens"]}
    heard = speech.log_probs(folders["speech"], other, tokens[0], torch.float64)
    assert (heard - exact[0]).abs().max() > 4 * tolerance


def test_tolerance_resolves_lost_sinks(golden, folders):
    """At least half of all next-token distributions would notice attention without them."""
    prompts, tokens, exact, tolerance = golden["sinks"]
    for prompt, answer, want in zip(prompts, tokens, exact, strict=True):
        without = tiny_sinks.log_probs(folders["sinks"], prompt + answer[:-1], torch.float64, sinks=False)
        assert (without - want).abs().amax(-1).median() > 4 * tolerance


def test_cross_attention_writes_once_and_attends_in_every_step(runs):
    """Three requests, one of which starts in each step, and 8 tokens each: 10 steps."""
    for run in matrix.RUNS:
        if run[0] == "speech":
            rows = runs[run]["batches"]["only"]["layers"]
            cross = [row for row in rows if ".encoder_attn." in row["layer"]]
            own = [row for row in rows if ".self_attn." in row["layer"]]
            assert len(cross) == len(own) == 2
            assert {row["attentions"] for row in rows} == {10}
            assert {row["writes"] for row in cross} == {3}
            assert {row["writes"] for row in own} == {10}
