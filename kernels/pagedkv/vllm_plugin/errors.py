# SPDX-License-Identifier: Apache-2.0
"""Errors of the vLLM plugin, one class each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class PluginError(RuntimeError):
    """Base of the plugin's own errors; the arguments fill the gaps of the class's message."""

    message: ClassVar[str]

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # as they are, because vLLM pickles errors of its processes

    def __str__(self) -> str:
        return self.message.format(*self.args)


class UnsupportedFeatureError(PluginError):
    """The model or its configuration needs a feature, named as its user knows it, that this backend does not serve."""

    message = (
        "pagedkv does not serve {}. To do: select another attention backend for this model, or (on the CPU "
        "platform) unset TRITON_INTERPRET, which leaves vLLM's own CPU_ATTN in place."
    )


class SettingError(PluginError):
    """An environment variable of the plugin has a value that is not one of those expected."""

    message = "{}: got {!r}; expected {}. To do: set it to that, or unset it, before Python starts."


class PageError(PluginError):
    """vLLM has handed out a KV pool in another arrangement than the plugin asked for; the message shows both."""

    message = (
        "KV pool: got {}; expected {}. To do: give all processes of one engine the same "
        "PAGEDKV_PACKING, and see that no other plugin changes the KV cache spec of these layers."
    )


class ScaleError(PluginError):
    """A scale of a quantised KV cache, as the model was loaded, is 0, negative, infinite or NaN."""

    message = (
        "layer {}: {} is {}; expected finite and > 0. To do: repair the KV scales of the checkpoint, or serve it with "
        "--kv-cache-dtype auto."
    )


class BackendTakenError(PluginError):
    """Another plugin has claimed a member of vLLM's AttentionBackendEnum first; the message has its class path."""

    message = (
        "attention backend {} is already registered as {}, so pagedkv does not serve it. To do: load only one of "
        "the two plugins, for example with VLLM_PLUGINS=pagedkv."
    )


TESTED = ("0.32", "0.33")
"""Versions of vLLM in which names are claimed: those that the tests were run with, as the page of the plugin says."""


class VersionError(PluginError):
    """The installed version of vLLM is not one that we know; the message says why, and which versions are."""

    message = (
        "vLLM {}: {}. pagedkv was tested with vLLM {}. To do: install one of these; or set PAGEDKV_VLLM to this "
        "version's first two numbers to try it; or leave the plugin out of VLLM_PLUGINS."
    )

    @classmethod
    def of_this_vllm(cls, reason: str) -> VersionError:
        """The error about the vLLM of this process."""
        import vllm

        return cls(getattr(vllm, "__version__", "of no version"), reason, ", ".join(TESTED))


class NotInterpretedError(PluginError):
    """The CPU platform was asked for our kernels without Triton's interpreter."""

    message = (
        "on vLLM's CPU platform pagedkv's kernels run under Triton's interpreter only. To do: set "
        "TRITON_INTERPRET=1 in the environment before Python starts."
    )


class NotServedError(PluginError):
    """This backend did not serve some attention layers, a line each: what was measured is not about our kernels."""

    message = (
        "pagedkv did not serve every attention layer:\n{}\n"
        "To do: look for 'pagedkv' in vLLM's log; VLLM_PLUGINS must be unset or name pagedkv, "
        "TRITON_INTERPRET=1 must be set on the CPU platform, and ROCm and CUDA need --attention-backend CUSTOM "
        "(for MLA: PAGEDKV_MLA=1 and --attention-backend TRITON_MLA)."
    )


class CompiledLateError(PluginError):
    """Requests waited while Triton compiled kernels of ours; the message counts the variants of each."""

    message = (
        "compiled while serving: {}. To do: let the warm-up of that kernel launch this variant (`warm_up.py` of its "
        "package); vLLM's --jit-monitor-verbose prints what is special about it."
    )


class PoisonUnsafeError(PluginError):
    """Poisoning the KV pool now would destroy contents that a request may still read."""

    message = (
        "the KV pool cannot be poisoned: {}. To do: call pagedkv_poison while no request is running, on an "
        "engine started with enable_prefix_caching=False."
    )


def refuse(features: Mapping[str, object]) -> None:
    """Refuse what is asked for and not served.

    Args:
        features: Feature -> whether it is asked for.

    Raises:
        UnsupportedFeatureError: One is.
    """
    for feature, asked in features.items():
        if asked:
            raise UnsupportedFeatureError(feature)
