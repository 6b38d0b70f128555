# SPDX-License-Identifier: Apache-2.0
"""`pytest --amdgcn ARCH`: the device tests of the kernels, unchanged, on AMD machine code (kernels/amdgcn).

A test that the machine code of some arch and Triton fails is declared in `DECLARED`, and then must fail: when the
compiler is repaired, the declaration is out of date, and the test is red until it goes. What cannot run so is in
`NOT_RUN`. `python -m support.machine_code` prints which device tests run on which arch (docs/reference/executor.md).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hilgate.conditions import NEEDS

OUTPUTS = {
    "_write_kernel": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "packed_write_kernel": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "rotated_write_kernel": ("query", "key", "key_cache", "value_cache", "key_scale", "value_scale"),
    "_gather_kernel": ("key", "value"),
    "packed_gather_kernel": ("key", "value"),
    "attention_kernel": ("out", "lse"),
    "merge_kernel": ("out", "lse"),
    "reduce_kernel": ("out", "out_lse"),
    "mla_decode_kernel": ("out", "lse", "partial", "partial_lse"),
    "mla_reduce_kernel": ("out", "lse"),
    "mla_schedule_kernel": ("works", "work_indptr", "reduce_indptr"),
    "gdn_decode_kernel": ("out", "states", "keys", "updates", "decays"),
    "ssd_carry_kernel": ("carried", "falls"),
    "ssd_prefill_kernel": ("out", "states"),
    # vLLM's
    "cp_mha_gather_cache_kernel": ("key_ptr", "value_ptr"),
    "reshape_and_cache_shuffle_kernel": ("key_cache_ptr", "value_cache_ptr"),
    "reshape_and_cache_kernel_flash": ("key_cache_ptr", "value_cache_ptr"),
    "kernel_paged_attention_2d": ("output_ptr",),
    "_fwd_kernel": ("Out",),
    "kernel_unified_attention": ("output_ptr", "segm_output_ptr", "segm_max_ptr", "segm_expsum_ptr"),
    "reduce_segments": ("output_ptr",),
    "_fwd_grouped_kernel_stage1": ("Att_Out",),
    "_fwd_kernel_stage2": ("o", "lse"),
}
"""What each kernel may write; a write to any other argument is a fault."""

DECLARED: dict[tuple[str, str, str], str] = {
    ("gfx942", "3.6.0", r"^tests/vllm_kernels/test_mla\.py::test_mla_decode_of_16_rope_channels$"): (
        "products of 16 channels halve the accumulator that comes in (the planted bug products-of-16-channels)"
    ),
}
"""(arch, Triton, regular expression found in a test's id) -> why the machine code is known to be wrong."""
NOT_RUN = {
    "tests/kernels/attention/test_paged.py::test_paged_attention_in_a_captured_graph": "needs a CUDA graph",
    "tests/kernels/gdn/test_decode.py::test_verify_in_a_captured_graph": "needs a CUDA graph",
    "tests/kernels/mla/test_decode.py::test_mla_decode_in_a_captured_graph": "needs a CUDA graph",
    "tests/vllm_kernels/test_write.py::test_write_to_a_quantised_cache": "sets a mode of FP8 conversions",
    "tests/vllm_kernels/test_unified_attention.py::test_settings[bs16-q8kv2-d64-segments-window": "has v_max3_i32",
    "tests/vllm_kernels/test_unified_attention.py::test_settings[bs48-q4kv4-d128-segments-window": "has v_max3_i32",
    "tests/vllm_kernels/test_declared.py::test_shuffle_write_to_a_quantised_cache": "the same mode",
    "tests/kernels/test_selfcheck.py::test_the_command_prints_a_line_for_each_gpu": "asks this machine for its GPUs",
    "tests/kernels/test_selfcheck.py::test_a_wrong_number_is_said_and_red": "asks this machine for its GPUs",
}
"""Beginning of a test's id -> why no arch's machine code runs it."""
NOT_RUN_ON = {
    "gfx1201": {
        "tests/kernels/mla/": "MLA is refused there",
        "tests/amdgcn/compiled/test_planted.py::test_a_miscompile": "MLA is refused there",
        "tests/amdgcn/compiled/test_atomics.py": "no kernel that is promised there has atomics",
    }
}
"""Arch -> beginning of a test's id -> why its machine code does not run it."""
NO_COVER = {
    "tests/benchmarks": "the same kernels, in shapes of measurements",
    "tests/families": "starts an engine; the pocket hybrid's prompt is tests/models/test_machine_code.py",
    "tests/mamba": "vLLM's kernels; run by hand, gfx942: 96 of 113 agree",
    "tests/vllm_kernels": "vLLM's kernels; area vllm runs them so",
    "tests/models": "starts an engine; the pocket hybrid's prompt is tests/models/test_machine_code.py",
}
"""Folder of device tests that the exhaustive steps leave out -> why."""

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def declared(arch: str, triton: str, test: str) -> str:
    """Why the test is known to fail there; empty if it is not."""
    found = [why for (a, t, pattern), why in DECLARED.items() if (a, t) == (arch, triton) and re.search(pattern, test)]
    return found[0] if found else ""


class MachineCode:
    """Opens the machine for each test.

    Args:
        arch: One of `targets.TARGETS`.
    """

    def __init__(self, arch: str) -> None:
        from amdgcn.targets import TARGETS

        if arch not in TARGETS:
            raise pytest.UsageError(f"--amdgcn {arch}: expected one of {', '.join(TARGETS)}")
        self.arch = arch

    def pytest_collection_modifyitems(self, config, items):
        import triton

        not_run = (*NOT_RUN, *NOT_RUN_ON.get(self.arch, {}))
        without = [item for item in items if item.nodeid.startswith(not_run)]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
        for item in items:
            if why := declared(self.arch, triton.__version__, item.nodeid):
                item.user_properties.append((NEEDS, f"package:triton!={triton.__version__}"))
                item.add_marker(pytest.mark.xfail(reason=f"declared: {why}", raises=AssertionError, strict=True))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        from amdgcn.errors import ProgramFault
        from amdgcn.launch import amdgcn

        with amdgcn(self.arch, outputs=OUTPUTS) as session:
            try:
                return (yield)
            except ProgramFault as fault:
                item.user_properties += [(f"fault_{name}", str(value)) for name, value in fault.where.items()]
                raise
            finally:
                done = session.launches
                item.user_properties.append(("launches", len(done)))
                if done:
                    item.user_properties.append(("wave_instructions", sum(each.wave_instructions for each in done)))


def table() -> list[str]:
    """Lines of a Markdown table: folders of device tests, and which run on the machine code of each arch."""
    from amdgcn.targets import TARGETS

    files = [path.relative_to(ROOT).as_posix() for path in sorted(TESTS.rglob("test_*.py"))]
    folders = {name.rpartition("/")[0] for name in files if "mark.device" in (ROOT / name).read_text()}
    lines = [f"| device tests in | {' | '.join(TARGETS)} | but for |", "|---" * (len(TARGETS) + 2) + "|"]
    for folder in sorted(folders):
        but = [f"`{test.split('::')[1]}`, {why}" for test, why in NOT_RUN.items() if test.rpartition("/")[0] == folder]
        for (arch, triton, pattern), why in DECLARED.items():
            if pattern.startswith(f"{folder}/"):
                test = pattern.partition("::")[2].replace("\\", "").rstrip("$")
                but.append(f"`{test}`, which {arch} of Triton {triton} fails: {why}")
        left_out = {arch: NOT_RUN_ON.get(arch, {}).get(f"{folder}/", "") for arch in TARGETS}
        but += [f"{arch}: {why}" for arch, why in left_out.items() if why]
        but = [NO_COVER[folder]] if folder in NO_COVER else but
        run = ("no" if folder in NO_COVER or left_out[arch] else "all" for arch in TARGETS)
        lines.append(f"| {folder} | {' | '.join(run)} | {'; '.join(but)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))  # noqa: T201
