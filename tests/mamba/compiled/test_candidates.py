# SPDX-License-Identifier: Apache-2.0
"""Every candidate of the autotuned prefill kernels of vLLM's delta rules, executed with races looked for.

An autotuner picks by time alone: a candidate that is wrong or races serves as soon as it is the fastest. Each is taken
in a whole prefill of one head, whose outputs and states are compared with the recurrence.
"""

import contextlib
import re

import pytest
import triton
from mamba import deltas
from triton.runtime.errors import OutOfResources

from amdgcn.errors import ProgramFault
from amdgcn.launch import amdgcn
from pagedkv.audit.budgets import load_declared
from pagedkv.audit.cases import cases_of
from pagedkv.audit.compile import LdsExceededError, compile_kernel, specialisations

TUNED = [case for case in cases_of("delta") if case.configuration.autotuned]
SHORT = [0, 80, 100]
"""A chunk and a part of one, and a sequence of its own."""
LONG = [0, 290, 310]
"""Five chunks, so that a pipeline of four stages is full once."""
STATES = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
BY_TOKEN = "chunk_kda_fwd_kernel_intra_token_parallel"
KDA = ("chunk_kda_scaled_dot_kkt_fwd_kernel", "chunk_gla_fwd_kernel_o")
RACES = {
    # Kernel -> where (archs, Triton or "" for any), which candidates, what the race detector says, and why.
    "chunk_kda_fwd_kernel_intra_sub_chunk": (
        (("gfx942", "gfx950"), ""),
        r"warps[248]$",
        r"global race: waves \d and \d of workgroup .* of Akk .*buffer_store.*chunk_intra.py:463.*chunk_intra.py:458",
        "its waves read rows of Akk in a loop and overwrite them after it, with no barrier between the two",
    ),
    "merge_16x16_to_64x64_inverse_kernel": (
        (("gfx942",), "3.8.0"),
        r"warps8$",
        r"LDS race: write of byte \d+ .* access in this very instruction",
        "copies of one sum, one of them of a fused product, differ in the last bit; which of them is kept is open",
    ),
}
"""A candidate that no longer races must leave this table."""


@pytest.fixture
def arch(request):
    return request.config.getoption("amdgcn")


def prefill(case, ops, record=lambda *_: None):
    """Launch the prefill that the case's kernel is part of, and compare it."""
    kernel, variant = case.kernels[0], case.configuration.kernel
    gated, kimi = kernel == "kda_gate_cumsum_fwd_kernel", variant.endswith("-kimi")
    by_key = gated or kimi or variant.endswith("-kda") or kernel.startswith(KDA)
    starts = LONG if kernel == STATES else SHORT
    data = deltas.inputs(starts, (1, 1, 128, 128), "bfloat16", "cpu", initial=True, by_key=by_key)
    if gated or kimi:
        result = deltas.with_gate(ops, data, None if kernel == BY_TOKEN else -5.0, kimi=kimi)
    else:
        result = (deltas.kda if by_key else deltas.gated_delta_rule)(ops, data)
    deltas.check_sequences(data, *result, "bfloat16", record)


def races(case, arch):
    """What the race detector must say of a candidate, and why; None of one that must not race."""
    if case.kernels[0] not in RACES:
        return None
    (arches, version), candidates, says, why = RACES[case.kernels[0]]
    here = arch in arches and version in {"", triton.__version__}
    return (says, why) if here and re.search(candidates, case.configuration.name) else None


@pytest.mark.parametrize("case", TUNED, ids=lambda case: case.name.removeprefix("vllm/"))
def test_a_candidate_computes_the_recurrence(case, arch, delta_ops, record_property):
    """Or does not fit, as the audit says too: then the autotuner drops it."""
    expected = contextlib.nullcontext()
    if found := races(case, arch):
        expected = pytest.raises(ProgramFault, match=found[0])
        record_property("declared", found[1])
    try:
        with case.configuration.taken(), amdgcn(arch) as session, expected:
            prefill(case, delta_ops, record_property)
        if found:  # the executor runs waves side by side, so that what races is right here
            with case.configuration.taken(), amdgcn(arch, races=False):
                prefill(case, delta_ops, record_property)
    except OutOfResources:
        (wanted,) = specialisations(arch, case.launch)
        with pytest.raises(LdsExceededError) as error:
            compile_kernel(wanted)
        record_property("dropped", str(error.value))
        return
    assert found or case.kernels[0] in [launch.kernel for launch in session.launches]


def test_what_is_declared_is_about_candidates(arch):
    """No crash of the compiler: a test above would have to expect it."""
    assert RACES.keys() <= {case.kernels[0] for case in TUNED}
    for kernel, (_, candidates, *_) in RACES.items():
        assert any(re.search(candidates, case.configuration.name) for case in TUNED if case.kernels[0] == kernel)
    declared = load_declared()
    assert not [case.name for case in TUNED if declared.crash(case.configuration, arch, triton.__version__)]


def candidate(name):
    return next(case for case in TUNED if case.name == f"vllm/{name}")


PLANTED = {
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64/BV32-stages2-warps4": {r"\ts_barrier": "LDS race"},
    "chunk_fwd_kernel_o/BK32-BV64-stages3-warps4": {
        r"\ts_barrier": "LDS race",
        r"\ts_waitcnt vmcnt\(\d+\)": "its load not waited for",
    },
}
"""Candidate -> what is taken out of its machine code, each place in turn, and what must be said of at least one."""


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in PLANTED.items() for line in lines])
def test_a_candidate_with_a_line_less_is_found_out(name, line, arch, delta_ops):
    case, found, places = candidate(name), [], 1

    def mutate(kernel, text):
        nonlocal places
        if kernel != case.kernels[0]:
            return text
        code, end, rest = text.partition(".amdhsa_kernel")
        matches = list(re.finditer(rf"^{line}$", code, re.MULTILINE))
        places = len(matches)
        start, stop = matches[len(found)].span()
        return code[:start] + "\ts_nop 0" + code[stop:] + end + rest

    while len(found) < places:
        with case.configuration.taken(), amdgcn(arch, mutate=mutate):
            try:
                prefill(case, delta_ops)
                found.append("")
            except (ProgramFault, AssertionError) as error:
                found.append(str(error))
    assert any(PLANTED[name][line] in each for each in found), found
