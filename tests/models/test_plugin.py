# SPDX-License-Identifier: Apache-2.0
"""How the plugin registers, and what the workers' report can and cannot be fooled by."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import make_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

pytest.importorskip("vllm", reason="needs package:vllm")

import vllm.plugins
from vllm.config import SpeculativeConfig
from vllm.config.attention import AttentionConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import subclass_attention_backend_with_overrides
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from pagedkv import vllm_plugin
from pagedkv.vllm_plugin import (
    CPU_MLA_BACKEND,
    GPU_MLA_BACKEND,
    backend,
    compiling,
    delta,
    errors,
    inspect,
    metadata,
    mla_backend,
    scan,
)

pytestmark = pytest.mark.usefixtures("deployment")

KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 2, 32, 48, 5


@pytest.fixture
def registry():
    """vLLM's registry with nobody in our places, before and after."""
    members = [AttentionBackendEnum[name] for name in ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA", "TRITON_MLA")]
    for member in members:
        member.clear_override()
    yield AttentionBackendEnum
    for member in members:
        member.clear_override()


def platform(monkeypatch, *, cpu):
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: cpu))


@pytest.mark.parametrize("mla", ["0", "1"])
@pytest.mark.parametrize(("cpu", "interpret"), [(True, "1"), (True, "0"), (False, "1")])
def test_which_of_vllms_backends_are_overridden(monkeypatch, registry, cpu, interpret, mla):
    platform(monkeypatch, cpu=cpu)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setenv("PAGEDKV_MLA", mla)
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may call it again
    assert registry.CUSTOM.get_class() is backend.PagedKVBackend
    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        assert registry[name].is_overridden() is (cpu and interpret == "1"), name
    assert registry.TRITON_MLA.is_overridden() is (not cpu and mla == "1")
    if registry.TRITON_MLA.is_overridden():
        assert registry.TRITON_MLA.get_class() is mla_backend.PagedKVGPUMLABackend


@pytest.fixture
def said(caplog):
    """What the plugin logs; vLLM's logger does not propagate to the root."""
    vllm_plugin.log.addHandler(caplog.handler)
    yield caplog
    vllm_plugin.log.removeHandler(caplog.handler)


@pytest.fixture
def load(monkeypatch):
    """vLLM loads its plugins, as each of its processes does, on a GPU if not said; of those installed, ours alone."""

    def load(*, cpu=False, **environment):
        platform(monkeypatch, cpu=cpu)
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        vllm.plugins.load_general_plugins()

    monkeypatch.setenv("VLLM_PLUGINS", "pagedkv")
    yield load
    vllm_plugin._refused.clear()


@pytest.mark.parametrize("version", ["0.31.0", "0.99.0", "0.3.20", "dev"])
def test_a_vllm_that_was_not_tested_goes_on_without_us(monkeypatch, registry, said, load, version):
    monkeypatch.setattr("vllm.__version__", version)
    load()
    assert f"vLLM {version}: not tested. pagedkv was tested with vLLM {', '.join(vllm_plugin.TESTED)}." in said.text
    assert "To do: install one of these; or set PAGEDKV_VLLM" in said.text
    with pytest.raises(ValueError, match="CUSTOM must be registered before use"):
        registry.CUSTOM.get_class()
    load(PAGEDKV_VLLM=".".join(version.split(".")[:2]))
    assert registry.CUSTOM.get_class() is backend.PagedKVBackend


@pytest.mark.parametrize("missing", ["vllm.v1.attention.backends.registry", "vllm.platforms"])
def test_a_vllm_without_a_module_goes_on_without_us(monkeypatch, registry, said, load, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(vllm.plugins, "load_plugins_by_group", lambda group: {group: vllm_plugin.register})
    load()
    assert f"ModuleNotFoundError: import of {missing} halted" in said.text
    assert "To do:" in said.text
    assert not registry.CUSTOM.is_overridden()


def test_a_vllm_without_a_symbol_is_named_to_who_selects_us(monkeypatch, registry, load):
    """Not as an ImportError, which vLLM on ROCm and CUDA turns into one word without the reason."""
    load()
    monkeypatch.delattr("vllm.v1.attention.backend.MultipleOf")
    monkeypatch.delitem(sys.modules, "pagedkv.vllm_plugin.backend")
    with pytest.raises(errors.VersionError, match=r"cannot import name 'MultipleOf'.*was tested with"):
        registry.CUSTOM.get_class()


def stranger(x, mask):
    """Stand for a function of vLLM whose arguments have changed."""
    return x, mask


def test_the_mamba_2_prefill_is_ours_where_asked(monkeypatch, registry, said, load):
    module = import_module(scan.MODULE)
    theirs = getattr(module, scan.NAME)
    monkeypatch.setattr(module, scan.NAME, theirs)  # restored after this test
    load()
    assert getattr(module, scan.NAME) is theirs
    with scan.claim():
        assert getattr(module, scan.NAME) is scan.combined
    assert getattr(module, scan.NAME) is theirs
    load(PAGEDKV_SSD="1")
    assert getattr(module, scan.NAME) is scan.combined
    monkeypatch.setattr(module, scan.NAME, stranger)
    load(PAGEDKV_SSD="1")
    assert f"{scan.NAME} takes (x, mask), not (x, dt, A" in said.text
    assert getattr(module, scan.NAME) is stranger
    assert registry.CUSTOM.is_overridden(), "attention stays ours"


def test_gated_delta_nets_are_ours_where_asked(monkeypatch, registry, said, load):
    layer = import_module(delta.LAYERS).QwenGatedDeltaNetAttention
    builder = import_module(delta.BUILDERS).GDNAttentionMetadataBuilder
    names = [(layer, name) for name in ("_forward_core", "_warmup_prefill_kernels", "forward_cpu", "forward_hip")]
    kimi = import_module(delta.KIMI_LAYERS).KimiGatedDeltaNetAttention
    names += [(kimi, "_forward"), (layer, "_can_use_fused_gdn_mtp_decode")]
    names += [(builder, "build"), (builder, "update_block_table")]
    theirs = [getattr(owner, name) for owner, name in names]
    for (owner, name), method in zip(names, theirs, strict=True):
        monkeypatch.setattr(owner, name, method)  # restored after this test
    load()
    assert [getattr(owner, name) for owner, name in names] == theirs
    with delta.claim():
        assert (layer._forward_core, kimi._forward) == (delta._forward_core, delta._forward)
        assert layer.forward_cpu is layer.forward_hip is layer.forward_cuda
    assert [getattr(owner, name) for owner, name in names] == theirs
    load(PAGEDKV_GDN="1")
    load(PAGEDKV_GDN="1")
    assert delta._theirs["build"] is theirs[-2], "ours must not call itself"
    monkeypatch.setattr(layer, "_forward_core", stranger)
    monkeypatch.setattr(builder, "build", theirs[-2])
    load(PAGEDKV_GDN="1")
    assert "_forward_core takes (x, mask), not (self, mixed_qkv, b, a, core_attn_out)" in said.text
    assert (layer._forward_core, builder.build) == (stranger, theirs[-2]), "all or nothing"
    assert registry.CUSTOM.is_overridden(), "attention stays ours"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PAGEDKV_MLA", "yes", "one of 0, 1"),
        ("PAGEDKV_GDN", "2", "one of 0, 1"),
        ("PAGEDKV_SSD", "2", "one of 0, 1"),
        ("PAGEDKV_PACKING", "foo", "one of rows, native, shuffle"),
        ("PAGEDKV_VLLM", "new", "the first two numbers of a version, such as 0.34"),
        ("PAGEDKV_VLLM", "", "the first two numbers"),
    ],
)
@pytest.mark.parametrize("cpu", [False, True])
def test_a_meaningless_setting_is_refused_on_selection(
    monkeypatch, registry, said, load, variable, value, expected, cpu
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    load(**{variable: value}, cpu=cpu)
    message = f"{variable}: got {value!r}; expected {expected}"
    assert f"pagedkv stops registering: {message}" in said.text
    names = ["CUSTOM", *(["CPU_ATTN", "CPU_MLA", "AMX_MLA"] if cpu else [])]
    names += ["TRITON_MLA"] if variable == "PAGEDKV_MLA" and not cpu else []
    overridden = [
        name for name in ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA", "TRITON_MLA") if registry[name].is_overridden()
    ]
    assert overridden == names
    for name in names:
        with pytest.raises(errors.SettingError, match=message):
            registry[name].get_class()


def test_settings_without_effect_are_told(monkeypatch, registry, said, load):
    monkeypatch.setattr("vllm.__version__", "0.32.0")
    load(PAGEDKV_VLLM="0.31", PAGEDKV_PACKNG="native")
    assert "PAGEDKV_VLLM=0.31 changes nothing, because this is vLLM 0.32.0" in said.text
    assert (
        "PAGEDKV_PACKNG is no setting of it; they are PAGEDKV_PACKING, PAGEDKV_MLA, PAGEDKV_SSD, PAGEDKV_GDN"
        in said.text
    )
    assert registry.CUSTOM.get_class() is backend.PagedKVBackend


def test_settings_that_mean_something_are_not_mentioned(monkeypatch, registry, said, load):
    monkeypatch.setattr("vllm.__version__", "0.32.0")
    load(PAGEDKV_VLLM="0.32", PAGEDKV_PACKING="native", PAGEDKV_MLA="0", PAGEDKV_SSD="0")
    assert not [record for record in said.records if record.levelname == "WARNING"]
    assert registry.CUSTOM.is_overridden()


@pytest.mark.parametrize(
    ("name", "asked"), [("CUSTOM", {}), ("CUSTOM", {"PAGEDKV_PACKING": "rows"}), ("TRITON_MLA", {"PAGEDKV_MLA": "1"})]
)
def test_a_taken_name_is_an_error_on_selection(registry, said, load, name, asked):
    register_backend(registry[name], "pathlib.Path")
    load(**asked)
    load(**asked)
    message = f"attention backend {name} is already registered as pathlib.Path"
    assert message in said.text
    assert "VLLM_PLUGINS=pagedkv" in said.text
    if not asked:
        assert registry[name].get_class() is Path
        return
    with pytest.raises(errors.BackendTakenError, match=message):
        registry[name].get_class()
    if name != "CUSTOM":
        assert registry.CUSTOM.get_class() is backend.PagedKVBackend


def test_an_engine_asked_of_us_is_not_another_plugins(monkeypatch, registry):
    monkeypatch.setattr(inspect, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    register_backend(registry.CUSTOM, "pathlib.Path")
    with pytest.raises(errors.BackendTakenError, match=r"CUSTOM is already registered as pathlib\.Path"):
        inspect.build_llm("model")


@pytest.fixture
def arguments_of_llm(monkeypatch):
    """arguments_of_llm(...): what `build_llm` gives to vLLM on a GPU."""

    def build(**given):
        inspect.build_llm("model", **given)
        return started.pop()

    started = []
    monkeypatch.setattr(inspect, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr("vllm.LLM", lambda **arguments: started.append(arguments))
    return build


@pytest.mark.parametrize("asked", [False, True])
def test_engine_on_a_gpu_selects_both_of_our_backends(monkeypatch, arguments_of_llm, asked):
    monkeypatch.setenv("PAGEDKV_MLA", str(int(asked)))
    arguments = arguments_of_llm(seed=3)
    assert (arguments["model"], arguments["seed"], arguments["attention_backend"]) == ("model", 3, "CUSTOM")
    config = AttentionConfig(**arguments.get("attention_config", {}))
    assert config.backend_per_kind == ({"mla_attention": AttentionBackendEnum.TRITON_MLA} if asked else {})


@pytest.mark.parametrize("named", [{}, {"worker_extension_cls": "families.mla_prefill.PlainPrefillReport"}])
def test_workers_report_by_our_class_or_a_named_subclass(arguments_of_llm, named):
    report = resolve_obj_by_qualname(arguments_of_llm(**named)["worker_extension_cls"])  # as a worker does
    assert issubclass(report, inspect.WorkerReport)


@pytest.mark.parametrize(
    ("named", "backend"), [({}, "CUSTOM"), ({"attention_backend": "TRITON_ATTN"}, "TRITON_ATTN")], ids=["ours", "named"]
)
def test_engine_on_a_gpu_selects_us_for_its_drafter_too(arguments_of_llm, named, backend):
    """vLLM gives a drafter the backend of the speculative configuration, and never the model's."""
    drafter = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}
    given = arguments_of_llm(speculative_config=drafter | named)["speculative_config"]
    assert drafter.items() <= given.items()
    chosen = SpeculativeConfig._parse_attention_backend(given.get("attention_backend"))
    of_the_model = make_dataclass("Config", ["attention_config"])(AttentionConfig(backend=AttentionBackendEnum.CUSTOM))
    proposer = SimpleNamespace(
        vllm_config=of_the_model,
        speculative_config=SimpleNamespace(moe_backend=None, attention_backend=chosen, kv_cache_dtype=None),
    )
    of_the_drafter = SpecDecodeBaseProposer._create_draft_vllm_config(proposer)
    assert of_the_drafter.attention_config.backend == AttentionBackendEnum[backend]


@pytest.mark.parametrize(
    ("method", "backend", "cpu", "warns"),
    [
        ("draft_model", None, False, True),
        ("mtp", None, False, True),
        ("mtp", AttentionBackendEnum.CUSTOM, False, False),
        ("ngram", None, False, False),
        ("draft_model", None, True, False),
    ],
)
def test_a_drafter_that_others_serve_is_told(monkeypatch, said, method, backend, cpu, warns):
    platform(monkeypatch, cpu=cpu)
    monkeypatch.setattr(metadata, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    drafts = SimpleNamespace(
        attention_backend=backend, uses_draft_kv_cache=lambda: method != "ngram", num_speculative_tokens=1
    )
    metadata._tell_of_drafters(SimpleNamespace(speculative_config=drafts))
    assert ('"attention_backend": "CUSTOM" in --speculative-config' in said.text) == warns


def test_leaving_cpu_attn_alone_is_said(monkeypatch, registry, said):  # noqa: ARG001 - restores the registry
    platform(monkeypatch, cpu=True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    vllm_plugin.register()
    assert "CPU_ATTN stays vLLM's own, because TRITON_INTERPRET=1 is not set" in said.text


def test_package_imports_without_vllm_and_torch():
    program = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; import pagedkv.vllm_plugin"
    subprocess.run([sys.executable, "-c", program], check=True)


class Layer(AttentionLayerBase):
    """Just enough of an attention layer for the worker's report."""

    def __init__(self, served_by, cache):
        self.impl = backend.PagedKVImpl(num_heads=4, head_size=HEAD_SIZE, scale=0.25, num_kv_heads=KV_HEADS)
        self.backend, self.kv_cache = served_by, cache

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.fixture
def worker():
    worker = inspect.WorkerReport()
    pool = torch.zeros(2, BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)  # two layers in one allocation, layer by layer
    context = {"a": Layer(backend.PagedKVBackend, pool[0]), "b": Layer(Layer, pool[1]), "not attention": object()}
    worker.rank = 3
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    worker.model_runner = SimpleNamespace(requests={}, kv_cache_config=SimpleNamespace(num_blocks=BLOCKS))
    worker.pool = pool
    return worker


def test_report_names_every_attention_layer(worker):
    ours, theirs = worker.pagedkv_report()
    assert ours["backend"] == vllm_plugin.BACKEND
    assert (ours["layer"], ours["rank"], ours["block_size"]) == ("a", 3, BLOCK_SIZE)
    assert ours["kv_strides"] == [2 * HEAD_SIZE * BLOCK_SIZE * KV_HEADS, 2 * HEAD_SIZE * BLOCK_SIZE, 2 * HEAD_SIZE, 1]
    assert theirs["backend"].endswith("Layer")
    assert (ours["packing"], ours["fp8_format"]) == ("rows", None)
    reader = "pagedkv.paged_attention"
    assert ours["route"] == {
        "decode": reader,
        "prefill": reader,
        "write": "pagedkv.write_kv_cache",
        "gather": None,
        "layout": "rows, interleaved, 16 tokens a block",
    }


@pytest.fixture
def compiler(monkeypatch):
    """compiler(kernel): what Triton does when it has compiled one; somebody else listens too."""
    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: heard.append(told["fn"].name))
    monkeypatch.setattr(compiling, "_hooked", False)

    def compiled(module, name):
        knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(module=module, name=name), key="", compile={})

    return SimpleNamespace(compiled=compiled, heard=heard)


def test_kernels_of_ours_that_are_compiled_late_are_found(worker, compiler):
    llm = SimpleNamespace(collective_rpc=lambda name: [getattr(worker, name)(), getattr(worker, name)()])
    compiler.compiled("pagedkv.attention.kernel", "attention_kernel")  # the warm-up's
    worker.pagedkv_watch_compiler()
    assert inspect.require_warm(llm) == {}
    compiler.compiled("vllm.ops", "theirs_kernel")
    assert inspect.require_warm(llm) == {"vllm.ops.theirs_kernel": 2}, "of two workers"
    compiler.compiled("pagedkv.attention.kernel", "attention_kernel")
    wanted = r"compiled while serving: pagedkv\.attention\.kernel\.attention_kernel \(2\)\. "
    with pytest.raises(errors.CompiledLateError, match=wanted):
        inspect.require_warm(llm)
    worker.pagedkv_watch_compiler()
    assert worker.pagedkv_compiled() == {}
    compiler.compiled("vllm.ops", "theirs_kernel")
    assert worker.pagedkv_compiled() == {"vllm.ops.theirs_kernel": 1}, "it is asked once, however often it is watched"
    assert compiler.heard == ["attention_kernel", "theirs_kernel", "attention_kernel", "theirs_kernel"]


def test_who_watches_on_top_of_us_calls_us(worker, compiler, monkeypatch):
    """vLLM's own monitor does so where it is switched on later."""
    worker.pagedkv_watch_compiler()
    below = knobs.runtime.jit_post_compile_hook

    def above(**told):
        return below(**told)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", above)
    worker.pagedkv_watch_compiler()
    compiler.compiled("pagedkv.ssd.kernel", "ssd_prefill_kernel")
    assert worker.pagedkv_compiled() == {"pagedkv.ssd.kernel.ssd_prefill_kernel": 1}


def test_report_sees_through_what_vllm_wraps(worker):
    """For cross attention vLLM derives classes from ours at run time."""
    wrapped = subclass_attention_backend_with_overrides("Cross_", backend.PagedKVBackend, {})
    layer = Layer(wrapped, torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE))
    layer.impl.__class__ = type("CrossImpl", (backend.PagedKVImpl,), {"__module__": "vllm.somewhere"})
    worker.vllm_config.compilation_config.static_forward_context = {"a": layer}
    [row] = worker.pagedkv_report()
    assert row["backend"] == vllm_plugin.BACKEND
    assert row["impl"] == "pagedkv.vllm_plugin.impl.PagedKVImpl"


def test_counts_start_again_after_a_reset(worker):
    worker.vllm_config.compilation_config.static_forward_context["a"].impl.attentions = 5
    assert worker.pagedkv_report()[0]["attentions"] == 5
    worker.pagedkv_reset()
    assert worker.pagedkv_report()[0]["attentions"] == 0


def test_poison_fills_the_pool_and_new_blocks(worker):
    assert worker.pagedkv_poison() == worker.pool.untyped_storage().nbytes()
    assert worker.pool.isnan().all()
    worker.pool.zero_()
    worker.model_runner._zero_block_ids([4, 1])
    assert worker.pool.isnan().all(dim=(0, 2, 3, 4)).tolist() == [False, True, False, False, True]
    assert worker.pool[:, [0, 2, 3]].count_nonzero() == 0


@pytest.mark.parametrize(("name", "fill"), [("e4m3fn", 0xFF), ("e4m3fnuz", 0x80), ("e5m2", 0xFF)])
def test_poison_of_codes_is_nan_in_their_format(worker, name, fill):
    """In e4m3fnuz 0xff is -240, which would go unnoticed."""
    pool = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.uint8)
    layer = Layer(backend.PagedKVBackend, pool)
    layer.impl.page = replace(layer.impl.page, format=name)
    worker.vllm_config.compilation_config.static_forward_context = {"a": layer}
    worker.pagedkv_poison()
    assert (pool == fill).all()
    assert pool.view(getattr(torch, f"float8_{name}")).float().isnan().all()
    pool.zero_()
    worker.model_runner._zero_block_ids([2])
    assert (pool == fill).all(dim=(1, 2, 3)).tolist() == [False, False, True, False, False]


def test_poison_reaches_new_blocks_of_model_runner_v2(worker):
    zeroer = SimpleNamespace(zero_block_ids=None)
    states = SimpleNamespace(req_id_to_index={})
    config = SimpleNamespace(num_blocks=BLOCKS)
    worker.model_runner = SimpleNamespace(req_states=states, kv_block_zeroer=zeroer, kv_cache_config=config)
    worker.pagedkv_poison()
    worker.pool.zero_()
    zeroer.zero_block_ids([])
    assert worker.pool.count_nonzero() == 0
    zeroer.zero_block_ids([2])
    assert worker.pool[:, 2].isnan().all()


def test_poison_is_refused_where_contents_are_needed(worker):
    worker.model_runner.requests = {"one": object()}
    with pytest.raises(errors.PoisonUnsafeError, match="1 requests are running"):
        worker.pagedkv_poison()
    worker.model_runner.requests = {}
    worker.vllm_config.cache_config.enable_prefix_caching = True
    with pytest.raises(errors.PoisonUnsafeError, match="prefix caching"):
        worker.pagedkv_poison()
    assert worker.pool.count_nonzero() == 0


@pytest.mark.parametrize("ours", [vllm_plugin.BACKEND, CPU_MLA_BACKEND, GPU_MLA_BACKEND])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"backend": "vllm.Other"}, r"layer 1 \(rank 0\): served by vllm\.Other"),
        ({"attentions": 0}, "no attention call reached it"),
        ({"attentions": None}, "no attention call reached it"),
    ],
)
def test_one_layer_not_served_is_enough_to_fail(ours, change, problem):
    good = {"layer": "layer 0", "rank": 0, "backend": ours, "attentions": 1}
    inspect.require_served([good])
    with pytest.raises(errors.NotServedError, match=problem):
        inspect.require_served([good, good | {"layer": "layer 1"} | change])


def test_an_empty_report_is_not_a_pass():
    with pytest.raises(errors.NotServedError, match="no attention layer at all"):
        inspect.require_served([])


def test_cpu_platform_without_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(inspect, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(errors.NotInterpretedError, match="TRITON_INTERPRET=1"):
        inspect.build_llm("model")
