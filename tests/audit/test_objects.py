# SPDX-License-Identifier: Apache-2.0
"""Code objects that an earlier run compiled: a key that sees whatever the code depends on, and files that are whole."""

import os
import shutil
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedkv.audit import __main__ as cli
from pagedkv.audit import objects
from pagedkv.audit.compile import LdsExceededError, MachineCode, probe, specialisations
from pagedkv.audit.objects import ObjectStore, find_or_compile, object_key

SOURCE = """
from typing import NamedTuple

import triton
import triton.language as tl

OFFSET = tl.constexpr(1)
KIND = tl.float16

class Pair(NamedTuple):
    first: object
    second: object

@triton.jit
def deeper(x):
    return x + OFFSET + sizes.STEP

@triton.jit
def helper(x):
    return Pair(deeper(x).to(KIND), x).first

@triton.jit
def kernel(x_ptr, out_ptr, SIDE: tl.constexpr):
    offsets = tl.arange(0, SIDE)
    tl.store(out_ptr + offsets, helper(tl.load(x_ptr + offsets)))
"""


@pytest.fixture
def key(run_source):
    """key(old, new, ...): of the kernel above with one text replaced, in the same file of the same folder."""

    def make(old="", new="", *, arch="gfx942", step=2, side=64, folder="", **options):
        sizes = types.ModuleType("sizes")
        sizes.STEP = step
        scope = run_source(SOURCE, old, new, folder, sizes=sizes)
        tile = torch.empty(side)
        [wanted] = specialisations(arch, lambda: scope["kernel"][(1,)](tile, tile, SIDE=side, **options))
        return object_key(wanted)

    return make


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(("deeper(x).to", "deeper(x * 2).to"), id="a helper"),
        pytest.param(("x + OFFSET", "x - OFFSET"), id="a helper of a helper"),
        pytest.param(("constexpr(1)", "constexpr(2)"), id="a constant"),
        pytest.param(("KIND = tl.float16", "KIND = tl.bfloat16"), id="a dtype"),
        pytest.param(("first: object\n    second:", "second: object\n    first:"), id="the fields of a named tuple"),
        pytest.param(("offsets, helper", "offsets,  helper"), id="the kernel"),
        pytest.param(("KIND =", "\nKIND ="), id="its line"),
        pytest.param({"step": 3}, id="a value of another module"),
        pytest.param({"folder": "elsewhere"}, id="its file"),
        pytest.param({"side": 128}, id="a launch size"),
        pytest.param({"num_warps": 8}, id="an option"),
        pytest.param({"waves_per_eu": 2}, id="an option of the AMD backend"),
        pytest.param({"arch": "gfx950"}, id="the arch"),
    ],
)
def test_the_key_sees_a_change_of(edit, key):
    assert (key(**edit) if isinstance(edit, dict) else key(*edit)) != key()


@pytest.mark.parametrize(
    "flag", ["AMDGCN_SCALARIZE_PACKED_FOPS", "AMDGCN_USE_BUFFER_ATOMICS", "TRITON_HIP_USE_BLOCK_PINGPONG"]
)
def test_the_key_sees_a_flag(flag, key, monkeypatch):
    before = key()
    monkeypatch.setenv(flag, "1")
    assert key() != before


def test_the_key_sees_another_compiler_and_nothing_else(key, monkeypatch):
    before = key()
    assert key() == before
    monkeypatch.setenv("HOME", "/elsewhere")
    assert key() == before
    monkeypatch.setattr(objects, "triton_key", lambda: "3.6.0, built again")
    assert key() != before


@pytest.mark.parametrize("name", ["audit/compile.py", "audit/code_object.py", "audit/machine.py", "arch.py"])
def test_the_key_sees_the_code_that_compiles_and_reads(name, key, monkeypatch, tmp_path):
    """Kept figures of LDS survived a change of the code that writes them."""
    package = tmp_path / "pagedkv"
    for maker in objects.MAKERS:
        (package / maker).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(objects.__file__).parents[1] / maker, package / maker)
    before = key()
    monkeypatch.setattr(objects, "__file__", str(package / "audit/objects.py"))
    monkeypatch.setattr(objects, "_makers", objects._makers.__wrapped__)
    assert key() == before
    (package / name).write_text((package / name).read_text() + "\n# another\n")
    assert key() != before


CODE = MachineCode("attend", 1024, 4, b"\x7fELF" * 99, "attend:\n\ts_endpgm\n" * 99, 0.5, 0)


def test_what_is_kept_comes_back_and_another_key_finds_nothing(tmp_path):
    store = ObjectStore(tmp_path / "objects")
    assert store.get("a") is None
    store.put("a", CODE)
    assert store.get("a") == CODE
    assert store.get("b") is None
    assert [path.name for path in store.folder.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="edited"),
        pytest.param(lambda _: b"", id="empty"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_not_used(spoil, tmp_path):
    store = ObjectStore(tmp_path)
    store.put("a", CODE)
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    assert store.get("b") is None, "written under another key"
    (tmp_path / "a").write_bytes(spoil((tmp_path / "a").read_bytes()))
    assert store.get("a") is None
    assert not (tmp_path / "a").exists(), "it is deleted"
    store.put("a", CODE)
    assert store.get("a") == CODE, "and the next run mends it"


def test_what_was_not_used_for_the_longest_time_goes(tmp_path):
    store = ObjectStore(tmp_path)
    for age, name in enumerate("abcd"):
        store.put(name, CODE)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert store.get("d") == CODE, "now the last one used"
    replace(store, limit=2 * (tmp_path / "a").stat().st_size).prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]


def test_a_kernel_is_compiled_once_and_its_figures_are_the_same(tmp_path):
    store = ObjectStore(tmp_path)
    [wanted] = specialisations("gfx942", probe)
    first, again = find_or_compile(wanted, store), find_or_compile(wanted, store)
    assert (first.kept, again.kept) == (False, True)
    assert replace(again, kept=False) == first
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert not find_or_compile(wanted, store).kept
    assert find_or_compile(wanted, store).kept


def test_failures_and_unwritable_folders_cost_no_result(tmp_path):
    [too_large] = specialisations("gfx942", lambda: probe(256))
    with pytest.raises(LdsExceededError):
        find_or_compile(too_large, ObjectStore(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    [wanted] = specialisations("gfx942", probe)
    assert not find_or_compile(wanted, ObjectStore(tmp_path / "file")).kept


@pytest.mark.parametrize(
    ("env", "all_of_them"),
    [({}, False), ({"HILGATE_PROFILE": "gate"}, False)]
    + [({"HILGATE_PROFILE": profile}, True) for profile in ("pr", "nightly", "release", "another")],
)
def test_agents_and_releases_compile_everything(env, all_of_them, monkeypatch, tmp_path: Path):
    taken = []
    monkeypatch.delenv("HILGATE_PROFILE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pagedkv.audit.runner.run", lambda *_, objects, **__: taken.append(objects) or ([], 0, 0))
    cli.main(["--source", "ours", "--only", "write-", "--objects", str(tmp_path)])
    assert taken == [None if all_of_them else tmp_path]
