# SPDX-License-Identifier: Apache-2.0
"""What vLLM's worker imports: who served (`pagedkv_report`), and the load format `drawn`."""

from hileval.engines import worker as drawn  # noqa: F401  its import registers the format
from pagedkv.vllm_plugin.inspect import WorkerReport


class Worker(WorkerReport):
    """vLLM adds these methods to its worker class (`worker_extension_cls`)."""
