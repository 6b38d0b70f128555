"""The declarations of what a compiler does wrong: what an entry must say, and what it holds for."""

import pytest

from pagedkv.audit.cases import Case, LaunchConfiguration
from pagedkv.audit.declared import EVERY, load_declared
from pagedkv.errors import InvalidFileError

NARROW = """[[narrow]]
triton = "3.8.0"
row = "gfx942/ours/a/attend"
pointers = ["value_cache"]
why = "it does"
"""


def test_a_narrow_load_is_declared_for_its_row_and_its_compiler(tmp_path):
    path = tmp_path / "declared.toml"
    path.write_text(NARROW)
    declared = load_declared(path)
    rows = [("gfx942", "3.8.0"), ("gfx950", "3.8.0"), ("gfx942", "3.6.0")]
    found = [declared.narrow_pointers(f"{arch}/ours/a/attend", triton) for arch, triton in rows]
    assert found == [("value_cache",), (), ()]


VALID = {
    "kernel": '"vllm/scan"',
    "triton": '"3.6.0"',
    "arch": '["gfx942"]',
    "configurations": '["a"]',
    "says": '"assert"',
    "why": '"because"',
}

INVALID = [
    pytest.param({"kernel": '"vllm/scam"'}, "got vllm/scam; known: vllm/scan", id="kernel"),
    pytest.param({"arch": '["gfx1100"]'}, "arch: got gfx1100", id="arch"),
    pytest.param({"configurations": '["z"]'}, "configurations: got z; known: every, a, b", id="configuration"),
    pytest.param({"says": '"("'}, "no regular expression", id="expression"),
]


def declare(tmp_path, **changes):
    path = tmp_path / "declared.toml"
    path.write_text("[[crash]]\n" + "".join(f"{key} = {value}\n" for key, value in (VALID | changes).items()))
    declared = load_declared(path)
    configurations = [LaunchConfiguration("vllm/scan", name, 2, autotuned=True) for name in "ab"]
    declared.check_names(Case("mamba", "scan", ("scan",), list, {}, configuration=each) for each in configurations)
    return declared.crashes


def test_a_declaration_is_read(tmp_path):
    [one] = declare(tmp_path)
    assert (one.arch, one.configurations) == (("gfx942",), ("a",))
    [every] = declare(tmp_path, configurations='["every"]')
    assert every.configurations == (EVERY,)


@pytest.mark.parametrize(("change", "message"), INVALID)
def test_an_invalid_declaration_is_refused(tmp_path, change, message):
    with pytest.raises(InvalidFileError, match=message):
        declare(tmp_path, **change)
