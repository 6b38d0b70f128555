# SPDX-License-Identifier: Apache-2.0
"""torch has no AVX-512 and no AMX that /proc/cpuinfo does not name: it asks the processor, which `run.sh` cannot hide.

Python imports this at its start where it lies on the import path; torch is changed when somebody imports it.
"""

import importlib.abc
import importlib.machinery
import re
import sys
from pathlib import Path
from types import MappingProxyType

HIDDEN = ("avx512", "avx10", "avxvnni", "amx")


class _TorchCpu(importlib.abc.MetaPathFinder):
    """Finds `torch.cpu` as Python does, and replaces its list of capabilities once it has been executed."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            found = module.get_capabilities()
            module.get_capabilities = lambda: MappingProxyType({key: as_said(key, has) for key, has in found.items()})

        spec.loader.exec_module = exec_module
        return spec


def as_said(key, has):
    """What torch says of one of its keys: `avx512_f` is the flag avx512f."""
    name = key.replace("_", "")
    return has and (not name.startswith(HIDDEN) or name in _flags())


def _flags():
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {flag.replace("_", "") for flag in line[1].split()} if line else set()


sys.meta_path.insert(0, _TorchCpu())
