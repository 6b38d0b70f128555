# SPDX-License-Identifier: Apache-2.0
"""Configurations in the two formats of vLLM, written here with their published values."""

import pytest
import yaml

from hileval.engines.vllm_engine import structured
from hileval.gates.declare import Gate
from hileval.gates.foreign import ForeignConfigError, as_yaml, read_foreign
from hilgate.errors import Exit

SUPER = """
model_name: "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
accuracy_threshold: 0.93
num_questions: 1319
num_fewshot: 5
startup_max_wait_seconds: 1200
env: {VLLM_ROCM_USE_AITER: "1"}
server_args: >-
  --enforce-eager --max-model-len 4096 --tensor-parallel-size 4 --enable-expert-parallel --mamba-backend triton
  --speculative-config '{"method":"mtp","num_speculative_tokens":5}'
"""
NANO = """
model_name: "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8"
tasks:
- name: "gsm8k"
  metrics:
  - {name: "exact_match,strict-match", value: 0.7142}
  - {name: "exact_match,flexible-extract", value: 0.4579}
limit: 250
num_fewshot: 5
max_model_len: 262144
kv_cache_dtype: fp8
enforce_eager: false
apply_chat_template: true
"""


@pytest.fixture
def read(tmp_path):
    def reading(text, name="Some_Model-TP4.yaml", **options):
        path = tmp_path / name
        path.write_text(text)
        return read_foreign(path, **options)

    return reading


def test_a_gsm8k_config_keeps_its_promise_as_the_floor(read):
    key, gate = read(SUPER)
    assert key == "some_model-tp4"
    assert gate.floor == pytest.approx(0.93 - 0.08)
    assert (gate.filter, gate.gpus, gate.num_fewshot) == ("flexible", 4, 5)
    assert gate.engine_args == {
        "enforce_eager": True,
        "max_model_len": 4096,
        "enable_expert_parallel": True,
        "mamba_backend": "triton",
        "speculative_config": '{"method":"mtp","num_speculative_tokens":5}',
        "tensor_parallel_size": 4,
    }
    assert structured(gate.engine_args["speculative_config"]) == {"method": "mtp", "num_speculative_tokens": 5}
    assert gate.env == {"VLLM_ROCM_USE_AITER": "1"}
    assert gate.published[0].value == 0.93


def test_its_own_backend_is_demanded(read):
    assert read(SUPER)[1].attention_backend == "pagedkv"
    gate = read(SUPER.replace("--enforce-eager", "--enforce-eager --attention-backend ROCM_AITER_FA"))[1]
    assert gate.attention_backend == "ROCM_AITER_FA"
    assert "attention_backend" not in gate.engine_args


def test_its_own_tolerance_counts(read):
    assert read(SUPER + "tolerance: 0.03\n")[1].floor == pytest.approx(0.90)


def test_an_lm_eval_config_gates_the_filter_that_the_model_follows(read):
    _, gate = read(NANO, gpus=2)
    assert (gate.filter, gate.protocol, gate.gpus) == ("strict", "chat", 2)
    assert gate.floor == pytest.approx(0.7142 * 0.92)
    assert gate.engine_args["kv_cache_dtype"] == "fp8"
    assert gate.engine_args["enforce_eager"] is False
    assert (gate.published[0].n, gate.published[0].kind) == (250, "threshold")
    assert "the first questions" in gate.published[0].metric


def test_what_is_written_is_read_back_as_the_same_gate(read):
    for text in (SUPER, NANO):
        key, gate = read(text)
        assert Gate.model_validate(yaml.safe_load(as_yaml(key, gate))[key]) == gate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read"),
        ("model_name: x", "neither `accuracy_threshold` nor `tasks`"),
        (SUPER + "acuracy: 3\n", "acuracy: Extra inputs"),
        (SUPER.replace("0.93", "93"), "accuracy_threshold: Input should be less than or equal to 1"),
        (SUPER.replace("0.93", ".nan"), "accuracy_threshold"),
        (SUPER.replace("--enforce-eager", "eager"), "'eager' follows no option"),
        (NANO.replace('"gsm8k"', "mmlu_pro"), "tasks: mmlu_pro; only gsm8k"),
        (NANO + "backend: sglang\n", "backend: 'sglang'"),
        (NANO + 'gen_kwargs: "temperature=0.7"\n', "answers are sampled"),
        (NANO + 'gen_kwargs: "temperature=0,until=<|END|>"\n', "until cannot be passed on"),
        (NANO + "fewshot_as_multiturn: true\n", "fewshot_as_multiturn: examples are one message here"),
        (NANO.replace("exact_match", "acc"), "no known metric in acc,strict-match"),
    ],
)
def test_what_a_gate_cannot_keep_is_refused_by_name(read, text, message):
    with pytest.raises(ForeignConfigError, match=message) as caught:
        read(text)
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ForeignConfigError, match="cannot be read"):
        read_foreign(tmp_path / "none.yaml")
