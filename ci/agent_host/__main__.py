# SPDX-License-Identifier: Apache-2.0
"""Run a module of this package isolated: no file of the current folder and no PYTHON* variable counts.

python3 -I <clone>/ci/agent_host/__main__.py hooks preflight
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    del sys.argv[0]
    runpy.run_module(f"agent_host.{sys.argv[0]}", run_name="__main__", alter_sys=False)
