# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks: each has its share of the heads, in blocks of the size that this makes, and is served by ours.

MODELS_RANKS says how many ranks there are, a GPU each; without GPUs they are processes that talk through gloo.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from models import engine

pytest.importorskip("vllm", reason="needs package:vllm")

from families import checkpoints, judge
from families.family import FAMILIES
from families.oracle import VOCABULARY, Oracle
from families.processes import GPU, IN_PROCESS
from families.schedule import ScheduledRequest, prompt
from hilgate.conditions import Where, holds
from pagedkv.routing.explain import Deployment
from pagedkv.routing.fit import Budget, fit
from pagedkv.routing.model_config import read_config

VARIABLE = "MODELS_RANKS"


def ranks_of(value: str) -> int:
    """The number of ranks that MODELS_RANKS names."""
    if value not in {"2", "4", "8"}:
        raise pytest.Collector.CollectError(f"{VARIABLE}: got {value!r}; expected 2, 4 or 8 ranks")
    return int(value)


RANKS = ranks_of(os.environ.get(VARIABLE, "2"))

SECONDS = 900
"""Seconds for one model. On GPUs vLLM tunes its kernels of the delta rule and Mamba-2 for most of it."""

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(SECONDS + 120)]

PLATFORM = "cpu" if not GPU else "rocm" if torch.version.hip else "cuda"

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MAMBA_2 = {"mamba_n_heads": 16}
WIDER = {
    # Its heads have hidden_size / num_attention_heads channels, its scan expand * hidden_size.
    "granite-4.0-h": HEADS | MAMBA_2 | {"hidden_size": 256, "initializer_range": 0.05, "intermediate_size": 256},
    "falcon-h1": HEADS | MAMBA_2 | {"mamba_d_ssm": 512},
    # Every expert is chosen: in 16 bits rounding would send tokens to others, and that hides what ranks do.
    "qwen3-next": HEADS
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts": 8, "num_experts_per_tok": 8}
    | {"head_dim": 128}  # or a block would hold more tokens than the longest prompt has
    | {"num_key_value_heads": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "deepseek-v3": {"moe_intermediate_size": 256, "initializer_range": 0.07},
}
"""Family -> what its tiny model has more of, so that eight ranks can share it. Two or four KV heads are shared by some
numbers of ranks and copied to others."""
MODELS = {name: replace(FAMILIES[name], config={**FAMILIES[name].config, **more}) for name, more in WIDER.items()}

ENVIRONMENT = IN_PROCESS | {"PAGEDKV_MLA": "1", "PAGEDKV_GDN": "1"}

DRAFTS = 2
NGRAMS = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LENGTH = 256
ANSWERS = 24 if GPU else 12
SCHEDULE = tuple(ScheduledRequest(prompt(n, n, VOCABULARY), ANSWERS) for n in (190, 96, 40))

GRAPHS = {
    "enforce_eager": False,
    "max_num_batched_tokens": LENGTH,
    # The largest is for four sequences with their drafts.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 4 * (1 + DRAFTS)],
    },
}
"""Decode as captured graphs: capturing them, vLLM takes the steps at which the plugin compiles its kernels."""


def dtype(family):
    """On GPUs float32 where vLLM's kernels take it: answers are then decided by ranks and not by rounding."""
    return torch.float16 if GPU and ("delta" in family.states or family.attention == "latent") else torch.float32


def lacking(family, behaviour):
    """The condition that this machine lacks for a behaviour of the families' table; empty where it has it."""
    limit = family.limit(PLATFORM, behaviour)
    return limit.needs if limit and not holds(limit.needs, Where(PLATFORM)) else ""


def engines(family):
    """Arguments of the engines: a prefix cache and drafts, both in one where the platform can."""
    cache = {} if lacking(family, "prefix") else {"enable_prefix_caching": True}
    drafts = {} if lacking(family, "spec") else {"speculative_config": NGRAMS}
    if GPU or not family.states:
        return {"both": cache | drafts}
    # With both, vLLM copies states by a Triton kernel that its CPU platform does not have.
    return {"cache": cache} | ({"drafts": drafts} if drafts else {})


@pytest.fixture(scope="module", params=MODELS)
def family(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    made = tmp_path_factory.mktemp(family.name)
    checkpoints.save(family, made, dtype(family))
    return made


@pytest.fixture(scope="module")
def oracle(family, folder):
    return Oracle.load(family, folder, dtype(family))


@pytest.fixture(scope="module")
def engines_done(family, folder, tmp_path_factory):
    """What became of each engine; None where there are too few GPUs."""
    if GPU and torch.cuda.device_count() < RANKS:
        return None
    shared = {
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
        "dtype": str(dtype(family)).removeprefix("torch."),
        "max_model_len": LENGTH,
    }
    shared |= {"mamba_ssm_cache_dtype": "float32"} if family.states else {}
    shared |= (GRAPHS if GPU else {}) | family.arguments(PLATFORM)
    if GPU and family.attention == "latent":
        shared["worker_extension_cls"] = "families.mla_prefill.PlainPrefillReport"
    asked = {"first": SCHEDULE, "again": SCHEDULE}
    started = {
        name: engine.spec(folder, asked, prompt_rows=False, **shared | own) for name, own in engines(family).items()
    }
    return engine.run(tmp_path_factory.mktemp("log"), started, ENVIRONMENT, seconds=SECONDS)


@pytest.fixture
def runs(engines_done, lacks):
    if engines_done is None:
        lacks(f"gpus:{RANKS}", f"{RANKS} ranks")
    return engines_done


def test_answers_are_those_of_transformers(runs, oracle, record_property):
    found = [
        judge.compare(SCHEDULE, batch["answers"], oracle) for run in runs.values() for batch in run["batches"].values()
    ]
    record_property("max_abs_err", max(one.max_abs_err for one in found))
    record_property("tolerance", min(one.tolerance for one in found))


def test_ours_serves_every_layer_of_every_rank(runs, record_property):
    """What was compiled while it served is none of ours either; interpreted kernels compile nothing."""
    for run in runs.values():
        layers = run["batches"]["again"]["layers"]
        assert (run["refusal"], run["late"]) == ("", "")
        assert [row["rank"] for row in layers] == [rank for rank in range(RANKS) for _ in range(len(layers) // RANKS)]
        served = {f"{row['impl']} {row['route'] or ''}" for row in layers}
        assert len(served) == 1, "every rank is served alike"
        record_property("served", *served)


def test_each_rank_has_its_heads_in_blocks_as_planned(family, folder, runs, record_property):
    """Heads that are fewer than the ranks are copied; less state of each rank makes smaller blocks."""
    for name, run in runs.items():
        size = run["block_size"]
        record_property("block_size", size)
        if family.states:
            deployment = Deployment(
                arch="gfx942",
                providers=("pagedkv",),
                tp=RANKS,
                dtype=str(dtype(family)).removeprefix("torch."),
                ssm_dtype="float32",
                max_seq_len=LENGTH,
                drafts=DRAFTS if "speculative_config" in engines(family)[name] else 0,
            )
            assert size == fit(read_config(folder), deployment, Budget(gpu="any", memory=8, weights=0)).pages.block_size
        heads = [max(1, family.config["num_key_value_heads"] // RANKS)] if family.attention == "paged" else []
        for row in run["batches"]["again"]["layers"]:
            assert row["kv_shape"][1:-1] == [*heads, size]


def test_prompts_that_come_again_hit_their_whole_blocks(family, runs, lacks):
    if condition := lacking(family, "prefix"):
        lacks(condition, "the prefix cache")
    (run,) = [run for name, run in runs.items() if name != "drafts"]
    size = run["block_size"]
    assert [answer.cached for answer in run["batches"]["first"]["answers"]] == [0, 0, 0]
    hits = [(len(request.prompt) - 1) // size * size for request in SCHEDULE]
    assert [answer.cached for answer in run["batches"]["again"]["answers"]] == hits
    assert hits[0] > 0, "the longest prompt has a whole block"


def test_tokens_are_drafted(family, runs, lacks):
    if condition := lacking(family, "spec"):
        lacks(condition, "drafts beside states")
    assert [run["drafted"] > 0 for name, run in runs.items() if name != "cache"] == [True]
