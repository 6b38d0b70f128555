# SPDX-License-Identifier: Apache-2.0
"""What an operator was called with: shapes, strides, types and addresses, and the bytes of a cache that it touches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

READABLE = 4096
"""Integer tensors of at most so many elements are noted with their values: lengths, block tables, slots."""


class UnknownCallError(Exception):
    """No contract covers a call, or vLLM is not where the stand-in looks for it: the check did not run."""


@dataclass(frozen=True)
class Seen:
    """A tensor, as an operator sees it.

    Attributes:
        shape: Its sizes.
        strides: In elements, as torch counts them.
        dtype: Its torch dtype.
        address: Of its first element.
        storage: Address and bytes of the allocation that it is a view of.
        values: Its numbers, where they are few integers; else None.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int
    storage: tuple[int, int]
    values: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        """Note a tensor."""
        storage = tensor.untyped_storage()
        few = tensor.numel() <= READABLE and not tensor.dtype.is_floating_point
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.data_ptr(),
            (storage.data_ptr(), storage.nbytes()),
            _nested(tensor.tolist()) if few else None,
        )

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    def dense(self, first: int = 0) -> bool:
        """Whether the dimensions from `first` on lie without a gap, in order."""
        expected = 1
        for length, stride in zip(reversed(self.shape[first:]), reversed(self.strides[first:]), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} strides {list(self.strides)}"


def _nested(values: Any) -> Any:
    return tuple(_nested(value) for value in values) if isinstance(values, list) else values


@dataclass(frozen=True)
class CellMap:
    """Where each number of a paged cache lies: a base address and bytes to step for each coordinate.

    Block, token, head and channel are numbered as the model numbers them. Tokens and channels may be split in two
    (`token // width` and `token % width`), as the packed layouts of AMD's kernels split them.
    """

    base: int
    block: int
    head: int
    token: tuple[int, int, int]
    """Elements of a pack, step of a pack, step inside a pack."""
    channel: tuple[int, int, int]
    """Elements of a group, step of a group, step inside a group: of channels, as `token` is of tokens."""
    size: int
    """Bytes of an element."""

    def addresses(self, blocks: Any, tokens: Any, heads: Any, channels: Any) -> np.ndarray:
        """Addresses of all cells of these coordinates, [blocks, tokens, heads, channels]."""
        b, n, h, d = np.ix_(*(np.asarray(each, dtype=np.int64) for each in (blocks, tokens, heads, channels)))
        (token_width, token_pack, token_in), (width, pack, inside) = self.token, self.channel
        return (
            self.base
            + b * self.block
            + h * self.head
            + n // token_width * token_pack
            + n % token_width * token_in
            + d // width * pack
            + d % width * inside
        )


def by_rows(view: Seen) -> CellMap:
    """`[blocks, tokens, heads, channels]` by its strides."""
    block, token, head, channel = (stride * view.size for stride in view.strides)
    return CellMap(view.address, block, head, (1, token, 0), (1, channel, 0), view.size)


def native_key(view: Seen) -> CellMap:
    """K as `[blocks, heads, channels / x, tokens, x]` by its strides."""
    block, head, pack, token, inside = (stride * view.size for stride in view.strides)
    return CellMap(view.address, block, head, (1, token, 0), (view.shape[4], pack, inside), view.size)


def native_value(view: Seen) -> CellMap:
    """V as `[blocks, heads, channels, tokens]` by its strides."""
    block, head, channel, token = (stride * view.size for stride in view.strides)
    return CellMap(view.address, block, head, (1, token, 0), (1, channel, 0), view.size)


def as_if_dense(view: Seen) -> Seen:
    """The same shape, with the strides of a tensor without gaps: what an operator assumes that takes no strides."""
    strides: list[int] = []
    step = 1
    for length in reversed(view.shape):
        strides.insert(0, step)
        step *= length
    return Seen(view.shape, tuple(strides), view.dtype, view.address, view.storage)


def shuffled(view: Seen, side: str, *, tokens: int, channels: int, x: int) -> CellMap:
    """The SHUFFLE packing of a view whose first stride alone counts.

    K is `[heads, channels / x, tokens, x]` and V `[heads, tokens / x, channels, x]` inside a block.
    """
    size, block = view.size, view.strides[0] * view.size
    head = tokens * channels * size
    if side == "key":
        return CellMap(view.address, block, head, (1, x * size, 0), (x, tokens * x * size, size), size)
    return CellMap(view.address, block, head, (x, channels * x * size, size), (1, x * size, 0), size)


@dataclass(frozen=True)
class Access:
    """Read or write of one side of a paged cache by an operator."""

    operator: str
    side: str
    writes: bool
    cells: CellMap
    blocks: int
    tokens: int
    heads: int
    channels: int
    storage: tuple[int, int]

    def corners(self) -> np.ndarray:
        """Addresses of first, second, middle and last of each coordinate."""
        picks = [
            sorted({0, 1 % length, length // 2, length - 1})
            for length in (self.blocks, self.tokens, self.heads, self.channels)
        ]
        return self.cells.addresses(*picks)

    def all_cells(self) -> np.ndarray:
        """Addresses of all cells, a row for each block."""
        ranges = [range(length) for length in (self.blocks, self.tokens, self.heads, self.channels)]
        return self.cells.addresses(*ranges).reshape(self.blocks, -1)


@dataclass(frozen=True)
class Broken:
    """A promise of an operator that a call does not keep."""

    operator: str
    promise: str
    """Short name of the promise: what a declared fault names."""
    text: str


@dataclass(frozen=True)
class Layer:
    """What the layer of a call is: constants that every operator of it must get."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False
    kv_cache_dtype: str = "auto"


@dataclass
class Judge:
    """A call before its contract: arguments by name, and what the contract finds.

    Attributes:
        operator: Name of the operator.
        args: Its arguments, tensors as `Seen`; an argument that was not given is absent.
        layer: The layer whose call it is; None where it is not known (an engine under watch).
        memory: What operators of one step leave for each other.
        broken: Promises that the call does not keep.
        accesses: Sides of caches that it touches.
    """

    operator: str
    args: Mapping[str, Any]
    layer: Layer | None
    memory: dict[Any, Any]
    broken: list[Broken] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    def know(self, condition: object, what: str) -> None:
        """Refuse a call that the contract does not describe.

        Raises:
            UnknownCallError: It does not.
        """
        if not condition:
            raise UnknownCallError(
                f"the contract of {self.operator} does not know {what}: extend it in tests/operators/contracts.py"
            )

    def tensor(self, name: str, *ranks: int) -> Seen:
        """A tensor that must be there, of one of these ranks."""
        seen = self.args.get(name)
        self.know(isinstance(seen, Seen), f"a call without the tensor {name}")
        assert isinstance(seen, Seen)
        self.know(not ranks or len(seen.shape) in ranks, f"{name} of {seen}")
        return seen

    def promise(self, name: str, condition: object, text: str) -> None:
        """Note a promise that is broken."""
        if not condition:
            self.broken.append(Broken(self.operator, name, text))

    def touches(self, side: str, cells: CellMap, view: Seen, **extent: Any) -> None:
        """Note that it reads (or, with `writes=True`, writes) one side of a cache."""
        writes = bool(extent.pop("writes", False))
        self.accesses.append(Access(self.operator, side, writes, cells, storage=view.storage, **extent))


def disagreements(accesses: Iterable[Access], layer: str) -> list[Broken]:
    """Operators of one layer that look for the same number of its cache in different places."""
    first: dict[str, Access] = {}
    found: dict[tuple[str, str], Broken] = {}
    for access in accesses:
        known = first.setdefault(access.side, access)
        extent = (access.blocks, access.tokens, access.heads, access.channels)
        if extent == (known.blocks, known.tokens, known.heads, known.channels) and np.array_equal(
            access.corners(), known.corners()
        ):
            continue
        done, verb = ("wrote" if known.writes else "read"), ("writes" if access.writes else "reads")
        text = f"{layer}: {access.operator} {verb} {access.side} elsewhere than {known.operator} {done} it"
        found.setdefault((access.operator, access.side), Broken(access.operator, "same-bytes", text))
    return list(found.values())


def aliases(groups: Mapping[str, Iterable[Access]]) -> list[Broken]:
    """Blocks of two layers that share an allocation and name the same bytes under different numbers.

    A pool hands a block out once, to one of its groups: block 3 of one layer and block 5 of another must not overlap.
    """
    owners: dict[int, tuple[int, np.ndarray]] = {}
    found: dict[tuple[str, str], Broken] = {}
    holder: dict[int, str] = {}
    for layer, accesses in groups.items():
        for access in accesses:
            start, length = access.storage
            base, owner = owners.setdefault(start, (start, np.full(length, -1, dtype=np.int32)))
            cells = access.all_cells() - base
            if cells.min() < 0 or cells.max() + access.cells.size > length:
                text = f"{layer}: {access.operator} reaches bytes {cells.min()} to {cells.max()} of {length}"
                found.setdefault((layer, access.operator), Broken(access.operator, "inside-the-pool", text))
                continue
            numbers = np.arange(access.blocks, dtype=np.int32)[:, None]
            other = (owner[cells] != -1) & (owner[cells] != numbers)
            if other.any():
                block, cell = (int(axis[0]) for axis in np.nonzero(other))
                theirs = int(owner[cells][block, cell])
                text = f"block {block} of {layer} and block {theirs} of {holder[start]} name the same bytes"
                found.setdefault((layer, access.operator), Broken(access.operator, "blocks-of-their-own", text))
                continue
            owner[cells] = np.broadcast_to(numbers, cells.shape)
            holder.setdefault(start, layer)
    return list(found.values())


def bound(
    parameters: tuple[str, ...], given: tuple[Any, ...], named: Mapping[str, Any], operator: str
) -> dict[str, Any]:
    """Arguments by name, as the contract calls its parameters.

    Raises:
        UnknownCallError: The call has arguments that the contract does not name.
    """
    unknown = [name for name in named if name not in parameters]
    if unknown or len(given) > len(parameters):
        what = unknown[0] if unknown else f"argument {len(parameters) + 1}"
        raise UnknownCallError(
            f"the contract of {operator} has no parameter {what}: extend it in tests/operators/contracts.py"
        )
    return dict(zip(parameters, given, strict=False)) | dict(named)


def seen(value: Any, note: Callable[[torch.Tensor], Seen] = Seen.of) -> Any:
    """An argument with its tensors noted."""
    if isinstance(value, torch.Tensor):
        return note(value)
    if isinstance(value, (list, tuple)):
        return tuple(seen(each, note) for each in value)
    return value
