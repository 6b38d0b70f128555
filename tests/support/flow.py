# SPDX-License-Identifier: Apache-2.0
"""Whole builds on one machine: the real flow, planner, hooks, jobs and judge around a service and a docker of files.

A build uploads the flow of its merge base, runs each uploaded step under `bash -e -c` between the agent's hooks, and
keeps what a step uploads below the step's key. The docker runs what follows the image in the folders that are mounted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from support.forks import AREA
from support.nodes import ROOT
from support.plans import git
from support.store import LAND

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS, THEIRS = "https://forge.invalid/ours/it", "https://forge.invalid/theirs/it"
NAMES = {"ORGANIZATION_SLUG": "acme", "PIPELINE_SLUG": "it"}
BRANCH = {
    "BRANCH": "theirs",
    "PULL_REQUEST": "7",
    "PULL_REQUEST_BASE_BRANCH": "main",
    "PULL_REQUEST_REPO": OURS,
    **NAMES,
}
FORK = {**BRANCH, "PULL_REQUEST_REPO": THEIRS}
MAIN = {"BRANCH": "main", "PULL_REQUEST": "false", **NAMES}
"""Buildkite's variables of a pull request of a branch or of a fork, and of the default branch."""
SECRETS = {"HILGATE_GITHUB_TOKEN": "ghp_comments", "HILGATE_API_TOKEN": "bkua_ends"}
"""Secrets of a cluster, by the names that steps ask for."""
UPLOAD = "hilgate flow > upload.yml\nbuildkite-agent pipeline upload --reject-parse-warnings upload.yml"

HOOKS = ROOT / "ci/hooks"
JOB = f"""\
trap '. {HOOKS}/pre-exit' EXIT
for hook in environment post-checkout pre-command; do . {HOOKS}/$hook; done
status=0; bash -e -c "$BUILDKITE_COMMAND" || status=$?
. {HOOKS}/post-command
exit $status
"""

AGENT = """#!{python} -I
import glob, json, os, pathlib, shutil, sys
{land}
store, words, key = pathlib.Path({store!r}), sys.argv[1:], os.environ["BUILDKITE_STEP_KEY"]
if words[:2] == ["artifact", "upload"]:
    for name in [one for part in words[2].split(";") for one in glob.glob(part, recursive=True) if os.path.isfile(one)]:
        target = store / "artifacts" / key / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, target)
elif words[:2] == ["artifact", "download"]:
    source = store / "artifacts" / words[words.index("--step") + 1]
    found = [one for one in glob.glob(words[2], root_dir=source, recursive=True) if (source / one).is_file()]
    for name in found:
        target = pathlib.Path(words[3]) / land(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target)
    sys.exit(None if found else "fatal: Failed to download artifacts: No artifacts found for downloading")
elif words[:2] == ["pipeline", "upload"]:
    text = pathlib.Path(words[-1]).read_text()
    step = "${{BUILDKITE_STEP_KEY}}"
    text = text if "--no-interpolation" in words else text.replace(step, key).replace("$$", "$")
    (store / f"upload-{{len(list(store.glob('upload-*')))}}").write_text(text)
elif words[:2] == ["secret", "get"]:
    with (store / "secrets-asked").open("a") as file:
        file.write(words[2] + "\\n")
    secrets = json.loads((store / "secrets").read_text())
    print(secrets[words[2]]) if words[2] in secrets else sys.exit("no such secret")
elif words[0] == "annotate":
    (store / f"annotation-{{words[words.index('--context') + 1]}}").write_text(sys.stdin.read())
"""

GH = """#!{python} -I
import json, os, pathlib, sys
call = {{"words": sys.argv[1:], "token": os.environ.get("GH_TOKEN"), "at": os.getcwd(), "body": sys.stdin.read()}}
with pathlib.Path({store!r}, "gh").open("a") as file:
    file.write(json.dumps(call) + "\\n")
sys.exit({refusal!r})
"""

DOCKER = """#!{python} -I
import os, pathlib, subprocess, sys
words = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(" ".join(words) + "\\n")
if words[0] != "run":
    sys.exit()
options = [word for word in words if word.startswith("--")]
mounts = [dict(pair.split("=", 1) for pair in word.split(",")[1:3]) for word in options if word.startswith("--mount=")]
command = words[words.index("python3") :]
for mount in mounts:
    command = [word.replace(mount["target"], mount["source"]) for word in command]
(work,) = [mount["source"] for mount in mounts if mount["target"].endswith("workspace")]
env = dict(word[6:].split("=", 1) for word in options if word.startswith("--env=") and "=" in word[6:])
env |= {{"PATH": "/usr/bin:/bin", "PYTHONPATH": env["PYTHONPATH"] + {hilgate!r}}}  # an image that has it installed
env |= {{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}}  # another user's
sys.exit(subprocess.run([{python!r}, *command[1:]], cwd=work, env=env).returncode)
"""


def posts(
    condition: str, *, base: str | None = None, number: int | None = None, queue: str | None = None, branch: str = "x"
) -> bool:
    """Whether Buildkite sends a notice with this condition in such a build."""
    build = SimpleNamespace(
        pull_request=SimpleNamespace(base_branch=base, id=number),
        merge_queue=SimpleNamespace(base_branch=queue),
        branch=branch,
    )
    text = condition.replace("||", "or").replace("&&", "and").replace("null", "None")
    return bool(eval(text, {"build": build, "pipeline": SimpleNamespace(default_branch="main")}))


@dataclass
class Build:
    """What became of a build."""

    folder: Path
    statuses: dict[str, int] = field(default_factory=dict)
    """Key of each step that ran -> its exit status."""
    logs: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    """Keys of forms: every build here has said what it wants, and a dependency on a step that is left out is none."""
    posted: int | None = None
    """Exit status that was posted as the required one; None where none was."""

    def artifact(self, step: str, name: str) -> str:
        return (self.folder / "artifacts" / step / name).read_text()

    def log(self) -> str:
        """What all steps have printed."""
        return "\n".join(self.logs.values())

    @property
    def comments(self) -> list[dict[str, Any]]:
        """What `gh` was asked for: its `words`, `token`, working folder `at` and `body`."""
        path = self.folder / "gh"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def secrets_asked(self) -> list[str]:
        """Secrets that jobs asked the agent for while they ran."""
        path = self.folder / "secrets-asked"
        return path.read_text().split() if path.exists() else []

    @property
    def containers(self) -> list[str]:
        """The lines of `docker run`."""
        path = self.folder / "docker"
        return [line for line in path.read_text().splitlines() if line.startswith("run ")] if path.exists() else []


@dataclass
class Machine:
    """A host that serves a repository at `ours`, with a history of its default branch."""

    folder: Path
    ours: Path
    history: Path
    settings: dict[str, str] = field(default_factory=dict)
    """Variables of the host, beside those that every host has."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Secrets of the cluster; a step sees those that it names, and a job that names one that is not there does not
    start."""
    refusal: str | None = None
    """What GitHub says instead of taking a comment."""
    approver: str = ""
    """Address of who presses the button of an approval; where nobody does, no step after it runs."""

    @property
    def clone(self) -> Path:
        """A clone that sends changes."""
        return self.folder / "theirs"

    def change(self, floor: str, **files: str) -> str:
        """A commit of the clone on top of main; the test passes with a floor of 0.95."""
        git(self.clone, "checkout", "-q", "-B", "theirs", "origin/main")
        for name, text in {"src/limits.py": f"FLOOR = {floor}\n", **files}.items():
            (self.clone / name).write_text(text)
        git(self.clone, "add", "-A")
        git(self.clone, "commit", "-qm", "theirs")
        return git(self.clone, "rev-parse", "HEAD")

    def build(self, source: Path, commit: str, **facts: str) -> Build:
        """Build a commit of `source` to its end.

        Args:
            source: The repository that has the commit.
            commit: Full sha.
            facts: Buildkite's variables, without their prefix.
        """
        place = self.folder / f"build-{uuid.uuid4().hex[:8]}"
        checkout, build = place / "checkout", Build(place)
        git(source, "update-ref", f"refs/heads/of-{place.name}", commit)
        git(self.folder, "clone", "-q", "--branch", f"of-{place.name}", str(source), str(checkout))
        for name, text in (("buildkite-agent", AGENT), ("docker", DOCKER), ("gh", GH)):
            program = place / "bin" / name
            program.parent.mkdir(exist_ok=True)
            values = {"land": LAND, "python": sys.executable, "store": str(place), "calls": str(place / "docker")}
            program.write_text(text.format(hilgate=f":{ROOT / 'ci'}", refusal=self.refusal, **values))
            program.chmod(0o755)
        (place / "secrets").write_text(json.dumps(self.secrets))
        env = {f"BUILDKITE_{name}": value for name, value in facts.items()}
        if self.approver:
            env |= {"BUILDKITE_UNBLOCKER": "Somebody", "BUILDKITE_UNBLOCKER_EMAIL": self.approver}
            env |= {"BUILDKITE_BUILD_CREATOR_EMAIL": "starter@example.org"}
        for step in self._steps(build):
            status = self._run(build, checkout, step, commit, env)
            if status == 0 or step.get("key") in {"verdict", "required"}:
                self._post(build, step, facts, status)
        return build

    def _steps(self, build: Build) -> Iterator[dict[str, Any]]:
        """Steps in the order in which they may run; what a step uploads follows it."""
        waiting: list[Any] = [{"key": "upload", "command": UPLOAD, "agents": {"queue": "amd-gate"}}]
        uploaded = 0
        while waiting:
            step = waiting.pop(0)
            if isinstance(step, dict) and "group" in step:
                waiting = [*step["steps"], *waiting]
            elif isinstance(step, dict) and "block" in step and not self.approver:
                return
            elif isinstance(step, dict) and ("input" in step or "block" in step):
                build.left_out.add(step["key"])
            elif isinstance(step, dict) and "command" in step:
                needs = step.get("depends_on") or []
                if all(self._met(build, need) for need in ([needs] if isinstance(needs, str) else needs)):
                    yield step
                files = sorted(build.folder.glob("upload-*"))
                waiting = [
                    one for file in files[uploaded:] for one in yaml.safe_load(file.read_text())["steps"]
                ] + waiting
                uploaded = len(files)

    def _met(self, build: Build, need: str | dict[str, Any]) -> bool:
        if isinstance(need, dict):
            return need["step"] in build.statuses if need.get("allow_failure") else self._met(build, need["step"])
        return build.statuses.get(need) == 0 or need in build.left_out

    def _run(self, build: Build, checkout: Path, step: dict[str, Any], commit: str, facts: dict[str, str]) -> int:
        shutil.rmtree(checkout / "results", ignore_errors=True)
        command, key, home = step["command"], step["key"], self.folder / "home"
        command = command if isinstance(command, str) else "\n".join(command)
        job, paths = str(uuid.uuid4()), step.get("artifact_paths") or []
        programs = (build.folder / "bin", ROOT / "ci/bin", Path(sys.executable).parent, "/usr/bin", "/bin")
        env = {
            "PATH": ":".join(map(str, programs)),
            "HOME": str(home),
            "TMPDIR": str(self.folder),
            "BUILDKITE": "true",
            "BUILDKITE_JOB_ID": job,
            "BUILDKITE_STEP_KEY": key,
            "BUILDKITE_AGENT_META_DATA_QUEUE": step["agents"]["queue"],
            "BUILDKITE_AGENT_NAME": "agent-1",
            "BUILDKITE_COMMAND": command,
            "BUILDKITE_COMMIT": commit,
            "BUILDKITE_ARTIFACT_PATHS": ";".join(paths),
            "BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main",
            "BUILDKITE_REPO": OURS,
            "HILGATE_REPOSITORY": str(self.ours),
            "HILGATE_MIN_DISK_GIB": "1",
            "HILGATE_HISTORY": str(self.history),
            "HILGATE_STATE": str(home),
            **self.settings,
            **facts,
        }
        if missing := set(step.get("secrets", ())) - self.secrets.keys():
            build.statuses[key], build.logs[key] = -1, f"no secret {missing}"
            return -1
        env |= {name: self.secrets[name] for name in step.get("secrets", ())}
        words = ["bash", "-c", JOB]
        done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, check=False)
        build.statuses[key], build.logs[key] = done.returncode, done.stdout + done.stderr
        if paths:
            agent = [str(build.folder / "bin/buildkite-agent"), "artifact", "upload", ";".join(paths)]
            subprocess.run(agent, cwd=checkout, env=env, check=True)
        return done.returncode

    def _post(self, build: Build, step: dict[str, Any], facts: dict[str, str], status: int) -> None:
        number = facts.get("PULL_REQUEST", "false")
        kind = {
            "base": facts.get("PULL_REQUEST_BASE_BRANCH"),
            "number": None if number == "false" else int(number),
            "queue": facts.get("MERGE_QUEUE_BASE_BRANCH"),
            "branch": facts["BRANCH"],
        }
        for notice in step.get("notify", []):
            if "github_commit_status" in notice and posts(notice["if"], **kind):
                build.posted = status


def machine(folder: Path, ours: Path, theirs: Path) -> Machine:
    """A host whose git reaches both repositories by their public addresses."""
    (folder / "home").mkdir()
    lines = [f'[url "{path}"]\n  insteadOf = {url}\n' for path, url in ((ours, OURS), (theirs, THEIRS))]
    (folder / "home/.gitconfig").write_text("".join(lines) + "[safe]\n  directory = *\n")
    return Machine(folder, ours, folder / "history.sqlite")


# A project of one step in an image that another one builds; agents differ from those that decide.
AGENTS = """\
devices:
  cpu: {}
queues:
  amd-gate: {device: cpu, gpus: 0, memory_gib: 4, gate: true}
  cpus: {device: cpu, gpus: 0, memory_gib: 8, image: cpu}
"""
IMAGE = """\
  - {key: image, label: image, command: python build.py, devices: [cpu], evidence: findings,
     agents: {provides: cpu}}
"""
DIGEST = "sha256:" + "ab" * 32
BUILDS_IMAGE = f"""\
import json, os, pathlib, sys
sys.path.insert(0, {str(ROOT / "ci")!r})
from hilgate.images.contents import contents
out = pathlib.Path(os.environ["HILGATE_OUT"])
(out / "findings.jsonl").write_text(json.dumps({{"id": "built", "outcome": "pass"}}) + "\\n")
content = contents(pathlib.Path.cwd())["cpu"]
(out / "image.json").write_text(json.dumps({{"image": "cpu", "content": content, "digest": "{DIGEST}"}}))
"""
FEW_PLUGINS = 'evidence: junit, env: {PYTEST_DISABLE_PLUGIN_AUTOLOAD: "1"}'
"""pytest starts in half the time."""
TEST = "import limits\n\n\ndef test_it():\n    assert limits.FLOOR == 0.95\n"
FILES = {
    "ci/agents.yaml": AGENTS,
    "ci/areas/a.yaml": AREA.replace("steps:\n", f"steps:\n{IMAGE}").replace("evidence: junit", FEW_PLUGINS),
    "ci/project.yaml": "python_path: [src]\nforks_may_change: [src/, tests/]\nimages:\n  cpu: {recipe: Dockerfile}\n"
    "approvers: gate-owners\n",
    "ci/protected.yaml": 'rules:\n  - {paths: ["src/**", "tests/test_*.py"], flag: nothing}\n'
    "  - {paths: [tests/limit.txt], put_back: true}\n",  # as an older merge base has it
    "tests/limit.txt": "0.95\n",
    "Dockerfile": "FROM scratch\n",
    "build.py": BUILDS_IMAGE,
    ".gitignore": "results/\nupload.yml\n__pycache__/\n.pytest_cache/\n",
    "src/limits.py": "FLOOR = 0.95\n",
    "tests/test_a.py": TEST,
    **{f".buildkite/{path.name}": path.read_text() for path in (ROOT / ".buildkite").glob("*.yml")},
}
