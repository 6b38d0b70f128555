# SPDX-License-Identifier: Apache-2.0
"""The harness of planted faults: a fault is noticed only as it is declared."""

from __future__ import annotations

import pytest
from support.planted import PlantedFault, instead, must_be_noticed

FAULT = PlantedFault("a fault", None, says="wrong", fails="one", passes=("other",))
SOUND = {"one": "", "other": ""}
RED = SOUND | {"one": "it is wrong"}


def test_a_fault_that_its_check_alone_notices_is_noticed():
    must_be_noticed(FAULT, lambda site: site, instead(RED), SOUND)


@pytest.mark.parametrize(
    ("sound", "site", "why"),
    [
        (RED, RED, "red without the fault"),
        (SOUND, SOUND, "one must complain, got {}"),
        (SOUND, RED | {"other": "wrong too"}, "one must complain, got"),
        (SOUND, {"other": "it is wrong", "one": ""}, "one must complain, got"),
        (SOUND, RED | {"one": "another thing"}, "fails for another reason"),
        (SOUND, {"one": "it is wrong"}, "must run"),
    ],
)
def test_what_is_not_noticed_as_declared_is_an_error(sound, site, why):
    with pytest.raises(AssertionError, match=why):
        must_be_noticed(FAULT, lambda each: each, instead(site), sound)


def test_every_complaint_must_be_the_named_one():
    fault = PlantedFault("a fault", None, "wrong")
    must_be_noticed(fault, lambda site: site, instead(["wrong here", "wrong there"]), [])
    with pytest.raises(AssertionError, match="for another reason"):
        must_be_noticed(fault, lambda site: site, instead(["wrong here", "odd there"]), [])
