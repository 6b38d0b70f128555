# SPDX-License-Identifier: Apache-2.0
"""Launch data: the tables of `tuning/<arch>.toml` as dataclasses, for the launches of each operation."""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from typing import TYPE_CHECKING, get_args, get_type_hints

from pagedkv import toml
from pagedkv.arch import NEVER, limits, next_power_of_two

if TYPE_CHECKING:
    from pagedkv.arch import Arch

SEGMENTS = (1, 2, 3, 4, 8)
"""Into how many segments the gated delta rule cuts a sequence."""
FEWEST_CHUNKS_CUT = 16
"""Chunks of a sequence below which it does not."""
CROWDED, CARRIED, JOINED = 0.8, 0.65, 2.0
"""What a chunk costs on a unit that others fill too, one that is walked without outputs, and a product of what two
segments do to the state; as timed on an H100 with programs of four waves, relative to a chunk of a program that has a
unit alone."""
FEWEST_AT_ONCE = 8
"""Fewest partitions that a program of the reduce loads at once."""


@dataclass(frozen=True)
class Write:
    """How a write is launched."""

    block_m: int
    """Head rows that one program handles, a power of two."""
    block_d: int
    """Channels of a program that writes into a packed cache, a power of two; it takes as many tokens more."""
    waves: int


@dataclass(frozen=True)
class Gather:
    """How a gather is launched."""

    block_m: int
    """Head rows, from a packed cache tokens, that one program handles; a power of two."""
    waves: int


@dataclass(frozen=True)
class Reduce:
    """How the split-KV reduce is launched."""

    block_m: int
    """(token, head) rows of one program, a power of two."""
    block_splits: int
    """Most partitions that one program loads at once, a power of two."""
    waves: int
    channels_of_wave: int = 0
    """Channels for each wave of a program that loads more than 8 at once, in place of `waves`; 0 takes `waves`."""

    def waves_of(self, at_once: int, channels: int) -> int:
        """Return the waves of a program; `channels` are a power of two."""
        wide = at_once > FEWEST_AT_ONCE and self.channels_of_wave
        return max(self.waves, channels // self.channels_of_wave) if wide else self.waves


@dataclass(frozen=True)
class Where:
    """A measured launch of attention for some layers or lengths, with queries of two bytes: conditions and numbers.

    The numbers are taken as they are: what fits the arch was measured too. A condition that a file leaves out holds.
    """

    because: str
    """When, on what and among how many launches this was the fastest."""
    cache_bytes: int
    """Condition: bytes of a cache element."""
    packing: str
    """Condition: packing of the cache."""
    head_size_padded: int
    """Condition: channels of a head, rounded up to a power of two."""
    block_n: int
    """KV tokens of a tile."""
    waves: int
    stages: int
    block_m: int = 16
    """Query rows of a program. A layer whose query heads of one KV head are more takes the other data."""
    block_at_least: int = 1
    """Condition: tokens of a block."""
    length_at_most: int = NEVER
    """Condition: upper bound of the tokens that a query may see."""
    query_rows_at_least: int = 0
    """Condition: lower bound of the query rows of a sequence: its query tokens times the query heads of a KV head."""
    query_rows_at_most: int = NEVER
    """Condition: upper bound of them."""
    programs_at_most: int = NEVER
    """Condition: upper bound of the programs for each compute unit, rounded down: sequences (prefill: query tokens plus
    sequences) times KV heads."""
    programs_at_least: int = 0
    """Condition: lower bound of them."""
    split_tokens: int = 0
    """Overrides `Attention.split_tokens`; 0 keeps it."""
    programs_per_unit: int = 0
    """Overrides `Attention.programs_per_unit`; 0 keeps it."""
    waves_per_eu: int = 0
    """AMD: waves of a SIMD that the registers must suffice for; 0 leaves it to the compiler."""
    maxnreg: int = 0
    """NVIDIA: most registers of a thread, so that more programs fit a multiprocessor; 0 leaves it to the compiler."""
    pre_load_v: int = 0
    """1 loads and decodes V before the scores of a tile, 0 after them."""
    load_k_by_token: int = 0
    """1 loads a packed K along the channels of a token, 0 along the tokens."""


@dataclass(frozen=True)
class Attention:
    """How attention is launched in one phase (decode: one query token a sequence; prefill: more)."""

    block_m: int
    """Most query rows (tokens times heads) of one program, a power of two >= 16; one token's heads may exceed it."""
    block_n: int
    """Most KV tokens of one tile; fewer where LDS or registers say so."""
    fp8_pairs_block_n: int
    """KV tokens of a tile where FP8 codes are loaded two at a time."""
    waves: int
    quantised_waves: int
    """Waves where the cache is quantised: with fewer, each decodes more of a tile and waits less for the others."""
    stages: int
    packed_stages: int
    """Stages where K and V are packed: more loads of a tile, with addresses of their own, are in flight there."""
    occupancy: int
    """Programs that must fit one compute unit."""
    split_tokens: int
    """Fewest KV tokens worth a partition of their own."""
    programs_per_unit: int
    """Programs per compute unit below which the KV is split."""
    fixed_split_tokens: int
    """KV tokens of a partition where the split may not depend on the batch."""
    kpack: int
    """AMD: operands of MFMA that are read from LDS at once (`Mla.kpack`)."""
    quantised_block_m: int = 0
    """`block_m` where the cache is quantised, because decoded tiles take registers; 0 takes `block_m`."""
    quantised_stages: int = 0
    """Stages where the cache is quantised; 0 takes those of the packing."""
    waves_per_eu: int = 0
    """AMD: waves of a SIMD that registers must suffice for, with elements of 2 bytes; 0 leaves it to the compiler."""
    small_block_m: int = 0
    """Prefill: `block_m` where no sequence has more query rows, as when drafts are verified. Two sizes and not each
    power of two, because each is compiled. 0 takes `block_m`."""
    num_xcds: int = 0
    """AMD: XCDs to spread programs over so that each gets neighbours, whose K and V its L2 then holds; 0 keeps the
    launch order, in which the hardware gives neighbours to different XCDs in turn."""
    where: tuple[Where, ...] = ()
    """Measured launches; the first whose conditions hold counts."""


@dataclass(frozen=True)
class Mla:
    """How MLA decode is launched."""

    block_m: int
    """Most (token, head) rows of one program, a power of two >= 16."""
    block_n: int
    """Most KV tokens of one tile, a power of two >= 16; fewer where LDS or registers say so."""
    waves: int
    stages: int
    programs_per_unit: int
    """Programs that must fit one compute unit; the grid has as many."""
    split_tokens: int
    """Fewest KV tokens worth a program of their own."""
    kpack: int
    """AMD: how many operands of MFMA are read from LDS at once, 2 before gfx950 and 1 there. Elsewhere unused."""
    fixed_tokens: int = 0
    """Fixed cost of a work item, as the KV tokens that take as long."""
    quantised_block_n: int = 0
    """`block_n` where the cache is quantised; 0 takes `block_n`."""
    quantised_stages: int = 0
    """Stages where the cache is quantised; 0 takes `stages`."""
    wide_addresses: int = 0
    """AMD: 1 addresses a cache below 2 GiB with 64 bits too, where a program has `block_m` rows. With 32 bits of buffer
    loads the compiler keeps more in registers than it has, and spills."""


@dataclass(frozen=True)
class MlaReduce:
    """How the reduce of MLA decode is launched; extents are powers of two."""

    block_m: int
    """(token, head) rows of one program."""
    block_d: int
    block_splits: int
    """Partial results that one program loads at once."""
    waves: int


@dataclass(frozen=True)
class SsdLaunch:
    """How Mamba-2's prefill is launched; extents are powers of two."""

    block_t: int
    """Tokens of a tile, at least 16."""
    block_d: int
    """Most channels of one program, at least 16."""
    max_state_elements: int
    """Most elements of the state of one program."""
    waves: int
    stages: int
    kpack: int
    """AMD: operands of MFMA that are read from LDS at once (`Mla.kpack`)."""
    programs_per_unit: int
    """Programs per compute unit below which a sequence is cut into segments."""
    segment_tokens: int
    """Fewest tokens worth a segment of their own."""

    @staticmethod
    def block_dstate(state: int) -> int:
        """Return how many elements of a channel's state a program has room for."""
        return max(16, next_power_of_two(state))

    def segments(self, programs: int, tokens: int, compute_units: int) -> int:
        """Return into how many segments sequences of about `tokens` are cut, which have `programs` all together."""
        wanted = self.programs_per_unit * compute_units // programs
        return max(1, min(wanted, tokens // self.segment_tokens))


@dataclass(frozen=True)
class GdnLaunch:
    """How the gated delta rule's prefill is launched; extents are powers of two."""

    chunk_size: int
    """Tokens of a chunk: 16, 32 or 64."""
    block_v: int
    """Most rows of the state of one program, at least 16."""
    chunk_waves: int
    """Waves of a program that makes the matrices of a chunk."""
    waves: int
    """Waves of a program that walks."""
    stages: int
    most_segments: int = SEGMENTS[-1]
    """Most segments of a sequence that are walked at the same time."""

    def of(self, key_size: int, value_size: int, element_bytes: int) -> GdnLaunch:
        """Return the launch for heads of these sizes; with elements of 4 bytes half the tokens and half the rows."""
        shares = max(1, element_bytes // 2)
        block_v = min(self.block_v, key_size, value_size) // shares
        # Eight waves read heads of 64 keys in short pieces.
        waves, chunk_waves = (min(count, key_size // 16) for count in (self.waves, self.chunk_waves))
        chunk_size = max(16, self.chunk_size // shares)
        return replace(self, chunk_size=chunk_size, block_v=max(16, block_v), waves=waves, chunk_waves=chunk_waves)

    def segments(self, programs: int, tokens: int, compute_units: int) -> int:
        """Return into how many segments sequences of about `tokens` are cut, which have `programs` all together.

        Costs are counted in chunks that a lone program walks. What a segment does to the state takes twice the
        programs, because of M, and no outputs.
        """
        chunks = tokens // self.chunk_size

        def cost(count: int) -> float:
            share = -(-chunks // count)
            carried = CARRIED * share * crowd(2 * programs * (count - 1)) if count > 1 else 0.0
            return carried + share * crowd(programs * count) + JOINED * count

        def crowd(programs: int) -> float:
            return max(1.0, CROWDED * self.waves / 4 * programs / compute_units)

        if chunks < FEWEST_CHUNKS_CUT:
            return 1
        return min((count for count in SEGMENTS if count <= self.most_segments), key=cost)


GDN_HEAD_SIZES = (64, 128)
"""Keys or values of a head that the kernels of the gated delta rule take."""


MANY_STATES = 64 << 20
"""Bytes of the states of a step that are more than L2 holds."""


@dataclass(frozen=True)
class GdnDecode:
    """How decode of the gated delta rule is launched; extents are powers of two."""

    block_v: int
    """Most values of one program, whose state it keeps in registers."""
    keys_per_part: int
    """Most keys that lie next to each other in registers (`gdn.decode_kernel`)."""
    waves: int
    many_states_block_v: int = 0
    """`block_v` of a step with `MANY_STATES`, which L2 is then asked to keep until they are written; 0 does neither."""


@dataclass(frozen=True)
class Tuning:
    """`tuning/<arch>.toml`."""

    write: Write
    gather: Gather
    reduce: Reduce
    decode: Attention
    prefill: Attention
    scan_64: SsdLaunch
    """Launch for channels with up to 64 elements of state."""
    scan_128: SsdLaunch
    """Launch for up to 128."""
    scan_256: SsdLaunch
    """Launch for more."""
    gdn_prefill: GdnLaunch
    kda_prefill: GdnLaunch
    """Launch where each key has a decay."""
    gdn_decode: GdnDecode
    gdn_verify: GdnDecode
    """Launch for steps with drafts."""
    mla: Mla | None = None
    """None where MLA decode does not run on the arch; so with the two that follow."""
    mla_narrow: Mla | None = None
    """Launch where one token has at most 16 heads."""
    mla_reduce: MlaReduce | None = None

    def scan_of(self, head_size: int, state: int, element_bytes: int) -> SsdLaunch:
        """Return how a prefill of Mamba-2 is launched: at most the channels of a head, and what a program has room for.

        Inputs of fp32 take twice the registers, so programs have half the tokens, half the channels and half the waves.
        """
        data = self.scan_64 if state <= 64 else self.scan_128 if state <= 128 else self.scan_256
        shares = max(1, element_bytes // 2)
        room = max(16, data.max_state_elements // shares // data.block_dstate(state))
        channels = min(data.block_d, room, max(16, next_power_of_two(head_size)))
        waves = max(1, data.waves // shares)
        return replace(data, block_t=max(16, data.block_t // shares), block_d=channels, waves=waves)


def parse(text: str, where: str) -> Tuning:
    """Read a tuning file; every number is at least 1.

    Raises:
        InvalidFileError: if it is not TOML or its keys or values are not those of `Tuning`.
    """
    kinds = get_type_hints(Tuning)
    needed = [field.name for field in fields(Tuning) if field.default is MISSING]
    data = toml.parse(where, text, kinds, needed=needed)
    rules = {
        name: toml.entries(f"{where} [[{name}.where]]", data[name].pop("where", []), Where, least=1)
        for name in ("decode", "prefill")
        if isinstance(data[name], dict)
    }
    found = {
        name: toml.entry(f"{where} [{name}]", data[name], (*get_args(kind), kind)[0], least=1)
        for name, kind in kinds.items()
        if name in data
    }
    return Tuning(**found | {name: replace(found[name], where=each) for name, each in rules.items()})


@functools.cache
def tuning(arch: str) -> Tuning:
    """Return the tuning data of an arch.

    Raises:
        UnsupportedArchError: if there is none.
        InvalidFileError: if its file is wrong.
    """
    where = limits(arch).tuning_file
    file = resources.files("pagedkv").joinpath(*where.split("/")[1:])
    return parse(file.read_text(encoding="utf-8"), where)


def rows_of_program(arch: Arch, count: int, *, most: int, fewest: int) -> int:
    """Return how many of `count` rows a program takes, a power of two: `most`, or `fewest` where there are not as many.

    Two values and not every power of two, because each is compiled; Triton's interpreter, which compiles nothing, takes
    what the rows need.
    """
    if count >= most:
        return most
    return min(most, fewest if arch.compiled else next_power_of_two(count))
