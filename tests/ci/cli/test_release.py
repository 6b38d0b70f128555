"""hilgate bundle and hilgate verify-bundle, as a release manager calls them."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.bundles import edited, forge
from support.plans import IDENTITY, failing, hilgate, passing, write_repository, writes_findings


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A gate that passed."""
    root = write_repository(tmp_path_factory.mktemp("repository"), {"a": writes_findings(passing())})
    assert hilgate(root, "gate").returncode == 0
    return root


def test_the_commands(repository):
    done = hilgate(repository, "bundle", "--out", "e.tar")
    assert (done.returncode, done.stdout) == (0, "e.tar\n")
    checked = hilgate(repository, "verify-bundle", "e.tar", "--profile", "gate")
    assert checked.returncode == 0
    assert checked.stdout.endswith("sound; its verdict: pass\n")
    assert max(map(len, checked.stdout.splitlines())) <= 90
    as_json = json.loads(hilgate(repository, "verify-bundle", "e.tar", "--json").stdout)
    assert (as_json["sound"], as_json["outcome"]) == (True, "pass")


def test_an_unsound_bundle_ends_with_3_whatever_it_claims(repository):
    hilgate(repository, "bundle", "--out", "e.tar")
    forge(repository / "e.tar", repository / "f.tar", edited("verdict.json", b"1 passed", b"7 passed"))
    done = hilgate(repository, "verify-bundle", "f.tar")
    assert done.returncode == 3
    assert done.stdout.endswith("NOT SOUND: nothing that it says counts\n")
    assert hilgate(repository, "verify-bundle", "none.tar").returncode == 3


def test_results_that_were_not_judged_as_recorded_are_not_bundled(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(failing(), status=1)})
    assert hilgate(root, "gate").returncode == 1
    verdict = root / "results" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"fail"', '"pass"'))
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "the stored verdict says pass; the records give fail" in done.stderr
    assert not (root / "e.tar").exists()


def test_a_bundle_is_of_the_commit_that_is_checked_out(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    hilgate(root, "gate")
    subprocess.run(["git", *IDENTITY, "commit", "-q", "--allow-empty", "-m", "x"], cwd=root, check=True)
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "is checked out" in done.stderr
