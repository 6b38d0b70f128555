# SPDX-License-Identifier: Apache-2.0
"""The command as a person meets it: 80 columns, exit statuses, mistakes without tracebacks, and a light import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.routing import __main__ as cli

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture
def explain(capsys):
    def command(model, *arguments, arch="gfx942"):
        path = CONFIGS / f"{model}.json" if isinstance(model, str) else model
        status = cli.main(["explain", "--model", str(path), "--arch", arch, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


@pytest.mark.parametrize("model", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_model_fits_80_columns(explain, model):
    status, out, err = explain(model)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "write    pagedkv.write_kv_cache" in out or "pagedkv.mla_decode" in out


def test_the_report_of_a_hybrid(explain):
    _, out, _ = explain("qwen3-next-80b-a3b")
    printed = " ".join(out.split())
    assert "H200" not in printed
    for words in (
        "block_size 544: so that a block of 2048 bytes a token holds the state of a gated delta net layer, 1097728",
        "12 x full attention: 16 heads on 2, head size 256, up to 262144 tokens",
        "cache rows, interleaved, 544 tokens a block; no native blocks",
        "decode pagedkv.paged_attention policy:",
        "- aiter.pa_fwd_asm: head_size 256, takes 128 only",
        "gather pagedkv.gather_kv_cache",
        "36 x gated delta net Not attention: keeps [8192, 3] and [32, 128, 128] of each sequence, 1097728 bytes.",
    ):
        assert words in printed


def test_the_report_of_an_encoder_decoder_and_of_mla(explain):
    _, out, _ = explain("whisper-large-v3")
    assert "32 x cross attention: 20 heads on 20, head size 64, not causal, up to 1500" in out
    assert "32 x encoder self-attention\n  Keeps no cache" in out
    _, out, _ = explain("deepseek-v2-lite")
    assert "27 x MLA\n  Decode by pagedkv.mla_decode: 16 heads over one latent" in out


def test_a_kernel_that_changes_with_the_batch_says_where(explain):
    _, out, _ = explain("llama-3.1-8b", "--layout", "shuffle", "--num-blocks", "60000")
    printed = " ".join(out.split())
    assert "decode aiter.paged_attention_common measured on MI308X:" in printed
    assert "changes kernel above 19 sequences, which max_num_seqs 256 does reach" in printed


def test_json_says_the_same(explain):
    status, out, _ = explain("gemma-2-27b", "--json", "--kv-cache-dtype", "fp8", "--block-size", "32")
    data = json.loads(out)
    assert (status, data["served"], data["block_size"]) == (0, True, 32)
    first = data["layers"][0]
    assert first["request"]["softcap"] == 50.0
    assert first["request"]["kv_cache_dtype"] == "e4m3fnuz"
    assert first["layout"]["has_native_kv_cache_layout"] is True
    assert set(first["route"]) == {"decode", "prefill", "write", "gather"}
    (rejected,) = [r for r in first["route"]["decode"]["rejected"] if r["kernel"] == "aiter.pa_fwd_asm"]
    assert {mismatch["feature"] for mismatch in rejected["mismatches"]} >= {"softcap", "scale", "packing"}


def test_the_providers_are_what_is_installed(explain):
    _, out, _ = explain("llama-3.1-8b", "--with", "none")
    assert "aiter." not in out
    assert "vllm." not in out


def test_a_layer_that_nobody_serves_is_status_1(explain, tmp_path):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8")) | {"head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    status, out, err = explain(tmp_path, "--with", "none")
    assert (status, err) == (1, "")
    assert "NOT SERVED. decode: no kernel serves this layer: none serves head_size." in out
    assert "- pagedkv.paged_attention: head_size 512, takes multiples of 8, at least\n" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--layout", "nhd"], 2, "--layout: got nhd; expected rows, native, shuffle"),
        (["--layout", "rows:"], 2, "--layout: got rows:;"),
        (["--layout", "rows:packed"], 2, "--layout: got rows:packed"),
        (["--with", "aiter,flashinfer"], 2, "--with: got flashinfer; expected some of aiter, pagedkv, vllm"),
        (["--tp", "0"], 2, "--tp: got 0"),
        (["--block-size", "0"], 2, "--block-size: got 0"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs: got 0"),
        (["--layout", "shuffle", "--block-size", "12"], 2, "block_size: got 12; expected a multiple of 8"),
    ],
)
def test_misuse(explain, arguments, status, words):
    got, out, err = explain("llama-3.1-8b", *arguments)
    assert (got, out) == (status, "")
    assert words in err


@pytest.mark.parametrize("arguments", [["--arch", "gfx1030"], ["--kv-cache-dtype", "int8"], ["--no-such-option"]])
def test_misuse_that_the_parser_sees(explain, capsys, arguments):
    with pytest.raises(SystemExit) as left:
        explain("llama-3.1-8b", *arguments)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert (err.startswith("error: "), "usage:" in err) == (True, False)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "No such file"), ("{", "not JSON"), ("[]", "expected an object"), ("{}", "says none of")]
)
def test_a_bad_file_is_status_3(explain, tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    status, out, err = explain(tmp_path / "config.json", "--dtype", "float16")
    assert (status, out) == (3, "")
    assert words in err
    assert str(tmp_path) in err


def test_the_module_runs_and_loads_neither_torch_nor_triton():
    code = (
        "import sys, runpy; sys.argv[1:] = ['explain', '--model', sys.argv[1], '--arch', 'gfx950']\n"
        "try: runpy.run_module('pagedkv.routing', run_name='__main__')\n"
        "except SystemExit as left: assert left.code == 0, left.code\n"
        "assert not {'torch', 'triton', 'numpy', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(CONFIGS / "llama-3.1-8b.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama on gfx950" in done.stdout
