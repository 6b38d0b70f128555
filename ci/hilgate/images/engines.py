# SPDX-License-Identifier: Apache-2.0
"""The programs that build images, find them by their content and run them: docker with buildx, and buildah.

docker takes bases by digest, and finds wheels and images in the registry by their content. A build of a fork pushes
nothing and exports no cache; what it may read is public or content-addressed. buildah needs root and two Debian
packages, no daemon and no registry: its store is a folder of its own, and there is no base image to pull, so
debootstrap makes one, once per suite. What is started stays in this process's group, so that whoever ends the group
(Ctrl-C, a runner's timeout) ends it as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from hilgate.errors import CannotRunHereError, Exit, HilgateError
from hilgate.images.pins import WHEELS
from hilgate.images.pip_conf import pip_configuration

NETWORK: Final = (
    *("could not resolve", "temporary failure in name resolution", "temporary failure resolving"),
    *("network is unreachable", "connection timed out", "connection refused", "connection reset", "read timed out"),
    *("couldn't download", "tls handshake timeout", "no space left on device"),
)
"""What a build prints in the end when the machine is to blame and not the change."""

INSPECT: Final = ("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}")
BUILDAH: Final = ("buildah", "debootstrap")
FREE: Final = 12
"""Gigabytes that a build from nothing takes at its peak: measured, with the copies of the layer that is being made."""


class BuildFailedError(HilgateError):
    """The recipe does not build: the change is to blame until shown otherwise."""

    exit_status: ClassVar[Exit] = Exit.FAIL


@dataclass(frozen=True)
class BuildRequest:
    """One image to build."""

    image: str
    content: str
    """Key of the image, which becomes its tag."""
    recipe: str
    """Dockerfile, below the context."""
    context: Path
    """Folder with exactly the files of the key."""
    labels: dict[str, str]
    variables: dict[str, str]
    """Those of docker-bake.hcl; none for an image that is its Dockerfile alone."""
    pip_conf: str
    """Text of the pip configuration inside the build."""
    mounts: dict[str, str]
    """Path here -> path inside, for that configuration."""
    log: Path


def build(words: list[str], log: Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Run a build; its output goes to standard error and to `log`.

    Raises:
        CannotRunHereError: The program is missing, or the network or the disk stopped it.
        BuildFailedError: It failed for any other reason.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, _start(words, subprocess.STDOUT, cwd, env) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                sys.stderr.write(line)
                file.write(line)
            status = child.wait()
        except BaseException:  # an interrupt too: what was started must not go on building
            child.terminate()
            raise
    if status:
        tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line][-12:]
        what, where = f"{Path(words[0]).name} ended with {status}", f"{log}\n  " + "\n  ".join(tail)
        if any(sign in line.lower() for sign in NETWORK for line in tail):
            raise CannotRunHereError(what, where=where, remedy="mend the network or the disk of this machine")
        raise BuildFailedError(what, where=where, remedy="mend the recipe; the next build goes on from the last layer")


def output(words: list[str]) -> tuple[int, str]:
    """Exit status of a command and all it printed.

    Raises:
        CannotRunHereError: It is missing.
    """
    with _start(words, subprocess.STDOUT) as child:
        out, _ = child.communicate()
    return child.returncode, out


def answer(words: list[str]) -> str:
    """Standard output of a short command.

    Raises:
        CannotRunHereError: It is missing or fails.
    """
    with _start(words, subprocess.PIPE) as child:
        out, errors = child.communicate()
    if child.returncode:
        last = " ".join(errors.strip().splitlines()[-2:])
        what = f"{Path(words[0]).name} ended with {child.returncode}: {last}"
        raise CannotRunHereError(what, where=" ".join(words), remedy="run it to see")
    return out


def _start(
    words: list[str], errors: int, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CannotRunHereError(
            f"{words[0]} is not installed", remedy=f"install {words[0]}, e.g. apt-get install {words[0]}"
        ) from error


def _volumes(mounts: dict[str, str]) -> list[str]:
    pairs = [f"{here}:{inside}" + ("" if inside.endswith(":rw") else ":ro") for here, inside in mounts.items()]
    return [word for pair in pairs for word in ("--volume", pair)]


def pip_settings() -> dict[str, Any]:
    """`pip_conf` and `mounts` of a BuildRequest on this machine."""
    pip_conf, mounts = pip_configuration(answer([sys.executable, "-m", "pip", "config", "list"]))
    # What is not there, pip ignores here as well.
    return {"pip_conf": pip_conf, "mounts": {here: inside for here, inside in mounts.items() if Path(here).exists()}}


def available() -> bool:
    """Whether docker with buildx answers."""
    return bool(shutil.which("docker")) and output(["docker", "buildx", "version"])[0] == 0


@dataclass(frozen=True)
class Docker:
    """docker with buildx."""

    registry: str
    """Where images are found and pushed; empty for none."""
    bake_file: Path
    fork: bool
    """A stranger's change goes under a name that no other build looks for."""

    @property
    def store(self) -> str:
        """Prefix of the names it gives: the registry, or a name of this machine's own images."""
        return "hilgate-fork" if self.fork else self.registry or "hilgate"

    def with_base(self, labels: dict[str, str]) -> dict[str, str]:
        """The labels: the base is the one of the pins."""
        return labels

    def find(self, image: str, content: str) -> str | None:
        """Digest of an image in the registry, or else among those that a build like this one left on this machine."""
        return self._find(image, content)[1] or None

    def _find(self, image: str, content: str) -> tuple[str, str]:
        """Name and digest of an image; empty when there is none."""
        places: list[tuple[str, tuple[str, ...]]] = [(self.registry, INSPECT)] if self.registry else []
        if self.store != self.registry:
            places.append((self.store, ("docker", "image", "inspect", "--format", "{{.Id}}")))
        for store, inspect in places:
            name = f"{store}/{image}:{content}"
            status, printed = output([*inspect, name])
            digest = printed.strip().splitlines()[-1] if printed.strip() else ""
            if status == 0 and digest.startswith("sha256:"):
                return name, digest
        return "", ""

    def build(self, request: BuildRequest) -> None:
        """Bake the image, and the wheels that the registry does not have yet.

        Raises:
            CannotRunHereError: This machine's packages come from folders, which docker cannot mount into a build.
        """
        if request.mounts:
            raise CannotRunHereError(
                "pip's configuration names folders or a certificate of this machine",
                where=", ".join(request.mounts),
                remedy="give docker's builders an index over the network",
            )
        targets = [request.image]
        words: list[str] = []
        publish = bool(self.registry) and self.store == self.registry
        where = "--push" if publish else "--load"
        if not request.variables:
            name = f"{self.store}/{request.image}:{request.content}"
            words = [f"--label={label}={value}" for label, value in request.labels.items()]
            words += ["--secret=id=pip,env=HILGATE_PIP_CONF", where, f"--tag={name}", f"--file={request.recipe}", "."]
            command = ["docker", "buildx", "build", "--progress=plain", *words]
            return build(command, request.log, request.context, {"HILGATE_PIP_CONF": request.pip_conf})
        for prefix in WHEELS.values() if request.image == "rocm" else ():
            wheels = f"wheels-{prefix.lower()}"
            name, digest = self._find(wheels, request.variables[f"{prefix}_KEY"]) if self.registry else ("", "")
            if digest:
                words += ["--set", f"rocm.contexts.{wheels}=docker-image://{name}@{digest}"]
            elif publish:
                targets.append(wheels)
        command = ["docker", "buildx", "bake", "--file", str(self.bake_file), "--progress", "plain"]
        command += [where, *words, *targets]
        return build(command, request.log, request.context, request.variables | {"HILGATE_PIP_CONF": request.pip_conf})

    def labels(self, image: str, content: str) -> dict[str, str]:
        """Labels of a built image."""
        name, _ = self._find(image, content)
        if self.registry and name.startswith(f"{self.registry}/"):
            text = answer([*INSPECT[:4], "--format", "{{json .Image.Config.Labels}}", name])
        else:
            text = answer(["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", name])
        found: dict[str, Any] | None = json.loads(text)
        return {key: str(value) for key, value in (found or {}).items()}

    def size(self, image: str, content: str) -> tuple[float, int]:
        """Gigabytes, compressed in a registry, and number of layers of a built image."""
        name, _ = self._find(image, content)
        if self.registry and name.startswith(f"{self.registry}/"):
            sizes = [load["size"] for load in json.loads(answer([*INSPECT[:4], "--raw", name]))["layers"]]
            return sum(sizes) / 1e9, len(sizes)
        words = ["docker", "image", "inspect", "--format", "{{.Size}} {{len .RootFS.Layers}}", name]
        total, layers = answer(words).split()
        return int(total) / 1e9, int(layers)

    def run(self, image: str, content: str, words: list[str], mounts: dict[str, str]) -> tuple[int, str]:
        """Exit status and output of a command in a container without network, capabilities or devices.

        `mounts` has a path here -> a path inside, with `:rw` where the command may write.
        """
        command = ["docker", "run", "--rm", "--network", "none", "--cap-drop", "ALL"]
        command += ["--security-opt", "no-new-privileges", *_volumes(mounts)]
        return output([*command, self._find(image, content)[0], *words])


class Buildah:
    """buildah over the store in `folder`, on a base of this Debian suite that docker/scripts/debootstrap.sh makes."""

    store: Final = "localhost/hilgate"

    def __init__(self, folder: Path, suite: str, script: Path) -> None:
        """Raise CannotRunHereError where a program is missing, or this is not root."""
        missing = [name for name in BUILDAH if not shutil.which(name)]
        if missing:
            raise CannotRunHereError(
                f"{' and '.join(missing)} not installed, and neither is docker buildx",
                where="image build",
                remedy=f"as root: apt-get install --no-install-recommends {' '.join(BUILDAH)}",
            )
        if os.geteuid() != 0:
            raise CannotRunHereError(
                "debootstrap and buildah's chroot isolation need root",
                where=f"user id {os.geteuid()}",
                remedy="run it as root, or where docker buildx is installed",
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.suite, self.script, self.spool = folder, suite, script, folder / "spool"
        self.words = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def with_base(self, labels: dict[str, str]) -> dict[str, str]:
        """The labels with the base that debootstrap made."""
        base = {"name": f"debootstrap {self.suite}", "digest": self.find("base", self.suite) or ""}
        return labels | {f"org.opencontainers.image.base.{key}": value for key, value in base.items()}

    def find(self, image: str, content: str) -> str | None:
        """Digest of an image in the store."""
        return self._listed().get(self.name(image, content))

    def _listed(self) -> dict[str, str]:
        """Digest of each image in the store, by its name."""
        listed: list[dict[str, Any]] = json.loads(answer([*self.words, "images", "--json"]) or "[]") or []
        return {name: str(one["digest"]) for one in listed for name in one.get("names") or []}

    def build(self, request: BuildRequest) -> None:
        """Build on the base of the suite, layer by layer: an interrupted build goes on from its last layer."""
        self.bud(request, {"PACKAGES": request.variables["CPU_PACKAGES"]})

    def bud(self, request: BuildRequest, arguments: dict[str, str]) -> None:
        """Build a recipe with these arguments; a failure names the step, its line, and how to enter what is before it.

        BASE is the base of the suite where it is not among them. What the store had of this image goes when the new one
        is built: one of each is kept.
        """
        request.log.unlink(missing_ok=True)
        self._room()
        if "BASE" not in arguments:
            self._make_base(request.log)
            arguments = arguments | {"BASE": self.name("base", self.suite)}
        pip_conf = self.folder / "pip.conf"
        pip_conf.write_text(request.pip_conf, encoding="utf-8")
        command = [
            *(*self.words, "bud", "--isolation", "chroot", "--format", "docker", "--layers", "--force-rm"),
            *("--file", request.recipe, "--tag", self.name(request.image, request.content)),
            *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
            *("--secret", f"id=pip,src={pip_conf}"),
            *_volumes(request.mounts),
            *(f"--label={name}={value}" for name, value in self.with_base(request.labels).items()),
        ]
        try:
            build([*command, "."], request.log, request.context, {"TMPDIR": str(self.spool)})
        except BuildFailedError as error:
            text = request.log.read_text(encoding="utf-8", errors="replace")
            what = f"{error.what} {self._last_step(text, request)}"
            raise BuildFailedError(what, where=error.where, remedy=error.remedy) from error
        finally:
            pip_conf.unlink(missing_ok=True)
            with contextlib.suppress(HilgateError):  # what ended the build is what is to be said
                # An interrupted build leaves containers as large as what it was at.
                output([*self.words, "rm", "--all"])
        kept, tags = self.name(request.image, request.content), self.name(request.image, "")
        if old := [name for name in self._listed() if name.startswith(tags) and name != kept]:
            output([*self.words, "rmi", *old])

    def _room(self) -> None:
        """Remove what an interrupted build left; raise CannotRunHereError where the disk is too full."""
        shutil.rmtree(self.spool, ignore_errors=True)
        self.spool.mkdir()
        free = shutil.disk_usage(self.spool).free / 1e9
        if free < FREE:
            raise CannotRunHereError(
                f"{free:.1f} GB of the disk are free, and a build takes {FREE} GB at its peak",
                where=str(self.folder),
                remedy="free some; what is built already is kept",
            )

    def _last_step(self, log: str, request: BuildRequest) -> str:
        """The step that a log ends in, its line in the recipe, and the command that enters the layer before it."""
        step = re.findall(r"^(?:\[[\d/]+\] )?STEP [\d/]+: (.*)$", log, re.MULTILINE)[-1:] or ["before the first step"]
        recipe = (request.context / request.recipe).read_text(encoding="utf-8").splitlines()
        lines = [number for number, line in enumerate(recipe, 1) if line and step[0].startswith(line.rstrip(" \\"))]
        layer = re.findall(r"^--> (?:Using cache )?([0-9a-f]{11,})", log, re.MULTILINE)[-1:]
        words = " ".join(self.words)
        enter = f"; enter it: {words} run --isolation chroot $({words} from {layer[0]}) -- bash" if layer else ""
        return f"at {request.recipe}:{lines[-1] if lines else '?'} {step[0][:120]}{enter}"

    def size(self, image: str, content: str) -> tuple[float, int]:
        """Gigabytes and number of layers of an image in the store."""
        name = self.name(image, content)
        (listed,) = json.loads(answer([*self.words, "images", "--json", name]))
        number, unit = str(listed["size"]).split()
        facts = json.loads(answer([*self.words, "inspect", "--type", "image", name]))
        scale = {"GB": 1, "MB": 1e-3, "kB": 1e-6, "KB": 1e-6, "B": 1e-9}[unit]
        return float(number) * scale, len(facts["OCIv1"]["rootfs"]["diff_ids"])

    def labels(self, image: str, content: str) -> dict[str, str]:
        """Labels of an image in the store."""
        text = answer([*self.words, "inspect", "--type", "image", self.name(image, content)])
        return dict(json.loads(text)["Docker"]["config"].get("Labels") or {})

    def run(self, image: str, content: str, words: list[str], mounts: dict[str, str]) -> tuple[int, str]:
        """Run in a container that is removed whatever happens."""
        container = answer([*self.words, "from", self.name(image, content)]).strip()
        try:
            return output([*self.words, "run", "--isolation", "chroot", *_volumes(mounts), container, "--", *words])
        finally:
            answer([*self.words, "rm", container])

    def name(self, image: str, content: str) -> str:
        """Name of an image in the store."""
        return f"{self.store}/{image}:{content}"

    def _make_base(self, log: Path) -> None:
        """A folder of debootstrap, imported as an image and removed."""
        if self.find("base", self.suite):
            return
        folder = self.folder / "rootfs"
        if not folder.exists():
            build([str(self.script), self.suite, str(folder)], log, self.folder)
        container = answer([*self.words, "from", "scratch"]).strip()
        try:
            answer([*self.words, "add", "--quiet", container, str(folder), "/"])
            answer([*self.words, "commit", "--quiet", container, self.name("base", self.suite)])
        finally:
            answer([*self.words, "rm", container])
        shutil.rmtree(folder)


Engine = Docker | Buildah
