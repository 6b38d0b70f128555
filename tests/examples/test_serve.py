# SPDX-License-Identifier: Apache-2.0
"""The example that serves a model, run as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from families.processes import GPU

if find_spec("vllm") is None:  # imported where it is served; once more here would take seconds
    pytest.skip("needs package:vllm", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
def test_the_example_serves_a_hybrid_and_says_who_attended():
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {} if GPU else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/serve.py"],
        env=os.environ | quiet | ({} if GPU else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "\n Bob has 4. Tom has 3. 4 + 3 = 7\n#### 7" in done.stdout
    assert "2 attention layers, each served by pagedkv.vllm_plugin.backend.PagedKVBackend" in done.stdout
