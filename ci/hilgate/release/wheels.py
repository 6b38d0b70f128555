# SPDX-License-Identifier: Apache-2.0
"""Build the wheels of a release twice, compare their bytes, and try what was built: a step of the release.

    python -m hilgate.release.wheels . kernels evals        folders with a pyproject.toml, below the repository's root

The wheels stay in `wheels/` of the step's output folder, and so in the bundle. Each finding about one carries its file
name and its sha256 (labels `wheel` and `sha256`), by which `hilgate.release.bundle` ties it to the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata as installed
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate.declare.load import find_root
from hilgate.errors import CannotRunHereError, Exit, MisuseError, Parser, RecordsError, ending
from hilgate.git import tracked_files
from hilgate.model.record import Check, Outcome
from hilgate.pytest_recorder import recorders
from hilgate.release.bundle import DIGEST_LABEL, WHEEL_LABEL, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable
    from email.message import Message

FOLDER: Final = "wheels"
LICENSE: Final = "Apache-2.0"
RELATIVE: Final = re.compile(r"\]\((?!https://|#)([^)\s]+)")
"""A link of a description that a package index cannot follow."""
HELD: Final = re.compile(r"`([\w./-]+)` in the wheel")
"""A file that a description says is there."""
REQUIRED: Final = re.compile(r"[^\w.-]")
"""Where the name of a required distribution ends."""
SECONDS: Final = 300
OTHERWISE: Final = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "1", "SOURCE_DATE_EPOCH": ""}
"""How the second build differs, in what a careless build would write into a wheel; its umask and folder differ too."""


def labels_of(wheel: Path) -> dict[str, str]:
    """The labels of a check about a wheel."""
    return {WHEEL_LABEL: wheel.name, DIGEST_LABEL: f"sha256:{sha256(wheel)}"}


def copy(root: Path, target: Path) -> Path:
    """A copy of the files that git tracks or would track, without its history."""
    for name in tracked_files(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target / name)  # with its mode, which a wheel keeps
    return target


def build(
    root: Path, folders: Iterable[str], out: Path, *, env: dict[str, str] | None = None, umask: int = 0o22
) -> None:
    """Build a wheel of each folder of a copy of `root`, without a download, into `out`.

    Raises:
        RecordsError: One cannot be built; with the last words of pip.
    """
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--quiet", "--quiet")
    words = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(out)]
    for folder in folders:
        done = subprocess.run(
            [*words, str(root / folder)],
            cwd=root,
            env=plain(env or {}),
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode:
            printed = (done.stdout + done.stderr).strip()[-1500:]
            raise RecordsError(f"no wheel could be built: {printed}", where=folder, remedy="see its pyproject.toml")


def plain(more: dict[str, str]) -> dict[str, str]:
    """This environment without what shows Python the sources of the checkout; what it does is noted still."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    kept["PYTHONPATH"] = os.pathsep.join(recorders())
    return {name: value for name, value in (kept | more).items() if value}


def compared(first: Path, second: Path) -> list[Check]:
    """A check for each wheel that either build made: both made it, of the same bytes."""
    checks = []
    for name in sorted({path.name for folder in (first, second) for path in folder.glob("*.whl")}):
        made, again = first / name, second / name
        if not (made.is_file() and again.is_file()):
            why = f"only the {'first' if made.is_file() else 'second'} of two builds made it"
            checks.append(Check(id=f"{name} is built twice", outcome=Outcome.FAIL, message=why))
            continue
        same = sha256(made) == sha256(again)
        message = f"{made.stat().st_size} bytes" if same else f"differs in {', '.join(differing(made, again)[:5])}"
        outcome = Outcome.PASS if same else Outcome.FAIL
        checks.append(Check(id=f"{name} is built twice", outcome=outcome, message=message, labels=labels_of(made)))
    return checks


def differing(made: Path, again: Path) -> list[str]:
    """Members of two wheels that are not the same, or what else is not."""
    with zipfile.ZipFile(made) as first, zipfile.ZipFile(again) as second:
        members = [
            {entry.filename: (entry.CRC, entry.date_time, entry.external_attr) for entry in file.infolist()}
            for file in (first, second)
        ]
    names = sorted(name for name in {**members[0], **members[1]} if members[0].get(name) != members[1].get(name))
    return names or ["the order or the compression of its members"]


def tried(wheel: Path, folder: Path) -> Check:
    """Install a wheel where nothing else of ours is but what it requires, and use it.

    That is its modules, version, license and command.
    """
    began = time.monotonic()
    try:
        problem = _problem(wheel, folder)
    except (OSError, KeyError, ValueError, StopIteration, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        problem = f"it cannot be tried: {type(error).__name__}: {error}"
    outcome = Outcome.FAIL if problem else Outcome.PASS
    return Check(
        id=f"{wheel.name} works where nothing else of ours is",
        outcome=outcome,
        message=problem,
        seconds=time.monotonic() - began,
        labels=labels_of(wheel),
    )


def _problem(wheel: Path, folder: Path) -> str:
    """What is wrong with a wheel; empty for a sound one."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(about))
    name, version = metadata["Name"], metadata["Version"]
    if metadata["License-Expression"] != LICENSE:
        return f"its license is {metadata['License-Expression']}, not {LICENSE}"
    if not any(file.endswith(".dist-info/licenses/LICENSE") for file in names):
        return "it holds no LICENSE"
    promised = HELD.findall(str(metadata.get_payload()))
    if gone := [file for file in promised if file not in names]:
        return f"it holds no {gone[0]}, which its description names"
    if problem := _unshown(metadata):
        return problem
    if not wheel.name.startswith(f"{name}-{version}-"):
        return f"it says that it is {name} {version}"
    packages = sorted(file.partition("/")[0] for file in names if re.fullmatch(r"[^/]+/__init__\.py", file))
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    required = [REQUIRED.split(line, maxsplit=1)[0] for line in needed]
    others = [path.name.partition("-")[0] for path in wheel.parent.glob("*.whl")]
    wanted = [f"{name}=={version}", *(other for other in others if other in required)]
    _link(folder, [package for package in required if package not in others])
    return _unusable(wheel.parent, wanted, folder, name, version, packages)


def _link(folder: Path, required: list[str]) -> None:
    """Make an environment with links to these distributions of ours, to what they require, and to nothing else."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    waiting, linked = list(required), set()
    while waiting:
        name = waiting.pop()
        if name in linked:
            continue
        linked.add(name)
        try:
            distribution = installed.distribution(name)
        except installed.PackageNotFoundError:  # of another system or Python
            continue
        waiting += [
            REQUIRED.split(require, maxsplit=1)[0]
            for require in distribution.requires or ()
            if "extra ==" not in require
        ]
        for top in {Path(str(file)).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def _unshown(metadata: Message) -> str:
    """What a package index would show badly; empty where nothing is."""
    kind, text = metadata["Description-Content-Type"] or "", str(metadata.get_payload())
    if not kind.startswith("text/markdown") or not text.strip():
        return f"its description is {len(text.strip())} characters of {kind or 'no declared type'}, not Markdown"
    if link := RELATIVE.search(text):
        return f"its description links to {link[1]}, which a package index does not have"
    missing = [key for key in ("Summary", "Requires-Python", "Classifier") if not metadata[key]]
    return f"its metadata has no {missing[0]}" if missing else ""


def _unusable(index: Path, wanted: list[str], folder: Path, name: str, version: str, packages: list[str]) -> str:
    """The first command that fails where a wheel and those that it requires are installed; empty when none does.

    They are installed by name from a folder that is the only index, as a reader of the page about releases does.
    """
    (site,) = folder.glob("lib/python*/site-packages")
    python, program, home = folder / "bin" / "python", folder / "bin" / name, folder / "empty"
    home.mkdir()
    imported = "; ".join(
        [
            "import importlib, importlib.metadata as metadata",
            f"assert metadata.version({name!r}) == {version!r}, metadata.version({name!r})",
            f"modules = [importlib.import_module(package) for package in {packages!r}]",
            "files = [module.__file__ for module in modules]",
            f"assert all(file.startswith({str(site)!r}) for file in files), files",
            f"assert [module.__version__ for module in modules if module.__name__ == {name!r}] == [{version!r}]",
        ]
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--quiet", "--python", str(python), "install"]
    alone = ["--no-deps", "--no-index", "--ignore-installed", f"--find-links={index}"]
    if failure := _fails([*pip, *alone, *wanted], home):
        return f"it cannot be installed: {failure}"
    commands = [[str(python), "-P", "-s", "-c", imported]]
    commands += [[str(program), "--help"]] if program.exists() else []
    if name == "hilgate":  # it writes the declarations of another repository from its own templates
        (home / "tests").mkdir()
        (home / "tests" / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
        commands += [["git", "init", "--quiet"], *([str(program), word] for word in ("--version", "init", "plan"))]
    for words in commands:
        if failure := _fails(words, home):
            return f"`{Path(words[0]).name} {' '.join(words[1:])}` fails: {failure}"
    return ""


def _fails(words: list[str], folder: Path) -> str:
    """The last words of a command that fails; empty for one that does not."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=plain({"HOME": str(folder)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return (done.stdout + done.stderr).strip()[-600:] or f"exit status {done.returncode}" if done.returncode else ""


@ending
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is one of `hilgate.errors.Exit`."""
    parser = Parser(prog="python -m hilgate.release.wheels", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder below the root that has a pyproject.toml")
    folders: list[str] = parser.parse_args(arguments).folders
    root = find_root(Path.cwd())
    for folder in folders:
        if not (root / folder / "pyproject.toml").is_file():
            raise MisuseError("there is no pyproject.toml", where=folder, remedy="name the folder of a distribution")
    out = Path(os.environ.get("HILGATE_OUT", root / "results" / FOLDER))
    made = out / FOLDER
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="hilgate-wheels-") as name:
        scratch = Path(name)
        again = scratch / "another" / "dist"
        again.mkdir(parents=True)
        build(copy(root, scratch / "first"), folders, made)
        build(copy(root, scratch / "another" / "second"), folders, again, env=OTHERWISE, umask=0o77)
        checks = compared(made, again)
        wheels = sorted(made.glob("*.whl"))
        if len(wheels) != len(folders):
            what = f"{len(folders)} folders made {len(wheels)} wheels"
            raise CannotRunHereError(what, where=str(made), remedy="see what the build backend printed above")
        checks += [tried(wheel, scratch / "tried" / wheel.name) for wheel in wheels]
    Check.write_all(out, checks)
    for check in checks:
        sys.stdout.write(
            f"{check.outcome.value:<5} {check.id}  {check.labels.get(DIGEST_LABEL, '')[:19]} {check.message}\n"
        )
    return int(Exit.PASS if all(check.outcome is Outcome.PASS for check in checks) else Exit.FAIL)


if __name__ == "__main__":
    sys.exit(main())
