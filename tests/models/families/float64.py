"""Compute in float64 what a model computes in float32."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32: norms, softmax, scans and routers of transformers do.

    Without it the float64 model would be right to float32 alone, no better than what it judges.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Pass every torch function on, with float64 in place of float32."""
        kwargs = kwargs or {}
        if not self.enabled:
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*args, **kwargs)
