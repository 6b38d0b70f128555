# SPDX-License-Identifier: Apache-2.0
"""The tutorial's bug is one: its line changes the kernel, and the test that the page names turns red by it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")


def test_the_bug_of_the_tutorial_is_found_by_the_test_that_it_names(tmp_path):
    shutil.copytree(ROOT / "kernels/pagedkv", tmp_path / "kernels/pagedkv", ignore=shutil.ignore_patterns("*.pyc"))
    (test,) = set(re.findall(r"(tests/[\w/]+\.py::test_\w+\[[\w-]+\])", PAGE))
    (line,) = re.findall(r"^\$ (sed .*)$", PAGE, re.MULTILINE)
    said = re.search(r"reproduce: hilgate run kernels-cache-cpu -- -k '([^']+)'$", PAGE, re.MULTILINE)
    assert said
    assert test.endswith(f"::{said[1]}")
    assert f"$ hilgate run kernels-cache-cpu -- -k '{said[1]}'\n" in PAGE
    place = f"import sys; sys.path.insert(0, {str(tmp_path / 'kernels')!r}); import pytest; "
    command = [sys.executable, "-c", f"{place}sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}]))"]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sound = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert sound.returncode == 0, sound.stdout
    subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    broken = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert broken.returncode == 1, broken.stdout
    assert "1 failed" in broken.stdout
