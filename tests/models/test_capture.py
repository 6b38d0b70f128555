# SPDX-License-Identifier: Apache-2.0
"""What a captured GPU graph keeps, without a GPU: the metadata of its dummy batch, over buffers that change later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models.batches import common_metadata

pytest.importorskip("vllm", reason="needs package:vllm")

from support.tolerances import ROW_RELATIVE
from vllm.v1.attention.backend import AttentionCGSupport

from pagedkv.attention import reference
from pagedkv.vllm_plugin import impl
from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder

pytestmark = pytest.mark.usefixtures("on_device")

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 32, 16, 13
TOKENS, SEQUENCES, MAX_MODEL_LEN = 8, 8, 64


class Buffers:
    """The model runner's: a captured graph reads these, whatever they hold when it runs again."""

    def __init__(self):
        self.query_start_loc = torch.zeros(SEQUENCES + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(SEQUENCES, dtype=torch.int32)
        self.block_table = torch.zeros(SEQUENCES, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32)

    def fill(self, query_lens, seq_lens, blocks):
        """Sequences after the given ones are padding: no query, and lengths and blocks of long ago."""
        here = len(query_lens)
        self.query_start_loc.fill_(sum(query_lens))
        self.query_start_loc[: here + 1] = torch.tensor([0, *query_lens]).cumsum(0)
        self.seq_lens.fill_(40)
        self.seq_lens[:here] = torch.tensor(seq_lens)
        self.block_table.fill_(2**30)
        for row, ids in enumerate(blocks):
            self.block_table[row, : len(ids)] = torch.tensor(ids)

    def common(self, max_query_len):
        bounds = {"num_actual_tokens": TOKENS, "max_query_len": max_query_len, "max_seq_len": MAX_MODEL_LEN}
        return common_metadata(self.query_start_loc, self.seq_lens, self.block_table, **bounds)


@pytest.mark.parametrize(
    ("captured", "bound", "query_lens", "seq_lens"),
    [
        # A mixed graph: vLLM captures one token a sequence and bounds the query by the tokens of the graph.
        ([1] * 8, 8, [1, 1, 5], [33, 16, 20]),
        ([1] * 8, 8, [8], [50]),
        ([1] * 8, 8, [1], [1]),
        ([4, 4], 8, [1, 2, 1, 3], [17, 2, 40, 3]),
        # Uniform graphs: decode, and verification of one drafted token.
        ([1] * 8, 1, [1, 1, 1], [64, 1, 17]),
        ([2] * 4, 2, [2, 2], [18, 2]),
    ],
)
def test_a_captured_batch_serves_every_later_one(captured, bound, query_lens, seq_lens, builder_of, device):
    generator = torch.Generator(device).manual_seed(sum(seq_lens))
    layer = impl.PagedKVImpl(num_heads=HEADS, head_size=HEAD_SIZE, scale=0.2, num_kv_heads=KV_HEADS)
    buffers = Buffers()
    buffers.fill(captured, captured, [[0]] * len(captured))
    frozen = builder_of(BLOCK_SIZE).build_for_cudagraph_capture(buffers.common(bound))

    order = iter((torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist())
    blocks = [[next(order) for _ in range(-(-length // BLOCK_SIZE))] for length in seq_lens]
    buffers.fill(query_lens, seq_lens, blocks)
    cache = torch.full((BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.nan)
    for ids, length in zip(blocks, seq_lens, strict=True):
        for position in range(length):
            row = torch.randn(KV_HEADS, 2 * HEAD_SIZE, generator=generator)
            cache[ids[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = row
    query = torch.randn(TOKENS, HEADS, HEAD_SIZE, generator=generator)
    output = torch.full_like(query, torch.nan)
    layer.forward(None, query, None, None, cache, frozen, output)

    tokens, sequences = sum(query_lens), len(query_lens)
    keys, values = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    golden, _ = reference.attention(
        query[:tokens],
        keys,
        values,
        block_table=buffers.block_table[:sequences],
        seq_lens=buffers.seq_lens[:sequences],
        query_start_loc=buffers.query_start_loc[: sequences + 1],
        scale=0.2,
    )
    error = (output[:tokens].double().cpu() - golden).norm(dim=-1) / golden.norm(dim=-1)
    assert error.max() <= ROW_RELATIVE["attention", "float32"]
    assert output[tokens:].isnan().all(), "padding rows are nobody's"


def test_encoder_decoder_graphs_hold_equal_query_lengths():
    config = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=True))
    support = PagedKVMetadataBuilder.get_cudagraph_support(config, SimpleNamespace())
    assert support is AttentionCGSupport.UNIFORM_BATCH
