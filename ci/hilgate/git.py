# SPDX-License-Identifier: Apache-2.0
"""Run git: what a change touches, files and diffs of commits, and a fingerprint of the working tree."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True)
class Changes:
    """State of a checkout and, when it was compared with something, the files that differ."""

    commit: str
    """Full sha of HEAD; empty outside a git checkout."""
    dirty: bool
    """Whether the working tree (untracked files included) differs from the commit."""
    base: str | None
    """What it was compared with, as people write it; None when nothing was asked for."""
    files: tuple[str, ...] | None
    """Sorted paths below the root: changed, added, deleted, untracked, both names of a rename. None without a base.
    They are for people and records: bytes that are not UTF-8 stand as `\\xff`."""
    appeared: tuple[str, ...] = ()
    """Those of `files` that the merge base does not have, sorted."""
    merge_base: str = ""
    """Full sha of the merge base of HEAD and `base`; empty without a base."""
    links: tuple[str, ...] = ()
    """Those of `files` that the change makes a link or a submodule: what is read there is not the change's."""
    unreadable: tuple[str, ...] = ()
    """Those of `files` whose names are not UTF-8, sorted."""


def inspect(root: Path, base: str | None) -> Changes:
    """Compare the working tree under `root` with the merge base of HEAD and `base`.

    Raises:
        MisuseError: `base` names no commit, shares no history with HEAD, or `root` is no git checkout.
        CannotRunHereError: A base was given and git is not installed.
    """
    if base is None:
        return _without_base(root)
    if not _is_checkout(root):
        raise MisuseError(
            "not a git checkout, so there is nothing to compare",
            where=str(root),
            remedy="leave out --base to plan everything",
        )
    if base.startswith("-") or _git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") is None:
        raise MisuseError(
            f"git knows no commit {base!r}",
            where=str(root),
            remedy=f"name another --base{_names_like(root, base)}, or fetch it (git fetch origin)",
        )
    commit = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}") or "").strip()
    fork = (_git(root, "merge-base", base, "HEAD") or "").strip()
    if not fork:
        raise MisuseError(
            f"{base!r} and HEAD share no history here",
            where=str(root),
            remedy="in a shallow clone run git fetch --unshallow; else leave out --base",
        )
    with _plain_index(root) as index:
        raw = ("diff", "--raw", "-z", "--find-renames", "--no-ext-diff", fork, "--")
        changed, appeared, links = _names(_required(root, *raw, errors="surrogateescape", index=index))
    new = _untracked(root, errors="surrogateescape")
    return Changes(
        commit,
        _is_dirty(root),
        short(base),
        files=_for_records(changed | new),
        appeared=_for_records(appeared | new),
        merge_base=fork,
        links=_for_records(links),
        unreadable=_for_records(name for name in changed | new if not _is_utf8(name)),
    )


TO_MAKE_ONE = "clone the repository, or run `git init && git add --all` here"
"""What makes a checkout where there is none."""


def no_checkout(root: Path) -> str:
    """Why git can say nothing about the files below `root`, as the end of a sentence; empty where it can."""
    try:
        if _is_checkout(root):
            return ""
    except CannotRunHereError:
        return "git is not installed"
    if not (root / ".git").exists():
        return "this is no git checkout"
    refused = subprocess.run(("git", "status"), cwd=root, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    said = refused.stderr.decode(errors="replace").splitlines()  # that it belongs to another user, say
    return f"git does not take this for a checkout ({said[0] if said else 'its top folder is another one'})"


def _for_records(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in names))


def _is_utf8(name: str) -> bool:
    """Whether a name that was read with surrogates for odd bytes has none."""
    return not any("\udc80" <= char <= "\udcff" for char in name)


def default_base(root: Path) -> tuple[str, str]:
    """The default branch that HEAD came from, as a full ref; where there is none, an empty one, and why.

    That of the remote `upstream`, else of `origin`, else of the only remote: what its HEAD names, else main or master.
    Without one the local main or master for another branch that is checked out: of itself nothing says what is new.
    """
    if missing := no_checkout(root):
        return "", missing
    if _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}") is None:
        return "", "nothing is committed yet"
    remotes, names = (_git(root, "remote") or "").split(), list[str]()
    usual = [name for name in ("upstream", "origin") if name in remotes]
    for remote in usual or (remotes if len(remotes) == 1 else ()):
        head = _git(root, "symbolic-ref", "--quiet", f"refs/remotes/{remote}/HEAD") or ""
        names += [head.strip(), f"refs/remotes/{remote}/main", f"refs/remotes/{remote}/master"]
    here = (_git(root, "symbolic-ref", "--quiet", "HEAD") or "").strip()
    names += [name for name in ("refs/heads/main", "refs/heads/master") if here not in {name, ""}]
    unrelated = ""
    for name in filter(None, names):
        if _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") is None:
            continue
        if _git(root, "merge-base", name, "HEAD"):
            return name, ""
        unrelated = unrelated or short(name)
    shallow = (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "true"
    hint = " in this shallow clone (git fetch --unshallow)" if shallow else ""
    if unrelated:
        return "", f"{unrelated} and HEAD share no history{hint}"
    return "", f"no default branch to compare with is known{hint or ' (--base HEAD: with the last commit)'}"


def short(ref: str) -> str:
    """`refs/remotes/origin/main` as people write it."""
    return ref.removeprefix("refs/remotes/").removeprefix("refs/heads/")


def _names_like(root: Path, base: str) -> str:
    """Branches and tags that there are, those with the last part of this name first: ` (there are: main, v1)`."""
    names = (_git(root, "for-each-ref", "--format=%(refname:short)") or "").split()
    names.sort(key=lambda name: name.rpartition("/")[2] != base.rpartition("/")[2])
    return f" (there are: {', '.join(names[:5])})" if names else ""


def tracked_files(root: Path) -> tuple[str, ...]:
    """Files that git tracks or would track (untracked and not ignored), relative to `root`, sorted; links included.

    They are for opening: bytes that are not UTF-8 stand as surrogates (`os.fsdecode`), which no record can hold.

    Raises:
        CannotRunHereError: git is not installed or `root` is no checkout.
    """
    return tuple(name for name in _listed(root) if (root / name).is_file())


def _listed(root: Path) -> list[str]:
    listed = _required(root, "ls-files", "--cached", "-z", errors="surrogateescape").split("\0")
    found = {*listed, *_untracked(root, errors="surrogateescape")}
    return sorted({_for_opening(name) for name in found if name})


_OF_TOOLS = re.compile(
    r"(?:^|/)(?:__pycache__/.*|\.\w+_cache/.*|\.hypothesis/.*|[^/]*\.egg-info/.*"
    r"|\.[^/]*\.sw[a-p]|[^/]*~|\.#[^/]*|#[^/]*#|\.DS_Store)$"
)
"""What editors and tools leave beside files for themselves."""


_BYTECODE = re.compile(r"(?:^|/)__pycache__/[^/]+\.pyc$")
"""What Python writes while it imports; `hilgate.run.bytecode` sees to it that none is stale."""


def _untracked(root: Path, errors: str = "backslashreplace") -> set[str]:
    """Files that git would track, and those that a private list of exclusions hides in folders of the repository.

    What the repository's own .gitignore files name is ignored; `.git/info/exclude` and `core.excludesFile` are of this
    clone alone, and a conftest.py that they hide runs all the same. They may hide folders at the top, such as an
    environment, and what editors and tools leave.
    """

    def listed(*options: str) -> set[str]:
        names = _required(root, "ls-files", "-z", *options, errors=errors).split("\0")
        return {one for one in names if one and not _BYTECODE.search(one)}

    new = listed("--others", "--exclude-standard")
    hidden = listed("--others", "--exclude-per-directory=.gitignore") - new
    if hidden:
        folders = {name.partition("/")[0] for name in listed("--cached") if "/" in name}
        for name in hidden:
            top, slash, _ = name.partition("/")
            # At the top an agent links the compilers beside its workspace.
            of_a_folder = top in folders if slash else not (name[0] == "." and (root / name).is_symlink())
            if of_a_folder and not _OF_TOOLS.search(name):
                new.add(name)
    return new


@contextlib.contextmanager
def _plain_index(root: Path) -> Iterator[str]:
    """An index in which git overlooks no file (`--assume-unchanged`, `--skip-worktree`); empty for its own."""
    flagged = [
        entry[2:]
        for entry in _required(root, "ls-files", "-v", "-z", errors="surrogateescape").split("\0")
        if entry and (entry[0].islower() or entry[0] == "S")
    ]
    own = _git(root, "rev-parse", "--git-path", "index")
    if not flagged or own is None:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="hilgate-index-") as folder:
        index = Path(folder, "index")
        shutil.copyfile(root / own.rstrip("\n"), index)
        names = [os.fsencode(_for_opening(name)).decode(errors="surrogateescape") for name in flagged]
        for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
            for start in range(0, len(names), 200):
                _required(root, "update-index", flag, "--", *names[start : start + 200], index=str(index))
        yield str(index)


def tracks(folder: Path) -> bool:
    """Whether git tracks a file in a folder, of whatever checkout; False where git is not installed."""
    try:
        return bool(folder.is_dir() and _git(folder, "ls-files", "--cached", "-z"))
    except CannotRunHereError:
        return False


def file_at(root: Path, commit: str, path: str) -> bytes | None:
    """A file as it is in a commit; None when it is not in it (or is a folder there).

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    return _bytes(root, "cat-file", "blob", f"{known(root, commit)}:{path}")


def known(root: Path, commit: str) -> str:
    """A full sha that this checkout has.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit) or _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise CannotRunHereError(
            f"commit {commit[:12] or '(none)'} is not in this checkout",
            where=str(root),
            remedy="fetch it; in a shallow clone run git fetch --unshallow",
        )
    return commit


def names_at(root: Path, commit: str, folder: str) -> tuple[str, ...]:
    """Paths of the files directly in a folder of a commit, links left out, sorted.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    listed = _required(root, "ls-tree", "-z", "--full-tree", "--end-of-options", commit, "--", f"{folder}/")
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return tuple(sorted(name for facts, _, name in entries if facts.startswith("100")))


def tree(root: Path, commit: str) -> dict[str, str]:
    r"""Path of each file of a commit -> its mode and the name of its content, as `100644 <sha>`. One process for all.

    Bytes of a path that are not UTF-8 stand as `\xff`, as in `Changes.files`.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    listed = _required(root, "ls-tree", "-r", "-z", "--full-tree", "--end-of-options", known(root, commit))
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return {path: f"{facts.split()[0]} {facts.split()[2]}" for facts, _, path in entries}


def blob_name(content: bytes, like: Iterable[str]) -> str:
    """The name that git gives to a content, of the same kind (SHA-1 or SHA-256) as in these entries of a tree."""
    longest = max((len(entry.rpartition(" ")[2]) for entry in like), default=40)
    kind = hashlib.sha256 if longest == 64 else hashlib.sha1
    return kind(b"blob %d\0" % len(content) + content).hexdigest()


def files_at(root: Path, commit: str, paths: Iterable[str]) -> dict[str, bytes | None]:
    """Files as they are in a commit, None for each that is not in it. One process for all.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    names = {path: entry.partition(" ")[2] for path, entry in tree(root, commit).items() if entry[:3] != "160"}
    wanted = sorted({names[path] for path in paths if path in names})
    found = _bytes(root, "cat-file", "--batch", given="".join(f"{name}\n" for name in wanted).encode()) or b""
    blobs: dict[str, bytes] = {}
    at = 0
    for name in wanted:  # "<sha> blob <size>", a line break, the content, a line break
        head, _, _ = found[at : at + 200].partition(b"\n")
        size = int(head.split()[2])
        at += len(head) + 1
        blobs[name] = found[at : at + size]
        at += size + 1
    return {path: blobs.get(names.get(path, "")) for path in paths}


PATHS_AT_ONCE = 200
"""In one command line."""


def hunks(root: Path, before: str, after: str, paths: Sequence[str]) -> dict[str, str]:
    """How files differ between two commits: path -> the hunks of a unified diff without context.

    `after` is empty for the working tree. Every file counts as text, whatever attributes the change gives it: a file
    that is called binary would be shown to nobody.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    sides = [known(root, before), *([known(root, after)] if after else [])]
    found: dict[str, str] = {}
    for start in range(0, len(paths), PATHS_AT_ONCE):
        some = [f":(literal){path}" for path in paths[start : start + PATHS_AT_ONCE]]
        names = _required(root, "diff", *plain, "--name-only", "-z", "--end-of-options", *sides, "--", *some)
        text = _required(root, "diff", *plain, "--text", "--unified=0", "--end-of-options", *sides, "--", *some)
        # Lines of a file begin with a sign, so no line of a file can look like the head of the next one.
        of_each = re.split(r"^diff --git .*\n", text, flags=re.MULTILINE)[1:]
        listed = names.split("\0")[:-1]
        if len(listed) != len(of_each):
            what = f"git lists {len(listed)} changed files and shows {len(of_each)}"
            raise CannotRunHereError(what, where=str(root), remedy="run the same again; the checkout changed meanwhile")
        found |= {path: one[one.find("@@") :] if "@@" in one else "" for path, one in zip(listed, of_each, strict=True)}
    return found


LINK_MODES = frozenset({"120000", "160000"})
"""Of a symbolic link and of a submodule, in a tree of git."""


def _names(raw: str) -> tuple[set[str], set[str], set[str]]:
    """Names in `git diff --raw -z`; those of them that are new; those that are links now.

    It lists `:<old mode> <new mode> <shas> <letter>`, then one name, or two (old, new) after R (rename) and C (copy).
    """
    words = iter(raw.split("\0"))
    names: set[str] = set()
    appeared: set[str] = set()
    links: set[str] = set()
    for fields in words:
        if not fields:
            continue
        _, mode, *_, letter = fields.split()
        name = next(words)
        names.add(name)
        if letter[0] in "RC":
            name = next(words)
            names.add(name)
        if letter[0] in "ARC":
            appeared.add(name)
        if mode in LINK_MODES:
            links.add(name)
    return names, appeared, links


def _without_base(root: Path) -> Changes:
    try:
        checkout = _is_checkout(root)
    except CannotRunHereError:
        return Changes("", dirty=False, base=None, files=None)
    commit = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}") or "").strip() if checkout else ""
    return Changes(commit, dirty=checkout and _is_dirty(root), base=None, files=None)


def _is_checkout(root: Path) -> bool:
    """Whether git's own top folder is `root`: a copy unpacked inside another checkout is not that checkout."""
    top = _git(root, "rev-parse", "--show-toplevel", errors="surrogateescape")
    return top is not None and Path(_for_opening(top.rstrip("\n"))).resolve() == root.resolve()


def _for_opening(name: str) -> str:
    """A name that was read as UTF-8, as this process's locale writes it."""
    return os.fsdecode(name.encode(errors="surrogateescape"))


def _is_dirty(root: Path) -> bool:
    with _plain_index(root) as index:
        tracked = _required(root, "status", "--porcelain", "--untracked-files=no", "-z", index=index)
    return bool(tracked) or bool(_untracked(root))


def _required(root: Path, *arguments: str, errors: str = "backslashreplace", index: str = "") -> str:
    out = _git(root, *arguments, errors=errors, index=index)
    if out is None:
        if missing := no_checkout(root):
            raise CannotRunHereError(missing, where=str(root), remedy=TO_MAKE_ONE)
        raise CannotRunHereError(
            f"git {arguments[0]} failed", where=str(root), remedy=f"run `git {' '.join(arguments)}` there to see why"
        )
    return out


_SETTINGS = (
    "core.fsmonitor=false",
    "status.showUntrackedFiles=all",
    "core.fileMode=true",
    "core.checkStat=default",
    "core.trustctime=true",
)
"""Settings by which git sees every change of a file, whatever a clone's own say."""


def _git(root: Path, *arguments: str, errors: str = "backslashreplace", index: str = "") -> str | None:
    """Standard output of a git command, as UTF-8; None when it failed. `index` is a file to use in place of git's."""
    out = _bytes(root, *arguments, index=index)
    return None if out is None else out.decode("utf-8", errors=errors)


def _bytes(root: Path, *arguments: str, given: bytes = b"", index: str = "") -> bytes | None:
    """Standard output of a git command, which reads `given`; None when it failed."""
    command = ("git", *(word for setting in _SETTINGS for word in ("-c", setting)), *arguments)
    env = os.environ | ({"GIT_INDEX_FILE": index} if index else {})
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, check=False, input=given)
    except FileNotFoundError as error:
        raise CannotRunHereError(
            "git is not installed", where=str(root), remedy="install git, or leave out --base to plan everything"
        ) from error
    return done.stdout if done.returncode == 0 else None


def clone_at(root: Path, commit: str, target: Path) -> None:
    """A clone of a checkout at one of its commits, in a new folder; only what is committed is in it.

    It reads the objects where they lie. `git clone` would start a second git in the checkout, which refuses one that
    somebody else owns (as in a container) whatever `safe.directory` says, and a shallow one.

    Raises:
        CannotRunHereError: git is not installed, or cannot check the commit out.
        MisuseError: `root` is no checkout, or has no such commit.
    """
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit) or not _is_checkout(root):
        raise MisuseError("not a git checkout that has the commit", where=str(root), remedy="name a clone that has it")
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise MisuseError(f"it has no commit {commit[:12]}", where=str(root), remedy="git fetch there")
    _required(root, "init", "--quiet", "--", str(target.resolve()))
    own = target.resolve() / ".git"
    objects, shallow = (
        root.resolve() / _required(root, "rev-parse", "--git-path", name).strip() for name in ("objects", "shallow")
    )
    (own / "objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
    if shallow.exists():
        shutil.copy(shallow, own / "shallow")
    branches = "%(objectname) refs/remotes/origin/%(refname:lstrip=2)"
    (own / "packed-refs").write_text(
        _required(root, "for-each-ref", f"--format={branches}", "refs/heads"), encoding="utf-8"
    )
    _required(target, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit)


def commit_time(root: Path, commit: str) -> int:
    """When a commit was made, in seconds since 1970 (UTC).

    Raises:
        CannotRunHereError: git is not installed or does not know the commit.
    """
    return int(_required(root, "show", "--no-patch", "--format=%ct", "--end-of-options", f"{commit}^{{commit}}", "--"))


def snapshot(root: Path) -> dict[str, str]:
    """File that git tracks or would track -> sha256 of its content and mode; empty outside a checkout.

    A link counts as such, and with the content of the file that it leads to. Names are for records, as those of
    `Changes.files`.
    """
    try:
        names = _listed(root)
    except CannotRunHereError:
        return {}
    found = {}
    for name in names:
        path, link = root / name, b""
        with contextlib.suppress(FileNotFoundError):  # listed as tracked, and deleted
            if path.is_symlink():
                link = os.fsencode(path.readlink())
            content = path.read_bytes() if path.is_file() else b""
            if link or path.is_file():
                head = b"%o\0%d\0%s" % (path.stat().st_mode & 0o111 if path.exists() else 0, len(link), link)
                known = os.fsencode(name).decode("utf-8", "backslashreplace")
                found[known] = hashlib.sha256(head + content).hexdigest()
    return found


def fingerprint(root: Path) -> str:
    """sha256 over the snapshot of all files that git tracks or would track; empty outside a checkout.

    The commit alone does not do: the usual way to a failing gate is an uncommitted edit.
    """
    files = snapshot(root)
    lines = "".join(f"{name}\0{files[name]}" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest() if files else ""
