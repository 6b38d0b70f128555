# SPDX-License-Identifier: Apache-2.0
"""What the data about kernels says, read and applied without `pagedkv.routing`, and the requests to try it on."""

from __future__ import annotations

import itertools
import random
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "pagedkv" / "routing" / "candidates"
KERNELS = {
    kernel["name"]: kernel
    for path in FOLDER.glob("*.toml")
    for kernel in tomllib.loads(path.read_text(encoding="utf-8"))["kernel"]
}
COMPUTE_UNITS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256, "sm_90": 132, "interpreter": 1}

HOME = {
    "arch": "gfx942",
    "phase": "mixed",
    "head_size": 128,
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "kv_scales": "none",
    "block_size": 16,
    "packing": "rows",
    "sides": "planes",
    "max_num_seqs": 256,
    "max_seq_len": 8192,
    "num_blocks": 1000,
}
"""What most kernels take."""

CHANGES = (
    *({"arch": arch} for arch in ("gfx90a", "gfx950", "sm_90", "interpreter")),
    *({"phase": phase} for phase in ("decode", "extend", "prefill")),
    *({"head_size": size} for size in (16, 40, 64, 80, 256, 512)),
    *({"num_q_heads": heads} for heads in (8, 80, 160)),
    *({"dtype": dtype} for dtype in ("float32", "float16")),
    *(
        {"kv_cache_dtype": dtype, "kv_scales": scales}
        for dtype in ("e4m3fn", "e4m3fnuz", "e5m2")
        for scales in ("unit", "tensor", "head", "token")
    ),
    *({"block_size": size} for size in (1, 32, 48, 544, 1056, 2048)),
    *({"packing": packing} for packing in ("native", "shuffle")),
    {"sides": "interleaved"},
    {"window": 100},
    {"softcap": 50.0},
    {"alibi": True},
    {"sinks": True},
    {"scale": 0.05},
    {"q_len": 4},
    {"causal": False},
    {"causal": False, "attn_type": "encoder_decoder"},
    {"causal": False, "attn_type": "encoder_only"},
    {"max_seq_len": 200_000},
    {"num_blocks": None},
    {"num_blocks": 70_000},
)
PROVIDERS = tuple(
    frozenset(chosen) for count in (1, 2, 3) for chosen in itertools.combinations(("aiter", "pagedkv", "vllm"), count)
)


def requests(seed: int = 1, longer: int = 4000) -> list[tuple[dict, frozenset[str]]]:
    """Every change and every pair of changes of each packing's home, then longer combinations; and who is installed."""
    rng = random.Random(seed)
    found = [
        (HOME | {"packing": packing} | first | second, rng.choice(PROVIDERS))
        for packing in ("rows", "native", "shuffle")
        for first, second in itertools.combinations_with_replacement(CHANGES, 2)
    ]
    for _ in range(longer):
        request = dict(HOME)
        for change in rng.sample(CHANGES, rng.randint(3, 6)):
            request |= change
        found.append((request, rng.choice(PROVIDERS)))
    return found


def lacks(name: str, request: dict, task: str) -> list[str]:
    """Features of a request that the data does not say a kernel takes. A change of kernel is followed."""
    limits = KERNELS[name]["limits"]
    found = [
        key for key, value in _asked(request, task).items() if value is not None and not _takes(limits[key], value)
    ]
    for branch in limits.get("batch_size", {}).get("branches", []):
        found += [f"{branch}: {key}" for key in lacks(branch, request, task)]
    if task == "prefill":
        wanted = {"mixed": {"extend", "prefill"}}.get(request["phase"], {request["phase"]})
        found += sorted(wanted - set(KERNELS[name]["serves"]))
    return found


def runs(name: str, request: dict, num_seqs: int) -> str:
    """The kernel that really runs for a batch: aiter's `_should_use_asm_kernel`, in our words."""
    if name != "aiter.paged_attention_common":
        return name
    rows = num_seqs * request["num_q_heads"]
    assembly = request["head_size"] == 128 and rows > 2 * COMPUTE_UNITS[request["arch"]]
    return "aiter.pa_fwd_asm" if assembly else "aiter.paged_attention_rocm"


def _asked(request: dict, task: str) -> dict[str, object]:
    hardware = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn", "sm_90": "e4m3fn"}.get(request["arch"])
    dtype, scales = request["kv_cache_dtype"], request["kv_scales"]
    asked: dict[str, object] = {
        key: request[key] for key in ("arch", "head_size", "dtype", "block_size", "packing", "sides")
    }
    if request["arch"] == "interpreter" and request["dtype"] == "bfloat16":
        asked["dtype"] = "interpreted_bfloat16"
    asked |= {
        "kv_cache_dtype": "hardware_fp8" if dtype == hardware else dtype,
        "kv_scales": None if scales == "none" else scales,
        "num_blocks": 10**12 if request["num_blocks"] is None else request["num_blocks"],
    }
    if task in {"write", "gather"}:
        return asked
    asked |= {key: request.get(key) for key in ("window", "softcap", "max_seq_len", "scale")}
    asked |= {key: request.get(key) or None for key in ("alibi", "sinks")}
    asked["attn_type"] = request.get("attn_type", "decoder")
    asked["gqa"] = request["num_q_heads"] // request["num_kv_heads"]
    asked["mask"] = "causal" if request.get("causal", True) else "full"
    asked["q_len"] = request.get("q_len", 1) if task == "decode" else None
    return asked


def _takes(limit: dict, value: object) -> bool:
    if "branches" in limit or limit.get("takes") == "any":
        return True
    if "takes" in limit:
        return limit["takes"] != "none" and value in limit["takes"]
    assert isinstance(value, int | float)
    in_range = limit.get("from", value) <= value <= limit.get("to", value)
    power = not limit.get("power_of_two") or int(value).bit_count() == 1
    return in_range and power and ("step" not in limit or value % limit["step"] == 0)
