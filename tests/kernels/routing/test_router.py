# SPDX-License-Identifier: Apache-2.0
"""A route serves everything that is asked, whatever the batch, by one layout; and each check is needed for that."""

from __future__ import annotations

import dataclasses

import pytest
from support import routing_oracle as oracle

from pagedkv.routing import LayoutConflictError, NoKernelError, Request, RequestError, route, router
from pagedkv.routing.features import FEATURES


def answers(cases):
    """Requests that exist, with their route, or with the error that says there is none."""
    for fields, providers in cases:
        try:
            request = Request(**fields)
        except RequestError:
            continue
        try:
            yield fields, providers, route(request, providers)
        except NoKernelError as error:
            yield fields, providers, error


def violations(cases):
    """What chosen kernels lack; each of them would be a wrong answer. Lazy: a planted one is found early."""
    for fields, _, answer in answers(cases):
        if isinstance(answer, NoKernelError):
            continue
        for choice in answer.choices:
            if choice.kernel is not None:
                yield from (
                    f"{choice.kernel}: {key}: {fields}" for key in oracle.lacks(choice.kernel, fields, choice.task)
                )
        dense = answer.prefill.kernel and oracle.KERNELS[answer.prefill.kernel]["reads"] == "dense"
        if dense and fields["phase"] in {"mixed", "extend"} and answer.gather.kernel is None:
            yield f"no kernel gathers: {fields}"


def home(**changes):
    return Request(**(oracle.HOME | changes))


def test_chosen_kernels_serve_everything_that_is_asked():
    cases = oracle.requests()
    assert list(violations(cases)) == []
    made = list(answers(cases))
    routed = [answer for _, _, answer in made if not isinstance(answer, NoKernelError)]
    chosen = {choice.kernel for answer in routed for choice in answer.choices} - {None}
    # Alone, the assembly takes nothing that the HIP kernel before it in the order does not.
    assert set(oracle.KERNELS) - chosen == {"aiter.pa_fwd_asm"}
    assert len(made) > 6000
    assert 0.2 < len(routed) / len(made) < 0.8


def test_a_request_is_refused_only_when_no_kernel_serves_it():
    words = {"decode": {"decode"}, "prefill": {"extend", "prefill"}, "write": {"write"}}
    refused = [case for case in answers(oracle.requests(seed=2)) if isinstance(case[2], NoKernelError)]
    for fields, providers, error in refused:
        for name, kernel in oracle.KERNELS.items():
            if name.partition(".")[0] not in providers or not words[error.task] & set(kernel["serves"]):
                continue
            assert f"\n  {name}: " in str(error), "every kernel is named with what it lacks"
            # One that wants gathered keys may lack the gather alone.
            assert oracle.lacks(name, fields, error.task) or kernel["reads"] == "dense", fields


def test_only_installed_kernels_are_chosen():
    for _, providers, answer in answers(oracle.requests(longer=500)):
        for choice in () if isinstance(answer, NoKernelError) else answer.choices:
            named = {choice.kernel, *choice.also, *(rejection.kernel for rejection in choice.rejected)} - {None}
            assert {name.partition(".")[0] for name in named} <= providers


@pytest.mark.parametrize("key", [feature.key for feature in FEATURES])
def test_each_check_is_needed(key, monkeypatch):
    """Without it some request gets a kernel that does not serve it, or a route that contradicts itself."""
    monkeypatch.setattr(router, "FEATURES", tuple(feature for feature in FEATURES if feature.key != key))
    try:
        assert any(violations(oracle.requests(longer=0)))
    except LayoutConflictError:
        assert key in {"packing", "sides", "block_size"}


def test_the_check_of_both_kernels_is_needed(monkeypatch):
    """C3: aiter's assembly ignores the scale, so a custom scale would change with the batch."""
    custom = {"packing": "shuffle", "scale": 0.05}
    assert route(home(**custom), {"aiter", "pagedkv"}).decode.kernel == "aiter.paged_attention_rocm"
    monkeypatch.setattr(router, "_branch_mismatches", lambda *_: [])
    assert any("pa_fwd_asm: scale" in line for line in violations([(oracle.HOME | custom, {"aiter", "pagedkv"})]))


def test_the_check_of_the_gather_is_needed(monkeypatch):
    """aiter's prefill wants gathered keys; of a native cache vLLM gathers none, but reads it itself."""
    request, there = home(packing="native"), {"aiter", "vllm"}
    assert route(request, there).prefill.kernel == "vllm.context_attention_fwd"
    monkeypatch.setattr(router, "_gather_mismatch", lambda *_: ())
    with pytest.raises(NoKernelError, match=r"^gather"):
        route(request, there)


@pytest.mark.parametrize("gated", [("write",), ("decode", "prefill", "gather"), ()])
def test_a_gate_on_one_side_of_the_cache_cannot_make_a_route(gated, monkeypatch):
    """T2 and T3 of PR 38502: block strides looked at by the writer alone, by the readers alone, or by nobody."""
    request, there = home(packing="native", sides="interleaved"), {"aiter", "vllm"}
    answer = route(request, there)
    assert not answer.layout.has_native_kv_cache_layout
    assert (answer.write.kernel, answer.decode.kernel) == (
        "vllm.triton_reshape_and_cache_flash",
        "vllm.kernel_paged_attention_2d",
    )
    planted = tuple(dataclasses.replace(f, tasks=gated) if f.key == "sides" else f for f in FEATURES)
    monkeypatch.setattr(router, "FEATURES", planted)
    with pytest.raises(LayoutConflictError, match="interleaved"):
        route(request, there)


def test_batches_of_any_size_get_kernels_that_serve_them():
    """And the bound on the batch changes nothing but the words."""
    switching = 0
    for fields, providers, answer in answers(oracle.requests(longer=500)):
        if isinstance(answer, NoKernelError):
            continue
        for bound in (1, 4096):
            other = route(Request(**(fields | {"max_num_seqs": bound})), providers)
            assert [c.kernel for c in other.choices] == [c.kernel for c in answer.choices]
        if answer.decode.kernel:
            run = {oracle.runs(answer.decode.kernel, fields, num_seqs) for num_seqs in range(1, 700)}
            switching += len(run) > 1
            assert not [name for name in run if oracle.lacks(name, fields, "decode")]
    assert switching > 3
