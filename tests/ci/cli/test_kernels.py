"""`hilgate explain-kernel`: the answer, the mistakes and the exit statuses of the command it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hilgate.cli.app import run
from hilgate.errors import Exit

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = REPOSITORY / "tests" / "kernels" / "routing" / "configs"


@pytest.fixture
def explain_kernel(monkeypatch, capsys):
    """The command in this process, from the folder of the configs."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(CONFIGS)

    def command(*arguments, before=()):
        with pytest.raises(SystemExit) as ended:
            run([*before, "explain-kernel", *arguments])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return command


def test_the_answer_is_that_of_the_kernels(explain_kernel):
    status, out, err = explain_kernel("--model", "qwen3-next-80b-a3b.json", "--arch", "gfx942")
    assert (status, err) == (Exit.PASS, "")
    assert "block_size 544" in out
    assert "- aiter.pa_fwd_asm: head_size 256, takes 128 only" in out


def test_options_go_through(explain_kernel):
    status, out, _ = explain_kernel("--model", "gpt-oss-20b.json", "--arch=gfx950", "--with", "none", "--json")
    assert status == Exit.PASS
    assert {layer["route"]["decode"]["kernel"] for layer in json.loads(out)["layers"]} == {"pagedkv.paged_attention"}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "absent.json", "--arch", "gfx942"], Exit.INVALID_DECLARATION, "absent.json: No such file"),
        (["--model", "mpt-7b.json", "--arch", "gfx1100"], Exit.MISUSE, "gfx1100"),
        (["--model", "mpt-7b.json"], Exit.MISUSE, "--arch"),
        (["--model", "mpt-7b.json", "--arch", "gfx942", "--tp", "7"], Exit.MISUSE, "--tp: got 7"),
    ],
)
def test_mistakes_keep_their_status(explain_kernel, arguments, status, words):
    got, out, err = explain_kernel(*arguments)
    assert (got, out) == (status, "")
    assert words in err
    assert "Traceback" not in err


def test_a_layer_that_nobody_serves_is_a_fail(explain_kernel, tmp_path):
    config = json.loads((CONFIGS / "mpt-7b.json").read_text(encoding="utf-8")) | {"head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    status, out, _ = explain_kernel("--model", str(tmp_path), "--arch", "gfx942", "--with", "none")
    assert status == Exit.FAIL
    assert "NOT SERVED" in out


def test_help_is_that_of_the_kernels(explain_kernel):
    status, out, _ = explain_kernel("--help")
    assert status == Exit.PASS
    assert "--kv-cache-dtype" in out


def test_a_repository_without_kernels_cannot_run_it(explain_kernel, tmp_path):
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "agents.yaml").touch()
    status, _, err = explain_kernel("--arch", "gfx942", before=("--root", str(tmp_path)))
    assert status == Exit.CANNOT_RUN_HERE
    assert "this repository has no pagedkv.routing" in err
