# SPDX-License-Identifier: Apache-2.0
"""Compiling in a child, and figures to plant violations into."""

import functools

import pytest

from pagedkv.audit.code_object import Assembly, CodeObject, Loop, Site
from pagedkv.audit.isolation import run_isolated

# Triton decides when a kernel is defined whether to interpret it, and a session without a GPU interprets. This one
# kernel must compile; the others are tested elsewhere, interpreted, and so are audited in processes of their own.
with pytest.MonkeyPatch.context() as without:
    without.delenv("TRITON_INTERPRET", raising=False)
    from pagedkv.audit.compile import Figures, specialisations
    from pagedkv.audit.objects import find_or_compile


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    """The audit refuses to run where kernels would be interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="session")
def compiled():
    """compiled(arch, launch): what the launch compiles to, or how it failed."""

    def run(arch, launch):
        calls = [functools.partial(find_or_compile, wanted, None) for wanted in specialisations(arch, launch)]
        return [result for _, result, _ in run_isolated(calls, jobs=1, timeout=60)]

    return run


@pytest.fixture
def run_source(tmp_path):
    """run_source(source, old, new, folder): its names, with one text replaced, run from a file of a folder."""

    def run(source, old, new, folder, **names):
        assert old in source
        path = tmp_path / folder / "kernels.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source.replace(old, new) if old else source)
        scope = {"__name__": "kernels", **names}
        exec(compile(path.read_text(), path, "exec"), scope)
        return scope

    return run


@pytest.fixture
def figures():
    """figures(**changes): a kernel named `attend` that is within any sane budget, but for the changes."""

    def make(**changes):
        code = {"vgpr": 96, "agpr": 0, "sgpr": 40, "vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0}
        text = {
            "mfma": 16,
            "broadcast_high": 0,
            "loops": (Loop(200, 16, 2 * 16 * 16**3),),
            "occupancy": 5,
            "loads": (
                Site("attend.py:7", 16, 12, "k = tl.load(key_cache + row, mask=mask)"),
                Site("attend.py:5", 4, 1),
            ),
        }
        rest = {"kernel": "attend", "lds_bytes": 16384, "arch": "gfx942", "pointer_choices": ()}
        for name, value in changes.items():
            next(group for group in (code, text, rest) if name in group)[name] = value
        return Figures(
            **rest,
            num_waves=4,
            compile_seconds=0.5,
            code=CodeObject(name="attend", arch="gfx942", **code),
            text=Assembly(instructions=500, ds_ops=20, waits=20, **text),
        )

    return make
