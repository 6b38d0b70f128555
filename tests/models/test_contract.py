# SPDX-License-Identifier: Apache-2.0
"""Every question that vLLM can ask is answered in `contract.toml`, and our classes answer that."""

from __future__ import annotations

import inspect
import json
import tomllib
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import interface
from models.batches import common_metadata

pytest.importorskip("vllm", reason="needs package:vllm")

import vllm
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from pagedkv.device import INTERPRETED
from pagedkv.layout import PACKINGS
from pagedkv.vllm_plugin import TESTED, impl, metadata, mla_backend
from pagedkv.vllm_plugin.backend import ALTERNATIVE, PagedKVBackend

pytestmark = pytest.mark.usefixtures("deployment")

TABLE = tomllib.loads((interface.PLUGIN / "contract.toml").read_text())
LISTED = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "interfaces").glob("*"))}
INSTALLED = ".".join(vllm.__version__.split(".")[:2])
VERSIONS = LISTED | {INSTALLED: interface.describe(Path(vllm.__file__).parent)}
PARTS = {
    "backend": ("AttentionBackend",),
    "builder": ("AttentionMetadataBuilder",),
    "impl": ("AttentionImplBase", "AttentionImpl"),
    "batch": ("CommonAttentionMetadata",),
}
MLA_PARTS = {
    "backend": ("AttentionBackend", "MLACommonBackend"),
    "builder": ("AttentionMetadataBuilder", "MLACommonMetadataBuilder"),
    "impl": ("AttentionImplBase", "MLAAttentionImpl", "MLACommonImpl"),
}
CAPABILITY = DeviceCapability(9, 0)
ROWS = [(part, name) for part in ("backend", "builder", "impl") for name in TABLE[part]]


def members(version, classes, *, fields=False):
    """Public names that the interfaces of a version have; with `fields` none of methods."""
    found = VERSIONS[version]["classes"]
    names = {name: parameters for each in classes for name, parameters in found[each].items() if name[0] != "_"}
    return {name for name, parameters in names.items() if not fields or parameters is None}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("part", PARTS)
def test_every_question_has_a_row_with_a_reason(version, part):
    asked = members(version, PARTS[part], fields=part == "batch")
    assert asked <= set(TABLE[part]), "vLLM asks what contract.toml does not answer"
    for name, row in TABLE[part].items():
        if part == "batch":
            assert row, name
            assert name in asked, f"no vLLM has the field {name}"
            continue
        assert name in asked or row.get("since", "0") > version, f"{version} does not ask {name}"
        assert row.get("why") or row["test"], name


def said(value):
    """An answer as TOML writes it."""
    match value:
        case Enum():
            return value.name
        case bool() | int() | float() | str():
            return value
        case type():
            return value.__name__
        case list() | tuple():
            return [said(each) for each in value]
    return str(value).removeprefix("torch.")


ARGUMENTS = {
    "capability": (CAPABILITY,),
    "combination": (64, torch.float16, "auto", 16, False, False, False, False, CAPABILITY),
    "deployment": (SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=False)), None),
    "quant": (kFp8StaticTensorSym,),
}


def answer(of, name, row):
    it = getattr(of, name)
    if "asked" in row:
        asked = [getattr(torch, each) for each in row["asked"]] if name == "supports_dtype" else row["asked"]
        answers = [it(each) for each in asked]
        yes = [each for each, accepted in zip(row["asked"], answers, strict=True) if accepted]
        return yes if isinstance(answers[0], bool) else answers
    return said(it(*ARGUMENTS.get(row.get("argument"), ())) if callable(it) and not isinstance(it, type) else it)


@pytest.fixture
def ours(builder_of):
    layer = impl.PagedKVImpl(num_heads=4, head_size=32, scale=0.25, num_kv_heads=2)
    return {"backend": PagedKVBackend, "builder": builder_of(16), "impl": layer}


@pytest.fixture
def theirs():
    layer = TritonAttentionBackend.get_impl_cls()(4, 32, 0.25, 2, None, None, "auto")
    return {"backend": TritonAttentionBackend, "builder": TritonAttentionBackend.get_builder_cls(), "impl": layer}


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_answers_are_those_of_the_table(part, name, ours, theirs):
    row = TABLE[part][name]
    if not hasattr(ours[part], name):
        assert row["since"] > INSTALLED
        return
    if "does" in row:
        inherited = part != "backend" and row["test"].endswith("test_contract.py")
        assert getattr(ours[part], name).__module__.startswith("vllm" if inherited else "pagedkv")
        return
    assert answer(ours[part], name, row) == (row.get("interpreted", row["ours"]) if INTERPRETED else row["ours"])
    if row.get("theirs") != "by machine":
        assert answer(theirs[part], name, row) == row.get("theirs", row["ours"])


@pytest.mark.parametrize("part", MLA_PARTS)
def test_mla_answers_as_what_it_replaces_but_for_the_table(part):
    pair = mla_backend.PagedKVGPUMLABackend, TritonMLABackend
    if part != "backend":
        pair = tuple(getattr(each, f"get_{part}_cls")() for each in pair)

    def compared(of, name):
        row = TABLE["backend"].get(name, {"does": ""}) if part == "backend" else {"does": ""}
        it = getattr(of, name, None)
        if "does" not in row:
            return answer(of, name, row)
        return getattr(it, "__func__", it) if callable(it) else said(it)

    names = members(INSTALLED, MLA_PARTS[part]) - {"get_builder_cls", "get_impl_cls", "full_cls_name"}
    answers = {name: tuple(compared(each, name) for each in pair) for name in names}
    rows = {name: row for name, row in TABLE["mla"][part].items() if row.get("since", "0") <= INSTALLED}
    assert {name for name, (one, other) in answers.items() if one != other} == set(rows)
    for name, row in rows.items():
        assert "does" in row or (answers[name] == (row["ours"], row["theirs"]) and row["why"]), name


CLASSES = (
    *(PagedKVBackend, metadata.PagedKVMetadataBuilder, impl.PagedKVImpl),
    *(mla_backend.PagedKVGPUMLABackend, mla_backend.PagedKVMLABackend, mla_backend.PagedKVMLAMetadataBuilder),
    *(mla_backend.PagedKVGPUMLAImpl, mla_backend.PagedKVMLAImpl),
)
BY_NAME = {"MLADecode.__init__", "PagedKVMLAMetadataBuilder._build_decode"}
"""What vLLM passes by name alone."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_what_we_override_takes_what_vllm_passes(version, cls):
    found = VERSIONS[version]["classes"]
    checked = set()
    interfaces = [found.get(each.__name__, {}) for each in cls.__mro__]
    for name, parameters in ((n, p) for each in interfaces for n, p in each.items() if p):
        method = inspect.getattr_static(cls, name, None)
        function = getattr(method, "__func__", method)
        if not getattr(function, "__module__", "").startswith("pagedkv") or "metadata_cls" in parameters:
            continue  # `metadata_cls` is for subclasses to pass
        signatures = inspect.signature(eval(f"lambda {parameters}: 0")), inspect.signature(function)
        passed, takes = ([p for p in it.parameters.values() if p.name not in {"self", "cls"}] for it in signatures)
        names = [each.name for each in passed if each.kind not in {each.VAR_KEYWORD, each.VAR_POSITIONAL}]
        takes = signatures[1].replace(parameters=takes)
        takes.bind(**dict.fromkeys(names))
        if function.__qualname__ not in BY_NAME:
            takes.bind(*names)
        checked.add(name)
    assert len(checked) >= 2


@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_import_is_there(version):
    assert interface.imported() == set(VERSIONS[version]["symbols"])


def test_the_versions_that_are_claimed_are_compared():
    """All tested versions if the oldest of them is installed, else the installed one and those after it."""
    assert set(VERSIONS) == {version for version in TESTED if version >= INSTALLED}


def test_a_batch_is_read_as_the_table_says(builder_of):
    """A field that is neither read nor refused is ignored for the reason in the table."""
    read = set()

    class Batch:
        def __getattribute__(self, name):
            read.add(name)
            return getattr(common, name)

    common = common_metadata(torch.tensor([0, 1, 6]), torch.tensor([9, 8]), torch.zeros(2, 1, dtype=torch.int32))
    builder_of(16).build(0, Batch())
    assert read == {name for name, why in TABLE["batch"].items() if why in {"read", "refused"}}


ASKED = AttentionSelectorConfig(head_size=64, dtype=torch.float16, kv_cache_dtype="auto", block_size=784)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"has_sliding_window": True, "has_sink": True, "use_per_head_quant_scales": True}, []),
        ({"use_non_causal": True, "use_batch_invariant": True, "use_kv_connector": True}, []),
        (
            {"use_non_causal": True, "has_sliding_window": True},
            ["sliding window in non-causal attention not supported"],
        ),
        ({"attn_type": "encoder_only"}, ["attention type encoder_only not supported"]),
        ({"head_size": 512, "use_mm_prefix": True}, ["head_size not supported", "partial multimodal token"]),
        ({"use_adaptive_verification": True}, ["device-cpu query lens mismatch not supported"]),
        ({"use_dcp": True, "use_pcp": True, "use_rswa": True}, ["R-SWA not", "PCP not supported", "DCP not supported"]),
    ],
)
def test_a_refused_selection_names_what_to_select(changes, reasons):
    got = PagedKVBackend.validate_configuration(device_capability=CAPABILITY, **ASKED._replace(**changes)._asdict())
    assert all(one.startswith(reason) for one, reason in zip(got, reasons, strict=False))
    assert got[len(reasons) :] == ([ALTERNATIVE] if reasons else [])
    kinds = {kind.value for kind in KVCacheSpecKind}
    assert {"full_attention", "sliding_window", "cross_attention", "encoder_only_attention"} <= kinds


def test_a_refused_selection_of_mla_names_what_to_do():
    asked = ASKED._replace(use_mla=True, head_size=576, use_dcp=True, use_batch_invariant=True)
    got = mla_backend.PagedKVGPUMLABackend.validate_configuration(device_capability=CAPABILITY, **asked._asdict())
    assert got == ["batch invariance not supported", "DCP not supported", mla_backend.ALTERNATIVE]


@pytest.mark.parametrize("packing", PACKINGS)
def test_blocks_leave_the_engine_in_packing_rows_alone(monkeypatch, packing):
    """A connector compares names of backends, and takes head slots for KV heads."""
    monkeypatch.setattr("pagedkv.vllm_plugin.backend.packing", lambda: packing)
    assert PagedKVBackend.supports_kv_connector() is (packing == "rows")
