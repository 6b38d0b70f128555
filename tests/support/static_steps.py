# SPDX-License-Identifier: Apache-2.0
"""The steps of `.buildkite/*.yml` run as Buildkite runs them: under `bash -e -c`, in an empty folder.

hilgate, git and buildkite-agent are stand-ins that write down their calls.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hilgate.buildkite.lint import FLOWS

FOLDER = Path(__file__).resolve().parents[2] / ".buildkite"
FILES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FLOWS}
STEPS = {
    (name, step["key"]): step
    for name, text in FILES.items()
    for step in yaml.safe_load(text)["steps"]
    if "command" in step
}
PULL_REQUEST = {"BUILDKITE_PULL_REQUEST": "7", "BUILDKITE_PULL_REQUEST_BASE_BRANCH": "main"}

JUDGE = """[ "$1" = judge ] || exit 0
cat > results/verdict.json <<'END'
{{"protected_changes": {protected_changes}, "images": {{"rocm": "sha256:00"}}, "tree": "t", "steps": []}}
END
echo "the verdict" > results/annotation.md
exit {status}"""
"""A judge that leaves a verdict and ends with `status`."""

ANNOTATES = '[ "$1" = annotate ] && {{ echo "annotate $* $(cat)" >> "$CALLS"; exit {status}; }}; exit 0'
"""An agent whose annotations are written down with their text."""

PLANS = """case "$1" in
plan) while [ "$1" != --write ]; do shift; done; echo {} > "$2"; printf 'a `file` \\033[31mred\\n' ;;
pipeline) echo "steps: []" ;;
esac"""


@dataclass(frozen=True)
class Ended:
    """How a step ended."""

    status: int
    output: str
    calls: list[str]

    @property
    def uploads(self) -> list[str]:
        """Files that were uploaded as pipelines."""
        return [call.split()[-1] for call in self.calls if call.startswith("buildkite-agent pipeline upload")]


def script(step: dict[str, Any]) -> str:
    """The commands of a step after the uploader has replaced `$$`."""
    command = step["command"]
    return "\n".join([command] if isinstance(command, str) else command).replace("$$", "$")


def run(folder: Path, step: dict[str, Any], *, env: dict[str, str] | None = None, **stubs: str) -> Ended:
    """Run a step; `stubs` are the bodies of hilgate, git and buildkite_agent."""
    for command in ("hilgate", "git", "buildkite-agent"):
        path = folder / command
        path.write_text(f'#!/bin/bash\necho "{command} $*" >> "$CALLS"\n{stubs.get(command.replace("-", "_"), "")}\n')
        path.chmod(0o755)
    work, calls = folder / "work", folder / "calls"
    work.mkdir()
    calls.touch()
    done = subprocess.run(
        ["bash", "-e", "-c", script(step)],
        cwd=work,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout + done.stderr, calls.read_text().splitlines())
