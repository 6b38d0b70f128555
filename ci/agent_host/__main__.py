# SPDX-License-Identifier: Apache-2.0
"""Run a module of this package isolated: no file of the current folder and no PYTHON* variable counts.

python3 -I <clone>/ci/agent_host/__main__.py hooks preflight
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    modules = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
    if not modules.intersection(sys.argv[1:2]):
        sys.stderr.write("error: name a module of agent_host to run, such as: hooks preflight\n")
        sys.exit(2)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    del sys.argv[0]
    runpy.run_module(f"agent_host.{sys.argv[0]}", run_name="__main__", alter_sys=False)
