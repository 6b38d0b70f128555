"""Who served a model: one layer of somebody else's, or an empty report, is not a pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the plugin is about vLLM")

from pagedkv import vllm_plugin
from pagedkv.vllm_plugin import CPU_MLA_BACKEND, GPU_MLA_BACKEND, errors, inspect


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"backend": "vllm.Other"}, r"layer 1 \(rank 0\): served by vllm\.Other"),
        ({"attentions": 0}, "no attention call reached it"),
        ({"attentions": None}, "no attention call reached it"),
    ],
)
def test_one_layer_not_served_is_enough_to_fail(change, problem):
    good = {"layer": "layer 0", "rank": 0, "backend": vllm_plugin.BACKEND, "attentions": 1}
    inspect.require_served([good])
    with pytest.raises(errors.NotServedError, match=problem):
        inspect.require_served([good, good | {"layer": "layer 1"} | change])


@pytest.mark.parametrize("path", [CPU_MLA_BACKEND, GPU_MLA_BACKEND])
def test_mla_layers_count_as_ours_where_ours_serves_them(path):
    row = {"layer": "layer 0", "rank": 0, "backend": path, "attentions": 1}
    inspect.require_served([row])
    with pytest.raises(errors.NotServedError, match="no attention call"):
        inspect.require_served([row | {"attentions": 0}])
    with pytest.raises(errors.NotServedError, match="served by vllm"):
        inspect.require_served([row | {"backend": "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"}])


def test_an_empty_report_is_not_a_pass():
    with pytest.raises(errors.NotServedError, match="no attention layer at all"):
        inspect.require_served([])


def test_cpu_platform_without_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(inspect, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(errors.NotInterpretedError, match="TRITON_INTERPRET=1"):
        inspect.build_llm("model")
