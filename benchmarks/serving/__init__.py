# SPDX-License-Identifier: Apache-2.0
"""Whole models in vLLM, with our attention and with TRITON_ATTN: tokens a second, and the same tokens."""
