"""Timings of our kernels beside those of vLLM, with correctness in the same run."""
