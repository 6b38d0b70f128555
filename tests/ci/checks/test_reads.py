# SPDX-License-Identifier: Apache-2.0
"""What a step is seen to read, in a small repository: children and compiled modules included, what it writes not."""

import contextlib
import json
import socket

import pytest
from support.plans import AGENTS, git, python, write_repository

from hilgate.checks import reads
from hilgate.declare.load import load
from hilgate.errors import CannotRunHereError, DeclarationError, RecordsError
from hilgate.model.record import Outcome

CODE = """
import os, pathlib, subprocess, sys
sys.path.insert(0, 'inside')
import module
open('read.txt').read()
open('read.txt').read()
os.close(os.open('opened.bin', os.O_RDONLY))
open('untracked').read(), open('/etc/hostname').read()
pathlib.Path('written.txt').write_text('x')
if os.fork() == 0:
    open('by the fork').read()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', "open('by_the_child').read()"], check=True)
pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl').write_text('{\"id\": \"a\", \"outcome\": \"OUTCOME\"}')
"""
READ = ("by the fork", "by_the_child", "inside/module.py", "opened.bin", "read.txt")


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "inside").mkdir()
    for name in (*READ, "written.txt", "untouched.txt"):
        (tmp_path / name).write_text("")
    commands = {"good": python(CODE.replace("OUTCOME", "pass")), "bad": python(CODE.replace("OUTCOME", "fail"))}
    (tmp_path / "untracked").write_text("")
    write_repository(tmp_path, commands)
    (tmp_path / ".gitignore").write_text("results/\nuntracked\n")
    git(tmp_path, "rm", "-q", "--cached", "untracked")
    return tmp_path


def test_files_that_a_step_and_its_children_read(repository, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert reads.record(repository, "good").files == READ
    # The second run finds the compiled module, which counts as its source.
    assert list((repository / "inside" / "__pycache__").glob("module.*.pyc"))
    assert reads.record(repository, "good").files == READ


def test_step_that_does_not_pass_is_not_recorded(repository):
    with pytest.raises(CannotRunHereError, match="did not pass"):
        reads.record(repository, "bad")


def test_command_keeps_what_other_steps_read_and_drops_steps_that_are_gone(repository, capsys):
    (repository / "ci" / "areas" / "samples.yaml").write_text(
        (repository / "ci" / "areas" / "samples.yaml").read_text().replace('"always": true', '"always": false')
    )
    (repository / reads.READS_FILE).write_text('{"bad": ["kept"], "gone": ["dropped"]}')
    with contextlib.chdir(repository):
        assert reads.main(["good"]) == 1
        assert reads.main(["godo"]) == 2
    streams = capsys.readouterr()
    assert streams.out == "good: 5 files\n"
    assert "reuse of good: it rests on untracked, outside of what a reused pass holds for" in streams.err
    assert "did you mean 'good'" in streams.err
    assert reads.read(repository / reads.READS_FILE) == {"bad": ("kept",), "good": READ}


@pytest.mark.parametrize("text", ["", "[]", '{"s": "a"}', '{"s": [1]}'])
def test_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "reads.json").write_text(text)
    with pytest.raises(RecordsError):
        reads.read(tmp_path / "reads.json")
    with pytest.raises(RecordsError):
        reads.read(tmp_path / "absent.json")


def test_written_file_is_sorted_and_read_back(tmp_path):
    (tmp_path / "reads.json").write_text(reads.text_of({"b": ["y"], "a": ["x", "z"]}))
    assert list(reads.read(tmp_path / "reads.json").items()) == [("a", ("x", "z")), ("b", ("y",))]


@pytest.fixture
def areas(tmp_path):
    """One area that names its files, and one that claims all others."""
    one = {"label": "s", "devices": ["cpu"], "timeout_minutes": 1}
    steps = [
        {"key": "tests", "command": "python -m pytest tests/a", "evidence": "junit", **one},
        {"key": "nightly", "command": "python x.py", "evidence": "findings", "profiles": ["nightly"], **one},
    ]
    rest = [{"key": "rest", "command": "python x.py", "evidence": "findings", **one}]
    (tmp_path / "ci/areas").mkdir(parents=True)
    (tmp_path / "ci/agents.yaml").write_text(AGENTS)
    for name, paths, of in (("s", ["tests/a/"], steps), ("r", ["*"], rest)):
        area = {"area": name, "title": "S", "why": "w.", "paths": paths, "steps": of}
        (tmp_path / f"ci/areas/{name}.yaml").write_text(json.dumps(area))
    for name in ("tests/a/test_x.py", "tests/a/test_y.py", "data/d.json", "data/e.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git(tmp_path, "init", "-q")
    return tmp_path


OWN = ("tests/a/test_x.py", "tests/a/test_y.py")


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        ({"tests": OWN, "rest": ()}, ""),
        ({"tests": (*OWN, "gone.py"), "rest": ()}, ""),
        ({"rest": ()}, "nobody has recorded what it reads; record it with `python -m hilgate.checks.reads tests`"),
        ({"tests": (*OWN, "data/d.json"), "rest": ()}, "it reads data/d.json, which does not select it; name it in"),
        ({"tests": OWN[:1], "rest": ()}, "its record is older than tests/a/test_y.py; record it with"),
    ],
)
def test_every_recorded_read_is_held_against_the_plan(recorded, problem, areas):
    found = {check.id: check for check in reads.held(areas, load(areas), recorded)}
    assert found.keys() == {"reads of tests", "reads of rest"}
    assert found["reads of rest"].outcome is Outcome.PASS
    assert (found["reads of tests"].outcome is Outcome.FAIL) is bool(problem)
    assert found["reads of tests"].message.startswith(problem or f"{len(recorded['tests'])} files")


def test_a_read_that_decides_nothing_is_declared_with_its_reason(areas):
    declared = areas / "pyproject.toml"
    declared.write_text('[tool.hilgate.weightless_reads]\n"data/d.*" = {steps = ["tests"], why = "hashed alone"}\n')
    for name, outcome in (("data/d.json", Outcome.PASS), ("data/e.json", Outcome.FAIL)):
        found = reads.held(areas, load(areas), {"tests": (*OWN, name), "rest": ()})
        assert [check.outcome for check in found if check.id == "reads of tests"] == [outcome]
    declared.write_text('[tool.hilgate.weightless_reads]\n"*" = {steps = ["tests"], why = "it lists"}\n')
    assert reads.weighty(areas, {"tests": OWN, "rest": OWN}) == {"tests": (), "rest": OWN}
    for wrong in ('"data/d.*" = {steps = ["tests"]}', '"data/d.*" = "why"', "="):
        declared.write_text(f"[tool.hilgate.weightless_reads]\n{wrong}\n")
        with pytest.raises(DeclarationError):
            reads.declared_weightless(areas)


def test_the_nightly_check_leaves_the_new_record_and_names_what_was_not_recorded(repository, tmp_path, monkeypatch):
    area = repository / "ci" / "areas" / "samples.yaml"
    area.write_text(area.read_text().replace('"always": true', '"always": false'))
    monkeypatch.setenv("HILGATE_OUT", str(tmp_path / "out"))
    with contextlib.chdir(repository):
        assert reads.main(["--check"]) == 1
    found = {line["id"]: line for line in map(json.loads, (tmp_path / "out/findings.jsonl").read_text().splitlines())}
    assert {name: one["outcome"] for name, one in found.items()} == {
        "reads of good": "pass",
        "reads of bad": "did not run",
        "reuse of good": "fail",
    }
    assert reads.read(tmp_path / "out" / "reads.json") == {"good": READ}
    assert not (repository / reads.READS_FILE).exists()


END = 'pathlib.Path(os.environ[\'HILGATE_OUT\'], \'findings.jsonl\').write_text(\'{"id": "a", "outcome": "pass"}\')'
SERVES = "from socket import *; s = socket(); s.bind(('127.0.0.1', 0)); s.listen(); PORT = s.getsockname()[1]; "


@pytest.fixture
def outside(tmp_path):
    """A folder, a file in it, a service and a socket that were there before the step."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("x")
    server, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    with server, local:
        local.bind(str(tmp_path / "out/socket"))
        local.listen()
        yield {"OUT": str(tmp_path / "out"), "PORT": str(server.getsockname()[1])}


@pytest.mark.parametrize(
    ("code", "rests_on"),
    [
        ("open('OUT/file')", "OUT/file"),
        ("os.listdir('OUT')", "OUT/"),
        ("list(os.scandir('OUT'))", "OUT/"),
        ("sys.path.insert(0, 'OUT')\ntry:\n import absent\nexcept ImportError: pass\n", "OUT/"),
        ("subprocess.run([sys.executable, '-c', 'open(\"OUT/file\")'], cwd='/')", "OUT/file"),
        ("open('ignored/file')", "ignored/file"),
        ("os.listdir('ignored')", "ignored/"),
        ("socket.create_connection(('127.0.0.1', PORT))", "tcp://127.0.0.1:PORT"),
        ("socket.socket(socket.AF_UNIX).connect('OUT/socket')", "OUT/socket"),
        ("s = socket.socket(); s.settimeout(0.01); s.connect_ex(('192.0.2.1', 80))", "tcp://192.0.2.1:80"),
        ("subprocess.run(['git', 'tag'])", "git://tag"),
        ("subprocess.run(['git', '-c', 'a.b=c', '-C', os.getcwd() + '/inside', 'log'], cwd='/')", "git://log"),
        ("[os.listdir(place) for place in sys.path if os.path.isdir(place)]", ""),
        ("subprocess.run(['git', '--version']), subprocess.run(['git', 'ls-files'])", ""),
        ("subprocess.run(['git', 'init', tempfile.mkdtemp()], cwd='/')", ""),
        # What is the step's own, of the system, of the environment, or sends nothing.
        (f"{SERVES} create_connection(('127.0.0.1', PORT))".replace("PORT", "port"), ""),
        ("socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 80))", ""),
        ("import json.tool, pydantic, tempfile; open('/etc/hostname'); os.listdir('/usr/lib')", ""),
        ("p = pathlib.Path(tempfile.mkdtemp(), 'own'); p.write_text('x'); p.read_text(); os.listdir(p.parent)", ""),
        ("p = pathlib.Path('ignored/own'); p.write_text('x'); p.read_text()", ""),
        ("os.listdir('.'), os.listdir('inside'), os.listdir('inside/__pycache__')", ""),
    ],
)
def test_what_a_step_rests_on_outside_of_the_repository_is_named(code, rests_on, outside, tmp_path):
    root = tmp_path / "clone"
    (root / "inside/__pycache__").mkdir(parents=True)
    (root / "inside/file").write_text("x")
    for name, value in outside.items():
        code, rests_on = code.replace(name, value), rests_on.replace(name, value)
    write_repository(root, {"a": python(f"import os, pathlib, socket, subprocess, sys, tempfile\n{code}\n{END}")})
    (root / ".gitignore").write_text("results/\nignored/\n")
    (root / "ignored").mkdir()
    (root / "ignored/file").write_text("x")
    seen = reads.record(root, "a")
    assert seen.outside == ((rests_on,) if rests_on else ())
    [found] = reads.rests(root, load(root), {"a": seen})
    assert (found.outcome is Outcome.FAIL) is bool(rests_on)
    area = root / "ci/areas/samples.yaml"
    area.write_text(area.read_text().replace('"devices"', '"reuse": false, "devices"', 1))
    assert list(reads.rests(root, load(root), {"a": seen})) == []
