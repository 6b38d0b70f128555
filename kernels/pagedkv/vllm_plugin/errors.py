"""Errors of the vLLM plugin, one class each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PluginError(RuntimeError):
    """Base of what the plugin raises itself."""


class UnsupportedFeatureError(PluginError):
    """The model or its configuration needs something this backend does not serve.

    Args:
        feature: What was asked for, as its user knows it.
    """

    def __init__(self, feature: str) -> None:
        self.feature = feature
        super().__init__(
            f"pagedkv does not serve {feature}. To do: select another attention backend for this model, or (on the CPU "
            "platform) unset TRITON_INTERPRET, which leaves vLLM's own CPU_ATTN in place."
        )


class SettingError(PluginError):
    """A setting of the plugin has a value that means nothing.

    Args:
        variable: Environment variable.
        value: What it holds.
        allowed: What it may hold.
    """

    def __init__(self, variable: str, value: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{variable}: got {value!r}; expected one of {', '.join(allowed)}. To do: set it to one of these, or unset "
            "it, before Python starts."
        )


class PageError(PluginError):
    """vLLM has handed out a KV pool that is not arranged as the plugin has asked for.

    Args:
        got: What the pool is like.
        expected: What was asked for.
    """

    def __init__(self, got: str, expected: str) -> None:
        super().__init__(
            f"KV pool: got {got}; expected {expected}. To do: give all processes of one engine the same "
            "PAGEDKV_PACKING, and see that no other plugin changes the KV cache spec of these layers."
        )


class BackendTakenError(PluginError):
    """Another plugin has claimed the backend name first.

    Args:
        name: Member of vLLM's AttentionBackendEnum.
        holder: Class path of who holds it.
    """

    def __init__(self, name: str, holder: str) -> None:
        super().__init__(
            f"attention backend {name} is already registered as {holder}. To do: load only one of the two plugins, for "
            "example with VLLM_PLUGINS=pagedkv."
        )


class NotInterpretedError(PluginError):
    """The CPU platform was asked for our kernels without Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__(
            "on vLLM's CPU platform pagedkv's kernels run under Triton's interpreter only. To do: set "
            "TRITON_INTERPRET=1 in the environment before Python starts."
        )


class NotServedError(PluginError):
    """Some attention layer was not served by this backend, so whatever was measured is not about our kernels.

    Args:
        problems: One line per layer, or one for the whole report.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(
            f"pagedkv did not serve every attention layer:\n{lines}\n"
            "To do: look for 'pagedkv' in vLLM's log; VLLM_PLUGINS must be unset or name pagedkv, "
            "TRITON_INTERPRET=1 must be set on the CPU platform, and ROCm and CUDA need --attention-backend CUSTOM "
            "(for MLA: PAGEDKV_MLA=1 and --attention-backend TRITON_MLA)."
        )


class PoisonUnsafeError(PluginError):
    """Poisoning the KV pool now would destroy contents that vLLM still means to read.

    Args:
        reason: Who still needs them.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the KV pool cannot be poisoned: {reason}. To do: call pagedkv_poison while no request is running, on an "
            "engine started with enable_prefix_caching=False."
        )
