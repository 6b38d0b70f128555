# SPDX-License-Identifier: Apache-2.0
"""FP8 formats and scales of the KV cache."""
