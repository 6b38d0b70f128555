# SPDX-License-Identifier: Apache-2.0
"""Route attention layers to kernels: the limits of every kernel in the image as data, and one function over them.

    from pagedkv.routing import Request, route

    chosen = route(Request(arch="gfx942", phase="mixed", ...), providers={"pagedkv", "vllm"})
    chosen.write.kernel, chosen.decode.kernel, chosen.decode.why, chosen.decode.rejected

Pure: the standard library only, no torch, no triton, no device.
"""

from .request import CacheLayout, Request, RequestError
from .router import LayoutConflictError, NoKernelError, Route, route

__all__ = ["CacheLayout", "LayoutConflictError", "NoKernelError", "Request", "RequestError", "Route", "route"]
