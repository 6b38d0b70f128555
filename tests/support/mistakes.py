# SPDX-License-Identifier: Apache-2.0
"""Calls with one mistake in them: a cache that is right but for it, and what the error must say."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (3, 16, 2, 64)


def cache(device: str = "cpu", *, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE, **changes):
    """A cache that is right but for the changes."""
    if dtype == torch.uint8:
        scales = {"key_scale": torch.ones(1, device=device), "value_scale": torch.ones(1, device=device)}
        changes["quantisation"] = Quantisation(changes.pop("format", "e4m3fn"), **(scales | changes.pop("scales", {})))
    sides = {side: torch.zeros(shape, dtype=dtype, device=device) for side in ("key", "value")}
    return PagedCache(**(sides | changes))


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def moved(value: object, device: str) -> object:
    """The same argument where the kernels run, strides included; what lies on "meta" is refused for lying there."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        whole = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(value)
    if dataclasses.is_dataclass(value):
        parts = {field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


@contextlib.contextmanager
def refused(kind: str, match: str) -> Iterator[None]:
    """The block raises an ArgumentError of that kind whose message says got, expected and what to do."""
    with pytest.raises(ArgumentError, match=match) as caught:
        yield
    assert caught.value.kind == kind
    assert re.search(r"got .*; expected .*\.$", str(caught.value), re.DOTALL), "the message ends with what to do"


def check(call, case, device) -> None:
    wrong, kind, named = case
    with refused(kind, named):
        call(**{name: moved(value, device) for name, value in wrong.items()})
