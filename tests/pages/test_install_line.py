# SPDX-License-Identifier: Apache-2.0
"""The README's install lines are those of what a machine must have."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    import prerequisites

    yield prerequisites
    sys.modules.pop("prerequisites")


def install_line(program: str) -> list[str]:
    found = re.search(rf"^ *sudo {program} install ([^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    return found[1].split()


def test_the_readme_installs_what_is_asked_for(table):
    assert sorted(install_line("apt-get")) == sorted({one.debian for one in table.PREREQUISITES})
    # Fedora's python3 has ensurepip.
    assert sorted(install_line("dnf")) == sorted({one.fedora for one in table.PREREQUISITES} - {"python3"})


def test_the_readme_names_the_versions_of_python():
    assert "Python 3.11 to 3.13" in (ROOT / "README.md").read_text()
