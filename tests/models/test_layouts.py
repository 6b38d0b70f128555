# SPDX-License-Identifier: Apache-2.0
"""Layouts and packings are vLLM's and ours to choose, and no answer may depend on them: see matrix.py for what runs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("vllm", reason="needs package:vllm")

from models import matrix

from families import judge
from families.plain_attention import E4M3

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(2 * matrix.SECONDS + 120)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("models"), matrix.LAYOUTS)


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    return matrix.run(folders, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def oracle(folders):
    return cache(lambda model: matrix.oracle(model, folders[model]))


def answers(runs, run):
    return runs[run]["batches"]["only"]["answers"]


def layers(runs, run):
    return runs[run]["batches"]["only"]["layers"]


@pytest.mark.parametrize("run", matrix.RUNS, ids="-".join)
def test_answers_equal_transformers(run, runs, oracle, record_property):
    first = next(other for other in matrix.RUNS if other[0] == run[0])
    requests, got = matrix.requests(run[0]), answers(runs, run)
    for request, answer in zip(requests, got, strict=True):
        assert len(answer.rows) == 8 + (len(request.prompt) - 1) * (request.speech is None)
    closeness = judge.compare(requests, got, oracle(run[0]))
    record_property("max_abs_err", closeness.max_abs_err)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in answers(runs, first)]


@pytest.mark.parametrize("run", matrix.RUNS, ids="-".join)
def test_it_was_us_and_in_this_packing(run, runs):
    model, packing, _ = run
    assert runs[run]["refusal"] == ""
    for row in layers(runs, run):
        assert row["packing"] == packing
        assert row["fp8_format"] == (E4M3 if "fp8" in model else None)
        if packing != "rows":
            assert row["kv_shape"][1] == 2, "two parts, K and V"


@pytest.mark.parametrize("packing", matrix.PACKINGS)
@pytest.mark.parametrize("model", ["gemma-2", "granite-4.0-h"])
def test_layouts_really_differ(model, packing, runs):
    """Else the comparison of layouts compares nothing: vLLM would have ignored the choice."""
    mine = [run for run in matrix.RUNS if run[:2] == (model, packing)]
    strides = {tuple(layers(runs, run)[0]["kv_strides"]) for run in mine}
    assert len(strides) == len(mine) > 1


@pytest.mark.parametrize(("layout", "together"), [("LBHNC", 1), ("BLHNC", 2)])
def test_blocks_lie_by_layer_or_by_block(layout, together, runs):
    """There are two attention layers. In the packed layout nothing but the last dimension is dense."""
    run = ("granite-4.0-h", "rows", layout)
    rows = layers(runs, run)
    assert len(rows) == 2
    for row in rows:
        page = torch.Size(row["kv_shape"][1:]).numel()
        assert row["kv_strides"][0] == together * page
        assert row["kv_strides"][-1] == 1
    assert runs[run]["block_size"] == 48, "a state page fits; a power of two would hide wrong arithmetic"


@pytest.mark.parametrize("model", ["gemma-2-fp8", "gemma-2-fp8-per-token"])
def test_tolerance_resolves_a_cache_that_is_not_quantised(model, oracle):
    for request in matrix.PROMPTS[1:]:
        tokens, mine = list(request.prompt), oracle(model)
        plain = mine.log_probs(tokens, attention="eager") - mine.log_probs(tokens)
        assert plain.abs().max() > 4 * mine.tolerance(tokens).worst


def test_tolerance_resolves_lost_sinks(oracle):
    """At least half of all next-token distributions would notice attention without them."""
    mine = oracle("gpt-oss")
    sinks = [layer.self_attn.sinks.data for layer in mine.exact.model.layers]
    for request in matrix.PROMPTS:
        tokens = list(request.prompt)
        tolerance, want, kept = mine.tolerance(tokens), mine.log_probs(tokens), [sink.clone() for sink in sinks]
        for sink in sinks:
            sink.fill_(-torch.inf)
        without = mine.log_probs(tokens, exact=True)
        for sink, values in zip(sinks, kept, strict=True):
            sink.copy_(values)
        assert (without - want).abs().amax(-1).median() > 4 * tolerance.worst


def test_tolerance_resolves_lost_chunks(oracle):
    """Every token after the first chunk would notice keys of the chunk before its own."""
    mine = oracle("llama-4")
    chunk = mine.exact.config.attention_chunk_size
    for request in (request for request in matrix.PROMPTS if len(request.prompt) > chunk):
        tokens = list(request.prompt)
        tolerance, want = mine.tolerance(tokens), mine.log_probs(tokens)
        mine.exact.config.attention_chunk_size = len(tokens)
        whole = mine.log_probs(tokens, exact=True)
        mine.exact.config.attention_chunk_size = chunk
        assert (whole - want)[chunk:].abs().amax(-1).min() > 4 * tolerance.worst


def test_cross_attention_writes_once_and_attends_in_every_step(runs):
    """Three requests, one of which starts in each step, and 8 tokens each: 10 steps."""
    for run in (run for run in matrix.RUNS if run[0] == "whisper"):
        cross, own = (
            [row for row in layers(runs, run) if kind in row["layer"]] for kind in (".encoder_attn.", ".self_")
        )
        assert len(cross) == len(own) == 2
        assert {row["attentions"] for row in (*cross, *own)} == {10}
        assert {row["writes"] for row in cross} == {3}
        assert {row["writes"] for row in own} == {10}
