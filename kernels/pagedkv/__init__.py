"""Paged KV-cache kernels for hybrid attention + Mamba models: write, gather, attend over any strides.

Each operation is imported from its own module, so that importing the package loads neither torch nor triton:

    from pagedkv.cache_write import write_kv_cache
    from pagedkv.cache_gather import gather_kv_cache
    from pagedkv.paged_attention import paged_attention
"""
