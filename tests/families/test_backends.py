# SPDX-License-Identifier: Apache-2.0
"""The axis of attention backends: which family has cells with which, and that a cell counts only where it served.

No ROCm backend runs on a CPU: engines are stand-ins here that report layers as vLLM's workers do.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from families import backends, behaviours, drive, engine
from families.backends import BACKENDS, PLUGIN, BackendsFile, OtherBackendError, require_backend, served_by
from families.family import FAMILIES, FamilyDeclarationError, UnknownNameError, load

THEIRS = [name for name in BACKENDS if name != PLUGIN]
TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


def layer(path, impl=None, name="layers.0.attn"):
    """One attention layer as a worker reports it."""
    return {"layer": name, "rank": 0, "backend": path, "impl": impl or path.replace("Backend", "Impl")}


def layers_of(name):
    return [layer(AttentionBackendEnum[name].get_path())]


def test_the_kind_of_attention_decides_a_familys_backends():
    axis = {name: [one for one in BACKENDS if BACKENDS[one].takes(FAMILIES[name])] for name in FAMILIES}
    assert axis["jamba"] == [PLUGIN, "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN"]
    assert axis["whisper"] == [PLUGIN, "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN"]
    assert axis["deepseek-v3"] == axis["kimi-linear"] == [PLUGIN, "ROCM_AITER_MLA"]
    assert axis["mamba2"] == [PLUGIN], "what attends nowhere has no attention backend"
    assert {name for name, found in axis.items() if "ROCM_AITER_MLA" in found} == {"deepseek-v3", "kimi-linear"}


def test_a_family_without_cells_is_refused_where_named():
    mla = BACKENDS["ROCM_AITER_MLA"]
    assert served_by(mla, list(FAMILIES), named=False) == ["kimi-linear", "deepseek-v3"]
    with pytest.raises(UnknownNameError, match="ROCM_AITER_MLA serves latent attention: no cells of jamba"):
        served_by(mla, ["jamba"], named=True)
    with pytest.raises(UnknownNameError, match="no backend is called ROCM_ATN; there are pagedkv, ROCM_ATTN"):
        backends.backend_of("ROCM_ATN")


@pytest.mark.parametrize("name", THEIRS)
def test_backends_are_those_of_vllm(name):
    assert AttentionBackendEnum[name].get_path().startswith("vllm.v1.attention.backends.")
    assert "cpu" not in BACKENDS[name].platforms


def head_size(config):
    config = config.get_text_config()
    own = getattr(config, "attention_head_dim", None) or getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


@pytest.mark.parametrize(
    "name", [name for name, one in FAMILIES.items() if one.attention == "paged" and one.config_class]
)
def test_heads_are_as_wide_as_the_backend_takes(name):
    fitted = BACKENDS["ROCM_AITER_FA"].fitted(FAMILIES[name])
    assert head_size(FAMILIES[name].make_config()) == 32
    assert head_size(fitted.make_config()) == 64
    assert fitted.ssd == ""
    assert BACKENDS[PLUGIN].fitted(FAMILIES[name]) is FAMILIES[name]


def test_latents_are_as_wide_as_aiter_takes():
    fitted = BACKENDS["ROCM_AITER_MLA"].fitted
    assert [fitted(FAMILIES[name]).config["kv_lora_rank"] for name in ("deepseek-v3", "kimi-linear")] == [512, 512]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], "report no attention layer at all"),
        ([layer(TRITON)], "layers.0.attn (rank 0): served by vllm.v1.attention.backends.triton_attn.Trit"),
        ([*layers_of("ROCM_ATTN"), layer(TRITON, name="layers.5.attn")], "layers.5.attn (rank 0): served by"),
        ([layer("pagedkv.vllm_plugin.backend.PagedKVBackend")], "served by pagedkv."),
        (
            [layer(AttentionBackendEnum["ROCM_ATTN"].get_path(), "vllm.v1.attention.backends.triton_attn.TritonImpl")],
            "run by vllm.v1.attention.backends.triton_attn.TritonImpl",
        ),
    ],
)
def test_layers_of_another_backend_are_no_proof(layers, said):
    path = AttentionBackendEnum["ROCM_ATTN"].get_path()
    require_backend(BACKENDS["ROCM_ATTN"], path, layers_of("ROCM_ATTN"))
    with pytest.raises(OtherBackendError, match="asked for ROCM_ATTN") as raised:
        require_backend(BACKENDS["ROCM_ATTN"], path, layers)
    assert said in str(raised.value)


@pytest.fixture
def run(monkeypatch):
    """run(family, backend, layers): the cell `decode` of an engine that reports these layers, and what was driven."""

    def driven(family, backend, layers):
        asked = []

        def decode(bench):
            asked.append(bench.family.name)
            return {"max_abs_err": 0.0}

        monkeypatch.setitem(behaviours.DRIVEN, "decode", decode)
        reported = [one | dict.fromkeys(("packing", "fp8_format", "route")) for one in layers]
        engine = SimpleNamespace(restart=lambda: None, non_finite=lambda: 0, layers=lambda: reported)
        bench = SimpleNamespace(engine=engine, family=BACKENDS[backend].fitted(FAMILIES[family]), oracle=None)
        return drive.run_cell("decode", bench, {}, BACKENDS[backend]), asked

    return driven


@pytest.mark.parametrize("backend", THEIRS)
def test_a_cell_passes_where_the_asked_backend_served(run, backend):
    family = "deepseek-v3" if backend == "ROCM_AITER_MLA" else "jamba"
    cell, asked = run(family, backend, layers_of(backend))
    assert (cell.outcome, cell.numbers, asked) == ("pass", {"max_abs_err": 0.0}, [family])
    assert cell.labels["backend"] == AttentionBackendEnum[backend].get_path()


@pytest.mark.parametrize("backend", [name for name in THEIRS if name not in {"ROCM_AITER_MLA", "TRITON_ATTN"}])
def test_a_cell_that_another_backend_served_did_not_run(run, backend):
    cell, asked = run("jamba", backend, [layer(TRITON)])
    assert (cell.outcome, cell.needs) == ("did not run", ""), "nothing excuses it, so its step did not run"
    assert f"asked for {backend}" in cell.reason
    assert TRITON in cell.reason
    assert asked == [], "its answers would say nothing about the backend"


def test_a_backend_of_another_platform_did_not_run():
    model = SimpleNamespace(family=FAMILIES["jamba"])
    cell = drive.ModelRun(model, ("decode",), drive._nothing_planted, {}, BACKENDS["ROCM_ATTN"]).cells()["decode"]
    assert (cell.outcome, cell.needs) == ("did not run", "device:rocm")
    assert cell.reason == "ROCM_ATTN is a backend of rocm"


@pytest.mark.parametrize("drafts", [None, {"method": "ngram"}])
def test_vllm_is_told_the_backend_for_model_and_drafter(monkeypatch, drafts):
    told = {}
    monkeypatch.setattr(engine, "LLM", lambda _model, **arguments: told.update(arguments))
    monkeypatch.setattr(engine, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    more = {} if drafts is None else {"speculative_config": drafts}
    engine.start("a/folder", ours=False, backend="ROCM_AITER_FA", **more)
    assert told["attention_backend"] == "ROCM_AITER_FA"
    assert told.get("speculative_config") == (drafts and {"attention_backend": "ROCM_AITER_FA", **drafts})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backend: {}", "backends: Field required"),
        ("backends: {A: {platforms: [rocm]}}", "backends.A.attention: Field required"),
        ("backends: {A: {platforms: [vulkan], attention: [paged]}}", "backends.A.platforms.0: Input should be 'cpu', "),
        ("backends: {A: {platforms: [rocm], attention: [mla]}}", "backends.A.attention.0: Input should be 'paged', "),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_place(tmp_path, text, said):
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(FamilyDeclarationError) as raised:
        load(tmp_path / "some.yaml", BackendsFile)
    assert said in str(raised.value)
