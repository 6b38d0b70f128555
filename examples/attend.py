# SPDX-License-Identifier: Apache-2.0
"""Write a sequence to a paged cache, attend to it, and compare with torch. Without a GPU: TRITON_INTERPRET=1."""

import torch

from pagedkv.attention.paged import paged_attention
from pagedkv.cache.cache import PagedCache
from pagedkv.cache.write import write_kv_cache

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
# 8 blocks of 16 tokens, 2 heads.
cache = PagedCache(key=torch.zeros(8, 16, 2, 64), value=torch.zeros(8, 16, 2, 64))
# 20 tokens of a sequence, in blocks 3 and 5; slot = 16 * block + place in the block.
key, value = torch.randn(20, 2, 64), torch.randn(20, 2, 64)
table = torch.tensor([[3, 5]], dtype=torch.int32)
slots = torch.cat([torch.arange(48, 64), torch.arange(80, 84)])
write_kv_cache(key, value, cache, slots)

# The query of the last token, 4 heads.
query, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
where = {
    "block_table": table,
    "seq_lens": torch.tensor([20], dtype=torch.int32),
    "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
}
bounds = {"max_query_len": 1, "max_seq_len": 20, "scale": 64**-0.5}
paged_attention(query, cache, out, **where, **bounds)

heads = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
expected = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1)
print("largest difference from torch:", float((out - expected).abs().max()))
