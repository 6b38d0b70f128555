# SPDX-License-Identifier: Apache-2.0
"""The command: its refusals, its exit statuses, its files. The full audit is a step of its own, not a test."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pagedkv.audit import __main__ as cli
from pagedkv.audit.findings import Finding, format_report


def command(*arguments, **env):
    """Run the audit as a person would, in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "pagedkv.audit", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--timeout", "-1"]])
def test_misuse_is_2_and_names_the_value(arguments, capsys):
    assert cli.main(arguments) == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--arch", "gfx1030"], ["--archs", "gfx942"], ["--source", "theirs"]])
def test_misuse_that_the_parser_sees_is_2_and_names_the_value(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_another_triton_is_5_and_says_how_to_get_it(capsys):
    assert cli.main(["--triton", "3.0.0"]) == 5
    printed = capsys.readouterr().err
    assert "asked for Triton 3.0.0" in printed
    assert "pip install --target .triton/3.0.0 --no-deps triton==3.0.0" in printed


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("triton==0.1\n", 5, "next.in pins triton 0.1, and Python finds {triton}\n  to do: make next, "),
        ("triton=={triton}\nvlln==0.1 \\\n", 5, "pins vlln 0.1, and Python finds none"),
        ("triton>=3\n", 2, "next.in pins nothing"),
        (None, 2, "next.in cannot be read"),
    ],
)
def test_other_versions_than_pinned_are_refused(text, status, words, tmp_path, capsys):
    versions = {"triton": metadata.version("triton")}
    file = tmp_path / "next.in"
    if text is not None:
        file.write_text(text.format(**versions))
    assert cli.main(["--pins", str(file), "--list"]) == status
    assert words.format(**versions) in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["TRITON_INTERPRET", "AMDGCN_USE_BUFFER_OPS", "TRITON_OVERRIDE_ARCH"])
def test_settings_that_change_the_machine_code_are_5(setting, monkeypatch, capsys):
    monkeypatch.setenv(setting, "1")
    assert cli.main([]) == 5
    assert f"unset {setting}" in capsys.readouterr().err


def test_a_triton_without_the_amd_backend_is_5(tmp_path, monkeypatch, capsys):
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").touch()
    info = tmp_path / "triton-3.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert cli.main([]) == 5
    assert "has no AMD backend" in capsys.readouterr().err


def test_a_selection_of_nothing_is_4(capsys):
    assert cli.main(["--source", "ours", "--only", "no such case"]) == 4
    assert "no such case" in capsys.readouterr().err


def test_list_has_the_block_that_broke_vllm_and_compiles_none(capsys):
    assert cli.main(["--list", "--source", "ours", "vllm", "--arch", "gfx942"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert any("/ours/attention-decode-bfloat16-q32kv8-d64-bs2048" in line for line in listed)
    assert any("/vllm/pr-38502" in line for line in listed)
    assert len(listed) == len(set(listed))


def test_the_planted_defect_is_caught_end_to_end(tmp_path: Path):
    done = command("--source", "vllm", "--only", "pr-38502", "--arch", "gfx942", HILGATE_OUT=str(tmp_path))
    # Caught before anything is compiled: right, and yet no code object was audited, so it is no pass on its own.
    assert done.returncode == 4, done.stdout + done.stderr
    [finding] = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert finding["outcome"] == "pass"
    assert (finding["numbers"]["lds_bytes"], finding["numbers"]["lds_limit_bytes"]) == (262144, 65536)


def test_the_report_fits_80_columns_and_shows_what_is_not_green():
    labels = {"arch": "gfx942", "kernel": "_kernel_with_a_name_far_too_long_for_this", "side": "ours", "tile": "128"}
    numbers = {"lds_bytes": 65536, "vgpr": 512, "vgpr_spills": 168, "scratch_bytes": 0, "mfma": 16, "waves_per_simd": 1}
    made = [numbers, numbers | {"vgpr_spills": 0, "waves_per_simd": 0.5}, {"lds_bytes": 262144}, {}]
    findings = [
        Finding(f"gfx942/ours/{name}", "fail", message="word " * 60, labels=labels, numbers=found)
        for name, found in zip("wxyz", made, strict=True)
    ]
    report = format_report(findings, status=cli.Exit.FAIL, seconds=1.5)
    table = [line for line in report.splitlines() if not line.startswith("fail: ")]
    assert max(map(len, table)) <= 80
    [row] = [line for line in table if line.startswith("ours kernel_with_a_name")]
    assert row.split()[-8:] == ["4", "1", "1", "1", "65536", "512", "16", "0.5"]
    assert "fail: gfx942/ours/y\nfail: gfx942/ours/z\n  word" in report, "one message for all that it is true of"
    assert "0 passed, 4 failed, 0 neither" in report
