# SPDX-License-Identifier: Apache-2.0
"""The package replaces nothing of Triton's unless somebody asks for it."""

import os
import subprocess
import sys

FUNCTIONS = """
import triton.runtime.interpreter as theirs
from triton.language import core

def functions():
    places = (theirs, theirs.TritonSemantic, core)
    return {{(str(place), name): each for place in places for name, each in vars(place).items()}}

before = functions()
import pagedkv.attention.paged, pagedkv.cache.rotary, pagedkv.interpreter, pagedkv.mla.decode, pagedkv.ssd.prefill
import pagedkv.gdn.decode
{call}
print(sum(each is not before.get(key) for key, each in functions().items()))
"""


def replaced(call: str = "") -> int:
    """How many functions of Triton a process has replaced that imported the kernels and made a call."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    script = FUNCTIONS.format(call=call)
    run = [sys.executable, "-c", script]
    return int(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)


def test_an_import_replaces_nothing():
    assert replaced() == 0


def test_who_asks_gets_faster_functions():
    assert replaced("pagedkv.interpreter.speed_up()") > 3
