"""The Mamba kernels that an image installs, compiled for GPUs that are not there: `python -m pagedkv.audit.mamba`."""
