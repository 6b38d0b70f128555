# SPDX-License-Identifier: Apache-2.0
"""A release from its plan to its signature, and a forger who can write everything but the commit and the key."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import bill, edited, first_problem, forge, members_of
from support.plans import git, hilgate, python, write_repository, writes_findings
from support.static_steps import STEPS, script

from hilgate.declare.load import load_project
from hilgate.declare.protected import entry_for, load
from hilgate.errors import CannotRunHereError, MisuseError
from hilgate.git import commit_time
from hilgate.names import stays_inside
from hilgate.release import bundle, signature, verify

REPOSITORY = Path(__file__).resolve().parents[3]
WHEEL = "samples-0.1.0-py3-none-any.whl"
BUILDS = f"""\
import hashlib, json, os, pathlib
out = pathlib.Path(os.environ["HILGATE_OUT"])
(out / "wheels").mkdir()
(out / "wheels/{WHEEL}").write_bytes(b"a wheel")
labels = {{"wheel": "{WHEEL}", "sha256": "sha256:" + hashlib.sha256(b"a wheel").hexdigest()}}
(out / "findings.jsonl").write_text(json.dumps({{"id": "built twice", "outcome": "pass", "labels": labels}}) + chr(10))
"""


TODAY = dt.datetime.now(dt.UTC).date()
ENTRY = {"test": "other", "step": "works", "reason": "r", "owner": "o"}
QUARANTINED = json.dumps([{**ENTRY, "added": str(TODAY), "expires": str(TODAY + dt.timedelta(days=7))}]).encode()


def key(folder: Path, name: str) -> Path:
    """A key pair made for this test."""
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True)
    return path


def sign(file: Path, private: Path, namespace: str = signature.NAMESPACE) -> Path:
    made = file.with_name(f"{file.name}.sig")
    made.unlink(missing_ok=True)
    words = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(private), str(file)]
    subprocess.run(words, check=True, capture_output=True)
    return made


def judged(root: Path, *, profile: str = "release") -> None:
    """Plan for the agents, run each step as a job does, judge, and write the bill of materials."""
    shutil.rmtree(root / "results", ignore_errors=True)
    assert hilgate(root, "plan", "--profile", profile, "--write", "results/plan.json").returncode == 0
    for step in json.loads((root / "results/plan.json").read_text())["steps"]:
        name = f"{step['step']['key']}-{step['device']}"
        words = ("--plan", "results/plan.json", "--results", f"results/jobs/{name}")
        done = hilgate(root, "run", name, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    words = ("--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    done = hilgate(root, "judge", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "results/sbom.cdx.json").write_text(bill(("torch", "2.13.0")))


class Release:
    """A signed release of a repository of two steps, and who may sign."""

    def __init__(self, folder: Path) -> None:
        (folder / "root").mkdir()
        self.folder, self.bundle, self.sums = folder, folder / "evidence.tar", folder / "SHA256SUMS"
        commands = {"works": writes_findings({"id": "it works", "outcome": "pass"}), "wheels": python(BUILDS)}
        self.root = write_repository(folder / "root", commands)
        (self.root / "requirements").mkdir()
        (self.root / "requirements/a.txt").write_text(f"torch==2.13.0 --hash=sha256:{'a' * 64}\n")
        git(self.root, "add", "-A")
        git(self.root, "commit", "-qm", "locks")
        self.commit = git(self.root, "rev-parse", "HEAD")
        judged(self.root)
        self.bundled = hilgate(self.root, "bundle", "--out", str(self.bundle))
        self.key, self.other = key(folder, "ours"), key(folder, "theirs")
        self.signers = folder / "allowed_signers"
        public = self.key.with_name("ours.pub").read_text()
        self.signers.write_text(f'# who may\nrelease namespaces="{signature.NAMESPACE}" {public}')
        self.sums.write_bytes(members_of(self.bundle)["SHA256SUMS"])
        self.signature = sign(self.sums, self.key)
        self.asked = verify.Asked(
            demanded={"profile": "release", "commit": self.commit},
            root=self.root,
            signature=self.signature,
            signers=self.signers,
        )

    def forged(self, folder: Path, change) -> Path:
        return forge(self.bundle, folder / "evidence.tar", change)

    def signed_anew(self, folder: Path, file: Path, private: Path) -> verify.Asked:
        """What a forger gives with another bundle: a signature of its checksums by this key."""
        sums = folder / "SHA256SUMS"
        sums.write_bytes(members_of(file)["SHA256SUMS"])
        return replace(self.asked, signature=sign(sums, private))


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Release:
    return Release(tmp_path_factory.mktemp("release"))


def words_of(release: Release) -> list[str]:
    options = {
        "--profile": "release",
        "--commit": release.commit,
        "--root": release.root,
        "--signature": release.signature,
        "--signers": release.signers,
    }
    return ["verify-bundle", str(release.bundle), *(str(word) for pair in options.items() for word in pair)]


def test_a_release_is_cut_signed_and_verified(release, tmp_path):
    assert release.bundled.returncode == 0, release.bundled.stderr
    wheel = tmp_path / WHEEL
    wheel.write_bytes(b"a wheel")
    done = hilgate(release.root, *words_of(release), "--wheel", str(wheel))
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("sound and signed; its verdict: pass\n")
    assert "it declares these 2 steps" in " ".join(done.stdout.split())
    assert 'Good "hilgate-release" signature for release' in " ".join(done.stdout.split())
    wheel.write_bytes(b"another wheel")
    done = hilgate(release.root, *words_of(release), "--wheel", str(wheel))
    assert done.returncode == 3
    assert "is not the wheel of this build" in done.stdout


def test_a_maintainer_publishes_a_release_once(release, tmp_path):
    clone, origin, tools = (tmp_path / name for name in ("clone", "origin", "tools"))
    subprocess.run(["git", "clone", "-q", "--bare", str(release.root), str(origin)], check=True)
    subprocess.run(["git", "clone", "-q", str(origin), str(clone)], check=True)
    who = {"user.name": "A. Maintainer", "user.email": "a@b.invalid", "user.signingkey": str(release.other)}
    for name, value in ({"gpg.format": "ssh"} | who).items():
        git(clone, "config", name, value)
    (clone / "ci/allowed_signers").write_text(release.signers.read_text())
    # GitHub as a folder: a release is a file that lists what is attached.
    tools.mkdir()
    (tools / "gh").write_text(
        "#!/bin/sh\n"
        f"[ $2 = create ] || exec test -e {tools}/$3\n"
        f'for file; do [ ! -f "$file" ] || basename "$file" >> {tools}/$3; done\n'
    )
    (tools / "hilgate").write_text(f'#!/bin/sh\nexec {sys.executable} -m hilgate "$@"\n')
    for name in ("gh", "hilgate"):
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY / "ci")}

    def publish(commit, folder=release.folder):
        words = [REPOSITORY / "ci/publish.sh", commit, folder]
        return subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, check=False)

    for wrong, said in (
        (publish("nosuch"), "git knows no commit nosuch"),
        (publish("HEAD", tools), f"error: there is no evidence.tar\n  where: {tools}\n  to do: "),
    ):
        assert (wrong.returncode, said in wrong.stderr) == (2, True), wrong.stderr
    for _ in range(2):
        done = publish(release.commit)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("published samples-0.1.0\n")
    assert git(origin, "rev-parse", "samples-0.1.0^{commit}") == release.commit
    attached = (tools / "samples-0.1.0").read_text().split()
    assert attached == [WHEEL, "evidence.tar", "SHA256SUMS", "SHA256SUMS.sig"]
    git(clone, "commit", "-q", "--allow-empty", "-m", "main goes on")
    assert publish("HEAD").returncode == 3, "another commit than that of the bundle"
    git(clone, "tag", "--force", "samples-0.1.0", "HEAD")
    done = publish(release.commit)
    assert (done.returncode, "tags never move" in done.stderr) == (3, True)


def test_what_is_signed_names_every_file_of_the_bundle(release, tmp_path):
    """Anybody can check it with ssh-keygen, tar and sha256sum alone."""
    with tarfile.open(release.bundle) as tar:
        tar.extractall(tmp_path)
    top = tmp_path / "evidence"
    assert (top / "SHA256SUMS").read_bytes() == release.sums.read_bytes()
    done = subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=top, check=False)
    assert done.returncode == 0
    files = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    assert {line.split("  ", 1)[1] for line in release.sums.read_text().splitlines()} == files
    manifest = json.loads((top / "manifest.json").read_text())
    assert (manifest["commit"], manifest["profile"], [*manifest["wheels"]]) == (release.commit, "release", [WHEEL])


def test_a_clone_that_has_the_commit_is_enough(release, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(release.root), str(clone)], check=True)
    git(clone, "commit", "-q", "--allow-empty", "-m", "main goes on")
    (clone / "ci/areas/samples.yaml").write_text("broken\n")
    assert verify.verify(release.bundle, replace(release.asked, root=clone)).sound
    git(clone, "checkout", "-q", "--orphan", "other")
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    with pytest.raises(MisuseError, match="it has no commit"):
        verify.verify(release.bundle, replace(release.asked, root=empty))


ROWS = {
    "report.html replaced": edited("report.html", b"<", b"<b"),
    "a log replaced": edited("results/jobs/works-cpu/steps/works-cpu/log.txt", b"", b"all is well"),
    "a file added among the results": lambda m: {**m, "results/jobs/works-cpu/malware.bin": b"x"},
    "another hilgate": edited("manifest.json", b'"hilgate": "', b'"hilgate": "9.'),
}
"""What nothing in the bundle or its commit tells."""

ALONE = {
    "a file added": (lambda m: {**m, "malware.bin": b"x"}, "members: no build leaves 'malware.bin'"),
    "pins added": (lambda m: {**m, "pins.toml": b""}, "commit: not as the commit has it: pins.toml"),
    "another time": (edited("manifest.json", b'"committed": 1', b'"committed": 2'), "commit: its time is 2"),
    "other locks and a bill of them": (
        lambda m: edited("sbom.cdx.json", b"2.13.0", b"2.14.0")(edited("locks/a.txt", b"2.13.0", b"2.14.0")(m)),
        "commit: not as the commit has it: locks/a.txt",
    ),
    "a lock more": (lambda m: {**m, "locks/b.txt": b"torch==2.13.0\n"}, "commit: not as the commit has it: locks/b"),
    "a quarantine": (
        lambda m: {**m, "quarantine.json": m["quarantine.json"].replace(b"[]", QUARANTINED)},
        "commit: its quarantine is not that of the commit",
    ),
    "another wheel": (
        edited(f"results/jobs/wheels-cpu/steps/wheels-cpu/wheels/{WHEEL}", b"a wheel", b"another"),
        "wheels: ",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_nothing_derives_again_the_signature_covers(release, tmp_path, row):
    file = release.forged(tmp_path, ROWS[row])
    unsigned = replace(release.asked, signature=None, unsigned=True)
    assert verify.verify(file, unsigned).sound, "it is the signature that finds it"
    assert first_problem(file, release.asked).startswith("signature: not signed by a key that may")
    anew = release.signed_anew(tmp_path, file, release.other)
    assert first_problem(file, anew).startswith("signature: not signed by a key that may")


@pytest.mark.parametrize(("change", "words"), ALONE.values(), ids=ALONE)
def test_what_can_be_derived_again_is_found_without_a_signature(release, tmp_path, change, words):
    file = release.forged(tmp_path, change)
    unsigned = replace(release.asked, signature=None, unsigned=True)
    assert first_problem(file, unsigned).startswith(words)


def test_no_release_passes_without_a_commit_or_signature(release):
    assert first_problem(release.bundle, replace(release.asked, root=None)).startswith(
        "commit: a release is held against its commit: --root CLONE"
    )
    unsigned = replace(release.asked, signature=None)
    assert first_problem(release.bundle, unsigned).startswith("signature: a release needs its signature: --signature")


def test_a_release_of_one_step_is_found(release, tmp_path, monkeypatch):
    """Planned, run and judged with every word in order, and signed by the key itself: the commit declares more."""
    root = tmp_path / "root"
    shutil.copytree(release.root, root)
    area = root / "ci/areas/samples.yaml"
    declared = json.loads(area.read_text())
    area.write_text(json.dumps({**declared, "steps": declared["steps"][:1]}))
    monkeypatch.setattr("hilgate.git._differing", lambda *_: set())  # a forger's hilgate sees no change
    judged(root)
    assert hilgate(root, "bundle", "--out", "e.tar").returncode == 3, "it is not even bundled"
    # A forger's program does not ask.
    bundle.write_bundle(root, root / "results", root / "e.tar", committed=commit_time(root, release.commit))
    asked = release.signed_anew(tmp_path, root / "e.tar", release.key)
    problem = first_problem(root / "e.tar", asked)
    assert problem.startswith("commit: the plan lacks steps that its commit declares: wheels-cpu"), problem


SIGNATURES = {
    "of another key": lambda release, sums: sign(sums, release.other),
    "for another purpose": lambda release, sums: sign(sums, release.key, "git"),
    "none": lambda _release, sums: sums.with_name("SHA256SUMS.sig").unlink(),
    "of another text": lambda release, sums: (sums.write_text(sums.read_text() + "\n"), sign(sums, release.key)),
    "of the bundle and not of its checksums": lambda release, sums: (
        shutil.copy(release.bundle, sums),
        sign(sums, release.key),
    ),
    "garbage": lambda _release, sums: sums.with_name("SHA256SUMS.sig").write_text("x\n"),
}


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_signature_that_is_none_of_ours_is_found(release, tmp_path, what):
    sums = Path(shutil.copy(release.sums, tmp_path))
    shutil.copy(release.signature, tmp_path)
    SIGNATURES[what](release, sums)
    problem = first_problem(release.bundle, replace(release.asked, signature=tmp_path / "SHA256SUMS.sig"))
    assert problem.startswith("signature: ")


def test_whoever_lists_no_key_verifies_nothing(release, tmp_path):
    empty = Path(shutil.copy(REPOSITORY / signature.SIGNERS_FILE, tmp_path))
    problem = first_problem(release.bundle, replace(release.asked, signers=empty))
    assert problem.startswith("signature: nobody may sign a release: it names no key")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("none", "binary"):
        with pytest.raises(MisuseError, match="no list of signers"):
            verify.verify(release.bundle, replace(release.asked, signers=tmp_path / name))


def test_a_machine_without_openssh_learns_nothing(release, monkeypatch):
    only = shutil.which("git")
    folder = release.folder / "bin"
    folder.mkdir()
    (folder / "git").symlink_to(only)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(CannotRunHereError, match="ssh-keygen is not installed"):
        verify.verify(release.bundle, release.asked)


def test_the_signers_are_protected_and_forks_cannot_change_them():
    entries = load(REPOSITORY, git(REPOSITORY, "rev-parse", "HEAD"))
    assert entry_for(entries, signature.SIGNERS_FILE).flag == "any change"
    assert not stays_inside(signature.SIGNERS_FILE, load_project(REPOSITORY).forks_may_change)


def test_no_private_key_is_in_the_repository():
    words = ["git", "grep", "-l", "-e", "BEGIN OPENSSH PRIVATE " + "KEY"]
    assert subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout == ""


def test_a_signature_is_asked_for_or_left_out(release):
    done = hilgate(release.root, "verify-bundle", str(release.bundle), "--unsigned", "--signature", "x")
    assert done.returncode == 2


def test_a_part_of_a_gate_says_that_it_is_one(tmp_path):
    root = write_repository(tmp_path, {name: writes_findings({"id": "x", "outcome": "pass"}) for name in ("a", "b")})
    assert hilgate(root, "gate", "--steps", "a").returncode == 0
    assert hilgate(root, "bundle", "--out", "e.tar").returncode == 0
    done = hilgate(root, "verify-bundle", "e.tar")
    assert done.stdout.endswith("sound; its verdict: pass, of a part: 1 step were not asked for\n")
    assert hilgate(root, "verify-bundle", "e.tar", "--profile", "release").returncode == 3


AGENT = """#!/bin/sh
case "$*" in "artifact download"*) cp "$EVIDENCE" results/evidence.tar ;; esac
"""


def signed_by_the_step(release: Release, folder: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The step `sign` of release.yml as its host runs it, in a clone of its own."""
    clone, programs = folder / "clone", folder / "bin"
    subprocess.run(["git", "clone", "-q", str(release.root), str(clone)], check=True)
    shutil.copy(release.signers, clone / signature.SIGNERS_FILE)
    programs.mkdir()
    path = shlex.quote(str(REPOSITORY / "ci"))
    program = f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} -m hilgate "$@"\n'
    for name, text in (("buildkite-agent", AGENT), ("hilgate", program)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    facts = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "EVIDENCE": str(release.bundle),
        "BUILDKITE_COMMIT": release.commit,
    }
    words = ["bash", "-e", "-c", script(STEPS["release.yml", "sign"])]
    done = subprocess.run(words, cwd=clone, env={**facts, **env}, capture_output=True, text=True, check=False)
    return done, clone / "results"


def test_the_step_that_signs_leaves_what_anybody_can_verify(release, tmp_path):
    done, left = signed_by_the_step(release, tmp_path, HILGATE_RELEASE_KEY=str(release.key))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sound and signed" in done.stdout
    assert verify.verify(left / "evidence.tar", replace(release.asked, signature=left / "SHA256SUMS.sig")).sound
    assert (left / "SHA256SUMS").read_bytes() == release.sums.read_bytes()


def test_the_step_that_signs_does_not_sign_what_did_not_pass(release, tmp_path):
    file = release.forged(tmp_path, edited("verdict.json", b'"pass"', b'"fail"'))
    done, left = signed_by_the_step(release, tmp_path, HILGATE_RELEASE_KEY=str(release.key), EVIDENCE=str(file))
    assert done.returncode == 3
    assert not (left / "SHA256SUMS.sig").exists()


def test_the_signing_step_signs_with_the_right_key_only(release, tmp_path):
    for name, env, status in (("none", {}, 5), ("other", {"HILGATE_RELEASE_KEY": str(release.other)}, 3)):
        (tmp_path / name).mkdir()
        done, left = signed_by_the_step(release, tmp_path / name, **env)
        assert done.returncode == status, done.stdout + done.stderr
        assert "sound and signed" not in done.stdout
    (tmp_path / "commit").mkdir()
    done, left = signed_by_the_step(
        release, tmp_path / "commit", HILGATE_RELEASE_KEY=str(release.key), BUILDKITE_COMMIT="0" * 40
    )
    assert done.returncode == 3
    assert not (left / "SHA256SUMS.sig").exists()
