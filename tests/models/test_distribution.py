# SPDX-License-Identifier: Apache-2.0
"""The wheel of pagedkv: vLLM finds it where nothing else of this repository is installed, and it serves a model."""

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
from importlib.util import find_spec
from pathlib import Path

import pytest

import pagedkv
from families.processes import GPU

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
    """What a fresh environment's Python prints; nothing of this process's path reaches it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    command = [str(fresh / "bin" / "python"), *arguments]
    done = subprocess.run(
        command, cwd=fresh, env=clean | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-12000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel as `pip wheel ./kernels` makes it, without a download."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, ROOT / "kernels"], check=True)
    (made,) = folder.iterdir()
    return made


def test_the_wheel_has_code_and_data_and_needs_no_package(wheel):
    listing = subprocess.run(["git", "ls-files", "pagedkv"], cwd=ROOT / "kernels", capture_output=True, check=True)
    tracked = set(listing.stdout.decode().split())
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = next(name.partition("/")[0] for name in file.namelist() if ".dist-info/" in name)
        metadata = message_from_bytes(file.read(f"{about}/METADATA"))
        assert "Apache License" in file.read(f"{about}/licenses/LICENSE").decode()
    pages = {name for name in tracked if name.endswith(".md")} - {"pagedkv/CHANGELOG.md"}
    assert names == {name for name in tracked - pages if not name.startswith("pagedkv/audit/")}
    assert {"pagedkv/py.typed", "pagedkv/tuning/gfx942.toml", "pagedkv/routing/candidates/pagedkv.toml"} <= names
    assert (metadata["Name"], metadata["Version"]) == ("pagedkv", pagedkv.__version__)
    assert metadata.get_all("Requires-Dist") == ["vllm==0.32.0; extra == 'vllm'"]


def test_the_page_says_how_large_it_is(wheel):
    page = (ROOT / "docs/reference/kernels.md").read_text()
    (said,) = re.findall(r"pip wheel --no-deps \./kernels makes it: (\d+) KiB", page)
    assert abs(wheel.stat().st_size / 1024 - int(said)) < 0.1 * int(said)


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
