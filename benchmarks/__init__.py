# SPDX-License-Identifier: Apache-2.0
"""Timings of our kernels beside those of vLLM, with correctness in the same run."""
