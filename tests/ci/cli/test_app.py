# SPDX-License-Identifier: Apache-2.0
"""The boundary of the command line: trouble of the machine, streams, Ctrl-C and completion."""

import errno
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.plans import environ, git, hilgate, passing, write_repository, writes_findings

from hilgate.errors import Exit, MisuseError, of_system
from hilgate.model.plan import Plan
from hilgate.report import write

REPOSITORY = Path(__file__).resolve().parents[3]
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    return write_repository(root, {"a": writes_findings(passing("größer ✓"))})


def start(root, *words, code="", shell="", **env):
    """The command line in a process of its own, under `code` before it; in a line of shell it is `"$@"`."""
    program = [sys.executable, "-c", f"{code}\nfrom hilgate.__main__ import main\nmain()"]
    command = ["bash", "-o", "pipefail", "-c", shell, "bash", *program] if shell else program
    usual = {name: value for name, value in environ().items() if name not in {"LANG", "PYTHONIOENCODING"}}
    return subprocess.run([*command, *words], cwd=root, env=usual | env, capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.EDQUOT, Exit.CANNOT_RUN_HERE),
        (errno.ENOTDIR, Exit.MISUSE),
        (errno.ENOENT, Exit.BUG),  # whoever expects that a file may be missing says so
    ],
)
def test_machine_trouble_is_no_bug_and_says_what_to_do(repository, monkeypatch, tmp_path_factory, number, status):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))

    def full(*_, **__):
        raise OSError(number, os.strerror(number), "planted.html")

    monkeypatch.setattr(write, "report_page", full)
    done = hilgate(repository, "gate")
    assert done.returncode == status, done.stderr
    assert os.strerror(number) in done.stderr
    assert ("a bug in hilgate" in done.stderr) == (status is Exit.BUG)
    if status is not Exit.BUG:
        assert "where: planted.html" in done.stderr
        assert "to do: " in done.stderr


def test_a_full_disk_is_named_by_the_file_that_found_no_room(repository, tmp_path, monkeypatch):
    """A limit on the size of files is a full disk that needs no file system of its own."""
    save, before = Plan.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(plan, path):  # here alone: what watches this process for a reuse of its pass writes files too
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        try:
            save(plan, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Plan, "save", full)
    done = hilgate(repository, "plan", "--write", str(tmp_path / "plan.json"))
    assert done.returncode == Exit.CANNOT_RUN_HERE
    where = tmp_path / "plan.json"
    assert f"there is no room: File too large\n  where: {where}\n  to do: free disk space" in done.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--bass"], "error: no such option: --bass\n  where: hilgate plan\n  to do: did you mean --base?\n"),
        # Two shared dashes make no near word; a word of the libraries below typer never shows.
        (
            ["rerun", "--nope"],
            (
                "error: no such option: --nope\n  where: hilgate rerun\n"
                "  to do: hilgate rerun --help lists what it takes\n"
            ),
        ),
        (["gat"], "error: no such command 'gat'\n  where: hilgate\n  to do: did you mean 'gate'?\n"),
        (
            ["plan", "--profile", "night"],
            (
                "error: invalid value for '--profile': 'night' is not one of 'gate', 'pr', 'nightly', 'release'\n"
                "  where: hilgate plan\n  to do: hilgate plan --help lists what it takes\n"
            ),
        ),
        (
            ["nosuch"],
            "error: no such command 'nosuch'\n  where: hilgate\n  to do: hilgate --help lists what it takes\n",
        ),
        (
            ["run"],
            "error: missing argument 'STEP'\n  where: hilgate run\n  to do: hilgate run --help lists what it takes\n",
        ),
    ],
)
def test_misuse_is_told_like_every_other_error(repository, words, said):
    done = hilgate(repository, *words)
    assert (done.returncode, done.stderr, done.stdout) == (Exit.MISUSE, said, "")


@pytest.mark.parametrize("place", ["ci/agents.yaml", "ci/agents.yaml/below", "ci", "."])
def test_results_in_a_file_or_repository_folder_are_misuse(repository, place):
    done = hilgate(repository, "gate", "--results", place)
    assert done.returncode == Exit.MISUSE
    assert re.search(rf"where: (--results )?{place}\n  to do: name ", done.stderr)
    assert git(repository, "status", "--porcelain") == ""


FEW_FILES = """
import resource, subprocess
begin, before = subprocess.Popen.__init__, resource.getrlimit(resource.RLIMIT_NOFILE)
def begin_with_few(*words, **named):  # here alone: what watches this process opens files too
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        begin(*words, **named)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
subprocess.Popen.__init__ = begin_with_few
"""


def test_too_many_open_files_and_no_temporary_place_are_told(repository, tmp_path):
    done = start(repository, "plan", code=FEW_FILES)
    assert (done.returncode, b"raise the limit (ulimit -n)" in done.stderr) == (Exit.CANNOT_RUN_HERE, True), done.stderr
    gone = tmp_path / "gone"
    gone.mkdir()
    done = start(gone, "plan", code="import os; os.rmdir(os.getcwd())")
    assert (done.returncode, b"a folder is missing" in done.stderr) == (Exit.CANNOT_RUN_HERE, True), done.stderr
    nowhere = of_system(FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"))
    assert nowhere.exit_status is Exit.CANNOT_RUN_HERE
    assert of_system(OSError("without a number")) is None
    assert isinstance(of_system(NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b")), MisuseError)


NO_READER = 'pipe=$(mktemp -u) && mkfifo "$pipe" && exec 3<>"$pipe" 4>"$pipe" 3<&- && rm "$pipe" &&'
"""A pipe whose only reader is gone before the command starts; `| true` may still be there when the command writes."""


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        (f'{NO_READER} "$@" plan >&4', b"nobody reads the output any more: Broken pipe"),
        (f'{NO_READER} "$@" --help >&4', b"nobody reads the output any more: Broken pipe"),
        ('"$@" plan --json >/dev/full', b"there is no room: No space left on device"),
        ('"$@" gate >/dev/full', b"there is no room: No space left on device"),
    ],
    ids=["plan into a pipe", "help into a pipe", "plan onto a full disk", "gate onto a full disk"],
)
def test_output_that_does_not_arrive_is_no_pass_and_no_fail(repository, shell, reason):
    done = start(repository, shell=shell)
    assert done.returncode == Exit.CANNOT_RUN_HERE, done.stderr
    assert b"error: " + reason in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_standard_output_that_was_closed_before_is_no_trouble(repository):
    assert start(repository, shell='"$@" plan >&-').returncode == Exit.PASS


@pytest.mark.parametrize("env", [ASCII, {"PYTHONIOENCODING": "latin-1"}])
def test_the_verdict_is_printed_in_every_locale(repository, env):
    (repository / "ünï").write_text("")
    (repository / os.fsdecode(b"odd\xff")).write_text("")
    done = start(repository, "gate", **env)
    assert done.returncode == Exit.PASS, done.stderr
    assert b"+ pass   a-cpu" in done.stdout
    assert b"+ pass: 1 passed, 0 failed" in done.stdout
    assert b"a-cpu: + pass" in done.stderr
    plan = start(repository, "plan", "--base", "HEAD", "--json", **env)
    assert b'"odd\\\\xff"' in plan.stdout
    assert b'"\\u00fcn\\u00ef"' in plan.stdout


STRIKE = """
import os, sys
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Strike())
"""
SWALLOWED = """
import os
import re
from hilgate.declare import load
def native(start):
    try:
        os.kill(os.getpid(), 2)
    except KeyboardInterrupt:
        {ending}
load.find_root = native
"""


@pytest.mark.parametrize(
    "code",
    [
        STRIKE.format(name="hilgate.cli.app"),
        STRIKE.format(name="hilgate.plan.make"),
        SWALLOWED.format(ending="raise ValueError('native')"),
        SWALLOWED.format(ending="raise SystemExit(0)"),
    ],
)
def test_ctrl_c_is_one_line_and_130_at_any_moment(repository, code, tmp_path):
    # A suite in the background ignores SIGINT, and its children inherit that.
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    done = start(repository, "plan", code=code, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr, done.stdout) == (Exit.INTERRUPTED, b"error: interrupted\n", b"")
    assert not list(tmp_path.glob("hilgate-*.log"))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("run k", {"kernels", "kernels-cache", "kernels-mla"}),
        ("run --unknown k", {"kernels-cache"}),
        ("run kernels-cache", {"kernels-cache", "kernels-cache-cpu", "kernels-cache-gfx942"}),
        ("gate --steps hyg", {"hygiene"}),
        ("plan rou", {"routing"}),
        ("plan --models pocket", {"pocket-hybrid", "pocket-latent"}),
        ("plan images-u", {"images-units"}),
        ("rerun jam", {"jamba2-mini"}),
        ("selftest tile", {"tile-is-block-size"}),
        ("history show --step hyg", {"hygiene"}),
    ],
)
def test_a_shell_completes_the_names_that_are_declared(tmp_path, line, offered):
    def complete(root):
        words = f"hilgate {line}"
        env = {"_HILGATE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = hilgate(root, **env)
        assert (done.returncode, done.stderr) == (Exit.PASS, "")
        return set(done.stdout.split())

    found = complete(REPOSITORY)
    assert offered <= found
    assert all(name.startswith(line.rsplit(" ", 1)[-1]) for name in found)
    assert complete(tmp_path) == set()  # no repository: no names, and no error
