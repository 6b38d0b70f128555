# SPDX-License-Identifier: Apache-2.0
"""Paged KV-cache kernels for hybrid attention + Mamba models: write, gather, attend over any strides.

Each operation is imported from its own module, so that importing the package loads neither torch nor triton:

    from pagedkv.cache.write import write_kv_cache
    from pagedkv.cache.gather import gather_kv_cache
    from pagedkv.attention.paged import paged_attention
"""

__version__ = "0.1.0"
