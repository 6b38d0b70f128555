# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/how-to/serve-a-model.md against the parsers of the installed vLLM."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs package:vllm")

from vllm.benchmarks import latency, serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

PAGE = Path(__file__).parents[2] / "docs/how-to/serve-a-model.md"
FENCED = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
BENCHMARKS = {"latency": latency, "serve": serve}


def commands(page):
    """Words of each command in the fenced bash blocks, without `vllm`."""
    lines = "".join(FENCED.findall(page)).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("vllm ")]


COMMANDS = commands(PAGE.read_text(encoding="utf-8"))


def parsed(words):
    """What vLLM reads. Argparse completes an abbreviated option; a page must not rely on that."""
    parser = FlexibleArgumentParser()
    if words[0] == "bench":
        words = words[1:]
        BENCHMARKS[words[0]].add_cli_args(parser)
    else:
        parser = make_arg_parser(parser)
    known = parser._option_string_actions
    assert [word for word in words if word.startswith("-") and word not in known] == []
    return parser.parse_args(words[1:])


def test_the_page_serves_and_times():
    assert [words[:2] for words in COMMANDS] == [
        ["serve", "Qwen/Qwen3-Next-80B-A3B-Instruct"],
        ["bench", "latency"],
        ["bench", "serve"],
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_vllm_takes_every_command(words):
    read = parsed(words)
    backend = getattr(read, "attention_backend", None)
    # `bench serve` asks a server that runs; every other command names the attention that it times.
    assert backend is None if words[1] == "serve" else backend in AttentionBackendEnum.__members__
