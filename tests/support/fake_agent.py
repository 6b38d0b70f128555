# SPDX-License-Identifier: Apache-2.0
"""A stand-in for buildkite-agent 4, as much of it as `support/chaos.py` asks of one: `start`, its executor, `pause`,
`annotate` and `artifact upload`. Hooks run in the order of the real one, each sourced in a script written to TMPDIR.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ctypes.CDLL(None).prctl(15, b"buildkite-agent")  # processes of an agent are known by this name


def call(method, path, data=None, endpoint=None):
    body = data if isinstance(data, bytes) else json.dumps(data or {}).encode()
    address = (endpoint or os.environ["BUILDKITE_AGENT_ENDPOINT"]) + path
    with urllib.request.urlopen(urllib.request.Request(address, data=body, method=method), timeout=10) as answer:
        return json.loads(answer.read() or b"{}")


def option(words, name, default=""):
    return words[words.index(name) + 1] if name in words else default


class Executor:
    """One job: `buildkite-agent bootstrap`."""

    def __init__(self):
        self.env, self.cancelled, self.child = dict(os.environ), False, None
        signal.signal(signal.SIGTERM, self.cancel)

    def cancel(self, *_):
        self.cancelled = True
        self.env["BUILDKITE_JOB_CANCELLED"] = "true"
        if self.child is not None:
            os.killpg(self.child.pid, signal.SIGTERM)

    def shell(self, text, **more):
        self.child = subprocess.Popen(["/bin/bash", "-c", text], env={**self.env, **more}, start_new_session=True)
        status = self.child.wait()
        self.child = None
        return status if status >= 0 else 128 - status

    def hook(self, name):
        """Source an agent's hook, and take what it exports; a hook that is not there passes."""
        path = Path(self.env["BUILDKITE_HOOKS_PATH"], name)
        if not path.exists():
            return 0
        with tempfile.NamedTemporaryFile("w", prefix="hook-script-wrapper-", delete=False) as script:
            script.write(f'. "{path}"\nstatus=$?\nenv -0 > "$0.env"\nexit $status\n')
        status = self.shell(f'exec /bin/bash "{script.name}"')
        after = Path(f"{script.name}.env")
        if after.exists():
            pairs = [pair.partition("=") for pair in after.read_text().split("\0") if "=" in pair]
            self.env.update({key: value for key, _, value in pairs if key not in {"_", "SHLVL", "PWD"}})
            after.unlink()
        Path(script.name).unlink()
        self.env["BUILDKITE_LAST_HOOK_EXIT_STATUS"] = str(status)
        return status

    def checkout(self):
        parts = [
            re.sub(r"[^A-Za-z0-9-]", "-", self.env[f"BUILDKITE_{name}"])
            for name in ("AGENT_NAME", "ORGANIZATION_SLUG", "PIPELINE_SLUG")
        ]
        place = Path(self.env["BUILDKITE_BUILD_PATH"], *parts)
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        self.env["BUILDKITE_BUILD_CHECKOUT_PATH"] = str(place)
        repository, commit = self.env["BUILDKITE_REPO"], self.env["BUILDKITE_COMMIT"]
        for _ in range(2):  # what git cannot use is made anew, once
            made = Path(".git").exists() or self.shell(f"git clone -q -- {repository} .") == 0
            if made and self.shell(f"git clean -ffxdq && git fetch -q origin && git checkout -qf {commit}") == 0:
                return 0
            os.chdir(place.parent)
            shutil.rmtree(place)
            place.mkdir()
            os.chdir(place)
        return 128

    def run(self):
        status = self.hook("environment") or self.checkout() or self.hook("post-checkout")
        status = status or self.hook("pre-command")
        if not status and not self.cancelled:
            status = self.shell(self.env["BUILDKITE_COMMAND"])
            self.env["BUILDKITE_COMMAND_EXIT_STATUS"] = str(status)
            status = self.hook("post-command") or status
        if paths := self.env.get("BUILDKITE_ARTIFACT_PATHS"):
            uploaded = self.shell(f"buildkite-agent artifact upload '{paths}'")
            status = status or int(uploaded != 0)
        return self.hook("pre-exit") or status


class Agent:
    """`buildkite-agent start`: jobs, one at a time, until it is made to stop."""

    def __init__(self, words):
        lines = Path(option(words, "--config")).read_text().splitlines()
        self.settings = dict(
            re.fullmatch(r'([a-z-]+)="?([^"]*)"?', line).groups() for line in lines if re.match("[a-z]", line)
        )
        self.endpoint, self.token = option(words, "--endpoint"), option(words, "--token")
        self.context = option(words, "--job-context-dir")
        self.stopping, self.child, self.reason = False, None, ""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        signal.signal(signal.SIGQUIT, self.quit)

    def quit(self, *_):
        self.stopping = True
        self.end("agent_stop")

    def end(self, reason):
        if self.child is not None and not self.reason:
            self.reason = reason
            self.child.terminate()

    def loop(self):
        call("POST", "register", {"name": "host-1"}, self.endpoint)
        while not self.stopping:
            answer = call("GET", "ping", endpoint=self.endpoint)
            if job := answer.get("job"):
                self.job(call("PUT", f"jobs/{job['id']}/accept", endpoint=self.endpoint))
            else:
                time.sleep(0.2)

    def job(self, job):
        path = f"jobs/{job['id']}"
        files = [
            Path(tempfile.mkstemp(prefix=f"job-env{kind}-{job['id']}", dir=self.context)[1]) for kind in ("", "-json")
        ]
        for file in files:
            file.write_text(json.dumps(job["env"]))
        own = {"BUILDKITE_AGENT_ENDPOINT": self.endpoint, "BUILDKITE_AGENT_ACCESS_TOKEN": "of-the-agent"}
        hook = Path(self.settings["hooks-path"], "pre-bootstrap")
        first = {**os.environ, **own, "BUILDKITE_JOB_ID": job["id"], "BUILDKITE_ENV_JSON_FILE": str(files[1])}
        admitted = not hook.exists() or subprocess.run([str(hook)], env=first, check=False).returncode == 0
        call("PUT", f"{path}/start", endpoint=self.endpoint)
        status, self.reason = -1, "" if admitted else "agent_refused"
        if admitted:
            env = {
                **os.environ,
                **job["env"],
                **own,
                "BUILDKITE_HOOKS_PATH": self.settings["hooks-path"],
                "BUILDKITE_BUILD_PATH": self.settings["build-path"],
            }
            self.child = subprocess.Popen(
                [sys.argv[0], "bootstrap"],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            threading.Thread(target=self.watch, args=(job["id"], self.child), daemon=True).start()
            out, _ = self.child.communicate()
            status, self.child = self.child.returncode, None
            call("POST", f"{path}/chunks?sequence=1", out, self.endpoint)
        status = -1 if self.reason else status if status >= 0 else 255
        ended = {"exit_status": str(status)} | ({"signal_reason": self.reason} if self.reason else {})
        call("PUT", f"{path}/finish", ended, self.endpoint)
        for file in files:
            file.unlink(missing_ok=True)

    def watch(self, job, child):
        while child.poll() is None:
            if call("GET", f"jobs/{job}", endpoint=self.endpoint).get("state") == "canceled":
                self.end("cancel")
            time.sleep(0.3)


def upload(paths):
    found = [path for pattern in paths.split(";") for path in Path().glob(pattern) if path.is_file()]
    if found:
        artifacts = [{"path": str(path)} for path in sorted(set(found))]
        call("POST", f"jobs/{os.environ['BUILDKITE_JOB_ID']}/artifacts", {"artifacts": artifacts})


def main(words):
    try:
        if words[0] == "start":
            Agent(words).loop()
        elif words[0] == "bootstrap":
            return Executor().run()
        elif words[0] == "pause":
            call("POST", "pause", {"note": option(words, "--note")})
        elif words[0] == "annotate":
            call("POST", f"jobs/{os.environ['BUILDKITE_JOB_ID']}/annotations", {"body": words[-1]})
        elif words[:2] == ["artifact", "upload"]:
            upload(words[2])
    except (urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"fatal: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
