# SPDX-License-Identifier: Apache-2.0
"""Paged attention over any strides: prefill, decode and extend; its reference, checks, merge and cascade."""
