# SPDX-License-Identifier: Apache-2.0
"""Each command of docs/recipes.toml against the installed vLLM: its parser, and the graphs that its backends allow.

That the numbers are those of `hilgate fit` is test_fit.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.recipes import recipes

pytest.importorskip("vllm", reason="needs package:vllm")

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from pagedkv.routing.explain import Deployment, explain
from pagedkv.routing.model_config import read_config
from pagedkv.vllm_plugin import settings
from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder

CONFIGS = Path(__file__).parents[1] / "kernels/routing/configs"
SERVED, _ = recipes.read()
NAMES = [one.name for one in SERVED]

STATES = {
    "Mamba": MambaAttentionBackendEnum.MAMBA1,
    "Mamba-2": MambaAttentionBackendEnum.MAMBA2,
    "short convolution": MambaAttentionBackendEnum.SHORT_CONV,
    "gated delta net": MambaAttentionBackendEnum.GDN_ATTN,
}
"""Name of a recurrence in `fit` -> that of vLLM's backend."""


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser())


def parsed(parser, line):
    """What vLLM reads out of a command. A prefix of an option, which argparse would complete, is none."""
    _, words = recipes.environment_and_options(line)
    known = parser._option_string_actions
    assert [word for word in words if word.startswith("-") and word not in known] == []
    return parser.parse_args(words)


@pytest.mark.parametrize("one", SERVED, ids=NAMES)
def test_vllm_takes_every_command(one, parser):
    for recipe in one.recipes:
        read = parsed(parser, one.line(recipe))
        assert (read.model_tag, read.tensor_parallel_size) == (one.model, recipe.gpus)
        assert read.max_num_seqs == recipe.max_num_seqs
        assert AttentionBackendEnum[read.attention_backend] is AttentionBackendEnum.CUSTOM
        assert read.enable_prefix_caching


@pytest.mark.parametrize("option", ["--max-num-sequences 8", "--max-num-seq 8"], ids=["unknown", "abbreviated"])
def test_an_option_that_vllm_lacks_is_red(option, parser):
    one = replace(SERVED[0], command=f"{SERVED[0].command} {option}")
    with pytest.raises(AssertionError, match=option.split()[0]):
        parsed(parser, one.line(one.recipes[0]))


@pytest.mark.parametrize("one", SERVED, ids=NAMES)
def test_the_plugin_knows_every_variable(one, monkeypatch):
    variables, _ = recipes.environment_and_options(one.line(one.recipes[0]))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings.unknown() == ()
    assert settings.ssd() is bool(one.scan)


def test_a_variable_that_the_plugin_lacks_is_red(monkeypatch):
    monkeypatch.setenv("PAGEDKV_SDD", "1")
    assert settings.unknown() == ("PAGEDKV_SDD",)


def graphs(support):
    """vLLM's mode of graphs where the least able backend has such support."""
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    compilation.set_splitting_ops_for_v1("", 1)
    return compilation.resolve_cudagraph_mode_and_sizes(
        support, "CUSTOM", uniform_decode_query_len=1, use_v2_model_runner=False
    ).name


@pytest.mark.parametrize("one", SERVED, ids=NAMES)
def test_the_graphs_are_those_that_all_backends_allow(one):
    deployment = Deployment(arch="gfx942", providers=("pagedkv",))
    found = explain(read_config(CONFIGS / f"{one.name}.json"), deployment)
    states = [STATES[layer.kind.name].get_class() for layer in found.layers if layer.kind.keeps == "state"]
    assert states
    config = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=False))
    builders = [PagedKVMetadataBuilder, *(state.get_builder_cls() for state in states)]
    supports = [builder.get_cudagraph_support(config, SimpleNamespace()) for builder in builders]
    assert graphs(min(supports, key=lambda one: one.value)) == one.graphs


def test_a_backend_without_graphs_is_red():
    assert graphs(AttentionCGSupport.NEVER) == "PIECEWISE"
