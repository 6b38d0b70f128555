"""What transformers computes with a published checkpoint, on the device that the engine has too.

Memory beside the engine's: 4 bytes a parameter for the wider copy and 2 for the narrow one, and in a forward pass 20
bytes for each token and word of the vocabulary. transformers' scans in plain torch take, of Mamba-2, 4 bytes x heads x
state channels x chunk size squared for each chunk, twice. All of this is arithmetic: no GPU has run it.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from families.judge import Error
from families.oracle import Oracle
from families.schedule import prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KERNEL_PACKAGES = ("mamba_ssm", "causal_conv1d", "fla")
"""transformers takes its scans from them where they are installed, as they are in our images: what would check vLLM's
scans would then be their ancestors. It decides when it imports a model's module."""

DRAWS = 4
"""Computations in the engine's dtype, each rounded otherwise, whose worst error is what rounding explains."""


@dataclass(eq=False)
class PublishedOracle(Oracle):
    """One checkpoint, loaded twice: `exact` is in float32, or in float64 where the engine computes in float32."""

    best: int = 20
    """Tokens of a distribution on which rounding is measured: as many as an engine is asked for."""

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, *, best: int, device: str) -> PublishedOracle:
        """Load a checkpoint.

        Args:
            folder: Where it is.
            dtype: Of the engine.
            best: How many tokens of each distribution are compared.
            device: "cpu" or "cuda" (CUDA or HIP).
        """
        wide = torch.float64 if dtype is torch.float32 else torch.float32
        kind = {"attn_implementation": "eager", "experts_implementation": "eager", "trust_remote_code": False}
        with plain_torch():
            models = [AutoModelForCausalLM.from_pretrained(folder, dtype=d, **kind).eval() for d in (wide, dtype)]
        for model in models:
            unlimited(model)
        return cls(*(model.to(device) for model in models), best=best)

    @contextmanager
    def computing(self, **way: Any) -> Iterator[torch.nn.Module]:
        """As `Oracle.computing`; float32 is float32."""
        with no_tf32(), super().computing(**way) as model:
            yield model

    def rounding(self, tokens: list[int], *, audio: int | None = None) -> Error:
        """By how much rounding moves transformers' own log-probabilities of the `best` tokens at each position.

        The worst of DRAWS computations. They begin from embeddings that differ in the last place, so that everything
        behind is rounded otherwise: where two experts are as good as each other, one computation goes to one of them,
        and would not explain an engine that goes to the other. (The tiny Granite in float16, 179 tokens: one draw of
        eight is off by 0.17, the others by 0.006 at most, and so was an engine off by 0.13.)
        """
        exact = self.log_probs(tokens, audio=audio).topk(self.best)
        errors = []
        for seed in range(DRAWS):
            with self._rounded_otherwise(seed):
                rows = self.log_probs(tokens, audio=audio, exact=False)
            errors.append(Error.of(rows.gather(-1, exact.indices), exact.values))
        return Error.largest(errors)

    @contextmanager
    def _rounded_otherwise(self, seed: int) -> Iterator[None]:
        """Let the working model's embeddings differ by up to a unit in the last place; by nothing for seed 0."""
        generator = torch.Generator().manual_seed(seed)

        def moved(_module: torch.nn.Module, _inputs: object, rows: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(rows.shape, generator=generator).to(rows.device) - 0.5
            return (rows.double() * (1 + torch.finfo(rows.dtype).eps * noise * bool(seed))).to(rows.dtype)

        hook = self.working.get_input_embeddings().register_forward_hook(moved)
        try:
            yield
        finally:
            hook.remove()

    def probe(self, length: int) -> list[int]:
        """A sequence of words of this vocabulary."""
        return list(prompt(length, length, self.exact.config.get_text_config().vocab_size))


def unlimited(model: torch.nn.Module) -> None:
    """Limit time steps as the config says, which is not at all where it says nothing.

    transformers' Zamba2 and Nemotron-H take for a limit what initial time steps are drawn from (`time_step_min`), in a
    prompt's scan and not in the step of an answer. vLLM limits none.
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(getattr(model.config, "time_step_limit", None) or (0.0, math.inf))


@contextmanager
def plain_torch() -> Iterator[None]:
    """Let transformers find no kernels while it imports a model's module."""
    here = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in KERNEL_PACKAGES}
    hidden = {*here, *KERNEL_PACKAGES}
    sys.modules.update(dict.fromkeys(hidden))  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(here)


@contextmanager
def no_tf32() -> Iterator[None]:
    """Multiply and convolve float32 in float32; the setting is the process's, and an engine lives in it too."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
