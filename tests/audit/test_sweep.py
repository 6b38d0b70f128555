# SPDX-License-Identifier: Apache-2.0
"""The search for launch sizes: what it ranks first, and what it refuses."""

import os
import subprocess
import sys

import pytest

from pagedkv.audit import sweep

MLA = ("--only", "ours/mla-bfloat16-h16-d512+64-bs16/")
CASE = ("--only", "ours/attention-decode-float16-q3kv3-d32-bs48-nhd/")


def test_waves_that_compute_the_same_rank_lower():
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv.audit.sweep", "gfx942", "mla_narrow.waves=8,2", "mla_narrow.block_n=16", *MLA],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    _, first, second = done.stdout.splitlines()
    assert first.endswith("mla_narrow.waves=2 mla_narrow.block_n=16")
    assert ("100%" in first, "21%" in second) == (True, True)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("waves=4", "expected TABLE.KEY=N,N"),
        ("decode.waves=many", "expected TABLE.KEY=N,N"),
        ("decode.sails=4", "tuning data have no decode.sails"),
        ("encode.waves=4", "tuning data have no encode.waves"),
    ],
)
def test_misuse_is_2_and_names_the_value(grid, message, capsys):
    assert sweep.main(["gfx942", grid, *CASE]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["decode.waves=4"], [*CASE]])
def test_a_grid_without_cases_or_cases_without_a_grid_is_2(arguments, capsys):
    assert sweep.main(["gfx942", *arguments]) == 2
    assert "expected TABLE.KEY=N,N and --only" in capsys.readouterr().err


def test_a_selection_without_products_is_2(capsys):
    assert sweep.main(["gfx942", "decode.waves=4", "--only", "ours/merge-"]) == 2
    assert "no case with products" in capsys.readouterr().err
