"""Who served attention, from reports as the worker gives them."""

import pytest

from hileval.ask.evaluation import check_served
from hilgate.model import Outcome


def layer(number, *, ours=True, writes=9, attentions=9):
    backend = (
        "pagedkv.vllm_plugin.backend.PagedKVBackend"
        if ours
        else "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    )
    impl = (
        "pagedkv.vllm_plugin.impl.PagedKVImpl"
        if ours
        else "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
    )
    counts = {"writes": writes, "attentions": attentions} if ours else {"writes": None, "attentions": None}
    name = f"model.layers.{number}.self_attn.attn"
    return {"layer": name, "backend": backend, "impl": impl, "block_size": 48} | counts


def test_both_layers_ours_and_called():
    check = check_served("g", "pagedkv", [layer(1), layer(3)])
    assert check.outcome is Outcome.PASS
    assert check.numbers == {"layers": 2, "writes": 18, "attentions": 18}
    assert check.labels == {"backend": "PagedKVBackend", "block_size": "48"}


@pytest.mark.parametrize(
    ("required", "layers", "why"),
    [
        ("pagedkv", [], "no attention layer"),
        ("pagedkv", [layer(1), layer(3, ours=False)], "1 of 2 layers served by another"),
        ("pagedkv", [layer(1), layer(3, attentions=0)], "never called for model.layers.3"),
        ("pagedkv", [layer(1, writes=0)], "never called"),
        ("pagedkv", [{"layer": "x"}], "another backend"),
        ("vllm", [layer(1, ours=False), layer(3)], "1 of 2 layers served by another"),
        ("vllm", [], "no attention layer"),
    ],
)
def test_everything_else_did_not_run(required, layers, why):
    check = check_served("g", required, layers)
    assert check.outcome is Outcome.DID_NOT_RUN
    assert why in check.message


def test_the_engines_own_attention_needs_no_counts():
    assert check_served("g", "vllm", [layer(1, ours=False)]).outcome is Outcome.PASS


def test_our_backend_alone_does_not_prove_the_packing_or_mla():
    packed = [layer(0) | {"packing": "shuffle", "fp8_format": "e4m3fn"}]
    check = check_served("g", "pagedkv", packed, packing="shuffle")
    assert check.outcome is Outcome.PASS
    assert "shuffle of e4m3fn" in check.message
    wrong = check_served("g", "pagedkv", [layer(0) | {"packing": "rows"}], packing="shuffle")
    assert wrong.outcome is Outcome.DID_NOT_RUN
    assert "packing rows instead of shuffle" in wrong.message
    assert check_served("g", "pagedkv", packed, latent=True).outcome is Outcome.DID_NOT_RUN
    mla = [layer(0) | {"impl": "pagedkv.vllm_plugin.mla_backend.PagedKVMLAImpl", "packing": None}]
    assert check_served("g", "pagedkv", mla, latent=True).outcome is Outcome.PASS
