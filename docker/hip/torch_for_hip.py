# SPDX-License-Identifier: Apache-2.0
"""Makes a CPU build of torch one that extensions for HIP compile and link against.

    torch_for_hip.py ROCM_VERSION

Its wheel carries the headers of ATen/cuda and c10/cuda. torch's own hipify translates them, as a build of torch for
ROCm does; what its CMake would generate is written here. libc10_hip and libtorch_hip hold nothing but the data that a
loader wants at once, for functions it looks up when they are called. Nothing runs on a GPU with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

GENERATED = {
    "c10/hip/impl/hip_cmake_macros.h": "#pragma once\n#define C10_HIP_BUILD_SHARED_LIBS\n",
    "ATen/hip/HIPConfig.h": "#pragma once\n"
    + "".join(
        f"#define AT_{name}_ENABLED() {value}\n"
        for name, value in (("CUDNN", 0), ("CUSPARSELT", 0), ("ROCM", 1), ("MAGMA", 0))
    )
    + '#define NVCC_FLAGS_EXTRA ""\n',
}
LIBRARIES = {
    "c10_hip": "void *_ZN3c104cuda20CUDACachingAllocator9allocatorE;",  # a std::atomic of a pointer
    "torch_hip": "",
}
APART = ("c10/cuda", "ATen/cuda")
IN_PLACE = ("torch/csrc/inductor/aoti_torch/c", "torch/csrc/stable/c")


def main(rocm: str) -> None:
    """Edit the installed torch; a second call changes nothing."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", rocm):
        sys.exit(f"torch_for_hip: {rocm!r} is no version of ROCm, such as 7.2.0: nothing was changed")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch_for_hip: torch is not installed")
    torch = Path(spec.origin).parent
    replace(torch / "version.py", "hip: Optional[str] = None", f"hip: Optional[str] = {rocm!r}")
    # A CPU build would never look for ROCm.
    asked = "(torch.cuda._is_compiled() and torch.version.hip)"
    replace(torch / "utils/cpp_extension.py", asked, "(torch.version.hip)")
    include = torch / "include"
    for name, text in GENERATED.items():
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text(text)
    sys.path.insert(0, str(torch / "utils"))  # without torch itself, which needs what a job installs
    from hipify import hipify_python

    done = {}
    # A build of torch translates these in place, and the others into files of their own.
    for apart, folders in ((True, APART), (False, IN_PLACE)):
        done |= hipify_python.hipify(
            project_directory=str(include),
            output_directory=str(include),
            includes=[f"{include}/{folder}/*" for folder in folders],
            out_of_place_only=apart,
            show_progress=False,
        )
    for name, text in LIBRARIES.items():
        library = torch / "lib" / f"lib{name}.so"
        words = ["g++", "-shared", f"-Wl,-soname,{library.name}", "-o", library, "-fPIC", "-x", "c", "-"]
        subprocess.run(words, check=True, input=text, text=True)
    sys.stdout.write(f"torch_for_hip: {len(done)} headers hipified, {len(LIBRARIES)} libraries\n")


def replace(path: Path, old: str, new: str) -> None:
    """Replace what must be there; else this torch is not the one it was written for."""
    text = path.read_text()
    if new not in text:
        if old not in text:
            sys.exit(f"torch_for_hip: {path} does not say {old!r}; this torch is another one than expected")
        path.write_text(text.replace(old, new))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
