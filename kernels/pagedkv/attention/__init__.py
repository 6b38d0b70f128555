# SPDX-License-Identifier: Apache-2.0
"""Paged attention over any strides: prefill, decode and extend; its checks and the merge of parts."""
