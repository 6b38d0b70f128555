# SPDX-License-Identifier: Apache-2.0
"""A pass stands for a step again only while nothing it rests on has changed; a store that lies is not believed."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support import plans
from support.plans import git, hilgate, passing, python, write_repository, writes_findings

from hilgate.errors import Exit
from hilgate.model import Plan
from hilgate.run import reuse, watch

READS = """
import contextlib, os, pathlib, subprocess, sys
sys.path.insert(0, 'code')
import helper
open('data.txt').read()
sorted(os.listdir('listed'))
subprocess.run([sys.executable, '-c', "open('deep/by_the_child').read()"], check=True)
if os.fork() == 0:
    open('deep/by_the_fork').read()
    os._exit(0)
os.wait()
pathlib.Path('/proc/self/stat').read_text()
os.link('deep/linked', os.environ['HILGATE_OUT'] + '/link')
open(os.environ['HILGATE_OUT'] + '/link').read()
os.unlink(os.environ['HILGATE_OUT'] + '/link')
open(os.environ['OUTSIDE']).read()
with contextlib.suppress(OSError):
    open('settings.ini')
pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl').write_text('{"id": "a", "outcome": "pass"}')
"""
FILES = (
    "code/helper.py",
    "data.txt",
    "listed/one",
    "deep/by_the_child",
    "deep/by_the_fork",
    "deep/linked",
    "unrelated.md",
    "code/b.py",
)
AREA = {"area": "samples", "title": "Samples", "why": "Samples work.", "paths": ["selected.txt", "ci/"]}
EVERY = {"area": "rest", "title": "Rest", "why": "Nothing is unclaimed.", "paths": ["*"]}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One step that reads far more than its area declares; another area claims every file."""
    root = tmp_path / "clone"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (tmp_path / "outside").write_text("1")
    monkeypatch.setenv("OUTSIDE", str(tmp_path / "outside"))
    write_repository(root, {"a": python(READS)})
    area = json.loads((root / "ci/areas/samples.yaml").read_text())
    (root / "ci/areas/samples.yaml").write_text(json.dumps(AREA | {"steps": area["steps"]}))
    other = area["steps"][0] | {"key": "other", "command": writes_findings(passing())}
    (root / "ci/areas/rest.yaml").write_text(json.dumps(EVERY | {"steps": [other]}))
    (root / ".gitignore").write_text("results/\nignored/\n__pycache__/\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "areas")
    return root


def gate(root, *options, **env):
    """(what was run, what the command said) of a gate that must be green."""
    done = hilgate(root, "gate", "--steps", "a", *options, **env)
    assert done.returncode == Exit.PASS, done.stdout + done.stderr
    return "a-cpu: started" in done.stderr, done.stdout + done.stderr


def evidence(root):
    (path,) = (root / "results" / "evidence").glob("*.json")
    return path


def test_second_gate_reuses_says_so_and_judges_again(repository):
    assert gate(repository)[0]
    ran, said = gate(repository)
    assert not ran
    assert "1 step reused (1 of 1 checks)" in said
    assert "reused, " in said
    assert "1 of 1 step passed before, and nothing they rest on has changed (--fresh runs them)" in " ".join(
        said.split()
    )
    verdict = json.loads((repository / "results/verdict.json").read_text())
    (first,) = verdict["steps"]
    assert (first["outcome"], first["counts"]["passed"]) == ("pass", 1)
    assert dt.datetime.fromisoformat(first["reused"]) < dt.datetime.fromisoformat(verdict["decided"])
    for name in ("report.html", "annotation.md"):
        assert "reused, " in (repository / "results" / name).read_text()
    assert hilgate(repository, "judge").returncode == Exit.PASS
    assert gate(repository, "--fresh")[0]
    assert hilgate(repository, "run", "a").stderr.count("a-cpu: started") == 1
    assert not gate(repository)[0]
    git(repository, "commit", "-qm", "nothing", "--allow-empty")
    assert not gate(repository)[0]


def write(text="changed"):
    def change(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return change


CHANGES = {
    "what-it-imports": ("code/helper.py", write("1"), True),
    "data-that-no-area-declares": ("data.txt", write(), True),
    "data-of-its-child": ("deep/by_the_child", write(), True),
    "data-of-its-fork": ("deep/by_the_fork", write(), True),
    "what-it-reads-under-another-name": ("deep/linked", write(), True),
    "what-its-area-declares": ("selected.txt", write(), True),
    "its-declaration": ("ci/areas/samples.yaml", lambda p: p.write_text(p.read_text().replace("a samples", "b")), True),
    "new-in-a-listed-folder": ("listed/two", write(), True),
    "gone-from-a-listed-folder": ("listed/one", Path.unlink, True),
    "what-it-looked-for-in-vain": ("settings.ini", write(), True),
    "a-conftest-anywhere": ("deep/conftest.py", write(""), True),
    "a-module-that-hides-another": ("code/contextlib.py", write(""), True),
    "a-mode": ("data.txt", lambda p: p.chmod(0o755), True),
    "outside-of-the-repository": ("../outside", write("22"), True),
    "a-page": ("unrelated.md", write(), False),
    "a-module-that-it-does-not-import": ("code/b.py", write("1"), False),
    "an-ignored-file": ("ignored/x", write(), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_runs_the_step_again_where_it_concerns_it(name, repository):
    file, change, runs = CHANGES[name]
    assert gate(repository)[0]
    change(repository / file)
    assert gate(repository)[0] is runs


def test_another_environment_machine_or_age_runs_it_again(repository, monkeypatch):
    gate(repository)
    assert not gate(repository, TERM="dumb", SSH_TTY="x", MAKEFLAGS="-j", SHLVL="9")[0]
    assert gate(repository, PYTEST_ADDOPTS="-x")[0]
    assert gate(repository)[0]
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "_installed", lambda: iter(["another-1.0.dist-info"]))
        assert gate(repository)[0]
    assert gate(repository)[0]
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another")
        assert gate(repository)[0]
    assert gate(repository)[0]
    monkeypatch.setattr(reuse, "LONGEST", dt.timedelta(0))
    assert gate(repository)[0]


def edited(path, _):
    path.write_bytes(path.read_bytes().replace(b'"id":"a"', b'"id":"b"'))


def cut_off(path, _):
    path.write_bytes(path.read_bytes()[:-9])


def of_another_key(_, root):
    shutil.rmtree(Path(plans.STATE.name, "hilgate"))
    assert root


DAMAGE = {"edited": edited, "cut off": cut_off, "empty JSON": lambda path, _: path.write_text("{}\n"),
          "another user's or machine's": of_another_key}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_evidence_that_was_tampered_with_is_named_and_the_step_runs(name, repository):
    gate(repository)
    DAMAGE[name](evidence(repository), repository)
    ran, said = gate(repository)
    assert ran
    assert said.count("a-cpu runs: its evidence is not as hilgate wrote it here (changed, cut off or copied)") == 1
    assert not gate(repository)[0]


def test_evidence_of_another_clone_is_not_used(repository, tmp_path):
    gate(repository)
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(repository), str(other))
    shutil.copytree(evidence(repository).parent, other / "results" / "evidence")
    assert gate(other)[0]


def test_a_key_that_others_can_read_or_that_lies_in_the_repository_is_not_used(repository, tmp_path):
    gate(repository)
    state = tmp_path / "state"
    assert gate(repository, XDG_STATE_HOME=str(state))[0]
    (state / "hilgate" / "evidence.key").chmod(0o644)
    ran, said = gate(repository, XDG_STATE_HOME=str(state))
    assert ran
    assert "passes are neither kept nor reused" in said
    assert "would lie in the repository" in gate(repository, XDG_STATE_HOME=str(repository / "ignored"))[1]
    assert (state / "hilgate").stat().st_mode & 0o077 == 0


def test_a_failure_takes_the_pass_away(repository):
    gate(repository)
    broken = repository / "ci/areas/samples.yaml"
    text = broken.read_text()
    broken.write_text(text.replace('\\"pass\\"', '\\"fail\\", \\"message\\": \\"x\\"'))
    assert hilgate(repository, "gate", "--steps", "a").returncode == Exit.FAIL
    broken.write_text(text)
    assert gate(repository)[0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("pathlib.Path('data.txt').write_text('x'); open('data.txt').read()", "data.txt changed"),
        (
            "p = pathlib.Path(os.environ['OUTSIDE']); p.read_text(); p.write_text('22')",
            "outside changed, which it had read",
        ),
        (
            "import socket; s = socket.socket(); s.settimeout(0.1); s.connect_ex(('192.0.2.1', 9))",
            "it called 192.0.2.1",
        ),
    ],
)
def test_a_pass_over_files_that_moved_or_with_the_network_is_not_kept(code, why, repository, monkeypatch):
    # Without the folder of whoever watches this test, who would note the call as well.
    monkeypatch.setattr(sys, "path", [part for part in sys.path if not Path(part, "lists").is_dir()])
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    area["steps"][0]["command"] = python(READS + code)
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    ran, said = gate(repository)
    assert ran
    assert f"the pass of a-cpu is not kept for reuse: {why}" in said.replace(str(repository.parent) + "/", "")
    assert gate(repository)[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("network", True), ("reuse", False), ("command", "git"), ("command", "sh"), ("command", "python -S")],
    ids=str,
)
def test_a_step_that_says_so_or_whose_program_cannot_be_watched(field, value, repository):
    """A program that nobody watches may have read every file, and the history."""
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    code = READS.replace("pathlib.Path(os", "subprocess.run(['git', 'log', '-1'], check=True)\npathlib.Path(os")
    line = shlex.join(["sh", "-c", 'echo "$1" > "$HILGATE_OUT/findings.jsonl"', "sh", json.dumps(passing())])
    isolated = python(READS).replace("python", "python -S", 1)
    commands = {"git": python(code), "sh": line, "python -S": isolated}
    area["steps"][0][field] = commands.get(value, value)
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    gate(repository)
    assert gate(repository)[0] is (field != "command")
    (repository / "unrelated.md").write_text("more")
    assert gate(repository)[0]
    git(repository, "commit", "-qam", "the same files")
    assert gate(repository)[0]


def test_what_a_named_step_needs_is_reused_and_a_part_leaves_no_evidence(repository):
    area = json.loads((repository / "ci/areas/rest.yaml").read_text())
    area["steps"][0] |= {"needs": ["a"]}
    (repository / "ci/areas/rest.yaml").write_text(json.dumps(area))
    hilgate(repository, "run", "a")
    before = evidence(repository)
    done = hilgate(repository, "run", "other", "--", "-x")
    assert (done.stderr.count("other-cpu: started"), done.stderr.count("a-cpu: started")) == (1, 0)
    assert evidence(repository) == before
    assert hilgate(repository, "run", "other", "--fresh").stderr.count("a-cpu: started") == 1


def test_agents_neither_keep_nor_reuse(repository):
    gate(repository)
    assert gate(repository, BUILDKITE="true")[0]
    planned = Plan.load(repository / "results" / "plan.json", "")
    for profile in ("pr", "nightly", "release"):
        with contextlib.chdir(repository):
            assert reuse.open_store(repository, planned.model_copy(update={"profile": profile}), None) is None


def test_a_full_disk_keeps_nothing_and_costs_no_pass(repository, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reuse, "packed", full)
    ran, said = gate(repository)
    assert ran
    assert "not kept for reuse: No space left on device" in said
    assert [path.name for path in (repository / "results/evidence").iterdir()] == [".gitignore"]


def test_an_environment_keeps_its_own_sitecustomize(repository, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['SITE'] = _folder = 'mine'")
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    area["steps"][0]["command"] = writes_findings(passing(), then="import os; assert os.environ['SITE'] == 'mine'")
    area["steps"][0]["env"] = {"PYTHONPATH": str(tmp_path / "site")}
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    assert gate(repository)[0]
    assert not gate(repository)[0]


def test_a_step_in_a_step_is_watched_once_by_each(repository, tmp_path):
    """Each `sitecustomize` runs the one behind it, never the one before."""
    outer = tmp_path / "outer"
    (outer / "lists").mkdir(parents=True)
    hook = Path(watch.__file__).read_text()
    (outer / "sitecustomize.py").write_text(reuse._SITE.format(watch=hook, folder=str(outer), root=str(repository)))
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    area["steps"][0]["command"] = writes_findings(passing())
    area["steps"][0]["env"] = {"PYTHONPATH": str(outer)}
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    assert gate(repository)[0]
    for path in (outer / "lists").iterdir():
        notes = path.read_bytes().split(b"\0")
        assert len(notes) == len(set(notes))


def test_a_note_that_cannot_be_written_stops_no_step_and_its_pass_is_not_kept(repository):
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    # Its own folder alone: whoever watches the test that is this step loses nothing.
    gone = (
        "import os; notes = os.environ['PYTHONPATH'].partition(':')[0] + '/lists'; os.rename(notes, notes + '-gone'); "
        "import decimal, fractions; os.rename(notes + '-gone', notes)"
    )
    area["steps"][0]["command"] = writes_findings(passing(), then=gone)
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    ran, said = gate(repository)
    assert ran
    assert "a note was lost" in said
    assert gate(repository)[0]


def test_a_pass_after_a_failure_of_the_same_build_is_not_kept(tmp_path):
    code = """
import os, pathlib
seen, out = pathlib.Path('results/seen'), pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl')
out.write_text('{"id": "a", "outcome": "pass"}' if seen.exists() else '{"id": "a", "outcome": "fail", "message": "m"}')
seen.touch()
"""
    root = write_repository(tmp_path, {"a": python(code)})
    assert hilgate(root, "gate").returncode == Exit.FAIL
    assert hilgate(root, "gate", "--resume").returncode == Exit.INCONCLUSIVE
    assert not list((root / "results").glob("evidence/*.json"))
