# SPDX-License-Identifier: Apache-2.0
"""Compile the extensions of the ROCm image on a machine without ROCm: its own recipe over Debian's HIP tool chain.

The stages of docker/rocm.Dockerfile that make a wheel are built as they are written, on the base of docker/hip. Objects
are kept unit by unit in the scratch folder (docker/hip/hipcc), so an interrupted run goes on after its last unit; a
wheel is kept by its key. Every unit has to hold kernels for every architecture of the pins; the figures of the kernels
are left beside the findings, a file for each source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from codeobjects import UnreadableError, code_objects

from hilgate.declare.load import find_root, load_project
from hilgate.errors import Exit, Parser, ending
from hilgate.git import tracked_files
from hilgate.images.build import check, locked, proven
from hilgate.images.contents import content, copy_inputs, wheel_keys
from hilgate.images.engines import Buildah, BuildFailedError, BuildRequest, pip_settings
from hilgate.images.pins import WHEELS, read, source_variables
from hilgate.model.declaration import Image
from hilgate.model.record import Check, Outcome
from pagedkv.audit.code_object import UnreadableCodeObjectError, metadata

SOURCES: Final = ("causal-conv1d", "mamba-ssm")
"""Those whose whole build needs nothing but pip, hipcc and torch's headers."""
HIP: Final = Image(
    recipe="docker/hip/Dockerfile",
    inputs=(
        *("/docker/hip/hipcc", "/docker/hip/torch_for_hip.py", "/docker/hip/lazy.pth"),
        *("/requirements/torch.txt", "/requirements/triton-next.txt"),
    ),
)
ROOTFS: Final = ("docker/hip/rootfs.sh", "docker/hip/debs.txt")
ABSENT: Final = ("wheels-aiter", "wheels-vllm")
"""Stages that need ROCm's own base, and hours of it."""
SCRIPTS: Final = "/run/hilgate/hip"
"""Where docker/hip is in a container; what is run there is in no image."""
GIGABYTES: Final = 12
"""What an image of a run may hold."""
OBJECTS: Final = "/var/cache/hilgate-objects"
SAMPLE: Final = ("causal-conv1d", "causal_conv1d_update", "gfx942")
"""Source, unit and architecture that a sample compiles."""
PATCHED: Final = (
    *("gfx90a without=64 with=64", "gfx942 without=64 with=64"),
    *("gfx950 without=guessed with=64", "gfx1250 without=guessed with=refused"),
)
"""Wave size that mamba-ssm's backward scan is compiled for, without its patch and with it."""
FIGURES: Final = (
    *(".vgpr_count", ".agpr_count", ".sgpr_count", ".vgpr_spill_count", ".sgpr_spill_count"),
    *(".private_segment_fixed_size", ".group_segment_fixed_size"),
)
"""Keys of a kernel's note (AMDGPUUsage, code object metadata): VGPR, AGPR, SGPR, both spills, scratch, static LDS."""


@dataclass
class Extensions:
    """One run over a repository at `root`; wheels, objects and the store are below `scratch`, findings in `out`.

    Raises:
        CannotRunHereError: buildah or root are missing, the network or the disk ended, or another build has the store.
        DeclarationError: A pin is wrong.
    """

    root: Path
    scratch: Path
    out: Path
    found: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Compute the keys: of the base, and of each wheel on it."""
        tag = _sha256(b"".join((self.root / name).read_bytes() for name in ROOTFS))[:16]
        self.engine = Buildah(self.scratch / "store", f"hip-{tag}", self.root / ROOTFS[0])
        self.pins, self.recipe = read(self.root), load_project(self.root).images["rocm"]
        names = tracked_files(self.root)
        self.hip = _sha256(f"{tag} {content(HIP, names, self.root)}".encode())
        wheels = wheel_keys(self.root, self.pins)
        self.keys = {name: _sha256(f"{wheels[name]} {self.hip}".encode()) for name in SOURCES}
        units = (self.root / "docker/hip/vllm-units.sh").read_text(encoding="utf-8")
        self.keys["vllm"] = _sha256(f"{wheels['vllm']} {self.hip} {units}".encode())
        self.compiler = _sha256(f"{self.hip} {content(self.recipe, names, self.root)}".encode())
        self.objects = self.scratch / "objects"
        self.events = self.objects / "units.jsonl"

    def run(self, *, sample: bool) -> tuple[Check, ...]:
        """Build every wheel, or compile the sample alone; the checks say what holds of them."""
        for folder in (self.out, self.objects):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(self.scratch):
            try:
                self._image("hip", self.hip, HIP, "")
                self._image("compiler", self.compiler, self.recipe, "compiler")
                self._patched()
                if sample:
                    self._sample()
                else:
                    for name in SOURCES:
                        self._wheel(name)
                    self._vllm()
                    self._whole()
            except BuildFailedError as error:
                self.found.append(check("built", False, str(error)))
        Check.write_all(self.out, self.found)
        return tuple(self.found)

    def _image(
        self,
        name: str,
        key: str,
        image: Image,
        stage: str,
        variables: dict[str, str] | None = None,
        pins: dict[str, Any] | None = None,
    ) -> None:
        """Build an image or find it; of a `stage`, from what of the recipe it needs. `pins` are those of this base."""
        began = time.monotonic()
        if not (reused := self.engine.find(name, key) is not None):
            context = self.scratch / f"context-{name}"
            copy_inputs("rocm", image, self.root, context)
            if stage:
                recipe = context / image.recipe
                recipe.write_text(cut(recipe.read_text(encoding="utf-8"), stage, ABSENT), encoding="utf-8")
            if pins:
                (context / "pins.json").write_text(json.dumps(pins), encoding="utf-8")
            asked = BuildRequest(
                name, key, image.recipe, context, {}, {}, log=self.out / f"{name}.log", **pip_settings()
            )
            asked = replace(asked, mounts=asked.mounts | {str(self.objects.resolve()): f"{OBJECTS}:rw"})
            base = {"BASE": self.engine.name("hip", self.hip)} if stage else {}
            self.engine.bud(asked, base | (variables or {}))
        how = "found by its content" if reused else "built"
        gigabytes, layers = self.engine.size(name, key)
        message = f"{how}: {gigabytes:.1f} GB in {layers} layers, at most {GIGABYTES} GB"
        self.found.append(check(f"image {name}", gigabytes <= GIGABYTES, message, 0 if reused else began))

    def _wheel(self, name: str) -> None:
        """Build one wheel or find it kept, and measure it."""
        began, key, prefix = time.monotonic(), self.keys[name], WHEELS[name]
        folder = self.scratch / "wheels" / key
        if not (reused := folder.exists()):
            if self.engine.find(name, key) is None:
                self.events.unlink(missing_ok=True)
            self._image(name, key, self.recipe, f"build-{prefix.lower()}", self._variables(name))
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            copy, mounts = ["sh", "-c", "cp /wheels/*.whl /out/"], {str(partial.resolve()): "/out:rw"}
            status, printed = self.engine.run(name, key, copy, mounts)
            if status or not self.events.exists():
                raise BuildFailedError(f"no wheel: {printed[-300:]}", where=name, remedy="read the build's log")
            self.events.rename(partial / self.events.name)
            partial.rename(folder)
        how = "found by its key" if reused else "built"
        self._measure(name, folder / self.events.name, self.pins.sources[name].archs, how, began)

    def _vllm(self) -> None:
        """Compile the attention and cache kernels of vLLM (docker/hip/vllm-units.sh), and measure them."""
        began = time.monotonic()
        self.events.unlink(missing_ok=True)
        script = f"{SCRIPTS}/vllm-units.sh /src/vllm/source.tar.gz {SAMPLE[2]}"
        status, printed = self._inside("vllm", "", script)
        if status:
            raise BuildFailedError(
                f"vLLM's kernels do not compile: {printed[-1500:]}",
                where="docker/hip/vllm-units.sh",
                remedy="correct what the compiler names, or the pin of vLLM in docker/pins.toml",
            )
        self._measure("vllm", self.events, SAMPLE[2:], "compiled", began)

    def _whole(self) -> None:
        """The last stages of the recipe, with the wheels that are made here: what they prove of themselves."""
        hip = {"rocm": _version(self.root), "python": "3.11"}
        pins = self.pins.model_dump(mode="json", include={"archs", "rocm", "sources"})
        pins = {
            "archs": pins["archs"],
            "rocm": pins["rocm"] | hip,
            "sources": {name: pins["sources"][name] for name in SOURCES},
        }
        variables = {key: value for name in SOURCES for key, value in self._variables(name).items()}
        key = _sha256(" ".join([self.compiler, *self.keys.values()]).encode())
        self._image("whole", key, self.recipe, "rocm", variables, pins)
        self.found.append(proven(*self.engine.run("whole", key, ["cat", "/opt/image/proof.json"], {})))

    def _variables(self, name: str) -> dict[str, str]:
        return source_variables(WHEELS[name], self.pins.sources[name])

    def _measure(self, name: str, events: Path, archs: tuple[str, ...], how: str, began: float) -> None:
        """Leave the figures of a source's kernels beside the findings; each unit holds kernels for each of `archs`."""
        try:
            lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
            units = measured(lines, self.objects)
        except (UnreadableError, UnreadableCodeObjectError, OSError, ValueError, KeyError) as error:
            what = f"the objects cannot be measured: {type(error).__name__}: {error}"
            remedy = "remove the folder; the next run compiles what is not kept whole"
            raise BuildFailedError(what, where=str(self.scratch / "wheels"), remedy=remedy) from error
        (self.out / f"{name}.json").write_text(json.dumps(units, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        problems = without_kernels(units, archs)
        counts = {arch: sum(sum(unit["archs"].get(arch, {}).values()) for unit in units.values()) for arch in archs}
        kernels = ", ".join(f"{arch} {count}" for arch, count in counts.items())
        minutes = sum(unit["cpu_seconds"] for unit in units.values()) / 60
        message = f"{how}: {', '.join(units)}; kernels: {kernels}; compiling took {minutes:,.0f} min of one core"
        self.found.append(check(f"{name}: kernels", not problems, "; ".join(problems) or message, began))

    def _patched(self) -> None:
        """What the patches of mamba-ssm change is what they are there for (docker/hip/prove-patch.sh)."""
        source = self.pins.sources["mamba-ssm"]
        for patch in source.patches:
            began = time.monotonic()
            script = f"{SCRIPTS}/prove-patch.sh /src/mamba-ssm/source.tar.gz {patch.file}"
            status, printed = self._inside("mamba-ssm", "", script)
            lines = [line for line in printed.splitlines() if line.startswith("gfx")]
            holds = status == 0 and tuple(lines) == PATCHED
            message = "; ".join(lines) if holds else f"{printed[-600:]}\nexpected {'; '.join(PATCHED)}"
            self.found.append(check("mamba-ssm: its patch is needed", holds, message, began))

    def _sample(self) -> None:
        """Compile one unit for one architecture as its setup.py does, in the stage that compiles the wheels."""
        source, unit, arch = SAMPLE
        # setup.py writes a build file for ninja. A ninja that does nothing keeps it from compiling the other units,
        # without which it then cannot link.
        script = f"""export CAUSAL_CONV1D_FORCE_BUILD=TRUE HIP_ARCHITECTURES={arch} PYTORCH_ROCM_ARCH={arch}
            cd /src/conv1d/tree; mkdir idle; echo '#!/bin/sh' > idle/ninja; chmod +x idle/ninja
            PATH=$PWD/idle:$PATH python3 setup.py build_ext || true
            cd build/temp.*; exec ninja -v "$PWD/csrc/{unit}.o" """
        began = time.monotonic()
        self.events.unlink(missing_ok=True)
        status, printed = self._inside(source, "conv1d", script)
        if status:
            remedy = "correct what the compiler names, or the pin of its source in docker/pins.toml"
            raise BuildFailedError(f"the sample does not compile: {printed[-1500:]}", where=unit, remedy=remedy)
        self._measure(source, self.events, (arch,), "compiled", began)

    def _inside(self, source: str, tree: str, script: str) -> tuple[int, str]:
        """Run a script in the stage that compiles, beside a fetched source, which `tree` has unpacked and patched."""
        pin, settings, pip_conf = self.pins.sources[source], pip_settings(), self.scratch / "pip.conf"
        pip_conf.write_text(settings["pip_conf"], encoding="utf-8")
        mounts = settings["mounts"] | {str(self.root / "docker/hip"): SCRIPTS}
        mounts |= {str(pip_conf.resolve()): "/etc/pip.conf", str(self.objects.resolve()): f"{OBJECTS}:rw"}
        folder = f"/src/{tree or source}"
        begin = f"set -eu; cd /opt/image; scripts/fetch.sh {source} {pin.version} {pin.sdist} {folder}; "
        if tree:
            patches = " ".join(patch.file for patch in pin.patches)
            begin += f"scripts/unpack.sh {folder}/source.tar.gz {folder}/tree {patches}; "
        return self.engine.run("compiler", self.compiler, ["bash", "-c", begin + script], mounts)


def measured(lines: list[dict[str, Any]], objects: Path) -> dict[str, Any]:
    """Unit -> its object, what compiling it took, and for each architecture `figures x count` of its kernels."""
    units = {}
    for line in lines:
        archs: dict[str, Counter[str]] = {}
        for arch, blob in code_objects(objects / f"{line['key']}.o"):
            kernels = metadata(blob).get("amdhsa.kernels", []) if blob else []
            archs.setdefault(arch, Counter()).update(
                " ".join(str(kernel[key]) for key in FIGURES) for kernel in kernels
            )
        facts = {key: line[key] for key in ("sha256", "cpu_seconds", "peak_mib", "flags")}
        units[line["unit"]] = facts | {"archs": archs}
    return units


def without_kernels(units: dict[str, Any], archs: tuple[str, ...]) -> list[str]:
    """The units that hold no kernel for an architecture that they must be compiled for."""
    if not units:
        return ["no unit was compiled"]
    return [
        f"{name} holds no kernel for {arch}"
        for name, unit in sorted(units.items())
        for arch in archs
        if not unit["archs"].get(arch)
    ]


def cut(recipe: str, stage: str, absent: tuple[str, ...] = ()) -> str:
    """The part of a Dockerfile that one stage needs: what is before the first FROM, and the stages it is made from.

    Nothing is copied from those that are `absent`.
    """
    recipe = "".join(
        line
        for line in recipe.splitlines(keepends=True)
        if not line.startswith(tuple(f"COPY --from={one} " for one in absent))
    )
    head, *parts = re.split(r"(?m)^(?=FROM )", recipe)
    stages = {part.partition(" AS ")[2].split()[0]: part for part in parts}
    needed = {stage}
    for name in reversed(stages):
        if name in needed:
            needed |= set(re.findall(r"(?:^FROM |--from=)(\S+)", stages[name]))
    return head + "".join(part for name, part in stages.items() if name in needed)


@ending
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is one of `hilgate.errors.Exit`."""
    parser = Parser(description="Compile the ROCm image's extensions without ROCm's base.")
    parser.add_argument("--sample", action="store_true", help="compile one unit for one architecture")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a runner or an agent: ends a build as Ctrl-C does
    root = find_root(Path.cwd())
    fork = os.environ.get("HILGATE_FORK", "") not in {"", "0"}
    out = Path(os.environ.get("HILGATE_OUT", root / "results/images/extensions"))
    try:
        run = Extensions(root, root / ".images" / ("fork" if fork else "own"), out)
        checks = run.run(sample=options.sample)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the next run goes on after the last finished unit\n")
        return Exit.INTERRUPTED
    for one in checks:
        sys.stdout.write(f"{one.outcome.value:<5} {one.id:<24} {one.seconds:6.1f} s  {one.message}\n")
    return Exit.PASS if all(check.outcome is Outcome.PASS for check in checks) else Exit.FAIL


def _version(root: Path) -> str:
    """ROCm version of the tool chain, as rootfs.sh reads it."""
    (found,) = re.findall(r"/libamdhip64-dev_([0-9.]+)", (root / ROOTFS[1]).read_text(encoding="utf-8"))
    return str(found)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
