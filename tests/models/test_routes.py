# SPDX-License-Identifier: Apache-2.0
"""The router decides for the plugin: what it refuses is refused, and what it describes is what is written and read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs package:vllm")

from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm
from vllm.v1.kv_cache_layout import KVCacheLayout

from pagedkv import arch as arches
from pagedkv import device
from pagedkv.routing import candidates, router
from pagedkv.vllm_plugin import errors, impl, metadata, routes


@pytest.fixture
def make(monkeypatch, deployment):
    """A function that makes a layer, in blocks of so many tokens and this packing."""
    routes.find.cache_clear()

    def layer(*, packing="rows", block_size=16, **features):
        monkeypatch.setattr(impl, "packing", lambda: packing)
        deployment.cache_config.block_size = block_size
        defaults = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2}
        return impl.PagedKVImpl(**(defaults | features))

    yield layer
    routes.find.cache_clear()


def on(monkeypatch, name, *, fnuz):
    """Choose routes as on a device of this arch, where vLLM's platform computes with this kind of FP8."""
    monkeypatch.setattr(routes, "current", lambda: arches.limits(name))
    monkeypatch.setattr(routes, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: fnuz))


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"head_size": 264}, "head_size 264, takes multiples of 8, at least 32, at most 256"),
        ({"packing": "shuffle", "block_size": 24, "kv_cache_dtype": "fp8"}, r"block_size 24, takes a multiple of 16"),
        ({"num_heads": 5}, "num_q_heads 5, takes a multiple of num_kv_heads 2"),
        ({"logits_soft_cap": 10_001.0}, "softcap 10001.0, takes at most 10000"),
        ({"logits_soft_cap": -1.0}, "softcap -1.0, takes None or a finite number > 0"),
    ],
)
def test_refusals_name_the_feature(make, features, named):
    with pytest.raises(errors.UnsupportedFeatureError, match=f"pagedkv does not serve {named}"):
        make(**features)


def test_a_block_size_that_vllm_decides_on_later_is_judged_too(make):
    layer = make(packing="shuffle", kv_cache_dtype="fp8")
    with pytest.raises(errors.UnsupportedFeatureError, match="block_size 24"):
        layer.set_pool(24, KVCacheLayout.LBHNC)


@pytest.mark.parametrize(
    ("name", "fnuz", "served"),
    [
        ("gfx942", True, "e4m3fnuz"),
        ("gfx950", False, "e4m3fn"),
        ("sm_90", False, "e4m3fn"),
        ("gfx90a", False, "e4m3fn"),  # computes with neither
        ("gfx942", False, None),
        ("gfx950", True, None),
    ],
)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_per_token_head"])
def test_fp8_is_the_format_of_the_arch(monkeypatch, make, name, fnuz, served, kv_cache_dtype):
    on(monkeypatch, name, fnuz=fnuz)
    if served:
        layer = make(kv_cache_dtype=kv_cache_dtype)
        assert layer.page.format == layer.route.request.kv_cache_dtype == served
        return
    with pytest.raises(errors.UnsupportedFeatureError, match=f"KV cache dtype '{kv_cache_dtype}' in the format .* on"):
        make(kv_cache_dtype=kv_cache_dtype)


def test_e5m2_is_one_format_everywhere(monkeypatch, make):
    on(monkeypatch, "gfx942", fnuz=True)
    assert make(kv_cache_dtype="fp8_e5m2").page.format == "e5m2"


def test_request_says_everything_about_the_layer(monkeypatch, make, deployment):
    on(monkeypatch, "gfx942", fnuz=True)
    deployment.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    layer = make(
        packing="native",
        block_size=48,
        scale=0.3,
        sliding_window=7,
        logits_soft_cap=30.0,
        alibi_slopes=[0.5] * 4,
        sinks=torch.zeros(4),
        kv_cache_dtype="fp8_per_token_head",
    )
    asked = layer.route.request
    assert (asked.arch, asked.phase, asked.dtype) == ("gfx942", "mixed", "float32")
    assert (asked.num_q_heads, asked.num_kv_heads, asked.head_size, asked.custom_scale) == (4, 2, 64, 0.3)
    assert (asked.window, asked.softcap, asked.alibi, asked.sinks) == (7, 30.0, True, True)
    assert (asked.kv_cache_dtype, asked.kv_scales) == ("e4m3fnuz", "token")
    assert (asked.packing, asked.block_size, asked.causal, asked.attn_type) == ("native", 48, True, "decoder")
    assert (asked.q_len, asked.max_num_seqs, asked.max_seq_len) == (4, 4, 256)
    cross = make(attn_type="encoder_decoder").route.request
    assert (cross.causal, cross.attn_type, cross.kv_scales, cross.softcap) == (False, "encoder_decoder", "none", None)


def test_products_are_padded_only_where_a_user_asks_for_it(monkeypatch, make, deployment):
    """Inductor pads by time, and what vLLM compiles next reads the padded rows where they were before."""
    options = deployment.compilation_config.inductor_compile_config
    make()
    assert options == {"shape_padding": False}
    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    product = (torch.empty(8, 64).half(), torch.empty(64, 292).half(), torch.ops.aten.mm)
    assert pad_mm.can_pad(*product)
    with inductor_config.patch(options):
        assert not pad_mm.can_pad(*product)
    options["shape_padding"] = True
    make()
    assert options == {"shape_padding": True}


@pytest.mark.parametrize(
    ("packing", "order", "native"),
    [("rows", "LHBNC", False), ("native", "LHBNC", True), ("native", "LBHNC", False), ("shuffle", "BHLNC", False)],
)
def test_the_pool_of_vllm_becomes_the_layout_of_the_route(make, deployment, builder_of, packing, order, native):
    layer = make(packing=packing)
    deployment.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout[order]
    builder_of(48, {"a": layer})
    assert layer.page.layout is layer.route.layout
    assert (layer.route.layout.packing, layer.route.layout.block_size) == (packing, 48)
    assert layer.route.layout.has_native_kv_cache_layout is native


def test_each_kind_of_layer_is_routed_and_logged_once(monkeypatch, make, builder_of):
    asked = []

    def counting(request, providers):
        asked.append((request, providers))
        return router.route(request, providers)

    monkeypatch.setattr(routes, "route", counting)
    layers = {"a": make(), "b": make(sliding_window=8), "c": make(), "d": make(sliding_window=8)}
    assert [request.window for request, _ in asked] == [None, 8]
    assert {providers for _, providers in asked} == {frozenset({"pagedkv"})}
    lines = []
    monkeypatch.setattr(metadata, "log", SimpleNamespace(info=lambda text, *values: lines.append(text % values)))
    builder_of(16, layers)
    assert len(asked) == 2, "nothing has changed, so nobody asks again"
    one, other = lines
    assert one.startswith(
        "pagedkv serves 2 layers of 4 heads on 2, head size 64 (rows, interleaved, 16 tokens a block)"
    )
    assert "decode pagedkv.paged_attention" in one
    assert "write pagedkv.write_kv_cache" in one
    assert "window 8" in other
    assert ("measured" in one) == (device.current().name == "sm_90")


@pytest.mark.parametrize(("arch", "said"), [("sm_90", True), ("interpreter", False), ("gfx942", False)])
def test_a_measurement_is_logged_on_the_arch_where_it_was_made(make, arch, said):
    request = replace(make().route.request, arch=arch)
    line = routes.log_line(router.route(request, routes.PROVIDERS))
    assert ("measured on H200: 1.1 to 11.2 times as fast" in line) == said
    assert ("; policy: " in line) != said
    assert line.count("pagedkv.paged_attention") == 2


def test_bfloat16_under_the_interpreter_is_refused_early(make, lacks):
    """At the first request it would end a server that has started."""
    if not device.INTERPRETED:
        lacks("device:cpu", "compiled kernels compute bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(errors.UnsupportedFeatureError, match=r"bfloat16 under .* --dtype float32") as raised:
            make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert "select another attention backend" in str(raised.value)


def test_a_writer_of_another_packing_refuses_the_layer(monkeypatch, make):
    """What the data says of our kernels counts, and not what the plugin believes of them."""

    def narrowed(preferred):
        if preferred.kernel.name != "pagedkv.write_kv_cache":
            return preferred
        limits = dict(preferred.kernel.limits) | {
            "packing": replace(preferred.kernel.limits["packing"], values=("rows",))
        }
        return replace(preferred, kernel=replace(preferred.kernel, limits=limits))

    data = {
        arch: {task: tuple(map(narrowed, order)) for task, order in tasks.items()}
        for arch, tasks in candidates.load().items()
    }
    monkeypatch.setattr(router, "load", lambda: data)
    make(packing="rows")
    with pytest.raises(errors.UnsupportedFeatureError, match="packing shuffle, takes rows only"):
        make(packing="shuffle")
