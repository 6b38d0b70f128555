"""The audit of the Mamba packages: stand-ins for extensions, what a crash means, both sides of a declaration."""

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from pagedkv.audit import cli
from pagedkv.audit.errors import Exit, LdsExceededError
from pagedkv.audit.findings import exit_status
from pagedkv.audit.isolation import Crash
from pagedkv.audit.mamba import imports
from pagedkv.audit.mamba.audit import judge_all
from pagedkv.audit.mamba.declared import EVERY, Declared, InvalidDeclarationError, load_declared
from pagedkv.audit.mamba.judge import Compilation
from pagedkv.audit.mamba.kernel import Kernel, autotuned
from pagedkv.audit.mamba.report import format_report

CRASHED = RuntimeError("PassManager::run failed")
CRASHED.add_note("; the compiler printed: CanonicalizePointers.cpp:1433: ConvertSCFIfOp")
TOO_LARGE = LdsExceededError("scan", 98304, 65536)
TIMED_OUT = Crash("no answer within the time limit", timed_out=True)
DECLARED = Declared("vllm/scan", "3.6.0", ("gfx942",), (EVERY,), "Canonicalize.*ConvertSCFIf", "a pointer in an if")


def kernel(*configurations, tuned=True):
    return Kernel("vllm", "scan", list, dict.fromkeys(configurations, contextlib.nullcontext), autotuned=tuned)


def judged(results, *declared, tuned=True, arch="gfx942", version="3.6.0", missing=()):
    """Findings of the configurations by name, and that of the kernel under "kernel"."""
    of = kernel(*results, *missing, tuned=tuned)
    compilations = [Compilation(arch, of, name, result, 1.0) for name, result in results.items()]
    findings = judge_all(compilations, declared, version)
    return {each.labels.get("configuration", "kernel"): each for each in findings}


@pytest.fixture
def good(figures):
    return [figures(kernel="scan")]


def test_what_compiles_and_fits_passes(good):
    findings = judged({"a": good, "b": good})
    assert {name: each.outcome for name, each in findings.items()} == {"a": "pass", "b": "pass", "kernel": "pass"}
    assert findings["kernel"].numbers["usable"] == 2
    assert findings["a"].id == "gfx942/vllm/scan/a"


def test_one_crash_that_nobody_declared_fails_although_others_compile(good):
    """The autotuner compiles every configuration and catches no such error: the launch is lost."""
    findings = judged({"a": good, "b": CRASHED})
    assert findings["b"].outcome == "fail"
    assert (
        "nobody declared: RuntimeError: PassManager::run failed; the compiler printed: Canon" in findings["b"].message
    )


def test_a_declared_crash_passes_and_says_why():
    findings = judged({"a": CRASHED, "b": CRASHED}, DECLARED)
    assert {each.outcome for each in findings.values()} == {"pass"}
    assert "none of 2 configurations" in findings["kernel"].message
    assert "a pointer in an if" in findings["kernel"].message


def test_a_declared_crash_that_does_not_happen_fails(good):
    findings = judged({"a": CRASHED, "b": good, "c": TOO_LARGE}, DECLARED)
    assert [findings[name].outcome for name in "abc"] == ["pass", "fail", "fail"]
    assert "remove the declaration" in findings["b"].message


def test_another_crash_than_the_declared_one_fails():
    findings = judged({"a": RuntimeError("out of registers")}, DECLARED)
    assert findings["a"].outcome == "fail"
    assert "otherwise than declared" in findings["a"].message


@pytest.mark.parametrize(("arch", "version"), [("gfx950", "3.6.0"), ("gfx942", "3.8.0")])
def test_a_declaration_holds_for_its_arch_and_its_triton(arch, version):
    assert judged({"a": CRASHED}, DECLARED, arch=arch, version=version)["a"].outcome == "fail"


def test_an_oversize_configuration_is_dropped_by_an_autotuner_and_by_nothing_else(good):
    assert judged({"a": good, "b": TOO_LARGE})["b"].outcome == "pass"
    alone = judged({"a": good, "b": TOO_LARGE}, tuned=False)["b"]
    assert alone.outcome == "fail"
    assert "98304 B of LDS" in alone.message


def test_a_kernel_needs_one_configuration_that_fits():
    finding = judged({"a": TOO_LARGE, "b": TOO_LARGE})["kernel"]
    assert finding.outcome == "fail"
    assert "2 oversize" in finding.message


def test_a_timeout_is_no_answer(good):
    findings = judged({"a": TIMED_OUT}, DECLARED)
    assert {each.outcome for each in findings.values()} == {"inconclusive"}
    assert judged({"a": TIMED_OUT, "b": good})["kernel"].outcome == "pass"


@pytest.mark.parametrize("kernels", [[], ["other"], ["scan", "scan"]], ids=["nothing", "another", "twice"])
def test_a_launch_that_compiles_anything_but_its_kernel_fails(kernels, figures):
    finding = judged({"a": [figures(kernel=name) for name in kernels]})["a"]
    assert finding.outcome == "fail"
    assert "must compile scan alone" in finding.message


def test_a_kernel_is_not_judged_by_some_of_its_configurations():
    assert "kernel" not in judged({"a": TOO_LARGE}, missing=["b"])


def test_the_report_fits_80_columns_and_names_what_is_declared():
    findings = list(judged({"a": CRASHED}, DECLARED).values())
    report = format_report(findings, status=Exit.PASS, seconds=1.0)
    assert "declared: gfx942/vllm/scan\n" in report
    assert max(map(len, report.splitlines())) == 80
    assert exit_status(findings, compiled=0) == Exit.NOTHING_COMPILED


VALID = {
    "kernel": '"vllm/scan"',
    "triton": '"3.6.0"',
    "arch": '["gfx942"]',
    "configurations": '["a"]',
    "says": '"assert"',
    "why": '"because"',
}

INVALID = [
    pytest.param({"kernel": '"vllm/scam"'}, "no kernel vllm/scam; known: vllm/scan", id="kernel"),
    pytest.param({"arch": '["gfx1100"]'}, "arch has .*gfx1100", id="arch"),
    pytest.param({"arch": "[]"}, "arch has", id="no arch"),
    pytest.param({"configurations": '["z"]'}, "configurations has .*z.*known: a, b", id="configuration"),
    pytest.param({"configurations": '"all"'}, "configurations has 'all'", id="a word for every one"),
    pytest.param({"says": '"("'}, "no regular expression", id="expression"),
    pytest.param({"why": '""'}, "texts that say something", id="no reason"),
    pytest.param({"whence": '"x"'}, "got .*whence", id="unknown key"),
]


def declare(tmp_path, **changes):
    path = tmp_path / "declared.toml"
    path.write_text("[[crash]]\n" + "".join(f"{key} = {value}\n" for key, value in (VALID | changes).items()))
    return load_declared([kernel("a", "b")], path)


def test_a_declaration_is_read(tmp_path):
    [one] = declare(tmp_path)
    assert (one.arch, one.configurations) == (("gfx942",), ("a",))
    [every] = declare(tmp_path, configurations='"every"')
    assert every.configurations == (EVERY,)


@pytest.mark.parametrize(("change", "message"), INVALID)
def test_an_invalid_declaration_is_refused(tmp_path, change, message):
    with pytest.raises(InvalidDeclarationError, match=message):
        declare(tmp_path, **change)


@pytest.mark.parametrize("text", ["[[crash]", "[[crush]]\n"])
def test_a_file_that_is_not_one_is_refused(tmp_path, text):
    path = tmp_path / "declared.toml"
    path.write_text(text)
    with pytest.raises(InvalidDeclarationError):
        load_declared([], path)


def test_an_autotuned_kernel_takes_one_configuration_after_the_other():
    configs = [SimpleNamespace(kwargs={"BLOCK_SIZE_M": m}, num_stages=2, num_warps=4) for m in (64, 32)]
    tuner = SimpleNamespace(configs=configs, base_fn=list)
    made = autotuned("vllm", tuner, list)
    assert list(made.configurations) == ["M64-stages2-warps4", "M32-stages2-warps4"]
    with made.configurations["M32-stages2-warps4"]():
        assert tuner.configs == [configs[1]]
    assert tuner.configs is configs


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A mamba_ssm whose `__init__` needs its extension and whose kernels do not."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda\nscan = selective_scan_cuda.fwd\n")
    (folder / "kernels.py").write_text("import selective_scan_cuda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in {"mamba_ssm", "selective_scan_cuda"}]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_kernels_are_importable_without_the_extension():
    module = imports.mamba_ssm("kernels")
    assert isinstance(module.selective_scan_cuda, ModuleType)
    assert not hasattr(sys.modules["mamba_ssm"], "scan"), "its __init__ must not have run"


def test_a_real_extension_is_used_as_it_is(package):
    (package / "selective_scan_cuda.py").write_text("fwd = 1\n")
    importlib.invalidate_caches()
    assert imports.mamba_ssm("kernels").selective_scan_cuda.fwd == 1
    assert sys.modules["mamba_ssm"].scan == 1, "its own __init__ has run"


def test_an_option_that_does_not_exist_is_misuse(capsys):
    assert cli.main(["--arch", "gfx1100"], program="pagedkv.audit.mamba", audit="pagedkv.audit.mamba.audit") == 2
    assert "gfx1100" in capsys.readouterr().err
