# SPDX-License-Identifier: Apache-2.0
"""A vLLM whose kernels moved: one sentence that says which and what to do, and no test has run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import vllm_kernels

ROOT = Path(__file__).parents[2]
PLACE = f"{vllm_kernels.BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache"
SIGNATURE = vllm_kernels.LAUNCHERS[PLACE]
MOVED = {
    "a module that is gone": ("KERNELS", ("vllm.v1.gone:kernel",), "vllm.v1.gone cannot be imported"),
    "a kernel that is gone": ("KERNELS", (f"{PLACE}_of_old",), "cp_mha_gather_cache_of_old is not there"),
    "a parameter that is gone": ("LAUNCHERS", {PLACE: f"{SIGNATURE} page_size"}, "has no parameter page_size"),
    "a parameter that is new": (
        "LAUNCHERS",
        {PLACE: SIGNATURE.replace(" dequant", "")},
        "needs dequant, which the tests do not give",
    ),
}


@pytest.mark.parametrize("case", MOVED.values(), ids=MOVED)
def test_a_kernel_that_moved_is_named(case, monkeypatch):
    name, table, says = case
    monkeypatch.setattr(vllm_kernels, name, table)
    with pytest.raises(vllm_kernels.MovedKernelError, match=says) as raised:
        vllm_kernels.check_all()
    assert "to do: look where this vLLM has the kernel" in str(raised.value)


def test_nothing_runs_where_a_kernel_moved(tmp_path):
    """pytest ends as after a wrong call, which no step counts as a result, and shows no traceback."""
    (tmp_path / "moved.py").write_text(
        "from support import vllm_kernels\nvllm_kernels.KERNELS = ('vllm.gone:kernel',)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "moved", str(ROOT / "tests/vllm_kernels/test_gather.py")]
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert "vllm.gone cannot be imported" in said
    assert "Traceback" not in said
