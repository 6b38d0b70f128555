# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, engines that hand KV blocks over, a drafting model: answers are as of one engine alone.

Transformers judges them, and the KV pool holds NaN at the start: what a rank or a connector did not write cannot be
attended to by chance.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import engine, matrix

pytest.importorskip("vllm", reason="needs package:vllm")

from families import checkpoints, judge
from families.oracle import VOCABULARY
from families.processes import GPU, IN_PROCESS
from families.schedule import ScheduledRequest, prompt

SECONDS = 600

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(SECONDS + 60)]

MODELS = ("gemma-2", "granite-4.0-h", "deepseek-v3", "bloom")

HANDED_OVER = tuple(ScheduledRequest(prompt(n, n, VOCABULARY), 8) for n in (37, 66, 96))
CACHED = [32, 64, 80]
"""Their tokens in whole blocks of 16 but for the last token, which every engine computes itself."""

DRAFTS = 3
ANSWERED = tuple(ScheduledRequest(request.prompt, 20) for request in matrix.PROMPTS)


def engines(folders, store):
    """What runs, by name; every consumer after its producer."""

    def spec(model, asked=matrix.PROMPTS, **arguments):
        return engine.spec(folders[model], {"only": asked}, **(matrix.arguments(model) | arguments))

    def connected(model, role, **arguments):
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(store / model)},
        }
        arguments |= {"max_num_batched_tokens": 256}  # it saves what the first step of a request computes
        return spec(model, HANDED_OVER, prompt_rows=False, kv_transfer_config=connector, **arguments)

    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    drafter = {"method": "draft_model", "model": str(folders["bloom"]), "num_speculative_tokens": DRAFTS}
    return {
        "gemma-2, one rank": spec("gemma-2"),
        "gemma-2, two ranks": spec("gemma-2", **two),
        "granite-4.0-h, one rank": spec("granite-4.0-h"),
        "granite-4.0-h, two ranks": spec("granite-4.0-h", **two),
        "gemma-2, saves": connected("gemma-2", "kv_producer"),
        "gemma-2, loads": connected("gemma-2", "kv_consumer"),
        "gemma-2, loads into another layout": connected("gemma-2", "kv_consumer", layout="BLNHC"),
        "deepseek-v3, saves": connected("deepseek-v3", "kv_producer"),
        "deepseek-v3, loads": connected("deepseek-v3", "kv_consumer"),
        "bloom, drafts": spec("bloom", ANSWERED, prompt_rows=False, speculative_config=drafter),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    for name in MODELS:
        checkpoints.save(matrix.MODELS[name], base / name, matrix.dtype(name))
    return {name: base / name for name in MODELS}


@pytest.fixture(scope="module")
def started_runs(folders, tmp_path_factory):
    started = engines(folders, tmp_path_factory.mktemp("store"))
    if GPU and torch.cuda.device_count() < 2:
        started = {name: spec for name, spec in started.items() if not name.endswith("two ranks")}
    # V1: the CPU platform runs no other, and on GPUs no other test has drafts under it.
    environment = IN_PROCESS | {"PAGEDKV_MLA": "1", "PAGEDKV_PACKING": "rows", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    return engine.run(tmp_path_factory.mktemp("log"), started, environment, seconds=SECONDS)


@pytest.fixture(scope="module")
def oracle(folders):
    return cache(lambda model: matrix.oracle(model, folders[model]))


@pytest.fixture
def runs(started_runs, lacks):
    """What every run answered, by name; asking for one that two GPUs are too few for skips the test."""

    class Runs(dict):
        def __missing__(self, run):
            lacks("gpus:2", f"{run!r}")

    return Runs(started_runs)


def answers(runs, run):
    assert runs[run]["refusal"] == "", "every layer of every rank was ours"
    return runs[run]["batches"]["only"]["answers"]


def layers(runs, run):
    answers(runs, run)
    return runs[run]["batches"]["only"]["layers"]


def judged(runs, run, asked, oracle, record_property):
    got = answers(runs, run)
    record_property("max_abs_err", judge.compare(asked, got, oracle(run.partition(",")[0])).max_abs_err)
    return got


@pytest.mark.parametrize("model", ["gemma-2", "granite-4.0-h"])
def test_two_ranks_answer_as_one(model, runs, oracle, record_property):
    """One rank is judged first: where it is wrong too, the ranks are not the cause."""
    alone = judged(runs, f"{model}, one rank", matrix.PROMPTS, oracle, lambda *_: None)
    together = judged(runs, f"{model}, two ranks", matrix.PROMPTS, oracle, record_property)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


@pytest.mark.parametrize(
    ("model", "heads", "block_sizes"), [("gemma-2", [2, 1], [16, 16]), ("granite-4.0-h", [1, 1], [48, 32])]
)
def test_ranks_share_the_heads_or_each_have_a_copy(model, heads, block_sizes, runs):
    """Of two KV heads each rank has one; one is copied. Half a state page inflates blocks less."""
    for run, have, size in zip(("one rank", "two ranks"), heads, block_sizes, strict=True):
        rows = layers(runs, f"{model}, {run}")
        assert {row["rank"] for row in rows} == set(range(2 if run == "two ranks" else 1))
        assert {tuple(row["kv_shape"][1:3]) for row in rows} == {(have, size)}


@pytest.mark.parametrize("run", ["gemma-2, loads", "gemma-2, loads into another layout", "deepseek-v3, loads"])
def test_who_loads_kv_blocks_answers_as_who_computed_them(run, runs, oracle, record_property):
    saved = answers(runs, run.partition(",")[0] + ", saves")
    loaded = judged(runs, run, HANDED_OVER, oracle, record_property)
    assert [answer.cached for answer in saved] == [0, 0, 0]
    assert [answer.cached for answer in loaded] == CACHED
    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in saved]


def test_the_layout_of_the_consumer_is_another(runs):
    strides = {
        tuple(layers(runs, run)[0]["kv_strides"]) for run in ("gemma-2, saves", "gemma-2, loads into another layout")
    }
    assert len(strides) == 2


def test_what_a_model_drafts_changes_no_answer(runs, oracle, record_property):
    """The model drafts for itself, so nearly every draft is taken, and tokens are verified four at a time."""
    judged(runs, "bloom, drafts", ANSWERED, oracle, record_property)
    verifying, *drafting = sorted({row["attentions"] for row in layers(runs, "bloom, drafts")})
    assert verifying < 3 + ANSWERED[0].answers, "fewer steps than without drafts"
    assert drafting == [DRAFTS * verifying]
