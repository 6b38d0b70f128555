# SPDX-License-Identifier: Apache-2.0
"""What kernels tell the compiler of their numbers is true: the compiler believes it, and reads several for one.

`tl.max_constancy(x, n)` says that aligned groups of n are equal, `tl.max_contiguous` that they count up. The
interpreter has the numbers, so here each claim is looked at.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.attending import HALF, attend, small
from triton.runtime import interpreter

from pagedkv.device import INTERPRETED

LAYOUTS = ("nhd", "interleaved", "native", "shuffle")


class Claims:
    """Counts claims, and says which is wrong."""

    def __init__(self) -> None:
        self.count = 0

    def look(self, handle, key: str, values: object) -> None:
        kind, data = key.removeprefix("tt."), handle.data
        if kind not in {"constancy", "contiguity"}:
            return
        sizes = [values] if isinstance(values, int) else [getattr(each, "value", each) for each in values]
        self.count += 1
        for axis, most in enumerate(sizes):
            size = min(int(most), data.shape[axis])
            step = np.diff(np.moveaxis(data.astype(np.int64), axis, -1).reshape(-1, size), axis=-1)
            wanted = 0 if kind == "constancy" else 1
            assert (step == wanted).all(), f"{kind} {sizes} is claimed of {data.tolist()}"


if INTERPRETED:  # elsewhere the numbers are not at hand

    @pytest.fixture
    def claims(monkeypatch):
        found = Claims()

        def look(handle, key, values):
            found.look(handle, key, values)

        monkeypatch.setattr(interpreter.TensorHandle, "set_attr", look)
        return found

    @pytest.mark.parametrize("codes", [{}, {"quantised": "e4m3fn", "scales": "token"}], ids=["", "codes"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.usefixtures("launched")
    @pytest.mark.parametrize("launched", ["interpreter", "gfx942"], indirect=True)
    def test_claims_of_attention_are_true(layout, codes, claims):
        for block_size in (16, 48):
            for query_lens in ([1, 1], [1, 9]):
                data = small(
                    "cpu", query_lens, [75, 130], layout_name=layout, dtype=HALF, block_size=block_size, **codes
                )
                attend(data, num_splits=1)
        if layout == "shuffle":
            assert claims.count > 0
