# SPDX-License-Identifier: Apache-2.0
"""A gated delta net of vLLM with our kernels: which tokens it reads, and where it goes on in the next step.

"kda" is a layer of Kimi-Linear, whose keys have a decay each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs package:vllm")

from pagedkv import prepared
from pagedkv.vllm_plugin import delta, errors

pytestmark = pytest.mark.device

HEADS, SIZE = 2, 64
CHANNELS = {"gdn": 4 * SIZE, "kda": 6 * SIZE}
UNUSED = torch.nan


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def convolution(monkeypatch, device):
    """On GPUs too the plain one: vLLM's kernels ask for more of its metadata than stands here."""

    def plain(layer, mixed, slots, starts, *, resumes=None, accepted=None, metadata=None):  # noqa: ARG001
        windows = layer.kv_cache[0].transpose(-1, -2)
        return delta._plain_convolution(layer, mixed, windows, slots, starts, resumes, accepted)

    if device != "cpu":
        monkeypatch.setattr(delta, "_convolution", plain)


def layer_of(drafts, device, kind="gdn", *, size=SIZE, mode="none", replayssm=False):
    """The attributes of vLLM's layer that ours reads: one key head (two of KDA), two heads, four taps."""
    channels = CHANNELS[kind]
    pools = [torch.full(shape, UNUSED).to(device) for shape in ((9, 3 + drafts, channels), (9, HEADS, size, size))]
    of_kind = {"head_k_dim": size, "head_v_dim": size}
    if kind == "kda":
        of_kind = {"head_dim": size, "gate_lower_bound": -3.0, "o_norm": torch.mul}
    return SimpleNamespace(
        **of_kind,
        prefix="layer",
        num_spec=drafts,
        activation="silu",
        conv1d=SimpleNamespace(
            weight=drawn(channels, 1, 4, seed=1).to(device), bias=drawn(channels, seed=2).to(device)
        ),
        A_log=drawn(HEADS, seed=3).to(device),
        dt_bias=drawn(HEADS * size if kind == "kda" else HEADS, seed=4).to(device),
        kv_cache=pools,
        cache_config=SimpleNamespace(mamba_cache_mode=mode, use_replayssm=replayssm),
        get_state_dtype=lambda: (torch.float32, torch.float32),
    )


def step(monkeypatch, layer, inputs, parts):
    """Run one step.

    Args:
        layer: From `layer_of`.
        inputs: Rows of mixed, b and a.
        parts: (tokens, first block, tokens before, accepted in the step before) of each sequence; None for the last
            where it has no drafts.

    Returns:
        [tokens, HEADS, SIZE], in the order of `inputs`.
    """
    drafted = [part for part in parts if part[3] is not None]
    others = [part for part in parts if part[3] is None]

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=layer.A_log.device)

    def flags(chosen):
        return ints([before > 0 for _, _, before, _ in chosen]).bool()

    def starts(chosen):
        return ints([0, *accumulate(len(tokens) for tokens, *_ in chosen)])

    def rows(chosen):
        return ints([token for tokens, *_ in chosen for token in tokens]).long()

    slots = ints([block for _, block, *_ in others])
    decodes = 0 if drafted else sum(len(tokens) == 1 for tokens, *_ in others)
    metadata = SimpleNamespace(
        num_actual_tokens=len(inputs[0]),
        spec_sequence_masks=flags(parts) if drafted else None,
        num_decode_tokens=decodes,
        num_prefills=len(others) - decodes,
        has_initial_state=flags(others),
        prefill_has_initial_state=flags(others[decodes:]),
        prefill_query_start_loc=starts(others[decodes:]),
        prefill_state_indices=slots[decodes:],
        non_spec_query_start_loc=starts(others),
        non_spec_token_indx=rows(others),
        non_spec_state_indices_tensor=slots,
        num_spec_decodes=len(drafted),
        spec_query_start_loc=starts(drafted),
        spec_token_indx=rows(drafted),
        spec_state_indices_tensor=ints([[block, block + 1, block + 2] for _, block, *_ in drafted]),
        num_accepted_tokens=ints([accepted for *_, accepted in drafted]),
        seq_lens=ints([before + len(tokens) for tokens, _, before, _ in drafted]),
    )
    context = SimpleNamespace(attn_metadata={"layer": metadata})
    monkeypatch.setattr(f"{delta.LAYERS}.get_forward_context", lambda: context)
    inputs = [side.to(layer.A_log.device) for side in inputs]
    out = inputs[0].new_zeros(len(inputs[0]), HEADS, SIZE)
    if hasattr(layer, "o_norm"):
        mixed, b, a = inputs
        delta._forward(layer, mixed, a.unflatten(1, (HEADS, SIZE))[None], out.new_full((), 2), b[None], out[None])
    else:
        delta._forward_core(layer, *inputs, out)
    return out.cpu()


def texts(kind):
    kinds = ((CHANNELS[kind], 5), (HEADS, 6), (HEADS * SIZE if kind == "kda" else HEADS, 7))
    return [tuple(drawn(70, width, seed=seed + text) for width, seed in kinds) for text in (0, 10)]


@pytest.fixture(params=CHANNELS)
def kind(request):
    """Which layer."""
    return request.param


@pytest.fixture
def whole(monkeypatch, device, kind):
    """Each text, and what one prefill makes of it."""
    layers = [layer_of(0, device, kind) for _ in range(2)]
    made = zip(texts(kind), layers, strict=True)
    return [(text, step(monkeypatch, layer, text, [(range(70), 1, 0, None)])) for text, layer in made]


def test_an_answer_and_a_chunk_go_on_from_their_states(monkeypatch, device, kind, whole):
    (first, wanted), (second, others) = whole
    layer = layer_of(0, device, kind)
    step(monkeypatch, layer, [side[:66] for side in first], [(range(66), 3, 0, None)])
    step(monkeypatch, layer, [side[:5] for side in second], [(range(5), 1, 0, None)])
    both = [torch.cat([one[66:67], other[5:]]) for one, other in zip(first, second, strict=True)]
    out = step(monkeypatch, layer, both, [(range(1), 3, 66, None), (range(1, 66), 1, 5, None)])
    torch.testing.assert_close(out, torch.cat([wanted[66:67], others[5:]]), rtol=1e-4, atol=1e-5)
    out = step(monkeypatch, layer, [side[67:68] for side in first], [(range(1), 3, 67, None)])
    torch.testing.assert_close(out, wanted[67:68], rtol=1e-4, atol=1e-5)
    assert layer.kv_cache[1][[0, 2, 4, 5, 6, 7, 8]].isnan().all(), "a block of nobody was written"


def test_graphs_break_off_where_a_layer_of_kimi_attends(monkeypatch, device):
    """Whether they do is known at the step alone: vLLM decides it after it has loaded plugins."""
    run_eagerly = []
    capture = SimpleNamespace(_capturing=True, add_eager=run_eagerly.append)
    monkeypatch.setattr(f"{delta.BREAKS}.BreakableCUDAGraphCapture.current", lambda: capture)
    monkeypatch.setattr(f"{delta.BREAKS}._weak_ref_capture_arg", lambda given: given)  # an operator of GPUs
    layer, inputs = layer_of(0, device, "kda"), [side[:5] for side in texts("kda")[0]]
    step(monkeypatch, layer, inputs, [(range(5), 1, 0, None)])
    assert not run_eagerly
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    before = [pool.clone() for pool in layer.kv_cache]
    step(monkeypatch, layer, inputs, [(range(5), 2, 0, None)])
    assert len(run_eagerly) == 1
    torch.testing.assert_close(layer.kv_cache, before, equal_nan=True)


GRAPHS_BREAK_OFF = """
import os
from pagedkv.vllm_plugin import delta
delta.claim()
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.model_executor.layers.attention import attention, mla_attention
class Capture:
    _capturing, run_eagerly = True, []
    add_eager = run_eagerly.append
BreakableCUDAGraphCapture._tls.active = Capture
attention.unified_attention_with_output()
mla_attention.unified_mla_attention_with_output()
assert len(Capture.run_eagerly) == 2
"""


def test_graphs_break_at_attention_that_we_import_first():
    """vLLM decides by the model (Kimi-Linear, DeepSeek-V4) that they do, after it has loaded plugins."""
    without = {name: value for name, value in os.environ.items() if name != "VLLM_USE_BREAKABLE_CUDAGRAPH"}
    subprocess.run([sys.executable, "-c", GRAPHS_BREAK_OFF], check=True, env=without)


@pytest.mark.parametrize("mode", ["none", "align"])
def test_drafts_that_were_taken_count_and_no_others(monkeypatch, device, kind, whole, mode):
    """A text in steps of three tokens, of which none, one or both drafts are right, beside the prompt of another.

    Beside a prefix cache (align) the state after each token lies in a block of its own, from which vLLM copies it.
    """
    (first, wanted), (second, others) = whole
    layer = layer_of(2, device, kind, mode=mode)
    out = step(monkeypatch, layer, [side[:5] for side in first], [(range(5), 1, 0, None)])
    torch.testing.assert_close(out, wanted[:5], rtol=1e-4, atol=1e-5)
    place, before = 5, 1
    for taken in (0, 1, 2, 0, 2, 1):
        right = [side[place : place + taken + 1] for side in first]
        wrong = [drawn(2 - taken, side.shape[1], seed=place) for side in first]
        other = [side[:4] for side in second]
        inputs = [torch.cat(parts) for parts in zip(right, wrong, other, strict=True)]
        out = step(monkeypatch, layer, inputs, [(range(3), 1, place, before), (range(3, 7), 4, 0, None)])
        torch.testing.assert_close(out[: taken + 1], wanted[place : place + taken + 1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out[3:], others[:4], rtol=1e-4, atol=1e-5)
        place, before = place + taken + 1, taken + 1
    if mode == "align":
        plain = layer_of(0, device, kind)
        step(monkeypatch, plain, [side[:place] for side in first], [(range(place), 1, 0, None)])
        torch.testing.assert_close(layer.kv_cache[1][before], plain.kv_cache[1][1], rtol=1e-4, atol=1e-5)


def test_block_strides_do_not_follow_from_the_table_width():
    """Triton compiles for them; the tensors of graphs must stay where they are."""
    table, kept = torch.arange(35).view(1, 35).int(), torch.zeros(4, 3).int()
    builder = SimpleNamespace(non_spec_state_indices_tensor=kept[:, 0], spec_state_indices_tensor=kept)
    found = SimpleNamespace(
        num_decodes=0,
        non_spec_state_indices_tensor=table[:, 0],
        prefill_state_indices=table[:, 0],
        spec_state_indices_tensor=kept[:1],
    )
    delta._dense(builder, found)
    assert found.non_spec_state_indices_tensor.stride() == found.prefill_state_indices.stride() == (1,)
    assert found.spec_state_indices_tensor.data_ptr() == kept.data_ptr()
    found.spec_state_indices_tensor = table[:, :3]
    assert delta._dense(builder, found).spec_state_indices_tensor.stride() == (3, 1)


@pytest.mark.parametrize(
    ("drafts", "given", "said"),
    [
        (0, {"size": 32}, r"gated delta nets of 32 keys and 32 values a head \(unset PAGEDKV_GDN\)"),
        (2, {"replayssm": True}, r"ReplaySSM of gated delta nets \(unset PAGEDKV_GDN, or --use-replayssm\)"),
        (40, {}, r"40 drafts \(unset PAGEDKV_GDN\)"),
    ],
)
def test_what_is_not_served_is_refused_by_name(monkeypatch, device, drafts, given, said):
    layer = layer_of(drafts, device, **given)
    inputs = drawn(3, CHANNELS["gdn"], seed=1), drawn(3, HEADS, seed=2), drawn(3, HEADS, seed=3)
    with pytest.raises(errors.UnsupportedFeatureError, match=said):
        step(monkeypatch, layer, inputs, [(range(3), 1, 5, 1)])


@pytest.mark.parametrize(
    ("mode", "verified"), [("none", ("gdn_decode", 1, None, True)), ("align", ("gdn_decode", 1, None, False))]
)
def test_the_warm_up_launches_every_variant_and_writes_no_state(monkeypatch, device, mode, verified):
    """Without a pool, one prefill of as many tokens as vLLM measures memory with."""
    launched = []

    def noting(name, launch):
        def call(**given):
            launched.append((name, len(given["q"]), given.get("num_segments"), "drafts" in given))
            launch(**given)

        monkeypatch.setattr(delta, name, call)

    noting("gdn_prefill", delta.gdn_prefill)
    noting("gdn_decode", delta.gdn_decode)
    monkeypatch.setattr(delta, "INTERPRETED", False)
    prepared.clear()
    layer = layer_of(2, device, mode=mode)
    pools, layer.kv_cache = layer.kv_cache, ()
    monkeypatch.setattr(delta, "MANY_STATES", 5 * pools[1][0].nbytes)
    mixed = drawn(7, CHANNELS["gdn"], seed=1).to(device)
    delta._warmup_prefill_kernels(layer, mixed, 0)
    assert launched == [("gdn_prefill", 7, None, False)]
    layer.kv_cache = pools
    for _ in range(2):
        delta._warmup_prefill_kernels(layer, mixed, 0)
    prefills = [("gdn_prefill", delta.WARM_TOKENS, segments, False) for segments in (1, 2, 3)]
    decodes = [("gdn_decode", sequences, None, False) for sequences in (1, 5)]
    assert launched[1:] == [*prefills, *decodes, verified]
    assert all(pool.isnan().all() for pool in pools)
