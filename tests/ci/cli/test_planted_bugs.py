# SPDX-License-Identifier: Apache-2.0
"""The self-test over a small tree: a bug is caught only by the right step failing for the right reason."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.plans import environ, git, hilgate, python, write_repository

from hilgate.cli import planted_bugs
from hilgate.errors import Exit, HilgateError
from hilgate.model.record import Outcome

CHECKS = (
    "import json, os, pathlib, sys; from samplekernel import gather, scale; ok = gather([1, 2]) == [2, 1]; "
    "strict = scale(2) == 4; word = lambda right: 'pass' if right else 'fail'; "
    "rows = [dict(id='gather[strided]', outcome=word(ok), message='got / expected'), "
    "dict(id='scale', outcome=word(strict), message='scale is off')]; out = pathlib.Path(os.environ['HILGATE_OUT']); "
    "(out / 'findings.jsonl').write_text(''.join(json.dumps(r) + chr(10) for r in rows)); "
    "sys.exit(0 if ok and strict else 1)"
)
SOUND = "def gather(x):\n    return x[::-1]\n\n\ndef scale(x):\n    return 2 * x\n"
BUG = {
    "id": "packed-reader",
    "title": "gather ignores strides",
    "source": "sample/sample#1",
    "symptom": "wrong order",
    "turns_red": "sample",
    "expect": r"gather\[strided\]",
}


def make_patch(old, new):
    head = "--- a/kernels/samplekernel.py\n+++ b/kernels/samplekernel.py\n@@ -1,3 +1,3 @@\n def gather(x):\n"
    return f"{head}-{old}\n+{new}\n \n"


CAUGHT = make_patch("    return x[::-1]", "    return x")
HARMLESS = make_patch("    return x[::-1]", "    return list(reversed(x))")
STALE = make_patch("    return something_else(x)", "    return x")
CRASH = make_patch("    return x[::-1]", "    import os; os._exit(9)")
ELSEWHERE = "--- /dev/null\n+++ b/other.py\n@@ -0,0 +1 @@\n+pass\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "samplekernel.py").write_text(SOUND)
    write_repository(tmp_path, {"sample": python(CHECKS)}, sample={"env": {"PYTHONPATH": "kernels"}})
    monkeypatch.delenv("HILGATE_OUT", raising=False)
    return tmp_path


def plant(root, patch, **changes):
    bug = BUG | changes
    folder = root / "tests" / "bugs" / bug["id"]
    folder.mkdir(parents=True)
    (folder / "bug.yaml").write_text(json.dumps(bug))
    if patch is not None:
        (folder / "bug.patch").write_text(patch)
    return folder


def outcomes(root):
    return planted_bugs.run_bugs(root, planted_bugs.load_bugs(root), root / "results" / "selftest")


def test_a_planted_bug_is_caught_and_the_checkout_is_untouched(repository):
    plant(repository, CAUGHT)
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.PASS, Outcome.PASS)
    assert bug.message.startswith("caught by sample-cpu: gather[strided]: got / expected")
    assert (repository / "kernels" / "samplekernel.py").read_text() == SOUND
    assert planted_bugs.status_of((control, bug)) == Exit.PASS


@pytest.mark.parametrize(
    ("patch", "changes", "why"),
    [
        (HARMLESS, {}, "not caught: sample-cpu is pass"),
        (CRASH, {}, "not caught: sample-cpu is did not run"),
        (CAUGHT, {"expect": "scale"}, "failed for another reason; nothing matches 'scale'"),
        (STALE, {}, "the patch no longer applies"),
        (ELSEWHERE, {}, "the patch changes nothing under kernels/"),
        (None, {}, "is missing"),
    ],
)
def test_what_is_not_caught_fails(repository, patch, changes, why):
    plant(repository, patch, **changes)
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.PASS, Outcome.FAIL)
    assert why in bug.message
    assert planted_bugs.status_of((control, bug)) == Exit.FAIL


def test_a_cause_that_a_reader_must_scroll_to_is_not_enough(repository, monkeypatch):
    monkeypatch.setattr("hilgate.report.terminal.SCREEN", (80, 3))
    plant(repository, CAUGHT)
    _, bug = outcomes(repository)
    assert bug.outcome is Outcome.FAIL
    assert bug.message == "sample-cpu caught it, and its cause is not on the first screen: gather[strided]"


def test_a_control_that_fails_proves_nothing(repository):
    plant(repository, CAUGHT)
    (repository / "kernels" / "samplekernel.py").write_text(SOUND.replace("2 * x", "3 * x"))
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.FAIL, Outcome.DID_NOT_RUN)
    assert "its control did not pass" in bug.message


def test_the_patch_applies_inside_a_checkout_too(repository):
    """git takes patch paths as relative to the checkout it finds; results/ lies inside one."""
    plant(repository, CAUGHT)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "bug")
    assert outcomes(repository)[1].outcome is Outcome.PASS


INSTALLED_PATCH = (
    "--- a/enginekernel/ops.py\n+++ b/enginekernel/ops.py\n@@ -2 +2 @@\n-    return x[::-1]\n+    return x\n"
)


@pytest.fixture
def installed(repository, monkeypatch):
    """A package that is installed beside the repository, and a step that checks it."""
    package = repository / "site" / "enginekernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .ops import gather\n\n\ndef scale(x):\n    return 2 * x\n")
    (package / "ops.py").write_text("def gather(x):\n    return x[::-1]\n")
    (package / "data.txt").write_text("as it is\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=":")
    write_repository(repository, {"sample": python(CHECKS.replace("samplekernel", "enginekernel"))})
    return package


def test_a_bug_of_an_installed_package_is_planted_in_a_copy(repository, installed):
    """The installed files stay as they are; what the patch does not name is a link to them."""
    plant(repository, INSTALLED_PATCH, package="enginekernel")
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.PASS, Outcome.PASS), bug.message
    assert bug.message.startswith("caught by sample-cpu: gather[strided]: got / expected")
    assert (installed / "ops.py").read_text() == "def gather(x):\n    return x[::-1]\n"
    copy = repository / "results" / "selftest" / "packed-reader" / "installed" / "enginekernel"
    assert (copy / "data.txt").is_symlink()
    assert not (copy / "ops.py").is_symlink()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (INSTALLED_PATCH.replace("x[::-1]", "x[1:]"), "rewrite packed-reader/bug.patch for today's enginekernel"),
        (ELSEWHERE, "the patch changes nothing under enginekernel/"),
    ],
)
def test_a_patch_that_does_not_fit_the_installed_package_fails(repository, patch, why):
    plant(repository, patch, package="enginekernel")
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.PASS, Outcome.FAIL)
    assert why in bug.message


def test_a_bug_of_a_package_that_is_not_installed_did_not_run(repository):
    plant(repository, INSTALLED_PATCH, package="nosuchengine")
    control, bug = outcomes(repository)
    assert (control.outcome, bug.outcome) == (Outcome.DID_NOT_RUN, Outcome.DID_NOT_RUN)
    assert "nosuchengine is not installed" in control.message


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"expect": "("}, "regular expression"), ({"surprise": 1}, "unknown key"), ({"expect": ""}, "at least 1")],
)
def test_an_invalid_bug_is_refused_with_its_place(repository, changes, why):
    plant(repository, CAUGHT, **changes)
    with pytest.raises(HilgateError) as caught:
        planted_bugs.load_bugs(repository)
    assert why in str(caught.value)
    assert "tests/bugs/packed-reader/bug.yaml:1" in str(caught.value)


def test_a_bug_is_called_like_its_folder(repository):
    folder = plant(repository, CAUGHT)
    folder.rename(folder.with_name("other"))
    with pytest.raises(HilgateError, match="in the folder 'other'"):
        planted_bugs.load_bugs(repository)


def test_the_command_lists_runs_and_leaves_findings(repository):
    plant(repository, CAUGHT)
    assert "packed-reader  gather ignores strides" in hilgate(repository, "selftest", "--list").stdout
    out = repository / "results" / "steps" / "selftest-cpu"
    done = subprocess.run(
        [*hilgate(repository, "--version").args[:3], "selftest", "packed-reader"],
        cwd=repository,
        env=environ() | {"HILGATE_OUT": str(out)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.PASS, done.stderr
    assert "✓ pass packed-reader" in done.stdout
    assert len((out / "findings.jsonl").read_text().splitlines()) == 2
