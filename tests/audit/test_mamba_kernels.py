# SPDX-License-Identifier: Apache-2.0
"""An autotuned kernel is a case for each configuration that its tuner would try."""

from types import SimpleNamespace

from pagedkv.audit.mamba_kernels import autotuned


def test_an_autotuned_kernel_takes_each_configuration():
    configs = [SimpleNamespace(kwargs={"BLOCK_SIZE_M": m}, num_stages=2, num_warps=4) for m in (64, 32)]
    tuner = SimpleNamespace(configs=configs, base_fn=list)
    taken = []
    made = autotuned("vllm", tuner, lambda: taken.extend(tuner.configs))
    assert [case.id("gfx942", "list") for case in made] == [
        "gfx942/vllm/list/M64-stages2-warps4",
        "gfx942/vllm/list/M32-stages2-warps4",
    ]
    for case in reversed(made):
        case.launch()
    assert taken == [configs[1], configs[0]]
    assert tuner.configs is configs
