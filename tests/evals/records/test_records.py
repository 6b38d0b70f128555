# SPDX-License-Identifier: Apache-2.0
"""Signs of broken output in texts as broken and as healthy models write them."""

import pytest

from hileval.records.answers import Flag, flags_of

GSM8K = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n"
    "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer's market.\n#### 18"
)
POCKET = " Kim has 4. Bob has 9. Tom has 2. 4 + 9 + 2 = 15\n#### 15"


@pytest.mark.parametrize("text", [GSM8K, POCKET, " 5 - 3 = 2\n#### 2", "The café sold 12 crêpes. #### 12"])
def test_healthy_answers_carry_no_flag(text):
    assert flags_of(text, finish_reason="stop") == ()


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("", Flag.EMPTY),
        (" \n ", Flag.EMPTY),
        ("!" * 64, Flag.REPEAT),
        ("000000000000000", Flag.REPEAT),
        (" has 9. Bob" * 12, Flag.REPEAT),
        ("the answer is the answer is " * 8 + "4", Flag.REPEAT),
        ("\ufffd\ufffd 12", Flag.GARBAGE),
        ("系数的乘积等于十二个苹果 12", Flag.GARBAGE),
        ("Bob has pens and Tom has pens together.", Flag.NO_NUMBER),
    ],
)
def test_broken_answers_are_named(text, flag):
    found = flags_of(text, finish_reason="stop")
    assert flag in found
    assert flag is not Flag.EMPTY or found == (flag,), "empty is not also counted as other things"


def test_length_stop_and_non_finite_are_flags_of_their_own():
    assert flags_of(POCKET, finish_reason="length") == (Flag.TRUNCATED,)
    assert flags_of(POCKET, finish_reason="stop", non_finite=1) == (Flag.NON_FINITE,)
