# SPDX-License-Identifier: Apache-2.0
"""A pass stands for a step again while nothing that selects the step has changed, in the same environment."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import git, hilgate, passing, python, write_repository, writes_findings

from hilgate.declare.imports import build
from hilgate.declare.load import load
from hilgate.errors import Exit
from hilgate.git import tracked_files
from hilgate.model.plan import Plan
from hilgate.plan.select import basis_of, select
from hilgate.run import reuse

CODE = """
import os, pathlib
state = pathlib.Path(os.environ["STATE"])
good = not state.exists() or state.read_text() == "good"
found = '{"id": "a", "outcome": "pass"}' if good else '{"id": "a", "outcome": "fail", "message": "m"}'
pathlib.Path(os.environ["HILGATE_OUT"], "findings.jsonl").write_text(found)
raise SystemExit(0 if good else 1)
"""
AREA = {"area": "samples", "title": "Samples", "why": "Samples work.", "paths": ["selected/", "step.py", "ci/"]}
EVERY = {"area": "rest", "title": "Rest", "why": "Nothing is unclaimed.", "paths": ["*"]}


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A file outside the tree that decides how the step ends: what a key cannot hold."""
    monkeypatch.setenv("STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def repository(tmp_path, state):
    """One step that some files select; another area claims every file."""
    root = tmp_path / "clone"
    for name in ("selected/one", "page.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "step.py").write_text(CODE)
    write_repository(root, {"a": "python step.py"})
    area = json.loads((root / "ci/areas/samples.yaml").read_text())
    (root / "ci/areas/samples.yaml").write_text(json.dumps(AREA | {"steps": area["steps"]}))
    other = area["steps"][0] | {"key": "other", "command": writes_findings(passing())}
    (root / "ci/areas/rest.yaml").write_text(json.dumps(EVERY | {"steps": [other]}))
    (root / ".gitignore").write_text("results/\n*.tmp\n__pycache__/\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "areas")
    assert state.parent == root.parent
    return root


def gate(root, *options, status=Exit.PASS, **env):
    """(what was run, what the command said) of a gate that must end so."""
    done = hilgate(root, "gate", "--steps", "a", *options, **env)
    assert done.returncode == status, done.stdout + done.stderr
    return "a-cpu: started" in done.stderr, done.stdout + done.stderr


def kept(root, what="pass"):
    return sorted((root / "results" / "evidence").glob(f"a-cpu-*.{what}.json"))


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
    "what its area declares": ("selected/one", write(), True),
    "new where its area looks": ("selected/two", write(), True),
    "gone where its area looks": ("selected/one", Path.unlink, True),
    "its declaration": ("ci/areas/samples.yaml", lambda p: p.write_text(p.read_text().replace("a samples", "b")), True),
    "a mode": ("selected/one", lambda p: p.chmod(0o755), True),
    "a page": ("page.md", write(), False),
    "a file of another area": ("other", write(), False),
    "an ignored file": ("x.tmp", write(), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_runs_the_step_again_where_it_selects_it(name, repository):
    file, change, runs = CHANGES[name]
    assert gate(repository)[0]
    change(repository / file)
    assert gate(repository)[0] is runs


def test_terminals_do_not_count_and_every_other_variable_does(repository):
    gate(repository)
    assert not gate(repository, TERM="dumb", SSH_TTY="x", MAKEFLAGS="-j", SHLVL="9")[0]
    for name in ("PYTEST_ADDOPTS", "TERMINATE_EARLY", "MAKE_IT_FAIL", "LC_ALL"):
        assert gate(repository, **{name: "x"})[0], name
    assert not gate(repository)[0]


def importable(path):
    (path / "sitecustomize.py").write_text("")


def distribution(path):
    (path / "one-1.0.dist-info/RECORD").write_text("one/a.py,sha256=2,9\none/a.so,,\n")


def installed_file(path):
    (path / "one/a.so").write_bytes(b"another library")


@pytest.mark.parametrize("change", [importable, distribution, installed_file])
def test_what_can_be_imported_counts(change, repository, tmp_path):
    site = tmp_path / "site"
    (site / "one").mkdir(parents=True)
    (site / "one-1.0.dist-info").mkdir()
    (site / "one/a.so").write_bytes(b"library")
    (site / "one-1.0.dist-info/RECORD").write_text("one/a.py,sha256=1,9\none/a.so,,\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    gate(repository, PYTHONPATH=path)
    assert not gate(repository, PYTHONPATH=path)[0]
    change(site)
    assert gate(repository, PYTHONPATH=path)[0]


@pytest.mark.parametrize("what", ["host", "limit", "affinity", "umask", "flags"])
def test_the_machine_and_the_limits_count(what, repository, monkeypatch):
    gate(repository)
    with monkeypatch.context() as patch:
        text = reuse._text
        if what == "host":
            patch.setattr("socket.gethostname", lambda: "another")
        elif what == "limit":
            patch.setattr(resource, "getrlimit", lambda _: (100, 100))
        elif what == "affinity":
            patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
        else:
            line = {"umask": "Umask:\t0777\n", "flags": "flags : none\n"}[what]
            patch.setattr(reuse, "_text", lambda name: line if name.startswith("/proc/") else text(name))
        assert gate(repository)[0]
    assert not gate(repository)[0]


def edited(path):
    path.write_bytes(path.read_bytes().replace(b'"id":"a"', b'"id":"b"'))


DAMAGE = {
    "edited": edited,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "other JSON": lambda path: path.write_text("{}\n"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_evidence_that_is_damaged_is_named_and_the_step_runs(name, repository):
    gate(repository)
    DAMAGE[name](*kept(repository))
    ran, said = gate(repository)
    assert ran
    assert said.count("is not as hilgate wrote it (changed or cut off)") == 1
    assert not gate(repository)[0]


def test_evidence_of_another_step_or_state_is_not_taken_for_it(repository):
    gate(repository)
    (old,) = kept(repository)
    (repository / "selected/one").write_text("other")
    gate(repository)
    (new,) = set(kept(repository)) - {old}
    shutil.copy(old, new)
    assert gate(repository)[0]


@pytest.mark.parametrize(
    "command",
    [
        ("gate", "--steps", "a", "--fresh"),
        ("run", "a"),
        ("run", "a", "--", "-x"),
        ("run", "a-cpu", "--plan", "results/plan.json"),
    ],
    ids=" ".join,
)
def test_a_failed_run_takes_the_pass_away_whoever_started_it(command, repository, state):
    gate(repository)
    state.write_text("bad")
    assert hilgate(repository, *command).returncode == Exit.FAIL
    assert not kept(repository)
    state.write_text("good")
    assert gate(repository, status=None or (Exit.PASS if "--" in command else Exit.INCONCLUSIVE))[0]


def test_a_failure_is_remembered_until_its_files_change(repository, state):
    state.write_text("bad")
    gate(repository, status=Exit.FAIL)
    state.write_text("good")
    for _ in range(2):  # a pass over the same files is no answer, however often
        ran, said = gate(repository, status=Exit.INCONCLUSIVE)
        assert ran
        assert "over these files" in " ".join(said.split())
    (repository / "selected/one").write_text("mended")
    assert gate(repository)[0]
    assert not gate(repository)[0]
    (repository / "selected/one").write_text("")
    gate(repository, status=Exit.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [("os.kill(os.getpid(), 11)", Exit.INCONCLUSIVE), ("os.kill(os.getpid(), 9)", Exit.PASS)],
)
def test_a_crash_that_passes_the_second_time_is_no_pass(end, outcome, tmp_path, state):
    code = f"""
import os, pathlib
state = pathlib.Path(os.environ["STATE"])
if not state.exists():
    state.touch()
    {end}
pathlib.Path(os.environ["HILGATE_OUT"], "findings.jsonl").write_text('{{"id": "a", "outcome": "pass"}}')
"""
    root = write_repository(tmp_path / "clone", {"a": python(code)})
    for options in ((), ("--resume",)):
        state.unlink(missing_ok=True)
        shutil.rmtree(root / "results", ignore_errors=True)
        assert hilgate(root, "gate").returncode == Exit.NOTHING_RAN
        assert hilgate(root, "gate", *options).returncode == outcome


@pytest.mark.parametrize("options", [(), ("--resume",), ("--fresh",)], ids=" ".join)
def test_a_timeout_that_passes_the_second_time_is_no_pass_and_is_said(options, tmp_path, state, monkeypatch):
    code = CODE.replace("good =", "import time\nif not state.exists(): time.sleep(600)\ngood =")
    root = write_repository(tmp_path / "clone", {"a": python(code)})
    with monkeypatch.context() as patch:
        patch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 1)
        first = hilgate(root, "gate")
    assert first.returncode == Exit.NOTHING_RAN
    assert "timed out after" in " ".join(first.stdout.split())
    state.write_text("good")
    for again in (options, ()):  # nor is any later one, until a file changes
        second = hilgate(root, "gate", *again)
        assert second.returncode == Exit.INCONCLUSIVE, second.stdout
        said = " ".join(second.stdout.split())
        assert ("before: did not run" if again == ("--resume",) else "over these files") in said


def test_a_run_is_not_resumed_in_another_environment(repository, state):
    state.write_text("bad")
    gate(repository, status=Exit.FAIL)
    done = hilgate(repository, "gate", "--steps", "a", "--resume", BAD="1")
    assert done.returncode == Exit.INVALID_DECLARATION
    assert "the environment changed since these results were recorded" in done.stderr


@pytest.mark.parametrize(("field", "value"), [("network", True), ("reuse", False)])
def test_a_step_that_says_so_is_never_reused(field, value, repository):
    area = json.loads((repository / "ci/areas/samples.yaml").read_text())
    area["steps"][0][field] = value
    (repository / "ci/areas/samples.yaml").write_text(json.dumps(area))
    assert gate(repository)[0]
    assert gate(repository)[0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("pathlib.Path('selected/one').write_text('x')", "selected/one changed"),
        ("p = pathlib.Path('selected/one'); p.write_text('x'); p.write_text('')", "selected/one was written"),
    ],
)
def test_a_pass_over_files_that_changed_is_not_kept(code, why, repository):
    (repository / "step.py").write_text(f"{CODE.replace('raise', f'{code}{chr(10)}raise')}")
    done = hilgate(repository, "gate", "--steps", "a")
    assert f"the pass of a-cpu is not kept for reuse: {why}" in done.stdout + done.stderr
    assert not kept(repository)


def test_what_a_named_step_needs_is_reused_and_a_part_leaves_no_pass_for_the_whole(repository):
    area = json.loads((repository / "ci/areas/rest.yaml").read_text())
    area["steps"][0] |= {"needs": ["a"]}
    (repository / "ci/areas/rest.yaml").write_text(json.dumps(area))
    hilgate(repository, "run", "a")
    before = kept(repository)
    done = hilgate(repository, "run", "other", "--", "-x")
    assert (done.stderr.count("other-cpu: started"), done.stderr.count("a-cpu: started")) == (1, 0)
    assert kept(repository) == before
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
    assert "the pass of a-cpu is not kept: No space left on device" in said
    assert not kept(repository)


def test_old_evidence_makes_room(repository, monkeypatch):
    monkeypatch.setattr(reuse, "MOST", 2)
    for text in "abc":
        (repository / "selected/one").write_text(text)
        gate(repository)
    assert len(kept(repository)) == 2


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def planner():
    declarations = load(ROOT)
    graph = build(ROOT, declarations.project.python_path)
    tree = dict.fromkeys(tracked_files(ROOT), "as it is")  # names alone: this test rests on no content
    return declarations.areas, graph, tree, basis_of(declarations.areas, tree, graph)


def test_the_key_of_every_step_holds_what_the_planner_selects_it_by(planner):
    """Each file of this repository, changed and new: the planner's answer and the key's are one."""
    areas, graph, tree, bases = planner
    for name in sorted(tree):
        changed = select(areas, [name], graph).reasons
        assert {key for key, basis in bases.items() if name in basis.contents} == set(changed), name
        came = select(areas, [name], graph, [name]).reasons
        assert {key for key, basis in bases.items() if name in basis.names} >= set(came), name


def test_a_module_that_goes_changes_the_key_of_every_step_that_the_planner_selects(planner, tmp_path):
    areas, graph, tree, bases = planner
    gone = ["kernels/pagedkv/strides.py", "kernels/pagedkv/audit/isolation.py", "ci/hilgate/checks/zoo.py"]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignored, copy_function=os.symlink)
    for folder in ("ci", "evals", "tests", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / gone[0]).unlink()
    after = build(tmp_path, ("ci", "kernels", "evals", "."))
    chosen = select(areas, gone[:1], after).reasons
    left = {name: digest for name, digest in tree.items() if name != gone[0]}
    now = basis_of(areas, left, after)
    assert len(chosen) > 10
    for key in chosen:
        assert reuse.files_digest(bases[key], tree) != reuse.files_digest(now[key], left), key
    assert graph.graph is not None


def test_arguments_of_make_are_no_part_of_the_environment(tmp_path):
    """`make gate ARGS=--all` reuses what `make test` has passed: make itself tells programs of its command line."""
    root = Path(__file__).parents[3]
    kept = next(line for line in (root / "Makefile").read_text().splitlines() if line.startswith("unexport"))
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    (tmp_path / "Makefile").write_text(f"{kept}\nall:\n\t@{sys.executable} -c '{dump}'\n")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a `make test`
    plain, given = (
        json.loads(
            subprocess.run(
                ["make", *words], cwd=tmp_path, env=outside, capture_output=True, text=True, check=True
            ).stdout
        )
        for words in ((), ("ARGS=--all",))
    )
    assert plain != given
    assert reuse.variables_of(plain) == reuse.variables_of(given)
