# SPDX-License-Identifier: Apache-2.0
"""Contracts find what breaks a promise, refuse what they do not describe, and stand before real operators."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest
import torch
from operators import drive, stand_in
from operators.calls import Access, Layer, Seen, UnknownCallError, aliases, by_rows, disagreements
from operators.conftest import records, start
from operators.contracts import CONTRACTS
from operators.faults import Fault, problems

VLLM = Path(importlib.util.find_spec("vllm").origin).parent


@pytest.fixture
def watch():
    return stand_in.fresh()


def gathered(**changes):
    """A call of the gather that keeps its contract, but for the changes."""
    cache = torch.zeros((4, 2, 16, 128), dtype=torch.bfloat16).transpose(1, 2).split(64, dim=-1)
    rows = torch.zeros((2, 40, 2, 64), dtype=torch.bfloat16)
    call = {
        "key_cache": cache[0],
        "value_cache": cache[1],
        "key": rows[0],
        "value": rows[1],
        "block_tables": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        "k_scales": None,
        "v_scales": None,
        "cu_seqlens_kv": torch.tensor([0, 20, 30], dtype=torch.int32),
        "token_to_batch": torch.zeros(30, dtype=torch.int32),
        "seq_starts": torch.zeros(2, dtype=torch.int32),
        "dequant": False,
        "kv_cache_layout": "NHD",
        "total_tokens": 30,
    }
    return call | changes


def broken(watch, operator, **call):
    """The promises that a call breaks."""
    watch.ask(CONTRACTS[operator], (), call)
    return [each.promise for each in watch.broken]


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({}, []),
        ({"total_tokens": 41}, ["fits", "rows"]),
        ({"dequant": True}, ["dequant"]),
        ({"kv_cache_layout": "SHUFFLE"}, ["dense-block", "dense-block"]),
        ({"seq_starts": torch.tensor([20, 0], dtype=torch.int32)}, ["wide-enough"]),
    ],
)
def test_contract_of_the_gather(watch, changes, promise):
    assert broken(watch, "cp_mha_gather_cache", **gathered(**changes)) == promise


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_layout": "NEW"}, "does not know the packing 'NEW'"),
        ({"extra": 1}, "has no parameter extra"),
        ({"key_cache": torch.zeros(4, 4)}, "does not know key_cache of float32"),
        ({"key": None}, "without the tensor key"),
    ],
)
def test_unknown_call_names_its_contract(watch, changes, words):
    with pytest.raises(UnknownCallError, match=words) as refused:
        broken(watch, "cp_mha_gather_cache", **gathered(**changes))
    assert "the contract of cp_mha_gather_cache" in str(refused.value)
    assert "tests/operators/contracts.py" in str(refused.value)


def test_backend_that_moved_is_named(monkeypatch):
    monkeypatch.setitem(drive.BACKENDS, "ROCM_ATTN", "json:RocmAttentionBackend")
    with pytest.raises(UnknownCallError, match="the backend ROCM_ATTN moved"):
        drive.backend_of("ROCM_ATTN")


def test_operator_without_contract_is_named():
    namespace = stand_in._Namespace("torch.ops._rocm_C", {})
    with pytest.raises(UnknownCallError, match=r"torch\.ops\._rocm_C\.paged_attention_v9 has no contract"):
        _ = namespace.paged_attention_v9
    assert not hasattr(namespace, "paged_attention_v9"), "vLLM asks with hasattr"


def test_writer_and_reader_must_agree():
    cells = torch.zeros((4, 16, 2, 64), dtype=torch.bfloat16)
    extent = {"blocks": 4, "tokens": 16, "heads": 2, "channels": 64}

    def access(operator, view, *, writes):
        seen = Seen.of(view)
        return Access(operator, "key", writes, by_rows(seen), storage=seen.storage, **extent)

    written = access("write", cells, writes=True)
    heads_outside = cells.view(4, 2, 16, 64).transpose(1, 2)
    assert not disagreements([written, access("read", cells, writes=False)], "layer")
    (found,) = disagreements([written, access("read", heads_outside, writes=False)], "layer")
    assert found.text == "layer: read reads key elsewhere than write wrote it"


def test_blocks_of_two_layers_must_not_overlap():
    pool = torch.zeros(4 * 2 * 16 * 2 * 64, dtype=torch.bfloat16)
    blocks_first, planes = pool.view(4, 2, 16, 2, 64), pool.view(2, 4, 16, 2, 64)
    extent = {"blocks": 4, "tokens": 16, "heads": 2, "channels": 64}

    def side(name, view):
        seen = Seen.of(view)
        return Access(name, name, True, by_rows(seen), storage=seen.storage, **extent)

    own = [side("key", blocks_first[:, 0]), side("value", blocks_first[:, 1])]
    assert not aliases({"attention": own, "cross-attention": own})
    found = aliases({"attention": own, "cross-attention": [side("key", planes[0])]})
    assert found[0].promise == "blocks-of-their-own"


FAULT = Fault("operator", "promise", "case-.*", "o/r#1", "why")


@pytest.mark.parametrize(
    ("case", "kept", "said"),
    [
        ("case-1", False, []),
        ("case-1", True, ["operator: promise is kept now: remove the fault from declared.toml (o/r#1)"]),
        ("other", False, ["operator: promise: text"]),
        ("other", True, []),
    ],
)
def test_declared_faults_are_strict(case, kept, said):
    found = [] if kept else [{"operator": "operator", "promise": "promise", "text": "text"}]
    assert problems({"case": case, "broken": found}, (FAULT,)) == said


def test_broken_call_is_not_made(watch):
    made = []
    operator = stand_in.judged(CONTRACTS["cp_mha_gather_cache"], lambda **_: made.append(1))
    operator(**gathered())
    assert made == [1]
    operator(**gathered(dequant=True))
    assert made == [1]
    assert watch.calls == ["cp_mha_gather_cache"] * 2


def test_layer_constants_reach_the_operator(watch):
    watch.layer = Layer("layer", 2, 2, 64, 0.125, softcap=30.0, window=48, sinks=True)
    rows = torch.zeros((8, 2, 64), dtype=torch.bfloat16)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    call = {"q": rows, "k": rows, "v": rows, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 8}
    call |= {"max_seqlen_k": 8, "softmax_scale": 0.1, "causal": True, "window_size": (-1, -1)}
    assert broken(watch, "aiter.flash_attn_varlen_func", **call) == ["scale", "window", "sinks", "softcap"]


AITER = {
    "__init__.py": """
        import os

        def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0,
                                   dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False,
                                   window_size=(-1, -1), alibi_slopes=None, return_lse=False, out=None, sink_ptr=None):
            with open(os.environ["CALLED"], "a") as file:
                file.write("flash_attn_varlen_func\\n")
            out = q.new_zeros((*q.shape[:2], v.shape[2])) if out is None else out
            return (out, q.new_zeros((q.shape[1], q.shape[0])).float()) if return_lse else out
    """,
    "ops/__init__.py": "",
    "ops/triton/__init__.py": "",
    "ops/triton/unified_attention.py": """
        import os

        def unified_attention(**arguments):
            with open(os.environ["CALLED"], "a") as file:
                file.write("unified_attention\\n")
    """,
}


def test_contracts_stand_before_an_installed_aiter(tmp_path, monkeypatch):
    for name, text in AITER.items():
        path = tmp_path / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    called = tmp_path / "called"
    monkeypatch.setenv("CALLED", str(called))
    cases = ("ROCM_AITER_UNIFIED_ATTN-block16-head64", "ROCM_AITER_FA-block16-window")
    found = records(start("gfx942", *cases, path=(tmp_path,)))
    assert [(record["outcome"], record["broken"]) for record in found] == [("ran", []), ("ran", [])]
    calls = called.read_text(encoding="utf-8").split()
    assert {"flash_attn_varlen_func", "unified_attention"} == set(calls)


def test_vllm_that_moved_did_not_run(tmp_path):
    """A copy of vLLM whose gather has another name: no case passes, and the contract to write is named."""
    for folder, _, files in os.walk(VLLM):
        place = tmp_path / "vllm" / Path(folder).relative_to(VLLM)
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            (place / name).symlink_to(Path(folder) / name)
    backend = tmp_path / "vllm/v1/attention/backends/rocm_aiter_fa.py"
    text = backend.read_text(encoding="utf-8").replace("cp_mha_gather_cache(", "gather_pages(")
    backend.unlink()
    backend.write_text(text, encoding="utf-8")
    (record,) = records(start("gfx942", path=(tmp_path,)))
    assert record["outcome"] == "did not run"
    assert "its backend moved, so write the contract of cp_mha_gather_cache" in record["why"]
