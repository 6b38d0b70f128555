"""What a caller of the kernels can get wrong: one class per mistake, each saying got, expected and what to do."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument of a kernel launcher is not what the operation takes."""

    def __init__(self, name: str, *, got: object, expected: object, remedy: str) -> None:
        self.name = name
        super().__init__(f"{name}: got {got}; expected {expected}. {remedy}")


class DtypeError(ArgumentError):
    """A tensor has a dtype that the operation does not take, or that its partners do not share."""


class ShapeError(ArgumentError):
    """The rank or an extent of a tensor does not follow from the other arguments."""


class DenseError(ArgumentError):
    """The last dimension of a tensor is not dense (stride 1)."""


class HeadSizeError(ArgumentError):
    """The head size is outside 32 .. 256 or not a multiple of 8."""


class ScaleError(ArgumentError):
    """A quantised cache has scales of a wrong shape, or a format that does not exist."""


class OptionError(ArgumentError):
    """A soft cap is not positive, or ALiBi is asked for without a causal mask."""


class HeadRatioError(ArgumentError):
    """The query heads are not a multiple of the KV heads."""


class DeviceError(ArgumentError):
    """The tensors do not all lie on the device that runs the kernels."""


class WindowError(ArgumentError):
    """The sliding window is not positive, or is asked for without a causal mask."""


class SplitError(ArgumentError):
    """The number of split-KV partitions is not positive, or is given where it must follow from the length alone."""


class PrefixError(ArgumentError):
    """The prefix of cascade attention is not whole blocks, or not shared (the latter checked with debug=True)."""


class AliasError(ArgumentError):
    """An output shares its memory with an input."""


class LengthError(ArgumentError):
    """A sequence or query length contradicts the bound that the caller gave (checked with debug=True)."""


class BlockTableError(ArgumentError):
    """A block id of the block table names no block of the cache (checked with debug=True)."""


class SlotError(ArgumentError):
    """A slot names no place in the cache, or two tokens name the same one (checked with debug=True)."""


class TablesError(ArgumentError):
    """The tables of MLA decode were allocated for another step than this one."""
