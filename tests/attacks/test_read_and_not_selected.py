# SPDX-License-Identifier: Apache-2.0
"""Who: nobody, or an author with two changes. What: the first makes a step read a file that does not select it; the
second edits that file alone. Both are green, and the default branch is red.

What must happen: the step of the first change did not run, and its reason names the file. Once the area names it too,
the second change runs the step, which is red.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.plans import AGENTS, git, hilgate

from hilgate.errors import Exit

if TYPE_CHECKING:
    from pathlib import Path

NOTES = "docs/notes.md"
STEP = (
    "{{key: {key}, label: {key}, tests: [tests/{key}], devices: [cpu], env: {{PYTEST_DISABLE_PLUGIN_AUTOLOAD: '1'}}}}\n"
)
AREA = "area: {area}\ntitle: {area}\nwhy: The {area} works.\npaths: {paths}\nsteps:\n  - " + STEP
TEST = "import {package}.mod\n\ndef test_it():\n    assert {package}.mod.limit() == 2\n"
PLAIN = "def limit():\n    return 2\n"
IGNORED = "results/\nignored/\n__pycache__/\n.pytest_cache/\n"
FILES = {
    ".gitignore": IGNORED,
    "README.md": "read me\n",
    NOTES: "limit: 2\n",
    "docs/count/one.md": "",
    "docs/count/two.md": "",
    "ci/agents.yaml": AGENTS,
    "ci/protected.yaml": "rules:\n  - {paths: ['**'], flag: nothing}\n",
    "ci/areas/library.yaml": AREA.format(area="library", key="library", paths='[lib/, tests/library/, "!*.md"]'),
    "ci/areas/pages.yaml": AREA.format(area="pages", key="pages", paths='["*.md", pages/, tests/pages/]'),
    "lib/__init__.py": "",
    "lib/data.txt": "2\n",
    "lib/mod.py": PLAIN,
    "pages/__init__.py": "",
    "pages/mod.py": PLAIN,
    "pages/two.py": "LIMIT = 2\n",
    "tests/library/test_mod.py": TEST.format(package="lib"),
    "tests/pages/test_mod.py": TEST.format(package="pages"),
}
BEGIN = "import os, pathlib, subprocess, sys, tempfile\n\ndef limit():\n"
LAST = "    return int(text.split()[-1])\n"
CHILD = "import os; print(os.read(os.open('docs/notes.md', os.O_RDONLY), 99).decode())"


def reading(*lines: str) -> str:
    return BEGIN + "".join(f"    {line}\n" for line in lines) + LAST


def output(command: str, **options: str) -> str:
    words = "".join(f", {name}={value}" for name, value in options.items())
    return f"text = subprocess.run({command}, stdout=-1, text=True, check=True{words}).stdout"


WAYS = {
    "opened": reading("text = pathlib.Path('docs/notes.md').read_text()"),
    "opened from below": reading("text = (pathlib.Path(__file__).parent / '../docs/notes.md').read_text()"),
    "opened in a forked child": reading(
        "end, start = os.pipe()",
        "if os.fork() == 0:",
        "    os.write(start, open('docs/notes.md', 'rb').read())",
        "    os._exit(0)",
        "os.wait()",
        "text = os.read(end, 99)",
    ),
    "opened by a program of Python": reading(output(f'[sys.executable, "-c", {CHILD!r}]')),
    "opened by another program": reading(output("['cat', 'docs/notes.md']")),
    "opened by a shell": reading(output("'cat <docs/notes.md; true'", shell="True")),
    "opened where another program runs": reading(output("['tail', '-n1', 'notes.md']", cwd="'docs'")),
    "asked of git": reading(output("['git', 'show', 'HEAD:docs/notes.md']")),
    "opened through a link": reading(
        "folder = tempfile.mkdtemp()",
        "os.symlink(os.path.abspath('docs'), folder + '/link')",
        "text = pathlib.Path(folder, 'link/notes.md').read_text()",
    ),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A green repository, whose change begins on a branch of its own."""
    write(tmp_path, FILES)
    git(tmp_path, "init", "-qb", "main")
    commit(tmp_path, "samples")
    git(tmp_path, "checkout", "-qb", "change")
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def commit(root: Path, message: str) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)


def merge(root: Path) -> None:
    git(root, "branch", "-f", "main")


def gate(root: Path) -> tuple[int, dict[str, object], list[str]]:
    """Plan against main, run and judge: the exit status, the verdict, and the planned steps."""
    done = hilgate(root, "gate", "--base", "main")
    assert "error" not in done.stderr, done.stderr
    results = root / "results"
    plan = json.loads((results / "plan.json").read_text())
    return (
        done.returncode,
        json.loads((results / "verdict.json").read_text()),
        [one["step"]["key"] for one in plan["steps"]],
    )


@pytest.mark.parametrize("way", WAYS)
def test_two_changes_by_a_page_are_not_both_green(repository: Path, way: str) -> None:
    write(repository, {"lib/mod.py": WAYS[way]})
    commit(repository, "Read the limit from the notes")
    status, verdict, planned = gate(repository)
    assert (status, planned) == (Exit.NOTHING_RAN, ["library"])
    assert f"it read {NOTES}, which does not select it" in verdict["why"]
    read = (repository / "results/steps/library-cpu/reads.txt").read_text().splitlines()
    assert {NOTES, "lib/mod.py", "tests/library/test_mod.py"} <= set(read)

    area = FILES["ci/areas/library.yaml"].replace('"!*.md"', f'"!*.md", {NOTES}')
    write(repository, {"ci/areas/library.yaml": area})
    commit(repository, "Name the notes in the area")
    assert gate(repository)[0] == Exit.PASS
    merge(repository)

    write(repository, {NOTES: "limit: 3\n"})
    commit(repository, "Edit a page")
    status, verdict, planned = gate(repository)
    assert (status, sorted(planned)) == (Exit.FAIL, ["library", "pages"])


HONEST = {
    "a file of its area": reading("text = pathlib.Path('lib/data.txt').read_text()"),
    "a file that selects everything": reading("text = pathlib.Path('settings.txt').read_text()"),
    "a file that it names itself": reading("text = pathlib.Path('docs/limits/limit.md').read_text()"),
    "an ignored file": reading("text = pathlib.Path('ignored/limit.txt').read_text()"),
    "a copy of the same name elsewhere": reading(
        "folder = pathlib.Path(tempfile.mkdtemp())",
        "(folder / 'README.md').write_text('2')",
        output("['cat', 'README.md']", cwd="folder"),
    ),
    "the names in a folder": reading("text = str(len(os.listdir('docs/count')))"),
    "a page that it writes": reading("open('docs/notes.md', 'a').close()", "text = '2'"),
}


@pytest.mark.parametrize("way", HONEST)
def test_files_that_select_a_step_or_never_change_may_be_read(repository: Path, way: str) -> None:
    area = FILES["ci/areas/library.yaml"].replace("devices:", "reads: ['docs/limits/*.md'], devices:")
    files = {"settings.txt": "2", "docs/limits/limit.md": "2", "ci/areas/library.yaml": area, "lib/mod.py": HONEST[way]}
    write(repository, files | {"ignored/limit.txt": "2"})
    commit(repository, "Read a limit")
    status, verdict, _ = gate(repository)
    assert status == Exit.PASS, verdict["why"]
    merge(repository)

    write(repository, {"docs/limits/limit.md": "3"})
    commit(repository, "Edit a page")
    status, _, planned = gate(repository)
    assert sorted(planned) == ["library", "pages"]
    assert status == (Exit.FAIL if way == "a file that it names itself" else Exit.PASS)


def test_a_step_whose_python_notes_nothing_did_not_run(repository: Path) -> None:
    """Isolated, Python looks at no variable: nobody knows what such a step reads."""
    area = FILES["ci/areas/library.yaml"]
    command = "command: python -I -m pytest --rootdir=., tests: [tests/library]"
    write(repository, {"ci/areas/library.yaml": area.replace("tests: [tests/library]", command)})
    write(repository, {"tests/library/test_mod.py": "def test_it(): pass\n"})
    commit(repository, "Isolate the tests")
    status, verdict, _ = gate(repository)
    assert status == Exit.NOTHING_RAN
    assert "none of its processes noted what it read" in verdict["why"]
