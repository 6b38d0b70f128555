# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the extensions of mamba-ssm, and none where the extension is there."""

import importlib
import sys
from types import ModuleType

import pytest

from pagedkv.audit import imports


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
