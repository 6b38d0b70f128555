# SPDX-License-Identifier: Apache-2.0
"""Run git: what a change touches, files and diffs of commits, and a fingerprint of the working tree."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate.errors import CannotRunHereError, MisuseError
from hilgate.pytest_recorder import bytes_to_compare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

NOTHING: Final[Mapping[str, str]] = {}


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
    unseen: tuple[str, ...] = ()
    """Those of `files` that `git diff` does not show: a setting, an attribute or a flag of this clone hides them."""


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
    now = _in_working_tree(root)
    changed = _differing(root, fork, now)
    diff = ("diff", "--name-only", "--no-renames", "--no-ext-diff", "-z", fork, "--")
    shown = (_bytes(root, *diff, settings=()) or b"").decode(errors="surrogateescape")
    return Changes(
        commit,
        bool(_differing(root, commit, now)),
        short(base),
        files=_for_records(changed),
        appeared=_for_records((changed & now.keys()) - _entries(root, fork).keys()),
        merge_base=fork,
        links=_for_records(name for name in changed if now.get(name, "").partition(" ")[0] in LINK_MODES),
        unreadable=_for_records(name for name in changed if not _is_utf8(name)),
        unseen=_for_records(changed - {*shown.split("\0"), *_untracked(root)}),
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
    refused = subprocess.run(
        ("git", "status"), cwd=root, env=_environment(), capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    lines = refused.stderr.decode(errors="replace").splitlines()  # that it belongs to another user, say
    return f"git does not take this for a checkout ({lines[0] if lines else 'its top folder is another one'})"


def _for_record(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _for_records(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(_for_record, names)))


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
    return sorted({_for_opening(name) for name in _with_nested(root, _names_below(root))})


def _in_index(root: Path) -> dict[str, str]:
    """File that git tracks -> its mode and the name of its content, as in `tree`."""
    listed = _required(root, "ls-files", "--stage", "-z", errors="surrogateescape").split("\0")
    entries = [entry.partition("\t") for entry in listed if entry]
    return {name: " ".join(facts.split()[:2]) for facts, _, name in entries}


def in_index(root: Path) -> frozenset[str]:
    """Files that git tracks, for opening as those of `tracked_files`; none outside a checkout."""
    try:
        return frozenset(map(_for_opening, _in_index(root)))
    except CannotRunHereError:
        return frozenset()


def _with_nested(root: Path, names: Iterable[str]) -> Iterator[str]:
    """These names, and in place of a folder, which is another repository's, the names of its files."""
    for name in names:
        folder = root / _for_opening(name)
        if not _is_folder(folder):
            yield name
        elif _is_checkout(folder):
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _with_nested(folder, _names_below(folder)))
        else:  # a submodule that is not checked out: git passes over whatever lies in its folder
            below = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
            inside = (os.fsencode(path.relative_to(root)).decode(errors="surrogateescape") for path in below)
            yield from (one for one in inside if not _BYTECODE.search(one))


def _is_folder(path: Path) -> bool:
    """Whether it is one, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _names_below(root: Path) -> set[str]:
    return {*_in_index(root), *_untracked(root)}


_OF_TOOLS = re.compile(
    r"(?:^|/)(?:__pycache__/.*|\.\w+_cache/.*|\.hypothesis/.*|[^/]*\.egg-info/.*"
    r"|\.[^/]*\.sw[a-p]|[^/]*~|\.#[^/]*|#[^/]*#|\.DS_Store)$"
)
"""What editors and tools leave beside files for themselves."""


_BYTECODE = re.compile(r"(?:^|/)__pycache__/[^/]+\.pyc$")
"""What Python writes while it imports; `hilgate.run.leftovers` sees to it that none is stale."""


def _untracked(root: Path) -> set[str]:
    """Files that git would track, and those that a private list of exclusions hides in folders of the repository.

    What the repository's own .gitignore files name is ignored; `.git/info/exclude` and `core.excludesFile` are of this
    clone alone, and a conftest.py that they hide runs all the same. They may hide folders at the top, such as an
    environment, and what editors and tools leave.
    """

    def listed(*options: str) -> set[str]:
        names = _required(root, "ls-files", "-z", *options, errors="surrogateescape").split("\0")
        return {name for name in names if name and not _BYTECODE.search(name)}

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


def _in_working_tree(root: Path) -> dict[str, str]:
    """File of the working tree -> its mode and the name of its bytes, as in `tree`; a submodule as the index has it.

    git's own comparison is not asked: a clone's filters, attributes, flags and times can hide a file from it.
    """
    index, untracked = _in_index(root), _untracked(root)
    folders = {name.partition("/")[0] for name in index if "/" in name}
    # Another repository at the top counts as one file, as an environment there counts as none.
    nested = {name for name in untracked if name.endswith("/") and name.partition("/")[0] not in folders}
    kind = _kind(index.values())
    entries = {name: entry for name, entry in index.items() if entry.startswith(SUBMODULE)}
    entries |= dict.fromkeys(nested, SUBMODULE)
    for name in _with_nested(root, {*index, *untracked} - nested):
        path = _path(root, name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # tracked, and deleted
            facts = os.lstat(path)
            if stat.S_ISLNK(facts.st_mode):
                entries[name] = f"120000 {_name_of(os.readlink(path), kind)}"  # noqa: PTH115 - bytes
            elif stat.S_ISREG(facts.st_mode):
                mode = "100755" if facts.st_mode & stat.S_IXUSR else "100644"
                entries[name] = f"{mode} {_name_of(bytes_to_compare(path), kind)}"
    return entries


def _path(root: Path, name: str) -> bytes:
    return os.fsencode(root) + b"/" + name.encode(errors="surrogateescape")


def _differing(root: Path, commit: str, now: Mapping[str, str]) -> set[str]:
    """Names of which a commit and the working tree (`now`) do not have the same bytes and mode; all for no commit."""
    before = _entries(root, commit) if commit else {}
    expected = dict(before)
    for name, entry in before.items():
        if entry.startswith(SUBMODULE):
            inside = _entries_if_there(root / _for_opening(name), entry.split()[1])
            expected |= {f"{name}/{inner}": one for inner, one in inside.items()}
    changed = {name for name in expected.keys() | now.keys() if expected.get(name) != now.get(name)}
    edited = {name for name in changed & before.keys() & now.keys() if before[name][:6] == now[name][:6]}
    return changed - _as_checked_out(root, commit, {name for name in edited if before[name].startswith("100")})


def _as_checked_out(root: Path, commit: str, names: Collection[str]) -> set[str]:
    """Those files of the working tree that are as git writes them from a commit, though their blobs are not.

    The commit's own .gitattributes may ask for other line endings, or store a file elsewhere (Git LFS) and its digest
    here. No setting of this clone or its user has a part in it.
    """
    if not names:
        return set()
    unchanged = set()
    with tempfile.TemporaryDirectory(prefix="hilgate-files-") as folder:
        tree = Path(folder, "tree")
        _new_repository(root, tree)
        plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
        plain |= {"GIT_CONFIG_COUNT": "0", "GIT_CONFIG_PARAMETERS": ""}
        given = "".join(f"{name}\0" for name in names).encode(errors="surrogateescape")
        done = [_bytes(tree, "read-tree", commit, env=plain)]
        done.append(_bytes(tree, "checkout-index", "--force", "-z", "--stdin", given=given, env=plain))
        if None in done:
            raise CannotRunHereError(
                f"git cannot write files of {commit[:12]}", where=str(root), remedy="run `git fsck` there to see why"
            )
        for name in names:
            here, there = bytes_to_compare(_path(root, name)), bytes_to_compare(_path(tree, name))
            stored = _LFS.match(there)
            if here == there or (stored and stored[1].decode() == hashlib.sha256(here).hexdigest()):
                unchanged.add(name)
    return unchanged


_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n")
"""What Git LFS commits in place of a file."""


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


def is_ancestor(root: Path, commit: str, of: str) -> bool:
    """Whether this checkout has a commit, and another one is it or comes after it."""
    sha = re.fullmatch(r"[0-9a-f]{40,64}", commit)
    return bool(sha) and _git(root, "merge-base", "--is-ancestor", commit, of) is not None


def names_at(root: Path, commit: str, folder: str) -> tuple[str, ...]:
    """Paths of the files directly in a folder of a commit, links left out, sorted.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    listed = _required(root, "ls-tree", "-z", "--full-tree", "--end-of-options", commit, "--", f"{folder}/")
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return tuple(sorted(name for facts, _, name in entries if facts.startswith("100")))


def _entries(root: Path, commit: str) -> dict[str, str]:
    """The files of a commit as `tree` has them; bytes of a path that are not UTF-8 stand as surrogates."""
    listed = _required(
        root, "ls-tree", "-r", "-z", "--full-tree", "--end-of-options", known(root, commit), errors="surrogateescape"
    )
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return {path: f"{facts.split()[0]} {facts.split()[2]}" for facts, _, path in entries}


def _entries_if_there(root: Path, commit: str) -> dict[str, str]:
    """The files of a submodule's commit (`_entries`); empty where it is not checked out or lacks the commit."""
    try:
        return _entries(root, commit) if root.is_dir() and _is_checkout(root) else {}
    except CannotRunHereError:
        return {}


def tree(root: Path, commit: str) -> dict[str, str]:
    r"""Path of each file of a commit -> its mode and the name of its content, as `100644 <sha>`. One process for all.

    Bytes of a path that are not UTF-8 stand as `\xff`, as in `Changes.files`.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    return {_for_record(path): entry for path, entry in _entries(root, commit).items()}


def blob_name(content: bytes, like: Iterable[str]) -> str:
    """The name that git gives to a content, of the same kind (SHA-1 or SHA-256) as in these entries of a tree."""
    return _name_of(content, _kind(like))


def _kind(entries: Iterable[str]) -> str:
    longest = max((len(entry.rpartition(" ")[2]) for entry in entries), default=40)
    return "sha256" if longest == 64 else "sha1"


def _name_of(content: bytes, kind: str) -> str:
    return hashlib.new(kind, b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


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
"""Most paths in one command line."""


def hunks(root: Path, before: str, after: str, paths: Sequence[str]) -> dict[str, str]:
    """How files differ between two commits: path -> the hunks of a unified diff without context.

    `after` is empty for the working tree. Every file counts as text, whatever attributes the change gives it: a file
    that is called binary would not be shown.

    Raises:
        CannotRunHereError: git is not installed, or knows no such commit here.
    """
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    sides = [known(root, before), *([known(root, after)] if after else [])]
    hunks_of: dict[str, str] = {}
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
        hunks_of |= {
            path: one[one.find("@@") :] if "@@" in one else "" for path, one in zip(listed, of_each, strict=True)
        }
    return hunks_of


SUBMODULE = "160000"
LINK_MODES = frozenset({"120000", SUBMODULE})
"""Modes of a symbolic link and of a submodule in a tree of git."""


def _without_base(root: Path) -> Changes:
    try:
        checkout = _is_checkout(root)
    except CannotRunHereError:
        return Changes("", dirty=False, base=None, files=None)
    commit = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}") or "").strip() if checkout else ""
    dirty = checkout and bool(_differing(root, commit, _in_working_tree(root)))
    return Changes(commit, dirty=dirty, base=None, files=None)


def _is_checkout(root: Path) -> bool:
    """Whether git's own top folder is `root`: a copy unpacked inside another checkout is not that checkout."""
    top = _git(root, "rev-parse", "--show-toplevel", errors="surrogateescape")
    return top is not None and Path(_for_opening(top.rstrip("\n"))).resolve() == root.resolve()


def _for_opening(name: str) -> str:
    """A name that was read as UTF-8, as this process's locale writes it."""
    return os.fsdecode(name.encode(errors="surrogateescape"))


def _required(root: Path, *arguments: str, errors: str = "backslashreplace") -> str:
    out = _git(root, *arguments, errors=errors)
    if out is None:
        if missing := no_checkout(root):
            raise CannotRunHereError(missing, where=str(root), remedy=TO_MAKE_ONE)
        raise CannotRunHereError(
            f"git {arguments[0]} failed", where=str(root), remedy=f"run `git {' '.join(arguments)}` there to see why"
        )
    return out


_SETTINGS = (
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.ignoreCase=false",
    "core.autocrlf=false",
    "core.attributesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "status.showUntrackedFiles=all",
    "core.fileMode=true",
    "core.checkStat=default",
    "core.trustctime=true",
)
"""Settings by which git sees every change of a file, whatever a clone's own say."""

_KEPT = ("GIT_CONFIG", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
"""Beginnings of the variables of git that stay: they say where a checkout may lie and who may own it."""


def _environment() -> dict[str, str]:
    """The environment of a git command, which asks the checkout itself: its own index, its history as it was made."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)}
    return kept | {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": os.devnull}


def _git(root: Path, *arguments: str, errors: str = "backslashreplace") -> str | None:
    """Standard output of a git command, as UTF-8; None when it failed."""
    out = _bytes(root, *arguments)
    return None if out is None else out.decode("utf-8", errors=errors)


def _bytes(
    root: Path,
    *arguments: str,
    given: bytes = b"",
    env: Mapping[str, str] = NOTHING,
    settings: Sequence[str] = _SETTINGS,
) -> bytes | None:
    """Standard output of a git command, which reads `given`, with more variables; None when it failed."""
    command = ("git", *(word for setting in settings for word in ("-c", setting)), *arguments)
    variables = {**_environment(), **env}
    try:
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, check=False, input=given)
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
    own = _new_repository(root, target)
    branches = "%(objectname) refs/remotes/origin/%(refname:lstrip=2)"
    (own / "packed-refs").write_text(
        _required(root, "for-each-ref", f"--format={branches}", "refs/heads"), encoding="utf-8"
    )
    _required(target, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit)


def _new_repository(root: Path, target: Path) -> Path:
    """A repository in a new folder, without refs and hooks, that reads the objects of `root`; its `.git`."""
    kind = _required(root, "rev-parse", "--show-object-format").strip()
    _required(root, "init", "--quiet", "--template=", f"--object-format={kind}", "--", str(target.resolve()))
    own = target.resolve() / ".git"
    objects, shallow = (
        root.resolve() / _required(root, "rev-parse", "--git-path", name).strip() for name in ("objects", "shallow")
    )
    (own / "objects/info").mkdir(exist_ok=True)
    (own / "objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
    if shallow.exists():
        shutil.copy(shallow, own / "shallow")
    return own


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
            content = bytes_to_compare(os.fsencode(path)) if path.is_file() else b""
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
