"""FP8 formats and scales of the KV cache."""
