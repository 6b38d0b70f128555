#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Registers a project's entry points without its package: entry-points.sh PYTHON PYPROJECT
# Its modules come from the workspace of each job (PYTHONPATH); vLLM finds its plugins by what is installed.
set -euo pipefail
"$1" -I - "$2" << 'PYTHON'
import pathlib, sys, sysconfig, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
folder = pathlib.Path(sysconfig.get_path("purelib"), f"{project['name']}-0.dist-info")
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
groups = project["entry-points"].items()
lines = [line for group, names in groups for line in (f"[{group}]", *(f"{one} = {at}" for one, at in names.items()))]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
PYTHON
