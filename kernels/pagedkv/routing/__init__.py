"""Route attention layers to kernels: the limits of every kernel in the image as data, and one function over them.

    from . import Request, route

    chosen = route(Request(arch="gfx942", phase="mixed", ...), providers={"pagedkv", "vllm"})
    chosen.write.kernel, chosen.decode.kernel, chosen.decode.why, chosen.decode.rejected

Pure: the standard library only, no torch, no triton, no device.
"""

from .candidates import PROVIDERS
from .errors import (
    InvalidFileError,
    LayoutConflictError,
    Mismatch,
    NoKernelError,
    Rejection,
    RequestError,
    RoutingError,
)
from .request import CacheLayout, Request
from .router import Choice, Route, route

__all__ = [
    "PROVIDERS",
    "CacheLayout",
    "Choice",
    "InvalidFileError",
    "LayoutConflictError",
    "Mismatch",
    "NoKernelError",
    "Rejection",
    "Request",
    "RequestError",
    "Route",
    "RoutingError",
    "route",
]
