# SPDX-License-Identifier: Apache-2.0
"""Which backend served attention."""

import pytest

from hileval.gates.served import check_layers
from hilgate.model.record import Outcome

OURS = ("pagedkv.vllm_plugin.backend.PagedKVBackend", "pagedkv.vllm_plugin.impl.PagedKVImpl")
THEIRS = tuple(f"vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend{kind}" for kind in ("", "Impl"))


def layer(number, *, ours=True, writes=9, attentions=9, **more):
    backend, impl = OURS if ours else THEIRS
    counts = {"writes": writes, "attentions": attentions} if ours else {"writes": None, "attentions": None}
    name = f"model.layers.{number}.self_attn.attn"
    return {"layer": name, "backend": backend, "impl": impl, "block_size": 48} | counts | more


def test_both_layers_ours_and_called():
    check = check_layers("g", "pagedkv", [layer(1), layer(3)])
    assert check.outcome is Outcome.PASS
    assert check.numbers == {"layers": 2, "writes": 18, "attentions": 18}
    assert check.labels == {"backend": "PagedKVBackend", "block_size": "48"}
    own = check_layers("g", "vllm", [layer(1, ours=False)])
    assert own.outcome is Outcome.PASS, "the engine's own attention needs no counts"


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
    check = check_layers("g", required, layers)
    assert check.outcome is Outcome.DID_NOT_RUN
    assert why in check.message


def test_our_backend_alone_does_not_prove_the_packing_or_mla():
    packed = [layer(0, packing="shuffle", fp8_format="e4m3fn")]
    check = check_layers("g", "pagedkv", packed, packing="shuffle")
    assert check.outcome is Outcome.PASS
    assert "shuffle of e4m3fn" in check.message
    wrong = check_layers("g", "pagedkv", [layer(0, packing="rows")], packing="shuffle")
    assert wrong.outcome is Outcome.DID_NOT_RUN
    assert "packing rows instead of shuffle" in wrong.message
    assert check_layers("g", "pagedkv", packed, latent=True).outcome is Outcome.DID_NOT_RUN
    mla = [layer(0, impl="pagedkv.vllm_plugin.mla_backend.PagedKVMLAImpl", packing=None)]
    assert check_layers("g", "pagedkv", mla, latent=True).outcome is Outcome.PASS


def test_a_backend_is_proved_by_name_layer_by_layer():
    fast = {"layer": "l0", "impl": "vllm.x.Impl", "backend": "vllm.x.AiterFlashAttentionBackend"}
    fast["names"] = ["ROCM_AITER_FA"]
    assert check_layers("g", "ROCM_AITER_FA", [fast, fast]).outcome is Outcome.PASS
    silent = {key: value for key, value in fast.items() if key != "names"}
    for layers in ([fast, fast | {"names": ["FLASH_ATTN"]}], [silent], []):
        assert check_layers("g", "ROCM_AITER_FA", layers).outcome is Outcome.DID_NOT_RUN
    assert "1 of 1 layers served by another" in check_layers("g", "FLASH_ATTN", [fast]).message
