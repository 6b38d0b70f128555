# SPDX-License-Identifier: Apache-2.0
"""Pages in Markdown: what they link to and what they name is there."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hilgate.git import tracked_files
from hilgate.model.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
PAGES = [name for name in tracked_files(ROOT) if name.endswith(".md")]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
NAMED = re.compile(r"`((?:ci|kernels|evals|tests|benchmarks|docker|docs|examples|requirements|\.buildkite)/[\w./-]+)`")
MADE = ("tests/evals/gsm8k", ".buildkite/lm-eval-harness", "tests/test_layout.py", "docker/acme-rocm.Dockerfile")
"""Paths of vLLM's own tree, and of the repository in docs/how-to/adopt.md."""


GENERATED = [ROOT / f"docs/{name}.md" for name in ("reference/cli", "reference/yaml", "reference/exit-status")]
"""Pages that are made when the site is built (docs/reference.py); tests/site follows links to them."""


def missing(page: str, text: str) -> list[str]:
    """Relative links and paths in backticks that lead nowhere."""
    text = FENCED.sub("", text)
    here = (ROOT / page).parent
    links = [link for link in LINK.findall(text) if "://" not in link and not (here / link).exists()]
    links = [link for link in links if (here / link).resolve() not in GENERATED]
    named = [name for name in NAMED.findall(text) if not name.startswith(MADE)]
    return links + [name for name in named if not (ROOT / name).exists() and not (here / name).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_nothing_that_is_not_there(page):
    assert missing(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_wrong_path_is_noticed():
    text = "[a](none.md) [b](README.md#x) [c](https://example.org) `ci/hilgate/none.py` `ci/hilgate/model/plan.py`"
    assert missing("README.md", text) == ["none.md", "ci/hilgate/none.py"]


def test_every_attack_is_listed_with_what_happens():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \| `(test_\w+\.py)` \|$", page, re.MULTILINE)
    files = sorted((ROOT / "tests/attacks").glob("test_*.py"))
    assert sorted(name for _, _, name in rows) == [path.name for path in files]
    for path in files:
        said = path.read_text(encoding="utf-8").split('"""')[1]
        assert said.startswith("Who: "), path
        assert all(word in said for word in (" What: ", "What must happen: ")), path


README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run an example as a reader would, on a CPU."""
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=env)


def test_the_readme_is_short_and_shows_the_example_that_runs():
    assert len(README.splitlines()) <= 80
    _, _, code = (ROOT / "examples/attend.py").read_text(encoding="utf-8").partition('"""\n\n')
    shown = code.rpartition("\n\nheads = ")[0]
    assert textwrap.indent(shown, "    ") in README
    done = example("attend.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("largest difference from torch: ")) < 1e-5


@pytest.mark.parametrize(("outcome", "status"), [("pass", 0), ("fail", 1), ("did not run", 1), ("inconclusive", 1)])
def test_the_example_reads_a_verdict(tmp_path, outcome, status):
    step = {"key": "a-cpu", "area": "a", "label": "a", "outcome": outcome, "ruling": "pass", "why": "2 checks"}
    step |= {"counts": {}, "seconds": 1.0, "reproduce": "hilgate run a-cpu"}
    verdict = {"decided": "2026-01-01T00:00:00Z", "profile": "pr", "commit": "", "plan_digest": "", "outcome": outcome}
    verdict |= {"why": "1 step", "steps": [step], "omissions": []}
    path = tmp_path / "verdict.json"
    path.write_text(Verdict.model_validate_json(json.dumps(verdict)).model_dump_json(), encoding="utf-8")
    done = example("read_verdict.py", path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (status, f"{outcome}: 1 step"), done.stderr
    assert ("repeat it with: hilgate run a-cpu" in done.stdout) == (status == 1)


PRIVATE = re.compile(
    r"\b(?:desks?|nouns?|deeds?|hasten\w*|Loosening|told|(?:it|change) loosens)\b"
    r"|\b(?:a|the|its|this|each|every|of) rooms?\b(?! (?:for|on|left|is|to)\b)"
)
"""Words that this project once used for local runs, data models, events, patches, protected changes and packages."""
READ = (".py", ".md", ".yaml", ".yml", ".j2", ".tf")
EXEMPT = (
    "tests/pages/test_documents.py",
    "tests/test_tiny.py",
    "tests/kernels/",
    "tests/audit/",
    "tests/amdgcn/",
    "tests/mamba/",
    "tests/models/",
)


@pytest.mark.parametrize("folder", ["", "benchmarks", "ci", "docker", "evals", "examples", "tests"])
def test_the_words_are_those_of_the_field(folder):
    found = []
    for name in tracked_files(ROOT):
        top = name.partition("/")[0] if "/" in name else ""
        if top == folder and name.endswith(READ) and not name.startswith(EXEMPT):
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
            found += [f"{name}:{at}: {line.strip()}" for at, line in enumerate(lines, 1) if PRIVATE.search(line)]
    assert found == []
