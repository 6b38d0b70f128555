"""What a build is told and what its image says of itself, both from the pins: variables of the bake file, labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hilgate import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hilgate.images.pins import Part, Pins, Source

WHEELS: Final = {"mamba-ssm": "MAMBA", "causal-conv1d": "CONV1D", "aiter": "AITER", "vllm": "VLLM"}
"""Source -> prefix of its variables; `wheels-<prefix>` in lower case is its target."""

PARTS: Final = {"3rdparty/composable_kernel": "CK", "triton_kernels": "TRITON"}
"""Folder of a part -> infix of its variables."""


def labels(image: str, pins: Pins, content: str, revision: str) -> dict[str, str]:
    """Labels of an image. `revision` is the commit that built it first; equal contents of a later commit are reused."""
    base = pins.cpu.base if image == "cpu" else pins.rocm.base
    found = {
        "org.opencontainers.image.title": f"hilgate {image}",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.base.name": base.reference,
        "org.opencontainers.image.base.digest": base.digest,
        "hilgate.content": content,
    }
    if image == "cpu":
        return found | {"hilgate.pins.suite": pins.cpu.suite, "hilgate.pins.packages": " ".join(pins.cpu.packages)}
    rocm = {"rocm": pins.rocm.rocm, "torch": pins.rocm.torch, "triton": pins.rocm.triton, "archs": " ".join(pins.archs)}
    sources = {name: source.version for name, source in pins.sources.items()}
    return found | {f"hilgate.pins.{name}": value for name, value in (rocm | sources).items()}


def bake_variables(
    pins: Pins, contents: Mapping[str, str], keys: Mapping[str, str], store: str, revision: str
) -> dict[str, str]:
    """Every variable of docker-bake.hcl. `store` is the prefix of image names: a registry, or `hilgate` without one."""
    found = {
        "REVISION": revision,
        "HILGATE_VERSION": __version__,
        "STORE": store,
        "CPU_CONTENT": contents["cpu"],
        "CPU_BASE": pins.cpu.base.pinned,
        "CPU_BASE_NAME": pins.cpu.base.reference,
        "CPU_BASE_DIGEST": pins.cpu.base.digest,
        "CPU_PACKAGES": " ".join(pins.cpu.packages),
        "CPU_SUITE": pins.cpu.suite,
        "ROCM_CONTENT": contents["rocm"],
        "ROCM_BASE": pins.rocm.base.pinned,
        "ROCM_BASE_NAME": pins.rocm.base.reference,
        "ROCM_BASE_DIGEST": pins.rocm.base.digest,
        "ROCM": pins.rocm.rocm,
        "TORCH": pins.rocm.torch,
        "TRITON": pins.rocm.triton,
        "ARCHS": " ".join(pins.archs),
    }
    for name, prefix in WHEELS.items():
        found[f"{prefix}_KEY"] = keys[name]
        found |= {f"{prefix}_{key}": value for key, value in _source(pins.sources[name]).items()}
    return found


def _source(source: Source) -> dict[str, str]:
    found = {
        "VERSION": source.version,
        "ARCHS": " ".join(source.archs),
        "PATCHES": " ".join(patch.file for patch in source.patches),
    }
    if source.sdist is not None:
        found["SDIST"] = source.sdist
    if source.archive:
        found |= _part("", source.archive)
    for folder, part in source.parts.items():
        found |= _part(f"{PARTS[folder]}_", part)
    return found


def _part(infix: str, part: Part) -> dict[str, str]:
    return {f"{infix}URL": part.url, f"{infix}SHA256": part.sha256}
