# SPDX-License-Identifier: Apache-2.0
"""The configuration that vLLM has in force while it makes layers, and our metadata builder in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def deployment(monkeypatch):
    """The configuration as an object to change."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from pagedkv.vllm_plugin import routes

    config = SimpleNamespace(
        kv_transfer_config=None,
        cache_config=SimpleNamespace(block_size=16, get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC),
        compilation_config=SimpleNamespace(static_forward_context={}, inductor_compile_config={}),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=256),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        diffusion_config=None,
    )
    monkeypatch.setattr(routes, "get_current_vllm_config", lambda: config)
    return config


@pytest.fixture
def on_device(device):
    """Tensors that a test makes lie where kernels run, as the model runner's do."""
    with torch.device(device):
        yield


@pytest.fixture
def builder_of(deployment, device):
    """builder_of(block_size, layers, scales): our metadata builder of a group of these layers, by name."""

    def build(block_size, layers=(), scales=None):
        from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder

        names = {name: SimpleNamespace(impl=layer, **(scales or {})) for name, layer in dict(layers).items()}
        deployment.compilation_config.static_forward_context.update(names)
        return PagedKVMetadataBuilder(
            SimpleNamespace(block_size=block_size), list(names), deployment, torch.device(device)
        )

    return build
