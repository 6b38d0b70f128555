# SPDX-License-Identifier: Apache-2.0
"""`hilgate explain-kernel` and `hilgate fit`: answers, mistakes and exit statuses of the command they start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hilgate.cli.app import main
from hilgate.errors import Exit

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = REPOSITORY / "tests" / "kernels" / "routing" / "configs"


@pytest.fixture
def explain_kernel(monkeypatch, capsys):
    """The command in this process, from the folder of the configs."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(CONFIGS)

    def run(*arguments, before=(), command="explain-kernel"):
        with pytest.raises(SystemExit) as ended:
            main([*before, command, *arguments])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["--model", "qwen3-next-80b-a3b.json", "--arch", "gfx942"],
            Exit.PASS,
            ["block_size 544", "- aiter.pa_fwd_asm: head_size 256, takes 128 only"],
        ),
        (
            ["--model", "gpt-oss-20b.json", "--arch=gfx950", "--with", "none", "--json"],
            Exit.PASS,
            ['"kernel": "pagedkv.paged_attention"'],
        ),
        (["--model", "wide", "--arch", "gfx942", "--with", "none"], Exit.FAIL, ["NOT SERVED"]),
        (["--model", "absent.json", "--arch", "gfx942"], Exit.INVALID_DECLARATION, ["No such file", "absent.json"]),
        (["--model", "mpt-7b.json"], Exit.MISUSE, ["--arch"]),
    ],
    ids=["answer", "options", "not served", "no file", "no arch"],
)
def test_answers_mistakes_and_statuses_are_those_of_the_kernels(explain_kernel, tmp_path, arguments, status, words):
    config = json.loads((CONFIGS / "mpt-7b.json").read_text(encoding="utf-8")) | {"head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    got, out, err = explain_kernel(*[str(tmp_path) if word == "wide" else word for word in arguments])
    answer, silent = (out, err) if status in {Exit.PASS, Exit.FAIL} else (err, out)
    assert (got, silent) == (status, "")
    assert [word for word in words if word not in answer] == []
    assert "Traceback" not in answer


def test_fit_is_the_kernels_too(explain_kernel):
    got, out, _ = explain_kernel("qwen3-next-80b-a3b.json", "--arch", "gfx942", "--weights", "500", command="fit")
    assert got == Exit.FAIL
    assert "DOES NOT FIT" in out


def test_the_installed_kernels_answer_without_a_checkout(explain_kernel, tmp_path, monkeypatch):
    config = str(CONFIGS / "qwen3-next-80b-a3b.json")
    monkeypatch.chdir(tmp_path)
    status, out, err = explain_kernel(config, "--memory", "80", "--weights", "20", command="fit")
    assert (status, err) == (Exit.PASS, "")
    assert "on 1 x GPU" in " ".join(out.split())
    monkeypatch.setattr("hilgate.cli.plan.find_spec", lambda _: None)
    status, _, err = explain_kernel(config, "--memory", "80", command="fit")
    assert status == Exit.CANNOT_RUN_HERE
    assert "pip install pagedkv" in err
