"""Which kernel serves a layer, and why: the limits of every kernel in the image as data, and one function over them.

    from pagedkv.routing import Request, route

    chosen = route(Request(arch="gfx942", phase="mixed", ...), providers={"pagedkv", "vllm"})
    chosen.write.kernel, chosen.decode.kernel, chosen.decode.why, chosen.decode.rejected

Pure: the standard library only, no torch, no triton, no device.
"""

from .candidates import PROVIDERS
from .errors import CandidateError, LayoutConflictError, NoKernelError, RequestError, RoutingError
from .request import Layout, Request
from .router import Choice, Mismatch, Rejection, Route, route

__all__ = [
    "PROVIDERS",
    "CandidateError",
    "Choice",
    "Layout",
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
