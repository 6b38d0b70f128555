"""Paged attention over any strides: prefill, decode and extend; its reference, checks, merge and cascade."""
