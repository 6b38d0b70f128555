# SPDX-License-Identifier: Apache-2.0
"""The wheels where nothing else of this repository is installed: vLLM finds pagedkv and serves a model; and the tools
that need next to nothing: fit, the audit of a kernel file, and `hileval compare`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import shown

import pagedkv
from families.processes import GPU
from hilgate.pytest_recorder import recorders

if find_spec("vllm") is None:  # imported where it is served; once more here would take seconds
    pytest.skip("needs package:vllm", allow_module_level=True)

ROOT = Path(__file__).parents[2]
OURS = ("_editable_impl_", "families", "hileval", "hilgate", "pagedkv")
"""How what this repository installs begins."""

SERVE = """
import importlib.util, json, multiprocessing, sys
from pathlib import Path

def main(model, prompts, result):
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.plugins import load_plugins_by_group

    # The engine's core is a process that finds the plugin by itself; a worker apart from it would import all once more.
    backend = {} if current_platform.is_cpu() else {"attention_backend": "CUSTOM"}
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=16, max_model_len=160, max_num_seqs=4, seed=0,
              enable_prefix_caching=False, mamba_ssm_cache_dtype="float32", num_gpu_blocks_override=64,
              gpu_memory_utilization=0.2, distributed_executor_backend="uni",
              worker_extension_cls="pagedkv.vllm_plugin.inspect.WorkerReport", **backend)
    params = SamplingParams(temperature=0.0, max_tokens=32, stop=["Question:"])
    answers = [output.outputs[0].text for output in llm.generate(json.loads(prompts), params, use_tqdm=False)]
    Path(result).write_text(json.dumps({
        "plugins": {name: found.__module__ for name, found in load_plugins_by_group("vllm.general_plugins").items()},
        "file": importlib.util.find_spec("pagedkv").origin,
        "layers": llm.collective_rpc("pagedkv_report")[0],
        "processes": len(multiprocessing.active_children()),
        "answers": answers,
    }))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

FOUND = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"


def python(fresh: Path, *arguments: str, **environment: str) -> str:
    """What a fresh environment's Python prints; nothing of this process's path reaches it but what notes it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    clean["PYTHONPATH"] = os.pathsep.join(recorders())
    command = [str(fresh / "bin" / "python"), *arguments]
    done = subprocess.run(
        command, cwd=fresh, env=clean | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-12000:]
    return done.stdout


def built(folder: Path, source: str) -> Path:
    """A wheel as `pip wheel` makes it, without a download."""
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, ROOT / source], check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of pagedkv."""
    return built(tmp_path_factory.mktemp("wheel"), "kernels")


def alone(folder: Path, wheel: Path, *packages: str) -> Path:
    """An environment with a wheel and these packages, without what else they may bring."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in packages:
        for file in {Path(str(file)).parts[0] for file in metadata.files(name) or ()} - {"..", "bin"}:
            (site / file).symlink_to(Path(str(metadata.distribution(name).locate_file(file))))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    return folder


def said(fresh: Path, *words: str | Path) -> tuple[int, str, str]:
    """Exit status, output and errors of a program of an environment, in an empty folder."""
    done = subprocess.run(
        [str(fresh / "bin" / str(words[0])), *map(str, words[1:])],
        cwd=fresh,
        env={"PATH": os.environ["PATH"], "HOME": str(fresh), "PYTHONPATH": os.pathsep.join(recorders())},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_wheel_has_code_and_data_and_needs_no_package(wheel):
    listing = subprocess.run(["git", "ls-files", "pagedkv"], cwd=ROOT / "kernels", capture_output=True, check=True)
    tracked = set(listing.stdout.decode().split())
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        info = next(name.partition("/")[0] for name in file.namelist() if ".dist-info/" in name)
        about = message_from_bytes(file.read(f"{info}/METADATA"))
        assert "Apache License" in file.read(f"{info}/licenses/LICENSE").decode()
    pages = {name for name in tracked if name.endswith(".md")} - {"pagedkv/CHANGELOG.md"}
    assert names == tracked - pages
    assert {"pagedkv/py.typed", "pagedkv/tuning/gfx942.toml", "pagedkv/routing/candidates/pagedkv.toml"} <= names
    assert (about["Name"], about["Version"]) == ("pagedkv", pagedkv.__version__)
    required = [one.partition("; ") for one in about.get_all("Requires-Dist")]
    assert {extra for _, _, extra in required} == {"extra == 'audit'", "extra == 'vllm'"}


CONFIG = ROOT / "tests/kernels/routing/configs/qwen3.5-27b.json"
KERNEL = ROOT / "examples/attend_paged.py"
TYPES = "*bf16:16, *bf16:16, *bf16:16, *i32:16, *bf16:16, i32, 256, 16"


def test_fit_needs_the_standard_library_alone(wheel, tmp_path):
    fresh = alone(tmp_path / "fresh", wheel)
    fit = ("python", "-m", "pagedkv.fit", CONFIG, "--weights", "20", "--max-model-len", "32768")
    status, out, err = said(fresh, *fit, "--gpu", "RX 7900 XT", "--tp", "2")
    assert (status, err) == (1, "")
    assert "Set --max-num-seqs 183 at most" in out
    assert said(fresh, *fit, "--memory", "80", "--max-num-seqs", "64")[0] == 0
    status, out, err = said(fresh, *fit, "--arch", "gfx7")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--arch: got gfx7; expected one of any, " in err


def test_the_audit_of_a_file_needs_triton_and_no_torch(wheel, tmp_path):
    fresh = alone(tmp_path / "fresh", wheel, "triton", "msgpack", "pyelftools")
    assert said(fresh, "python", "-c", "import torch")[0] == 1
    audit = ("python", "-m", "pagedkv.audit", f"{KERNEL}::attend", "--arch")
    status, out, _ = said(
        fresh, *audit, "gfx1201", "gfx942", "--signature", f"{TYPES}, 64", "--options", "num_stages=3"
    )
    assert status == 1
    assert re.search(r"^gfx1201 +65536 .* fail, spills: 0 at most", out, re.MULTILINE)
    assert re.search(r"^gfx942 +65792 .* fail, LDS: 65536 at most$", out, re.MULTILINE)
    status, out, _ = said(fresh, *audit, "gfx1201", "gfx1030", "--signature", f"{TYPES}, 16")
    assert re.search(r"^gfx1201 +\d+ +\d+ +0 +0 +[1-9]\d*  pass$", out, re.MULTILINE)
    status, out, _ = said(fresh, *audit, "gfx942", "--signature", f"{TYPES}, 16", "--options", "num_warps=32")
    assert (status, "2048 threads: 1024 at most" in out) == (1, True)
    status, out, _ = said(fresh, *audit, "gfx942", "--signature", f"{TYPES}, 33")
    assert (status, bool(re.search(r"does not compile: CompilationError at \d+:\d+: arange's range", out))) == (1, True)
    (fresh / "broken.py").write_text("import torch\n")
    for words, expected in {
        (f"{fresh}/broken.py::attend", "--arch", "gfx942", "--signature", "i32"): "No module named 'torch'",
        (KERNEL, "--arch", "gfx942", "--signature", "i32"): "expected FILE.py::KERNEL; ",
        (f"{KERNEL}::other", "--arch", "gfx942", "--signature", "i32"): "there is no such kernel",
        (f"{KERNEL}::attend", "--arch", "gfx9999", "--signature", "i32"): "--arch: got gfx9999",
        (f"{KERNEL}::attend", "--arch", "gfx942", "--signature", "i32, 64"): "got 2 entries; expected 9, for q_ptr",
        (f"{KERNEL}::attend", "--arch", "gfx942", "--signature", f"{TYPES}, i32"): "got i32 for TOKENS",
        (f"{KERNEL}::attend", "--arch", "gfx942", "--signature", f"{TYPES}, *f32"): "got '*f32' for TOKENS",
    }.items():
        status, out, err = said(fresh, "python", "-m", "pagedkv.audit", *words)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert expected in err


def test_compare_needs_scipy_alone(tmp_path):
    runs, folder = tmp_path / "runs", tmp_path / "wheel"
    words = [sys.executable, ROOT / "examples/lm_eval_runs.py", runs]
    offline = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, check=True, capture_output=True, env=os.environ | offline)
    fresh = alone(tmp_path / "fresh", built(folder, "evals"), "scipy", "numpy")
    for name in ("hilgate", "pagedkv", "lm_eval", "typer", "pydantic"):
        assert said(fresh, "python", "-c", f"import {name}")[0] == 1
    (before,), (after,) = runs.glob("before/samples_*"), runs.glob("after/samples_*")
    status, out, err = said(fresh, "hileval", "compare", before, after)
    (command,) = shown.commands((ROOT / "docs/how-to/compare-two-runs.md").read_text(encoding="utf-8"))
    assert (status, err, shown.not_printed(command.prints, out)) == (command.status, "", "")
    assert said(fresh, "hileval", "compare", before, before)[0] == 0
    status, out, err = said(fresh, "hileval", "compare", before, after, "--margin", "x")
    assert (status, out, err.partition("\n")[0]) == (2, "", "error: argument --margin: got x; expected 0.001 to 0.5")
    cut = fresh / "cut.jsonl"
    cut.write_text(before.read_text()[:-40])
    status, out, err = said(fresh, "hileval", "compare", before, cut)
    assert (status, out) == (3, "")
    assert err.startswith("error: not stored answers: no JSON: ")
    assert f"  where: {cut}:400\n" in err
    status, _, err = said(fresh, "hileval", "gate", "pocket-hybrid")
    assert (status, "pip install 'hileval[gates]'" in err) == (5, True)


@pytest.mark.engine
def test_vllm_finds_the_wheel_alone_and_answers_alike(wheel, tmp_path, record_property):
    # A release is sound only where these are the bytes that its wheel has (hilgate.release.bundle).
    record_property("wheel", wheel.name)
    record_property("sha256", f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    fresh = tmp_path / "fresh"
    venv.create(fresh, symlinks=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    for folder in (Path(path) for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}):
        for entry in folder.iterdir():
            if not entry.name.startswith(OURS) and not (site / entry.name).is_symlink():
                (site / entry.name).symlink_to(entry)
    modules = ("families", "hileval", "hilgate", "pagedkv", "vllm")
    assert python(fresh, "-c", FOUND, *modules) == "['vllm']\n"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", fresh / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    assert python(fresh, "-c", FOUND, *modules) == "['pagedkv', 'vllm']\n"

    evals = ROOT / "evals"
    recorded = json.loads((evals / "baselines/pocket-hybrid.json").read_text())
    assert recorded["setting"]["attention_backend"] == "CPUAttentionBackend"
    questions = [json.loads(line) for line in (evals / "pocket/data/test.jsonl").read_text().splitlines()[:3]]
    prompts = json.dumps([f"Question: {one['question']}\nAnswer:" for one in questions])
    (fresh / "serve.py").write_text(SERVE)
    quiet = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {} if GPU else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet |= {} if GPU else {"TRITON_INTERPRET": "1", "PAGEDKV_INTERPRETER": "fast"}
    python(fresh, "serve.py", str(evals / "pocket/hybrid"), prompts, "result.json", **quiet)
    result = json.loads((fresh / "result.json").read_text())

    assert result["plugins"]["pagedkv"] == "pagedkv.vllm_plugin"
    assert Path(result["file"]) == site / "pagedkv" / "__init__.py"
    assert result["processes"] == 1
    assert len(result["layers"]) == 2
    for layer in result["layers"]:
        assert layer["backend"] == "pagedkv.vllm_plugin.backend.PagedKVBackend"
        assert layer["attentions"] > 0
    assert result["answers"] == [question["text"] for question in recorded["questions"][:3]]
