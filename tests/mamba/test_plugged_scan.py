# SPDX-License-Identifier: Apache-2.0
"""Our prefill of Mamba-2 where the plugin puts it, in place of all steps of vLLM's; `kernels-ssd` runs it."""

from __future__ import annotations

import pytest
from mamba.data import DTYPES, LAYERS, check_packed_scan

from pagedkv.vllm_plugin import scan

pytestmark = pytest.mark.device


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_scan_is_what_vllm_calls(layer, dtype, device, vllm_ops, record_property, monkeypatch):
    ops = vllm_ops("ssd_combined")
    monkeypatch.setattr(ops, scan.NAME, scan.combined)
    check_packed_scan(ops, layer, dtype, device, record_property)
