# SPDX-License-Identifier: Apache-2.0
"""The launcher of decode and verification of the gated delta rule: checks, and one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.device import current, on
from pagedkv.gdn import checks, decode_checks
from pagedkv.gdn.decode_kernel import DecodeOptions, DecodeStrides, gdn_decode_kernel
from pagedkv.launch import MANY_STATES, tuning
from pagedkv.prepared import Launch, compiler_settings, find, keep, signature


class Drafts(NamedTuple):
    """What a layer keeps of the drafts of each slot until the next step, in a ring of twice as many places, and one."""

    keys: Tensor  # [slots, ring, key heads, keys], in the dtype of k
    updates: Tensor  # [slots, ring, heads, values] fp32
    decays: Tensor  # [slots, ring, heads] fp32, or of decays by key [slots, ring, heads, keys]

    @property
    def most(self) -> int:
        """Drafts of a step that there is room for."""
        return (self.keys.shape[1] - 1) // 2


def allocate_drafts(k: Tensor, states: Tensor, slots: int, most: int, *, by_key: bool = False) -> Drafts:
    """Return room for `most` drafts of each of `slots` sequences; nothing in it is read before a step wrote it.

    Args:
        k: [tokens, key heads, keys] of any step.
        states: [slots, heads, values, keys], the pool.
        slots: Of the result: those of the pool, where sequences have the same index in both.
        most: Drafts of a step.
        by_key: Whether each key has a decay.
    """
    heads, values, keys = states.shape[1:]
    single = {"dtype": torch.float32, "device": k.device}
    ring = 2 * most + 1
    return Drafts(
        torch.empty(slots, ring, k.shape[1], keys, dtype=k.dtype, device=k.device),
        torch.empty(slots, ring, heads, values, **single),
        torch.empty(slots, ring, heads, *[keys] * by_key, **single),
    )


def gdn_decode(
    q: Tensor,  # [tokens, key heads, keys]
    k: Tensor,  # [tokens, key heads, keys]
    v: Tensor,  # [tokens, heads, values]
    a: Tensor,  # [tokens, heads], or for a decay of each key [tokens, heads, keys]
    b: Tensor,  # [tokens, heads]
    out: Tensor,  # [tokens, heads, values]
    states: Tensor,  # [slots, heads, values, keys]
    *,
    A_log: Tensor,  # [heads]
    dt_bias: Tensor,  # [heads] or [heads, keys]
    state_indices: Tensor,  # [sequences] or [sequences, 1 + drafts] int32
    scale: float | None = None,
    lower_bound: float | None = None,
    pad_index: int = -1,
    drafts: Drafts | None = None,
    draft_indices: Tensor | None = None,  # [sequences] int32
    seq_lens: Tensor | None = None,  # [sequences] int32
    query_start_loc: Tensor | None = None,  # [sequences + 1] int32
    num_accepted_tokens: Tensor | None = None,  # [sequences] int32
    max_query_len: int = 1,
    debug: bool = False,
) -> None:
    """Outputs and new states of a step of the gated delta rule: one token of each sequence, or one and its drafts.

    Of each head, with k and q divided by their norms, beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias),

        S_t = S_{t-1} exp(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
        out_t = S_t q_t scale

    Without `drafts` a sequence has one token and its state is replaced. With them its first token is one that counts,
    the others are drafts, and the state in the pool becomes that after the first token: the drafts that the next step
    accepts are replayed there. A prefill or a step without `drafts` finds, and leaves, nothing to replay, so the next
    step must accept one token. With a slot for each token in `state_indices` the state after each is written instead,
    and the next step goes on from that of the last accepted one. States are computed in fp32 whatever their dtype. The
    call never waits for the device, and the grid follows from shapes, so it can be captured in a graph.

    Args:
        q: Queries of the key heads, each shared by heads / key heads neighbouring heads; 64 or 128 channels; fp32,
            fp16 or bf16. Its last dimension is dense, its other strides are free: a view of the convolution's output.
            k, v and out are the same, in one dtype.
        k: Keys, as q.
        v: Values; 64 or 128 channels.
        a: Gate of the decay.
        b: Gate of what is written.
        out: Result; 0 of sequences that are padding.
        states: Pool of states, changed in place.
        A_log: Logarithm of the rate of decay; `exp(A_log)` is finite.
        dt_bias: Added to `a`.
        state_indices: The slot of each sequence, of which no other sequence has the same; or one for the state after
            each of its tokens.
        scale: Of q; None for 1 / sqrt(keys).
        lower_bound: g is lower_bound sigmoid(exp(A_log) (a + dt_bias)) instead.
        pad_index: Sequences with an index of at most this are padding (vLLM: 0, its null block).
        drafts: Room for drafts, see `allocate_drafts`. All that follows is needed with it, but for `draft_indices`.
            With a slot for each token there is no `drafts`, `draft_indices` or `seq_lens`.
        draft_indices: The slot of each sequence in `drafts`; None for `state_indices`.
        seq_lens: Tokens of each sequence, those of this step included.
        query_start_loc: First token of each sequence, and the number of tokens.
        num_accepted_tokens: Tokens of the sequence's last step that count, at least its first one: 1 + accepted drafts.
        max_query_len: Upper bound of the tokens of a sequence in this step.
        debug: Also check indices and decays (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    at = {"seq_lens": seq_lens, "query_start_loc": query_start_loc, "num_accepted_tokens": num_accepted_tokens}
    kept = (None,) * 3 if drafts is None else drafts
    places = state_indices if draft_indices is None else draft_indices
    tensors = (q, k, v, a, b, A_log, dt_bias, out, states, state_indices, *kept, places, *at.values())
    options = (draft_indices is None, scale, lower_bound, pad_index, max_query_len)
    key = None if debug else ("gdn_decode", *map(signature, tensors), *options, compiler_settings())
    call = find(key)
    if call is not None:
        call.run(*tensors)
        return
    decode_checks.tensors(checks.layer(q, k, v, a, b, out, states, A_log, dt_bias), state_indices)
    decode_checks.options(scale, lower_bound)
    decode_checks.drafts(k, a, states, state_indices, drafts, draft_indices, at, max_query_len)
    if debug:
        checks.decays(A_log, dt_bias)
        decode_checks.slots("state_indices", state_indices.flatten(), pad_index, len(states))
        if drafts is not None or state_indices.dim() == 2:
            decode_checks.steps(state_indices, draft_indices, pad_index, drafts, at, len(q), max_query_len)
    if len(state_indices) == 0:
        return
    call = _prepare(q, k, v, a, b, out, states, state_indices, places, drafts, scale, lower_bound, pad_index)
    call.run(*tensors)
    keep(key, call)


@dataclass(frozen=True)
class DecodeCall:
    """Launch of the calls with one signature."""

    walk: Launch
    numbers: tuple[Any, ...]
    """Last arguments of the kernel."""

    def run(self, q: Tensor, *others: Tensor | None) -> None:
        """Launch for the tensors of one call."""
        with on(q):
            self.walk(q, *others, *self.numbers)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    states: Tensor,
    state_indices: Tensor,
    draft_indices: Tensor,
    drafts: Drafts | None,
    scale: float | None,
    lower_bound: float | None,
    pad_index: int,
) -> DecodeCall:
    """Choose the launch of a call that was checked."""
    heads, values, keys = states.shape[1:]
    arch = current(q)
    each = state_indices.dim() == 2
    data = tuning(arch.name).gdn_verify if each or drafts is not None else tuning(arch.name).gdn_decode
    many = data.many_states_block_v > 0 and len(state_indices) * states[0].nbytes >= MANY_STATES
    constants = DecodeOptions(
        NUM_HEADS=heads,
        HEADS_PER_KEY_HEAD=heads // k.shape[1],
        K=keys,
        V=values,
        BLOCK_V=min(data.many_states_block_v if many else data.block_v, values),
        KEYS_PER_PART=min(data.keys_per_part, keys),
        IS_KDA=a.dim() == 3,
        HAS_LOWER_BOUND=lower_bound is not None,
        HAS_DRAFTS=drafts is not None,
        WRITE_EACH_STATE=each,
        EVICTION_POLICY="evict_last" if many else "",
        USE_PDL=arch.dependent_launches,
    )
    strides = DecodeStrides(
        q=q.stride()[:2],
        k=k.stride()[:2],
        v=v.stride()[:2],
        out=out.stride()[:2],
        a=a.stride()[:2],
        b=b.stride()[:1],
        states=states.stride()[:3],
        keys=(0, 0, 0) if drafts is None else drafts.keys.stride()[:3],
        updates=(0, 0, 0) if drafts is None else drafts.updates.stride()[:3],
        decays=(0, 0, 0) if drafts is None else drafts.decays.stride()[:3],
        state_indices=state_indices.stride()[:1],
        draft_indices=draft_indices.stride()[:1],
    )
    grid = (heads * (values // constants.BLOCK_V), len(state_indices))
    launch: dict[str, Any] = {"OPTIONS": constants, "num_warps": data.waves, "num_stages": 1}
    if arch.dependent_launches:
        launch["launch_pdl"] = True
    walk = Launch(gdn_decode_kernel, grid, **launch)
    ring = 1 if drafts is None else drafts.keys.shape[1]
    factor = keys**-0.5 if scale is None else float(scale)
    return DecodeCall(walk, (strides, factor, float(lower_bound or 0.0), ring, pad_index))
