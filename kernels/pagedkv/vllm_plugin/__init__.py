# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: serves vLLM's paged attention with the kernels of this package.

`register` is the `vllm.general_plugins` entry point. vLLM calls it once in each of its processes (front end, engine
core, workers) before it selects backends. Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from inspect import signature
from typing import TYPE_CHECKING, Any

from pagedkv.vllm_plugin import settings
from pagedkv.vllm_plugin.errors import TESTED, BackendTakenError, PluginError, SettingError, VersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

BACKEND = "pagedkv.vllm_plugin.backend.PagedKVBackend"
"""Class path that vLLM resolves when it selects the backend."""

NAME = "CUSTOM"
"""The member of vLLM's `AttentionBackendEnum` that selects us: `--attention-backend CUSTOM`.

vLLM can also create a member at run time, but that one is lost between processes: an enum member is pickled by value,
and a spawned engine core unpickles its configuration before it has loaded any plugin. CUSTOM exists from the start.
"""

CPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVMLABackend"
"""Class path of our MLA on vLLM's CPU platform."""

CPU_NAME = "CPU_ATTN"
CPU_MLA_NAMES = ("CPU_MLA", "AMX_MLA")
"""vLLM's CPU platform selects one of these, depending on the processor."""

GPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVGPUMLABackend"
"""Name of the MLA backend on ROCm and CUDA."""

GPU_MLA_NAME = "TRITON_MLA"
"""The member of vLLM's `AttentionBackendEnum` that selects it there.

Not CUSTOM, which names the backend of all other layers: vLLM asks a class whether it is for MLA, and the answer of one
class is the same for all layers. A model may have both.
"""

log = logging.getLogger("vllm.pagedkv")
"""A child of vLLM's logger, so that vLLM's handlers print it. The front end loads plugins before it has any, and shows
warnings only; the backend therefore speaks up once more when it is built."""

WORTH_SAYING = 0.5
"""A warm-up of more seconds gets a line in the log; later layers of a kind find everything compiled."""

_refused: dict[str, PluginError] = {}
"""Member of vLLM's enum -> why a user who asked for our backend there cannot get it."""


def register() -> None:
    """Make the backend selectable; on vLLM's CPU platform put it in the place of CPU_ATTN.

    The CPU platform ignores every selection but CPU_ATTN, so there the name is overridden, and only when Triton runs
    interpreted (`TRITON_INTERPRET=1`): without it the kernels could not run. On ROCm and CUDA nothing changes until
    `--attention-backend CUSTOM` asks for it; TRITON_MLA is ours only with PAGEDKV_MLA=1, and on every platform
    the prefill of Mamba-2 only with PAGEDKV_SSD=1, and gated delta nets with PAGEDKV_GDN=1. Calling it again changes
    nothing.

    Raises nothing: vLLM also calls it for users who have not asked for us, and an error would end their engine. What
    goes wrong is a warning in the log; CUSTOM then stays unregistered, and vLLM refuses to select it. Whoever has set
    one of our settings has asked for us: if its value is invalid, selecting a backend that would be ours raises that
    error.
    """
    try:
        _register()
    except SettingError as error:
        log.warning("pagedkv stops registering: %s", error)
        _refuse(error)
    except PluginError as error:
        log.warning("pagedkv stops registering: %s", error)
    except Exception as error:  # noqa: BLE001 - of an unknown vLLM
        log.warning("pagedkv stops registering: %s", VersionError.of_this_vllm(f"{type(error).__name__}: {error}"))


def _register() -> None:
    from vllm import __version__
    from vllm.platforms import current_platform

    settings.check()
    for name in settings.unknown():
        log.warning("pagedkv: %s is no setting of it; they are %s", name, ", ".join(settings.SETTINGS))
    version, tried = ".".join(__version__.split(".")[:2]), settings.tried()
    if tried not in {None, version}:
        log.warning(
            "pagedkv: %s=%s changes nothing, because this is vLLM %s", settings.VLLM_VARIABLE, tried, __version__
        )
    if version not in (*TESTED, tried):
        raise VersionError.of_this_vllm("not tested")
    _claim(BACKEND, NAME, asked=settings.PACKING_VARIABLE in os.environ)
    if not current_platform.is_cpu():
        if settings.enabled(settings.MLA_VARIABLE):
            _claim(GPU_MLA_BACKEND, GPU_MLA_NAME, asked=True)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        if settings.read(settings.INTERPRETER_VARIABLE) == "fast":
            from pagedkv import interpreter

            interpreter.speed_up()
        _claim(BACKEND, CPU_NAME)
        _claim(CPU_MLA_BACKEND, *CPU_MLA_NAMES)
    else:
        log.warning("pagedkv: CPU_ATTN stays vLLM's own, because TRITON_INTERPRET=1 is not set")
        return
    if settings.enabled(settings.SSD_VARIABLE):
        from pagedkv.vllm_plugin import scan

        scan.claim()
        log.info("pagedkv: Mamba-2's prefill is now pagedkv.ssd_prefill")
    if settings.enabled(settings.GDN_VARIABLE):
        from pagedkv.vllm_plugin import delta

        delta.claim()
        log.info(
            "pagedkv: gated delta nets of Qwen3-Next, Qwen3.5 and Kimi-Linear are now pagedkv.gdn_prefill and "
            "gdn_decode; those of other models, such as Kimi-K3, stay vLLM's"
        )


def _claim(path: str, *names: str, asked: bool = False) -> None:
    """Point members of vLLM's enum at one of our backends; one that points at somebody else's stays theirs.

    Where a setting asks for ours, selecting such a member is an error instead: theirs would serve unnoticed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in (AttentionBackendEnum[name] for name in names):
        holder = member.get_path() if member.is_overridden() else path
        if holder == path:
            register_backend(member, path)
            log.info("pagedkv: %s is now %s", member.name, path)
        elif member.name not in _refused:
            error = BackendTakenError(member.name, holder)
            log.warning("%s", error)
            if asked:
                _refused[member.name] = error
                register_backend(member, f"{__name__}.{member.name}")


def check_parameters(theirs: Callable[..., Any] | None, ours: Callable[..., Any], place: str, *more: str) -> None:
    """Check that a function of vLLM takes the arguments of ours, and no others but `more`.

    Raises:
        VersionError: It does not, or is gone (None).
    """
    known = list(signature(ours).parameters)
    found = [] if theirs is None else list(signature(theirs).parameters)
    if [name for name in found if name not in more] != known:
        raise VersionError.of_this_vllm(f"{place} takes ({', '.join(found)}), not ({', '.join(known)})")


def replace_functions(functions: Collection[tuple[Any, str, Callable[..., Any]]]) -> ExitStack:
    """Put functions in classes and modules; the stack restores the earlier ones when it is closed."""
    earlier = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    restore = ExitStack()
    for owner, name, function in functions:
        setattr(owner, name, function)
    for place in earlier:
        restore.callback(setattr, *place)
    return restore


def _refuse(error: SettingError) -> None:
    """Make it an error to select a backend that would be ours if the settings were valid."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    names = [NAME]
    if current_platform.is_cpu():
        names += [CPU_NAME, *CPU_MLA_NAMES] if os.environ.get("TRITON_INTERPRET") == "1" else []
    elif error.args[0] == settings.MLA_VARIABLE:
        names.append(GPU_MLA_NAME)
    for name in names:
        if not AttentionBackendEnum[name].is_overridden():
            _refused[name] = error
            register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


def __getattr__(name: str) -> object:
    """Resolve a class path that stands for a backend that we cannot provide.

    Raises:
        BackendTakenError: It has been selected, and is another plugin's.
        SettingError: It has been selected, and a setting of ours is invalid.
    """
    if name in _refused:
        raise _refused[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
