# SPDX-License-Identifier: Apache-2.0
"""Hide AMX and AVX-512 from every Python process of the bare machine, so that an ordinary CPU's paths are tested.

torch and oneDNN read a variable each. vLLM asks functions of torch.cpu which operators to load and what MLA can do:
they answer as a CPU with AVX2 does. `.ci/bare-machine` installs this file where Python looks for it at every start.
"""

import importlib.abc
import importlib.util
import os
import sys

os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"

HIDDEN = ("amx", "avx512", "vnni")
"""Words in the names of torch.cpu's questions that are answered with no."""


class AfterTorchCpu(importlib.abc.MetaPathFinder):
    """Replaces the questions of torch.cpu when that module is imported."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        """Find torch.cpu as it is found without this, with a loader that runs `hide` behind it."""
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_hide(module):
            run(module)
            for question in [one for one in vars(module) if one.startswith(("_is_", "_init_"))]:
                if any(word in question for word in HIDDEN):
                    setattr(module, question, lambda: False)

        spec.loader.exec_module = run_and_hide
        return spec


sys.meta_path.insert(0, AfterTorchCpu())
