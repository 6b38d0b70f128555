"""What the AMD compiler makes of our kernels, on a machine without a GPU: `python -m pagedkv.audit`."""
