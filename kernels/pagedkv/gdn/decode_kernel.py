# SPDX-License-Identifier: Apache-2.0
"""Decode and verification of the gated delta rule (Yang, Kautz and Hatamizadeh 2024), of a state S [values, keys].

Of a token with q and k, decay d and write strength b, with n = 1 / |k| and m = scale / |q|,

    u = n b (v - n S d k),    S' = S d + u k^T,    y = m S' q = m (S d q + u (k . q))

with one d for each head, or one for each key (Kimi Linear 2025). A program holds the rows of some values in registers.
Norms are factors of rows, so k and q stay as they are loaded.

The first token of a step always counts, and the state after it is written. Of the drafts after it, some of which will
be rejected, only u, k and d are kept. The next step replays those that were accepted, S d + u k^T, before its own first
token. They are kept at their positions in the sequence modulo the length of a ring. What a step reads lies before its
first token and what it writes after it, so with room for twice the drafts, and one, no program waits for another.
Where states are copied between steps, as for a prefix cache, the state after each token is written instead.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.merge import pdl_wait
from pagedkv.attention.softmax import LOG2E, narrow, widen
from pagedkv.strides import wide

EPSILON = tl.constexpr(1e-6)
"""Added to the sum of squares of q and of k, as in the models."""


class DecodeStrides(NamedTuple):
    """Strides that a launch passes, in elements; 0 of what is not used."""

    q: tuple[int, ...]
    """Strides of token and head; k, v and out have the same two."""
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    a: tuple[int, ...]
    """Strides of token and head."""
    b: tuple[int, ...]
    """Stride of token."""
    states: tuple[int, ...]
    """Strides of slot, head and value."""
    keys: tuple[int, ...]
    """Strides of slot, place in the ring and head; updates and decays have the same three."""
    updates: tuple[int, ...]
    decays: tuple[int, ...]
    state_indices: tuple[int, ...]
    """Stride of sequence, which draft_indices has too."""
    draft_indices: tuple[int, ...]


class DecodeOptions(NamedTuple):
    """Compile-time options of the kernel: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    HEADS_PER_KEY_HEAD: int
    """Value heads that share a key head."""
    K: int
    """Keys of a head, a power of two."""
    V: int
    """Values of a head, a power of two."""
    BLOCK_V: int
    """Values of a program, a power of two."""
    KEYS_PER_PART: int
    """Keys that lie next to each other in a row's registers, a power of two. A sum over keys takes
    log2(KEYS_PER_PART / 4) exchanges between lanes, and a load takes 4 KEYS_PER_PART bytes of a row."""
    IS_KDA: bool
    """Kimi Delta Attention: whether each key has a decay."""
    HAS_LOWER_BOUND: bool
    """Whether decays have a lower bound."""
    HAS_DRAFTS: bool
    """Whether sequences have several tokens, of which those of the step before are replayed."""
    WRITE_EACH_STATE: bool
    """Whether sequences have several tokens, and the state after each goes to a slot of its own."""
    EVICTION_POLICY: str
    """Eviction policy of the loads of states."""
    USE_PDL: bool
    """Whether it is a programmatic dependent launch (`pdl_wait`)."""


@triton.jit
def parts_of(pointer, OPTIONS):
    """Load numbers of each key as they are, in parts of KEYS_PER_PART."""
    out = ()
    for part in tl.static_range(OPTIONS.K // OPTIONS.KEYS_PER_PART):
        out += (tl.load(pointer + part * OPTIONS.KEYS_PER_PART + tl.arange(0, OPTIONS.KEYS_PER_PART)),)
    return out


@triton.jit
def single(x):
    """Return parts in fp32."""
    out = ()
    for part in tl.static_range(len(x)):
        out += (x[part].to(tl.float32),)
    return out


@triton.jit
def store_parts(pointer, parts, OPTIONS: tl.constexpr):
    """Write numbers of each key."""
    column = tl.arange(0, OPTIONS.KEYS_PER_PART)
    for part in tl.static_range(OPTIONS.K // OPTIONS.KEYS_PER_PART):
        tl.store(pointer + part * OPTIONS.KEYS_PER_PART + column, parts[part])


@triton.jit
def rows_of(states, there, OPTIONS):
    """Load rows of a state as fp32 parts, [BLOCK_V, KEYS_PER_PART] each; zeros of a sequence that there is not."""
    out = ()
    for part in tl.static_range(OPTIONS.K // OPTIONS.KEYS_PER_PART):
        at = part * OPTIONS.KEYS_PER_PART
        out += (tl.load(states + at, mask=there, other=0.0, eviction_policy=OPTIONS.EVICTION_POLICY).to(tl.float32),)
    return out


@triton.jit
def store_rows(states, parts, there, OPTIONS):
    """Write rows of a state in its dtype."""
    STORED: tl.constexpr = states.dtype.element_ty
    for part in tl.static_range(OPTIONS.K // OPTIONS.KEYS_PER_PART):
        tl.store(states + part * OPTIONS.KEYS_PER_PART, narrow(widen(parts[part], STORED), STORED), mask=there)


@triton.jit
def decayed(x, decay, OPTIONS):
    """Return d x of each key; one decay of all is left to `along_keys`."""
    out = x
    if OPTIONS.IS_KDA:
        out = ()
        for part in tl.static_range(len(x)):
            out += (x[part] * decay[part],)
    return out


@triton.jit
def dot(x, y):
    """Return the sum over all keys of the products of two lists of parts."""
    total = x[0] * y[0]
    for part in tl.static_range(1, len(x)):
        total += x[part] * y[part]
    return tl.sum(total, axis=0)


@triton.jit
def along_keys(state, x, decay, OPTIONS):
    """Return S d x, [BLOCK_V]; the parts are added up before lanes exchange anything."""
    x = decayed(x, decay, OPTIONS)
    total = state[0] * x[0][None, :]
    for part in tl.static_range(1, len(x)):
        total += state[part] * x[part][None, :]
    out = tl.sum(total, axis=1)
    if not OPTIONS.IS_KDA:
        out *= decay
    return out


@triton.jit
def next_state(state, update, k, decay, OPTIONS):
    """Return S d + u k^T."""
    out = ()
    for part in tl.static_range(len(state)):
        if OPTIONS.IS_KDA:
            out += (state[part] * decay[part][None, :] + update[:, None] * k[part][None, :],)
        else:
            out += (state[part] * decay + update[:, None] * k[part][None, :],)
    return out


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def decay_of(raw, rate, bias, lower_bound, OPTIONS: tl.constexpr):
    """Return a decay: exp(-exp(A_log) softplus(raw + bias)), or exp(lower_bound sigmoid(exp(A_log) (raw + bias)))."""
    x = raw + bias
    if OPTIONS.HAS_LOWER_BOUND:
        out = tl.exp2(lower_bound * LOG2E * sigmoid(rate * x))
    else:
        grown = tl.exp2(x * LOG2E)
        # log(1 + grown): the quotient takes back what rounding 1 + grown has lost (Higham 2002, section 1.14.1).
        more = 1 + grown
        lost = tl.where(more == 1, 1.0, more - 1)
        base = tl.where(more == 1, grown * LOG2E, tl.log2(more) * (grown / lost))
        out = tl.exp2(-rate * tl.where(x > 20, x * LOG2E, base))
    return out


@triton.jit
def per_key(pointer, OPTIONS):
    """Load what a head has one number of, or with IS_KDA one of each key."""
    return parts_of(pointer, OPTIONS) if OPTIONS.IS_KDA else tl.load(pointer)


@triton.jit
def decays_of(raw, bias, rate, lower_bound, DTYPE, OPTIONS):
    """Return the decay of a head, or of each key."""
    if OPTIONS.IS_KDA:
        out = ()
        for part in tl.static_range(len(raw)):
            x = widen(raw[part], DTYPE)
            out += (decay_of(x, rate, widen(bias[part], DTYPE), lower_bound, OPTIONS),)
    else:
        out = decay_of(widen(raw, DTYPE), rate, widen(bias, DTYPE), lower_bound, OPTIONS)
    return out


@triton.jit
def inputs_at(pointers, strides, token, OPTIONS):
    """Load q, k, v, a and b of a token, as they are."""
    q, k, v, a, b = pointers
    stride_q, stride_k, stride_v, stride_a, stride_b = strides
    q, k = parts_of(q + token * stride_q, OPTIONS), parts_of(k + token * stride_k, OPTIONS)
    return q, k, tl.load(v + token * stride_v), per_key(a + token * stride_a, OPTIONS), tl.load(b + token * stride_b)


@triton.jit(
    do_not_specialize=["ring", "pad_index"],
    do_not_specialize_on_alignment=[
        "a",
        "b",
        "state_indices",
        "draft_indices",
        "seq_lens",
        "query_start_loc",
        "num_accepted",
    ],
)
def gdn_decode_kernel(
    q,  # [tokens, key heads, K]
    k,  # [tokens, key heads, K]
    v,  # [tokens, heads, V]
    a,  # [tokens, heads], with IS_KDA [tokens, heads, K]
    b,  # [tokens, heads]
    A_log,  # [heads]
    bias,  # [heads], with IS_KDA [heads, K]
    out,  # [tokens, heads, V]
    states,  # [slots, heads, V, K]
    state_indices,  # [sequences] int32, with WRITE_EACH_STATE [sequences, tokens]
    keys,  # [slots, ring, key heads, K] of drafts, in the dtype of k; as all that follows used with HAS_DRAFTS
    updates,  # [slots, ring, heads, V] fp32
    decays,  # [slots, ring, heads] fp32, with IS_KDA [slots, ring, heads, K]
    draft_indices,  # [sequences] int32
    seq_lens,  # [sequences] int32, with the tokens of this step
    query_start_loc,  # [sequences + 1] int32, used with HAS_DRAFTS or WRITE_EACH_STATE, as num_accepted
    num_accepted,  # [sequences] int32, tokens of the step before that count
    strides,  # DecodeStrides
    scale,  # of q
    lower_bound,  # of log decays, used with HAS_LOWER_BOUND
    ring,  # places
    pad_index,  # the largest index of a sequence that there is not
    OPTIONS: tl.constexpr,  # DecodeOptions
):
    """Walk the tokens of a sequence for BLOCK_V values of a head; grid [heads * tiles of values, sequences]."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    TILES: tl.constexpr = OPTIONS.V // OPTIONS.BLOCK_V
    head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    sequence = tl.program_id(1)
    key_head = head // OPTIONS.HEADS_PER_KEY_HEAD
    row = tile * OPTIONS.BLOCK_V + tl.arange(0, OPTIONS.BLOCK_V)
    column = tl.arange(0, OPTIONS.KEYS_PER_PART)[None, :]

    pdl_wait(OPTIONS.USE_PDL)
    first = sequence.to(tl.int64)
    count = 1
    position = 0
    SEVERAL: tl.constexpr = OPTIONS.HAS_DRAFTS or OPTIONS.WRITE_EACH_STATE
    if SEVERAL:
        first = tl.load(query_start_loc + sequence).to(tl.int64)
        count = tl.load(query_start_loc + sequence + 1) - first.to(tl.int32)
        if OPTIONS.HAS_DRAFTS:
            position = tl.load(seq_lens + sequence) - count
        if count == 0:  # such a sequence keeps its state, and what is kept of its drafts
            return
    (stride_index,) = wide(strides.state_indices)
    state_indices += sequence * stride_index
    if OPTIONS.WRITE_EACH_STATE:
        slot = tl.load(state_indices + tl.load(num_accepted + sequence) - 1).to(tl.int64)
    else:
        slot = tl.load(state_indices).to(tl.int64)
    there = slot > pad_index
    stride_slot, stride_state_head, stride_state_row = wide(strides.states)
    states += slot * stride_slot + head * stride_state_head + row[:, None] * stride_state_row + column
    state = rows_of(states, there, OPTIONS)

    stride_q, stride_q_head = wide(strides.q)
    stride_k, stride_k_head = wide(strides.k)
    stride_v, stride_v_head = wide(strides.v)
    stride_a, stride_a_head = wide(strides.a)
    (stride_b,) = wide(strides.b)
    stride_out, stride_out_head = wide(strides.out)
    pointers = (
        q + key_head * stride_q_head,
        k + key_head * stride_k_head,
        v + head * stride_v_head + row,
        a + head * stride_a_head,
        b + head,
    )
    token_strides = (stride_q, stride_k, stride_v, stride_a, stride_b)
    out += head * stride_out_head + row
    bias = per_key(bias + head * (OPTIONS.K if OPTIONS.IS_KDA else 1), OPTIONS)
    rate = tl.exp2(widen(tl.load(A_log + head), DTYPE) * LOG2E)

    if OPTIONS.HAS_DRAFTS:
        (stride_draft_index,) = wide(strides.draft_indices)
        draft_slot = tl.load(draft_indices + sequence * stride_draft_index).to(tl.int64)
        stride_keys_slot, stride_keys, stride_keys_head = wide(strides.keys)
        stride_updates_slot, stride_updates, stride_updates_head = wide(strides.updates)
        stride_decays_slot, stride_decays, stride_decays_head = wide(strides.decays)
        keys += draft_slot * stride_keys_slot + key_head * stride_keys_head
        updates += draft_slot * stride_updates_slot + head * stride_updates_head + row
        decays += draft_slot * stride_decays_slot + head * stride_decays_head
        replayed = tl.where(there, tl.load(num_accepted + sequence) - 1, 0)
        for back in range(replayed):
            place = (position - replayed + back + ring) % ring
            update = tl.load(updates + place * stride_updates)
            decay = per_key(decays + place * stride_decays, OPTIONS)
            state = next_state(state, update, single(parts_of(keys + place * stride_keys, OPTIONS)), decay, OPTIONS)

    upcoming = inputs_at(pointers, token_strides, first, OPTIONS)
    for token in range(count):
        raw_q, raw_k, raw_v, raw_a, raw_b = upcoming
        if SEVERAL:  # the loads of the next token do not wait for what this one computes
            upcoming = inputs_at(pointers, token_strides, first + tl.minimum(token + 1, count - 1), OPTIONS)
        query, key = single(raw_q), single(raw_k)
        decay = decays_of(raw_a, bias, rate, lower_bound, DTYPE, OPTIONS)
        norm_q = tl.rsqrt(dot(query, query) + EPSILON) * scale
        norm_k = tl.rsqrt(dot(key, key) + EPSILON)
        found = along_keys(state, key, decay, OPTIONS) * norm_k
        update = (raw_v.to(tl.float32) - found) * (sigmoid(widen(raw_b, DTYPE)) * norm_k)
        y = (along_keys(state, query, decay, OPTIONS) + update * dot(key, query)) * norm_q
        y = tl.where(there, y, 0.0)  # as the padding of a graph, whose rows other layers read
        tl.store(out + (first + token) * stride_out, narrow(widen(y, DTYPE), DTYPE))
        if OPTIONS.WRITE_EACH_STATE:
            state = next_state(state, update, key, decay, OPTIONS)
            after = states + (tl.load(state_indices + token) - slot) * stride_slot
            store_rows(after, state, there, OPTIONS)
        else:
            if (token == 0) | (token + 1 < count):  # no step reads the state after the last draft
                state = next_state(state, update, key, decay, OPTIONS)
            if token == 0:
                store_rows(states, state, there, OPTIONS)
        if OPTIONS.HAS_DRAFTS:
            kept = (token > 0) & there
            place = (position + token) % ring
            tl.store(updates + place * stride_updates, update, mask=kept)
            if kept & (tile == 0):
                if OPTIONS.IS_KDA:
                    store_parts(decays + place * stride_decays, decay, OPTIONS)
                else:
                    tl.store(decays + place * stride_decays, decay)
                if head % OPTIONS.HEADS_PER_KEY_HEAD == 0:
                    store_parts(keys + place * stride_keys, raw_k, OPTIONS)
