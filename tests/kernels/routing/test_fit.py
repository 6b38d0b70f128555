# SPDX-License-Identifier: Apache-2.0
"""`fit` as a person meets it: what it works out by hand, what it says where a model does not fit, and every mistake.

That its numbers are vLLM's is tests/models/test_fit.py.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support import blocks

from pagedkv.configurations import BLOCKS
from pagedkv.routing import __main__ as cli

CONFIGS = Path(__file__).parent / "configs"
NEXT = json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text(encoding="utf-8"))


@pytest.fixture
def fit(capsys):
    def command(model, *arguments, arch="gfx942", weights="20"):
        path = CONFIGS / f"{model}.json" if isinstance(model, str) else model
        given = ["--weights", weights] if weights else []
        status = cli.main(["fit", str(path), "--arch", arch, *given, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


HYBRIDS = [
    path.stem
    for path in sorted(CONFIGS.glob("*.json"))
    if not path.stem.startswith(("bloom", "deepseek", "gemma", "gpt", "llama", "mistral", "mpt", "whisper"))
]


@pytest.mark.parametrize("model", HYBRIDS)
def test_every_hybrid_fits_80_columns(fit, model):
    status, out, err = fit(model, "--dtype", "bfloat16", "--max-model-len", "8192")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "write pagedkv.write_kv_cache" in " ".join(out.split())


def test_by_hand(fit):
    """Qwen3-Next on one MI300X: 544 tokens of 2048 bytes are a page; 12 layers of attention and 3 x 12 with states.

    Memory: 192 x 0.92 - 20 - 4 = 152.64 GiB, in blocks of 12 x 544 x 2048 bytes 12259. A state of the prefix cache
    beside the running one: 2 x 3 blocks a sequence, and of 8192 tokens 16 of attention.
    """
    status, out, _ = fit("qwen3-next-80b-a3b", "--json")
    made = json.loads(out)
    assert status == 0
    assert (made["block_size"], made["pages"]["state_bytes"]) == (544, 1_097_728)
    assert made["pages"]["block_bytes"] == 12 * 544 * 2048
    assert made["num_blocks"] == made["greatest_max_num_seqs"] == int(152.64 * 2**30) // (12 * 544 * 2048) == 12259
    assert made["pages"]["sequence_state_bytes"] == 6 * 12 * 544 * 2048
    assert made["running"]["8192"] == 12258 // (6 + 16)
    assert made["prefix_unit"] == 544
    assert made["hits"] == {"512": 0, "1024": 544, "2048": 1632, "4096": 3808, "8192": 8160, "32768": 32640}
    assert made["layers"][0]["route"]["decode"]["kernel"] == "pagedkv.paged_attention"


def test_more_ranks_make_smaller_blocks_and_drafts_larger_ones(fit):
    def blocks(*arguments):
        return json.loads(fit("qwen3-next-80b-a3b", "--json", *arguments)[1])["block_size"]

    assert [blocks("--tp", str(tp)) for tp in (1, 2, 4, 8)] == [544, 544, 272, 144]
    assert blocks("--drafts", "8") == 608
    assert blocks("--kv-cache-dtype", "fp8") == 1072


def test_without_a_prefix_cache(fit):
    status, out, _ = fit("qwen3-next-80b-a3b", "--json", "--no-prefix-cache")
    made = json.loads(out)
    assert (status, made["prefix_unit"], set(made["hits"].values())) == (0, None, {0})
    assert made["pages"]["states"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--memory", "28", "--max-model-len", "4096"],
            ["exceeds available Mamba cache blocks (", "Set --max-num-seqs "],
        ),
        (["--memory", "60", "--max-num-seqs", "8000"], ["max_num_seqs (8000) exceeds available Mamba cache blocks ("]),
        (
            ["--memory", "27", "--max-num-seqs", "8"],
            ["a sequence of 262144 tokens needs 488 blocks", "--max-model-len "],
        ),
        (["--memory", "25"], ["20.0 GiB of weights a rank and 4.0 GiB of reserve leave 0.0 GiB", "--tp"]),
    ],
    ids=["the default", "asked", "too long", "no room"],
)
def test_what_does_not_fit_says_what_to_set(fit, arguments, words):
    status, out, err = fit("qwen3-next-80b-a3b", *arguments)
    said = " ".join(out.split())
    assert (status, err) == (1, "")
    assert "DOES NOT FIT" in said
    assert [word for word in words if word not in said] == []
    assert json.loads(fit("qwen3-next-80b-a3b", *arguments, "--json")[1])["fits"] is False


def test_what_to_set_fits(fit):
    arguments = ["--memory", "28", "--max-model-len", "4096"]
    most = json.loads(fit("qwen3-next-80b-a3b", *arguments, "--json")[1])["greatest_max_num_seqs"]
    assert fit("qwen3-next-80b-a3b", *arguments, "--max-num-seqs", str(most))[0] == 0
    assert fit("qwen3-next-80b-a3b", *arguments, "--max-num-seqs", str(most + 1))[0] == 1


def test_weights_are_those_of_the_folder(fit, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NEXT), encoding="utf-8")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    assert json.loads(fit(tmp_path, "--json", weights=None)[1])["service"]["weights"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "--tp: got 3"),
        (["--tp", "0"], "--tp: got 0"),
        (["--gpu", "H100"], "--gpu: got H100, which is sm_90; expected one of gfx942: MI300X, MI308X"),
        (["--gpu", "A100"], "--gpu: got A100; expected one of MI100, MI250X"),
        (["--gpu", "MI300A"], "--memory: the GPU of an APU (MI300A) has as much memory as"),
        (["--gpu", "8060S", "--memory", "96"], "--gpu: got 8060S, which is gfx1151; expected one of gfx942: MI300X"),
        (["--memory", "0"], "--memory: got 0.0"),
        (["--memory", "nan"], "--memory: got nan"),
        (["--memory", "10", "--gpu", "MI300X"], "--memory: got one beside --gpu MI300X, which has 192"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: got 1.5"),
        (["--reserve", "-1"], "--reserve: got -1"),
        (["--max-num-seqs", "0"], "--max-num-seqs: got 0"),
        (["--max-model-len", "0"], "--max-model-len: got 0"),
        (["--drafts", "-1"], "--drafts: got -1"),
    ],
)
def test_misuse(fit, arguments, words):
    status, out, err = fit("qwen3-next-80b-a3b", *arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_weights_that_nobody_gave(fit):
    status, out, err = fit("qwen3-next-80b-a3b", weights=None)
    assert (status, out) == (2, "")
    assert "--weights: " in err
    assert "give the GiB of the model's weights" in err


@pytest.mark.parametrize(
    ("arch", "words"),
    [("gfx999", "--arch: got gfx999; expected one of any, "), ("any", "neither --gpu nor --memory is given\n")],
)
def test_an_arch_without_a_memory_is_refused(fit, arch, words):
    status, out, err = fit("qwen3-next-80b-a3b", arch=arch)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("arch", "arguments", "gpu", "memory"),
    [
        ("any", ["--memory", "24"], "GPU", 24),
        ("any", ["--gpu", "mi308x"], "MI308X", 192),
        ("gfx1103", ["--memory", "48"], "gfx1103", 48),
        ("gfx1151", ["--gpu", "8060S", "--memory", "96"], "8060S", 96),
        ("gfx1101", [], "RX 7800 XT", 16),
        ("gfx1200", [], "RX 9060 XT", 16),
    ],
)
def test_the_arithmetic_is_the_same_on_any_arch(fit, arch, arguments, gpu, memory):
    asked = ["--max-model-len", "4096", "--max-num-seqs", "4", "--json"]
    status, out, err = fit("qwen3-next-80b-a3b", *asked, *arguments, arch=arch, weights="10")
    made = json.loads(out)
    assert (status, err) == (0, "")
    assert (made["service"]["gpu"], made["service"]["memory"]) == (gpu, memory)
    of_gfx942 = json.loads(fit("qwen3-next-80b-a3b", *asked, "--memory", str(memory), weights="10")[1])
    assert [made[key] for key in ("pages", "num_blocks", "running", "hits")] == [
        of_gfx942[key] for key in ("pages", "num_blocks", "running", "hits")
    ]


def test_blocks_are_those_that_vllm_reported(fit):
    """Two RX 7900 XT, a pool of 3.86 GiB: vLLM answered that 161 Mamba blocks are available (vllm#49064)."""
    arguments = ["--gpu", "RX 7900 XT", "--tp", "2", "--max-model-len", "4096", "--max-num-seqs", "256", "--json"]
    weights = 2 * (20 * 0.92 - 4 - 3.86)
    status, out, _ = fit("qwen3.5-27b", *arguments, "--no-prefix-cache", arch="any", weights=str(weights))
    assert (status, json.loads(out)["num_blocks"]) == (1, 161)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            (CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8"),
            "model type llama has no recurrent layer that is described here",
        ),
        (
            (CONFIGS / "whisper-large-v3.json").read_text(encoding="utf-8"),
            "model type whisper has no recurrent layer that is described here",
        ),
        (json.dumps(NEXT | {"layer_types": ["rwkv"] * 48}), "layers of type rwkv are not described"),
        (
            json.dumps({key: value for key, value in NEXT.items() if key != "linear_key_head_dim"}),
            "says none of linear_key_head_dim",
        ),
        (
            json.dumps({"model_type": "mystery", "num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]}),
            "model type mystery has recurrent layers that are not described",
        ),
        (json.dumps(NEXT | {"model_type": "nemotron_h", "n_groups": 8, "mamba_ssm_cache_dtype": "int4"}), "got 'int4'"),
        ("{", "not JSON"),
        ("[]", "expected an object"),
        (None, "No such file"),
    ],
    ids=["no hybrid", "speech", "layers", "missing key", "architecture", "dtype", "no JSON", "no object", "no file"],
)
def test_a_bad_config_is_status_3(fit, tmp_path, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    status, out, err = fit(tmp_path, "--dtype", "float16")
    assert (status, out) == (3, "")
    assert words in err
    assert str(tmp_path) in err


def test_the_kernels_tests_take_every_size_that_a_hybrid_gets():
    assert len(blocks.hybrids()) >= 9
    assert blocks.made_by("qwen3.5-35b-a3b") == {1: 1056, 2: 1056, 4: 528, 8: 272}
    assert list(BLOCKS) == blocks.all_sizes()


def test_the_page_shows_what_fit_prints(monkeypatch, capsys):
    """Command and output of docs/how-to/fit-a-model.md."""
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    page = Path("docs/how-to/fit-a-model.md").read_text(encoding="utf-8")
    shown = page.split("```console\n$ python -m pagedkv.fit ")[1].split("```")[0].replace("\\\n", "")
    command, *lines, status = shown.splitlines()
    assert f"exit {cli.main(['fit', *shlex.split(command)])}" == status
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in (*printed, "...")] == []
