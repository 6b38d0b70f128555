# SPDX-License-Identifier: Apache-2.0
"""A vLLM whose kernels moved ends the session with one sentence that says which and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import vllm_kernels

ROOT = Path(__file__).parents[2]
PLACE = f"{vllm_kernels.BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache"
MOVED = {
    "a module that is gone": ("vllm.v1.gone:kernel", {}, "vllm.v1.gone cannot be imported"),
    "a launcher that is gone": (f"{PLACE}_of_old", {}, "cp_mha_gather_cache_of_old is not there"),
    "a parameter that is gone": (PLACE, {"page_size": 16}, "takes other arguments: "),
    "a parameter that is new": (PLACE, {"key": None}, "takes other arguments: missing a required argument: "),
}


@pytest.mark.parametrize(("place", "arguments", "says"), MOVED.values(), ids=MOVED)
def test_a_kernel_that_moved_is_named(place, arguments, says):
    with pytest.raises(pytest.exit.Exception, match=says) as raised:
        vllm_kernels._launch(place, **arguments)
    assert "to do: look where this vLLM has the kernel" in str(raised.value)


def test_a_session_without_its_kernel_is_no_result(tmp_path):
    """pytest ends as after a wrong call, which no step counts as a result, and shows no traceback."""
    (tmp_path / "moved.py").write_text("from support import vllm_kernels\nvllm_kernels.BACKENDS = 'vllm.gone'\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "moved", str(ROOT / "tests/vllm_kernels/test_gather.py")]
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert "vllm.gone.rocm_aiter_fa cannot be imported" in said
    assert "Traceback" not in said
    assert "failed" not in said
