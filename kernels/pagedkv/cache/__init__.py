"""The paged KV cache: its description, write and gather."""
