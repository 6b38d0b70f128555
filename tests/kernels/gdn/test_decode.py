# SPDX-License-Identifier: Apache-2.0
"""Decode and verification of the gated delta rule against the recurrence, with NaN wherever nothing may be read."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.mistakes import refused
from support.tolerances import ROW_RELATIVE, UNIT_ROUNDOFF

from pagedkv.device import INTERPRETED
from pagedkv.gdn import decode, reference
from pagedkv.gdn.decode import Drafts, allocate_drafts, gdn_decode
from pagedkv.launch import tuning

pytestmark = pytest.mark.device

DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")
"""The interpreter computes bfloat16 wrongly."""

SHAPES = {  # key heads, heads, keys, values
    "qwen3-next": (1, 2, 128, 128),
    "odd": (3, 3, 64, 128),
    "narrow": (1, 3, 128, 64),
}
NAN = float("nan")


def spread(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN with strides of its own; only the last dimension is dense."""
    rows = torch.full((*(2 * size + 1 for size in shape[:-1]), shape[-1] + 8), NAN, dtype=dtype, device=device)
    return rows[tuple(slice(1, None, 2) for _ in shape[:-1])][..., : shape[-1]]


class Layer:
    """Sequences of one layer: their states in a pool, and in float64 as the recurrence has them."""

    def __init__(
        self,
        shape: str,
        sequences: int,
        dtype: str,
        device: str,
        *,
        by_key: bool = False,
        lower_bound: float | None = None,
        stored: str = "float32",
        most: int = 0,
    ) -> None:
        self.key_heads, self.heads, self.keys, self.values = SHAPES[shape]
        self.dtype, self.device, self.lower_bound, self.by_key = dtype, device, lower_bound, by_key
        torch.manual_seed(sequences + self.heads + most)
        size = (self.keys,) if by_key else ()
        self.A_log = torch.rand(self.heads).log()
        self.dt_bias = torch.randn(self.heads, *size)
        self.slots = (torch.randperm(sequences + 2) + 1)[:sequences].tolist()
        state = torch.randn(sequences, self.heads, self.values, self.keys)
        self.states = spread((sequences + 4, *state.shape[1:]), getattr(torch, stored), device)
        self.states[self.slots] = state.to(self.states)
        self.golden = self.states[self.slots].double().cpu()
        self.positions = [7 * number for number in range(sequences)]
        """Place of the first token of the next step, less the tokens that are accepted by then."""
        self.accepted = [1] * sequences  # after a prefill
        """Tokens of the last step that count."""
        self.kept: list[torch.Tensor] = [state[None] for state in self.golden]
        """The states after each token of the last step."""
        self.drafts = None
        if most:
            k = torch.empty(1, self.key_heads, self.keys, dtype=getattr(torch, dtype))
            plain = allocate_drafts(k, self.states.cpu(), sequences + 4, most, by_key=by_key)
            self.drafts = Drafts(*(spread(each.shape, each.dtype, device) for each in plain))
        self.untouched = torch.ones(sequences + 4, dtype=torch.bool)
        self.untouched[self.slots] = False

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """One token after the other; q, k and v are views of what a convolution writes."""
        kind = getattr(torch, self.dtype)
        widths = [self.key_heads * self.keys] * 2 + [self.heads * self.values]
        mixed = spread((tokens, sum(widths)), kind, self.device).copy_(torch.randn(tokens, sum(widths)))
        q, k, v = (each.unflatten(1, (-1, size)) for each, size in self.split(mixed, widths))
        size = (self.keys,) if self.by_key else ()
        a = spread((tokens, self.heads, *size), kind, self.device).copy_(torch.randn(tokens, self.heads, *size))
        b = spread((tokens, self.heads), kind, self.device).copy_(torch.randn(tokens, self.heads))
        return {"q": q, "k": k, "v": v, "a": a, "b": b}

    def split(self, mixed: torch.Tensor, widths: list[int]):
        return zip(mixed.split(widths, dim=1), (self.keys, self.keys, self.values), strict=True)

    def recurrence(self, inputs: dict[str, torch.Tensor], tokens: slice, state: torch.Tensor) -> reference.Delta:
        q, k, v, a, b = (inputs[name][tokens].double().cpu() for name in "qkvab")
        g = reference.log_decay(a, self.A_log, self.dt_bias, self.lower_bound)
        return reference.gated_delta_rule(q, k, v, g, torch.sigmoid(b), state, every_state=True)

    def step(self, counts: list[int], padded: int = 0, record=None, **more) -> None:
        """A step of `counts` tokens of the sequences, then of `padded` ones that are not there; judge all it leaves."""
        starts = [*itertools.accumulate(counts, initial=0)]
        inputs = self.inputs(starts[-1] + padded)
        out = spread((starts[-1] + padded, self.heads, self.values), inputs["q"].dtype, self.device)
        for number, accepted in enumerate(self.accepted):
            self.golden[number] = self.kept[number][accepted - 1]
            self.positions[number] += accepted if counts[number] else 0
        indices = torch.tensor([[slot, 99] for slot in [*self.slots, *[-1] * padded]], dtype=torch.int32)
        arguments = {
            "out": out,
            "states": self.states,
            "A_log": self.A_log.to(self.device),
            "dt_bias": self.dt_bias.to(self.device),
            "state_indices": indices.to(self.device)[:, 0],
            "lower_bound": self.lower_bound,
        }
        if self.drafts is not None:
            starts += [starts[-1] + 1 + number for number in range(padded)]
            index = {
                "seq_lens": [*map(sum, zip(self.positions, counts, strict=True)), *[0] * padded],
                "query_start_loc": starts,
                "num_accepted_tokens": [*self.accepted, *[1] * padded],
            }
            arguments |= {name: torch.tensor(each).int().to(self.device) for name, each in index.items()}
            arguments |= {"drafts": self.drafts, "max_query_len": max(1, *counts)}
        gdn_decode(**inputs | arguments | more, debug=True)
        self.judge(inputs, out, counts, padded, record)

    def judge(self, inputs, out, counts: list[int], padded: int, record) -> None:
        ends = [*itertools.accumulate(counts, initial=0)]
        stored = str(self.states.dtype).removeprefix("torch.")
        worst = 0.0
        for number, count in enumerate(counts):
            if not count:
                continue
            tokens = slice(ends[number], ends[number + 1])
            golden = self.recurrence(inputs, tokens, self.golden[number])
            since = self.accepted[number] + torch.arange(count)[:, None]
            bound = ROW_RELATIVE["delta step", self.dtype] * (since.sqrt() if self.dtype == "float32" else 1)
            off = (out[tokens].double().cpu() - golden.y).norm(dim=-1) / golden.scale
            share = (off / bound).max().item()
            assert share <= 1, f"a row of sequence {number} is off by {share:.2g} times what is allowed"
            worst = max(worst, share)
            found = self.states[self.slots[number]].double().cpu()
            off = (found - golden.states[0]).norm(dim=-1) / golden.states[0].norm(dim=-1)
            bound = ROW_RELATIVE["delta step", "float32"] * self.accepted[number] ** 0.5
            bound += 0 if stored == "float32" else UNIT_ROUNDOFF[stored]
            assert off.max() <= bound, f"state {number} is off by {off.max():.1e}, at most {bound:.1e}"
            self.kept[number] = golden.states
            self.kept[number][0] = found
        assert (out[ends[-1] :] == 0).all(), "rows of the padding"
        assert len(out) == ends[-1] + padded
        assert self.states[self.untouched.to(self.device)].isnan().all(), "slots of no sequence"
        if record:
            record("dtype", self.dtype)
            record("max_share_of_tolerance_delta_step", worst)

    def accept(self, counts: list[int]) -> None:
        """How many tokens of the last step count."""
        self.accepted = counts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dtype, shape, device, record_property):
    """Two steps of three sequences and of two that are padding, q, k and v as the convolution left them."""
    layer = Layer(shape, 3, dtype, device)
    layer.step([1, 1, 1], 2, record_property)
    layer.step([1, 1, 1], 0, record_property)


@pytest.mark.parametrize("stored", DTYPES[1:])
def test_decode_of_narrow_states(stored, device):
    """A state is rounded once a step."""
    Layer("qwen3-next", 2, DTYPES[-1], device, stored=stored).step([1, 1])


def test_many_states_in_programs_of_fewer_rows(device, monkeypatch):
    """Hopper's tuning, which asks L2 to keep states until they are written."""
    monkeypatch.setattr(decode, "MANY_STATES", 0)
    monkeypatch.setattr(decode, "tuning", lambda _: tuning("sm_90"))
    Layer("qwen3-next", 2, DTYPES[-1], device).step([1, 1], 1)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_accepts_any_count(dtype, most, device, record_property):
    """In each step every sequence has another number of drafts, and every number of them is accepted by one."""
    layer = Layer("qwen3-next", most + 1, dtype, device, most=most)
    layer.step([1 + most] * (most + 1), 1, record_property)
    layer.accept([1 + number for number in range(most + 1)])
    counts = [1 + (2 * number + 1) % (most + 1) for number in range(most + 1)]
    layer.step(counts, 0, record_property)
    layer.accept(counts)
    layer.step([1] * (most + 1), 1, record_property)
    layer.accept([1] * (most + 1))
    layer.step([1 + most] * (most + 1), 0, record_property)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("most", [0, 2])
def test_a_decay_for_each_key(most, lower_bound, device, record_property):
    """Kimi Delta Attention, with and without drafts."""
    layer = Layer("odd", 3, DTYPES[-1], device, by_key=True, lower_bound=lower_bound, most=most)
    for accepted in (2, 1):
        counts = [most + 1, 1, most + 1]
        layer.step(counts, 1, record_property)
        layer.accept([min(accepted, count) for count in counts])
    layer.step([1, most + 1, 1], 0, record_property)


def test_an_empty_sequence_keeps_its_state_and_its_drafts(device):
    layer = Layer("narrow", 2, DTYPES[-1], device, most=3)
    layer.step([4, 4])
    layer.accept([3, 2])
    before = [each.clone() for each in (layer.states, *layer.drafts)]
    layer.step([0, 0])
    for found, want in zip((layer.states, *layer.drafts), before, strict=True):
        assert torch.equal(found[layer.slots].nan_to_num(7.0), want[layer.slots].nan_to_num(7.0))


def test_drafts_have_slots_of_their_own(device):
    """The ring lies in the blocks that vLLM has for a state after each draft."""
    layer = Layer("qwen3-next", 2, DTYPES[-1], device, most=2)
    places = torch.tensor([[7, 3], [8, 0]]).int().to(device)[:, 1]
    layer.step([3, 3], draft_indices=places)
    layer.accept([3, 2])
    layer.step([3, 1], draft_indices=places)
    assert not layer.drafts.updates[[3, 0]].isnan().all()
    assert layer.drafts.updates[[1, 2, 4]].isnan().all()


@pytest.mark.parametrize("by_key", [False, True])
def test_the_state_after_each_token_has_a_slot(by_key, device):
    """A step goes on from the slot of the last token that counts, and writes a slot for each of its own."""
    layer = Layer("odd", 3, "float32", device, by_key=by_key)
    slots = torch.tensor([[4, 9, 2], [1, 3, 8], [5, 7, 6], [0, 0, 0]]).int()
    pool = spread((10, *layer.golden.shape[1:]), torch.float32, device)
    pool[slots[:3, 0]] = layer.golden.to(pool)
    before, accepted = list(layer.golden), [1, 1, 1]
    for counts, taken in (([3, 1, 2], [2, 1, 2]), ([3, 3, 1], [3, 1, 1]), ([0, 2, 3], [3, 2, 1])):
        starts = [*itertools.accumulate(counts, initial=0)]
        inputs = layer.inputs(starts[-1] + 1)
        out = spread((starts[-1] + 1, layer.heads, layer.values), torch.float32, device)
        index = {"query_start_loc": [*starts, starts[-1] + 1], "num_accepted_tokens": [*accepted, 1]}
        arguments = {name: torch.tensor(each).int().to(device) for name, each in index.items()}
        arguments |= {"A_log": layer.A_log.to(device), "dt_bias": layer.dt_bias.to(device), "states": pool, "out": out}
        gdn_decode(**inputs, **arguments, state_indices=slots.to(device), pad_index=0, max_query_len=3, debug=True)
        for number, count in enumerate(counts):
            if not count:
                continue
            tokens = slice(starts[number], starts[number + 1])
            golden = layer.recurrence(inputs, tokens, before[number])
            torch.testing.assert_close(out[tokens].double().cpu(), golden.y, rtol=1e-4, atol=1e-4)
            found = pool[slots[number, :count]].double().cpu()
            torch.testing.assert_close(found, golden.states, rtol=1e-4, atol=1e-4)
            before[number] = found[taken[number] - 1]
        accepted = taken
        assert (out[-1] == 0).all(), "padding"
        assert pool[0].isnan().all(), "the slot of padding"


def test_gates_at_their_ends(device):
    """A decay of 0 and of 1, a strength of 0 and of 1, and softplus from 1e-9 to beyond 20."""
    layer = Layer("odd", 2, "float32", device)
    raw = torch.tensor([[-20.0, 0.0, 60.0], [25.0, 19.0, -100.0]]).to(device)
    strengths = torch.tensor([[-100.0, 0.0, 60.0], [50.0, -20.0, 1.0]]).to(device)
    inputs = layer.inputs(2) | {"a": raw, "b": strengths}
    layer.inputs = lambda _: inputs
    layer.A_log = torch.tensor([2.0, -3.0, 1.0])
    layer.step([1, 1])


def test_a_nan_stays_in_its_sequence(device):
    layer = Layer("qwen3-next", 3, DTYPES[-1], device, most=2)
    inputs = layer.inputs(9)
    for name in "qkvab":
        inputs[name][3:6] = NAN
    layer.inputs = lambda _: inputs
    judged = []
    layer.judge = lambda *given: judged.extend(given[:2])
    layer.step([3, 3, 3])
    _, out = judged
    assert out[3:6].isnan().all()
    assert not out[[0, 1, 2, 6, 7, 8]].isnan().any()
    assert layer.states[layer.slots[1]].isnan().all()
    assert not layer.states[[layer.slots[0], layer.slots[2]]].isnan().any()


def test_decode_beyond_int32(device, far_storage):
    """States lie 2^30 elements apart: offsets do not fit 32 bits."""
    layer = Layer("odd", 2, "float32", device, stored="float16")
    shape = layer.states.shape
    far = far_storage((1 << 30) * (shape[0] - 1) + layer.states[0].numel(), torch.float16)
    far = far.as_strided(shape, (1 << 30, shape[2] * shape[3], shape[3], 1))
    for slot in range(shape[0]):
        far[slot] = layer.states[slot]
    layer.states = far
    layer.step([1, 1])


if not INTERPRETED:  # the interpreter has no graphs

    def test_verify_in_a_captured_graph(device):
        """Replayed with other lengths, acceptance and padding than it was captured with."""
        layer, mirror = (Layer("qwen3-next", 3, "bfloat16", device, most=3) for _ in range(2))
        inputs = layer.inputs(12)
        out, want = (
            torch.full((12, layer.heads, layer.values), NAN, dtype=torch.bfloat16, device=device) for _ in "ab"
        )
        names = ("seq_lens", "query_start_loc", "num_accepted_tokens", "state_indices")
        step = dict(
            zip(names, (torch.zeros(size, dtype=torch.int32, device=device) for size in (3, 4, 3, 3)), strict=True)
        )
        fixed = {"A_log": layer.A_log.to(device), "dt_bias": layer.dt_bias.to(device), "max_query_len": 4}

        def call(layer: Layer, out: torch.Tensor) -> None:
            gdn_decode(**inputs, out=out, states=layer.states, drafts=layer.drafts, **fixed, **step)

        step["state_indices"].fill_(-1)
        call(layer, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(layer, out)
        slots = layer.slots
        for lens, starts, accepted, indices in (
            ([10, 20, 30], [0, 4, 8, 12], [1, 1, 1], slots),
            ([10, 24, 30], [0, 2, 6, 6], [2, 4, 1], [*slots[:2], -1]),
            ([11, 23, 31], [0, 1, 2, 6], [2, 2, 1], slots),
        ):
            for name, each in zip(names, (lens, starts, accepted, indices), strict=True):
                step[name].copy_(torch.tensor(each, dtype=torch.int32))
            graph.replay()
            call(mirror, want)
            assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))
            assert torch.equal(layer.states[slots], mirror.states[slots])


def test_no_sequence_is_no_work(device):
    layer = Layer("odd", 1, "float32", device)
    given = right(layer)
    for name in ("q", "k", "v", "a", "b", "out", "state_indices"):
        given[name] = given[name][:0]
    gdn_decode(**given, debug=True)


def right(layer: Layer) -> dict:
    """A call that is right."""
    count, device = len(layer.slots), layer.device
    inputs = layer.inputs(count)
    more = {}
    if layer.drafts is not None:
        more = {
            "drafts": layer.drafts,
            "seq_lens": torch.full((count,), 9).int().to(device),
            "query_start_loc": torch.arange(count + 1).int().to(device),
            "num_accepted_tokens": torch.ones(count).int().to(device),
        }
    return (
        inputs
        | more
        | {
            "out": torch.empty_like(inputs["v"]),
            "states": layer.states,
            "A_log": layer.A_log.to(device),
            "dt_bias": layer.dt_bias.to(device),
            "state_indices": torch.tensor(layer.slots).int().to(device),
        }
    )


def by_drafts(**changes):
    return lambda drafts: drafts._replace(**{name: change(getattr(drafts, name)) for name, change in changes.items()})


# What is changed of the arguments, kind and message of the mistake. Of the checks that prefill shares, some.
WRONG = [
    ({"k": lambda t: t[0]}, "shape", "k: got"),
    ({"dt_bias": lambda t: t[:, None].expand(-1, 64)}, "shape", "dt_bias: got"),
    ({"state_indices": lambda t: t.long()}, "dtype", "state_indices: got torch.int64"),
    ({"state_indices": lambda t: t + 90}, "slot", r"state_indices: got slot \d+ \(2 in all\)"),
    ({"state_indices": lambda t: t * 0 + 1}, "slot", r"slot 1 for sequences \[0, 1\]"),
    ({"A_log": lambda t: t.to("meta")}, "device", "A_log: got meta"),
    ({"A_log": lambda t: t + 100}, "decay", "A_log: got"),
    ({"scale": lambda _: 0.0}, "option", "scale: got 0.0"),
    ({"lower_bound": lambda _: 1.0}, "option", "lower_bound: got 1.0"),
    ({"drafts": lambda _: None}, "drafts", "drafts: got None"),
    ({"seq_lens": lambda _: None}, "drafts", "seq_lens: got None"),
    ({"max_query_len": lambda _: 4}, "drafts", "max_query_len: got 4 tokens of a sequence; expected 1 .. 3"),
    ({"query_start_loc": lambda t: t * 2}, "length", "query_start_loc: got"),
    ({"num_accepted_tokens": lambda t: t + 3}, "length", "num_accepted_tokens: got 4"),
    ({"seq_lens": lambda t: t * 0}, "length", "seq_lens .* got -1"),
    ({"drafts": by_drafts(keys=lambda t: t[:, 0, 0, 0])}, "shape", "drafts.keys: got"),
    ({"drafts": by_drafts(updates=torch.Tensor.double)}, "dtype", "drafts.updates: got torch.float64"),
    ({"drafts": by_drafts(decays=lambda t: t[:, :3])}, "shape", "drafts.decays: got"),
    ({"drafts": lambda drafts: Drafts(*(each[:1] for each in drafts))}, "slot", "state_indices: got slot"),
    ({"draft_indices": lambda _: torch.tensor([0, 0]).int()}, "slot", "draft_indices: got slot 0 for sequences"),
]


@pytest.mark.parametrize(("change", "kind", "named"), WRONG, ids=[f"{kind}-{named}" for _, kind, named in WRONG])
def test_decode_refuses(change, kind, named, device):
    given = right(Layer("odd", 2, "float32", device, most=2))
    wrong = {name: change_one(given.get(name)) for name, change_one in change.items()}
    wrong = {
        name: each.to(device) if isinstance(each, torch.Tensor) and each.device.type == "cpu" else each
        for name, each in wrong.items()
    }
    with refused(kind, named):
        gdn_decode(**given | wrong, debug=True)


def test_sequences_of_several_tokens_need_room_for_drafts(device):
    given = right(Layer("odd", 2, "float32", device))
    with refused("shape", "state_indices: got"):
        gdn_decode(**given | {"state_indices": given["state_indices"][:1]})
    with refused("drafts", "drafts: got None, and sequences of several tokens"):
        gdn_decode(**given, max_query_len=2)
    drafting = right(Layer("odd", 2, "float32", device, most=2))
    each = {"state_indices": torch.arange(1, 5).view(2, 2).int().to(device)}
    with refused("drafts", "drafts: got room for drafts, and a slot for each token"):
        gdn_decode(**drafting | each)
    for name in ("drafts", "seq_lens"):
        del drafting[name]
    with refused("drafts", "max_query_len: got 3 tokens of a sequence; expected 1 .. 2"):
        gdn_decode(**drafting | each, max_query_len=3)
    drafting["num_accepted_tokens"] += 2
    with refused("length", "num_accepted_tokens: got 3"):
        gdn_decode(**drafting | each, max_query_len=2, debug=True)
