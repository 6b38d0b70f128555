# SPDX-License-Identifier: Apache-2.0
"""No promised shape is launched far behind the best of its sweep; and a launch that is, is seen."""

from dataclasses import replace
from unittest import mock

import pytest

from pagedkv.attention import launch as attention_launch
from pagedkv.audit import swept
from pagedkv.audit.cases import select
from pagedkv.audit.compile import specialisations
from pagedkv.audit.machine import LDS_GRANULES
from pagedkv.audit.swept import Candidate, Shape, Swept, read_swept, shapes, write_swept
from pagedkv.errors import InvalidFileError
from pagedkv.launch import parse, tuning

MOST_BEHIND = 0.10
FOUND = read_swept()
OPEN = {
    "gfx942-prefill-2-rows-256": "with Triton 3.8.0 the best spills 8 to 12 VGPRs",
    "gfx942-decode-1-rows-128": "with Triton 3.8.0 the best spills 5 VGPRs",
    "gfx942-decode-1-shuffle-128": "with Triton 3.8.0 the best has 458 FLOP an instruction, 690 are the budget",
    "gfx942-prefill-1-rows-256": "with Triton 3.8.0 the best spills 46 VGPRs",
    "gfx942-prefill-1-rows-128": "with Triton 3.8.0 the best spills 28 VGPRs",
    "gfx90a-prefill-2-rows-256": "with Triton 3.8.0 the best spills 39 VGPRs",
    "gfx950-decode-2-shuffle-256": "with Triton 3.6.0 the best spills 5 VGPRs, the next has 681 FLOP an instruction",
    "gfx950-prefill-2-rows-128": "with Triton 3.8.0 the best has 1061 FLOP an instruction where K and V share a block",
    "gfx950-prefill-2-shuffle-128": "with Triton 3.6.0 the best has 1049 FLOP an instruction, 1200 are the budget",
    "gfx950-prefill-2-shuffle-256": "with Triton 3.6.0 the best spills 41 VGPRs, the next has 622 FLOP an instruction",
}
"""Shapes whose best cannot be launched with both Tritons, so that the table decides still; the rest was not compiled
with the second one. An entry of a shape that is no longer behind is out of date."""


def launched(arch: str, name: str) -> Candidate:
    """What a case launches today."""
    ((_, case),) = select([f"ours/{name}/"], [arch], ["ours"])
    (kernel,) = (each for each in specialisations(arch, case.launch) if each.kernel == "attention_kernel")
    constants, options = dict(kernel.constants), kernel.options
    sizes = int(constants["ROWS"]), int(constants["TILE"])
    return Candidate(*sizes, options["num_warps"], options["num_stages"], options["waves_per_eu"])


@pytest.mark.parametrize("arch", LDS_GRANULES)
def test_every_shape_was_swept_on_every_arch(arch):
    assert {each.shape: list(each.cases) for each in FOUND if each.arch == arch} == shapes()


@pytest.mark.parametrize("found", FOUND, ids=lambda each: f"{each.arch}-{each.shape}")
def test_no_promised_shape_is_launched_far_behind_the_best_of_its_sweep(found):
    assert set(found.scores) == set(found.shape.candidates())
    assert found.best is not None
    if f"{found.arch}-{found.shape}" in OPEN:
        assert any(found.behind(launched(found.arch, name)) > MOST_BEHIND for name in found.cases), (
            "OPEN is out of date"
        )
        return
    for name in found.cases:
        now = launched(found.arch, name)
        assert found.behind(now) <= MOST_BEHIND, (
            f"{name} is launched as {now}, the best was {found.best}\n{found.rule()}"
        )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_launch_far_behind_is_seen(phase):
    found = next(each for each in FOUND if each.shape == Shape(phase, 2, "rows", 128))
    scored = {candidate: score for candidate, score in found.scores.items() if score is not None}
    worst = min(scored, key=scored.get)
    data = tuning(found.arch)
    planted = replace(getattr(data, phase), where=(worst.where(found.shape, "planted"),))
    with mock.patch.object(attention_launch, "tuning", return_value=replace(data, **{phase: planted})):
        attention_launch.choose.cache_clear()
        now = launched(found.arch, found.cases[0])
    attention_launch.choose.cache_clear()
    assert now == worst
    assert found.behind(now) > MOST_BEHIND


def test_what_was_not_swept_or_does_not_fit_is_as_far_behind_as_can_be():
    shape, best, spills = Shape("decode", 2, "rows", 64), Candidate(16, 32, 1, 2, 2), Candidate(16, 64, 1, 2, 2)
    found = Swept("gfx942", "3.6.0", "2026-11-23", shape, (), {best: 200.0, spills: None})
    assert (found.behind(best), found.behind(spills), found.behind(Candidate(64, 32, 4, 1, 0))) == (0.0, 1.0, 1.0)


def test_a_rule_with_its_evidence_is_tuning_data():
    found = next(each for each in FOUND if each.shape == Shape("prefill", 2, "rows", 128))
    file = swept.FILE.parents[1] / f"tuning/{found.arch}.toml"
    text = file.read_text().replace("[[prefill.where]]", found.rule() + "[[prefill.where]]", 1)
    first = parse(text, "a file").prefill.where[0]
    assert Candidate(first.rows, first.tokens, first.waves, first.stages, first.waves_per_eu) == found.best
    assert found.date in first.because
    assert f"of {len(found.scores)} launches" in first.because


def test_what_is_written_is_read_again(tmp_path):
    write_swept(FOUND, tmp_path / "swept.jsonl")
    assert read_swept(tmp_path / "swept.jsonl") == FOUND
    assert (tmp_path / "swept.jsonl").read_text() == swept.FILE.read_text()


def test_a_broken_line_is_refused(tmp_path):
    path = tmp_path / "swept.jsonl"
    path.write_text('{"arch": "gfx942"}\n')
    with pytest.raises(InvalidFileError, match=r"swept.jsonl:1: (?s:.*)sweep it again"):
        read_swept(path)
