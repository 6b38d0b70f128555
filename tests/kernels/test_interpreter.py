# SPDX-License-Identifier: Apache-2.0
"""The package replaces nothing of Triton's unless it is asked to."""

import os
import subprocess
import sys

FUNCTIONS = """
import triton.runtime.interpreter as theirs
from triton.language import core

def functions():
    places = (theirs, theirs.TritonSemantic, core)
    return {(str(place), name): each for place in places for name, each in vars(place).items()}

def replaced():
    return sum(each is not before.get(key) for key, each in functions().items())

before = functions()
import pagedkv.attention.paged, pagedkv.cache.rotary, pagedkv.interpreter, pagedkv.mla.decode, pagedkv.ssd.prefill
import pagedkv.gdn.decode
print(replaced())
pagedkv.interpreter.speed_up()
print(replaced())
"""


def test_only_who_asks_gets_faster_functions():
    run = [sys.executable, "-c", FUNCTIONS]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    printed = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    imported, asked = map(int, printed.split())
    assert imported == 0
    assert asked > 3
