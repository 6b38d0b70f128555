# SPDX-License-Identifier: Apache-2.0
"""The pocket hybrid served by vLLM with AMD machine code in its attention layers answers as with interpreted kernels.

Each of the two is a process of its own, this file as a script: Triton decides once whether it interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from families.processes import QUIET

ROOT = Path(__file__).parents[2]
PROMPT = (
    "Question: Sam has 7 coins. Joe has 2 coins. Leo has 8 coins. Zoe has 9 coins. How many coins do Sam and Joe have "
    "together?\nAnswer:"
)
ANSWER = " Sam has 7. Joe has 2. 7 + 2 = 9\n#### 9"


def serve(arch: str, result: str) -> None:
    """Answer the prompt and say what was launched; arch "" interprets."""
    from support.machine_code import OUTPUTS

    import pagedkv.attention.paged
    import pagedkv.cache.write  # noqa: F401 - defined while Triton compiles
    from amdgcn.launch import amdgcn

    with amdgcn(arch, outputs=OUTPUTS) if arch else nullcontext() as session:
        os.environ["TRITON_INTERPRET"] = "1"  # what the plugin asks of a CPU before it serves
        from vllm import SamplingParams

        from pagedkv.vllm_plugin.inspect import build_llm, require_served, served_layers

        llm = build_llm(
            str(ROOT / "evals/pocket/hybrid"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=192,
            max_num_seqs=4,
            enable_prefix_caching=False,
            num_gpu_blocks_override=64,
            kv_cache_memory_bytes=1 << 26,
            seed=0,
        )
        os.environ["TRITON_INTERPRET"] = "0" if arch else "1"
        [answer] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40))
        require_served(served_layers(llm))
    launches = [[each.kernel, each.wave_instructions] for each in session.launches] if session else []
    found = {"text": answer.outputs[0].text, "tokens": list(answer.outputs[0].token_ids), "launches": launches}
    Path(result).write_text(json.dumps(found))


def served(arch: str, folder: Path) -> dict:
    """What a process answers."""
    result = folder / f"{arch or 'interpreter'}.json"
    environment = os.environ | QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRITON_INTERPRET": "0" if arch else "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, arch, str(result)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return served("", tmp_path_factory.mktemp("interpreted"))


@pytest.mark.engine
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_pocket_hybrid_answers_as_with_interpreted_kernels(arch, interpreted, tmp_path, record_property):
    found = served(arch, tmp_path)
    assert (found["text"], found["tokens"]) == (interpreted["text"], interpreted["tokens"])
    assert found["text"] == ANSWER
    kernels = [kernel for kernel, _ in found["launches"]]
    assert {"attention_kernel", "_write_kernel"} <= set(kernels)
    record_property("launches", len(kernels))
    record_property("wave_instructions", sum(done for _, done in found["launches"]))


if __name__ == "__main__":
    serve(*sys.argv[1:])
