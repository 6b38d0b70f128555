# SPDX-License-Identifier: Apache-2.0
"""Note which files of a checkout a Python process reads, by an audit hook: the `sitecustomize` of a step's processes.

It notes files that it opens, imports or loads, files named on the command lines of programs that it starts, and, with a
`/` at the end, folders that it lists. One file for each process: each note once, ended by a NUL. A compiled
module counts as its source. It does not see what other programs read beyond their command line, or what
libraries read without Python's help. Processes end without notice, so nothing is kept for their end. Imports os and
sys alone.

It also notes, each after a mark that begins no file's name: functions that Triton compiles or interprets, as
`<file>::<function>`, sources of such that are read as text and neither imported nor copied, and programs in which
nothing would be noted.
"""

import os
import sys

TYPE_CHECKING = False  # of the module typing, which would be another import in every process
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, FrameType, ModuleType
    from typing import Any

LOADS = {"ctypes.dlopen": 0, "sqlite3.connect": 0, "os.link": 0, "import": 1}
"""Event -> which of its arguments names the file; an import names one for an extension module alone."""

FOLDERS = frozenset({"os.listdir", "os.scandir"})
STARTS = {"subprocess.Popen": 1, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2, "os.system": 0}
"""Event -> which of its arguments is the command that it starts."""
BETWEEN = str.maketrans(dict.fromkeys("'\"`:=,;|<>(){}&", " "))
"""What stands around the name of a file in a word of a command: `HEAD:docs/notes.md`, `sh -c "cat notes.md; ls"`."""
LIST = ("importlib.", "_frozen_importlib", "_pytest.")
"""Modules that list a folder only to find what they import or collect, and then open that."""
COMPARES = "bytes_to_compare"
"""Name of the function that opens a file only for a digest, to tell whether it changed: that is no read."""
EVENTS = frozenset({"open", *LOADS, *FOLDERS, *STARTS})

LAUNCHED, AS_TEXT, UNSEEN = "/launched ", "/text ", "/unseen "
MARKS = (LAUNCHED, AS_TEXT, UNSEEN)
"""What stands before the name of a function of Triton, of a source that is read as text, of a program."""
ELSEWHERE = "*"
"""Stands for a file that is none of the checkout, a copy of one or a package's: `*::<function>`, and for its folders
where it is read as text: `*/<folder>/<file>`."""
HOOKS = {
    "triton.compiler.compiler": ("ASTSource", "__init__"),
    "triton.runtime.interpreter": ("FunctionRewriter", "rewrite_ast"),
    "inspect": ("findsource",),
}
"""Module -> what of it is wrapped: what Triton calls once for each function that it compiles, launched from a cache or
not, and for each that it interprets, helpers among them; and how a program asks for the text of a function."""
IMPORTING = ("importlib.", "_frozen_importlib")

ALONE = frozenset(
    {"git", "ssh-keygen", "lscpu", "uname", "true", "sleep", "gcc", "g++", "cc", "c++", "clang", "clang++", "ld"}
)
"""Programs that start no Python: whatever environment they have, nothing is missed."""
ISOLATED = "IES"
"""Options with which Python does not load this file."""

FOLDER, WHOLE = "recorder", "whole"
"""Name of the folder of a recorder, and of a file there that goes as soon as a note is lost."""

_looked: set[tuple[str, bool]] = set()
_noted: set[str] = set()
_walked: "set[CodeType]" = set()
_folder = _root = ""


def watch(folder: str, root: str) -> None:
    """Begin: notes go to `<folder>/lists/<pid>`, an empty one first; `root`, the checkout, has no link in its path."""
    global _folder, _root
    _folder, _root = folder, root
    _note("")
    sys.addaudithook(_hook)
    sys.meta_path.insert(0, _Hooks())
    for name in HOOKS.keys() & sys.modules.keys():
        _wrap(sys.modules[name])


def recorders() -> list[str]:
    """The entries of this process's PYTHONPATH by which a Python notes what it does; a child needs no other."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in entries if os.path.basename(entry) == FOLDER and os.path.isfile(f"{entry}/{WHOLE}")]


def name_elsewhere(path: str) -> str:
    """What a copy of a file is known by where it is read as text: the last two parts of its path, and a mark."""
    return "/".join([ELSEWHERE, *path.split("/")[-2:]])


def bytes_to_compare(path: "str | bytes | os.PathLike[str]") -> bytes:
    """The bytes of a file, of which the caller makes nothing but a digest."""
    with open(path, "rb") as file:
        return file.read()


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: note a file that is opened for reading, a folder that is listed, and what a command line names."""
    if event not in EVENTS:  # most are none
        return
    try:
        caller = sys._getframe(1)  # noqa: SLF001 - Python has no other way
    except ValueError:  # the interpreter itself opens the program
        caller = sys._getframe()  # noqa: SLF001
    try:
        if event == "open":
            path, mode, flags = arguments
            # builtins.open gives a mode, os.open flags alone; both give flags.
            written = isinstance(mode, str) and mode[:1] in {"w", "a", "x"}
            written = written or (isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY)
            if not written and not isinstance(path, int) and caller.f_code.co_name != COMPARES:
                _read(path, text=_is_text(caller))
        elif event in LOADS:
            _read(arguments[LOADS[event]])
        elif event in FOLDERS:
            if not str(caller.f_globals.get("__name__", "")).startswith(LIST):
                _read(arguments[0] if arguments[0] is not None else ".", folder=True)
        elif event in STARTS:
            place = arguments[2] if event == "subprocess.Popen" else None
            _start(arguments[STARTS[event]], place, None if event == "os.system" else arguments[-1])
    except (OSError, ValueError):  # no name of a file, or the working directory is gone: the call itself says so
        pass


def _is_text(caller: "FrameType") -> bool:
    """Whether a source that is opened is what its reader works on.

    It is not where Python imports it or shows its lines, which tokenize opens for linecache, nor where Hypothesis takes
    first examples from the constants of each module. Triton, too, asks for the lines of each function of a file, used
    or not: `inspect.findsource` is watched instead. A copy, or a wheel, made from it does not count either: a process
    that launches a kernel of the copy, or reads it as text, is noted.
    """
    if caller.f_code.co_name == "copyfile" and caller.f_globals.get("__name__") == "shutil":
        source, copy = (os.path.abspath(os.fsdecode(caller.f_locals[end])) for end in ("src", "dst"))
        # The copy must be known by its name.
        return os.path.dirname(source) == _root or name_elsewhere(source) != name_elsewhere(copy)
    frame: FrameType | None = caller
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("pathlib", "tokenize")):
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return not name.startswith((*IMPORTING, "linecache", "hypothesis.", "hatchling."))


class _Hooks:
    """Finds the modules of `HOOKS` as the finders after it do, and wraps them once they are loaded."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The specification of such a module; None for any other."""
        if name not in HOOKS:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def load_and_wrap(module: "ModuleType", load: "Callable[[ModuleType], object]" = load) -> None:
                    load(module)
                    _wrap(module)

                spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
                return spec
        return None


def _wrap(module: "ModuleType") -> None:
    """Have what `HOOKS` names in a module note what it is called with; where it is missing, nothing can be noted."""
    owner: object = module
    *classes, name = HOOKS[module.__name__]
    for part in classes:
        owner = getattr(owner, part, None)
    call = getattr(owner, name, None)
    if call is None:
        _once(UNSEEN + f"{module.__name__} has no {'.'.join(HOOKS[module.__name__])}")
        return
    note = _note_source if module.__name__ == "inspect" else _note_functions

    def noting(first: object, *arguments: object, **named: object) -> object:
        answer = call(first, *arguments, **named)
        try:
            note(first)
        except Exception as error:  # noqa: BLE001 - the step goes on, and its record says that it is incomplete
            _once(f"{UNSEEN}{type(error).__name__} of the recorder")
        return answer

    setattr(owner, name, noting)


def _note_functions(asked: object) -> None:
    """Note the function that Triton is asked for, those that it is given as constants, and all that these call.

    What a function calls are values of its module, or of modules and tables that it names. Triton's own are left out.
    """
    waiting: list[Any] = [getattr(asked, "fn", None), *getattr(asked, "constants", {}).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple | dict):
            waiting.extend(value.values() if isinstance(value, dict) else value)
            continue
        for name in ("value", "fn"):  # of a constant, of a function of Triton
            value = value if hasattr(value, "__code__") else getattr(value, name, value)
        code = getattr(value, "__code__", None)
        if code is None or code in _walked or str(value.__module__).startswith("triton."):
            continue
        _walked.add(code)
        path = os.path.realpath(code.co_filename)
        file = path[len(_root) + 1 :] if path.startswith(f"{_root}/") else ELSEWHERE
        _once(f"{LAUNCHED}{file}::{code.co_name}")
        names = {name for part in _with_inner(code) for name in (*part.co_names, *part.co_freevars)}
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        places = value.__globals__ | {name: cell.cell_contents for name, cell in cells}
        found = [places[name] for name in names & places.keys()]
        modules = [vars(one) for one in found if isinstance(one, type(os))]
        waiting += [*found, *(module[name] for module in modules for name in names & module.keys())]


def _with_inner(code: "CodeType") -> "list[CodeType]":
    """The code of a function, and of what it defines inside."""
    found = [code]
    for one in found:
        found.extend(constant for constant in one.co_consts if isinstance(constant, type(code)))
    return found


def _note_source(asked: object) -> None:
    """Note the file of a function whose text is asked for, unless Triton asks, or for a frame, whose line is shown."""
    caller = sys._getframe(2)  # noqa: SLF001
    while caller.f_globals.get("__name__") == "inspect" and caller.f_back is not None:
        caller = caller.f_back
    if not str(caller.f_globals.get("__name__", "")).startswith("triton."):
        _read(getattr(getattr(asked, "__code__", asked), "co_filename", getattr(asked, "__file__", None)), text=True)


def _is_seen(words: "list[str]", env: object) -> bool:
    """Whether the Pythons that a command starts, if any, note what they do: they load this file."""
    if not words or os.path.basename(words[0]) in ALONE:
        return True
    given: dict[Any, Any] = dict(env if hasattr(env, "keys") else os.environ)  # type: ignore[call-overload]
    path = given.get("PYTHONPATH", given.get(b"PYTHONPATH", ""))
    if _folder not in os.fsdecode(path).split(os.pathsep):
        return False
    said = " ".join(words).split()
    for number, word in enumerate(said):
        options = said[number + 1 :] if os.path.basename(word).startswith("python") else []
        for option in options:
            if not option.startswith("-") or option in {"-", "-c", "-m"}:
                break
            if not option.startswith("--") and set(option) & set(ISOLATED):
                return False
    return True


def _start(command: object, place: object, env: object) -> None:
    """Note the files that a command line names; git's `-C` says where, and names in its commits begin at the root."""
    given = command if isinstance(command, list | tuple) else [command]
    words = [os.fsdecode(word) for word in given if isinstance(word, str | bytes | os.PathLike)]
    where = os.path.abspath(os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ".")
    if not _is_seen(words, env):
        _once(UNSEEN + words[0])
    if words and os.path.basename(words[0]) == "git":
        if "-C" in words[:-1]:
            where = os.path.join(where, words[words.index("-C") + 1])
        words = [word for word in words if not word.startswith("-")]  # --exclude-per-directory=.gitignore
    copies = (
        bool(words) and not os.path.basename(words[0]).startswith("python") and os.path.basename(words[0]) not in ALONE
    )
    places = {where, _root} if f"{os.path.realpath(where)}/".startswith(f"{_root}/") else {where}
    for word in words:
        for name in {word, *word.translate(BETWEEN).split()}:
            for folder in places:
                _read(os.path.join(folder, name), known=False, text=True)
                path = os.path.realpath(os.path.join(folder, name))
                if copies and name and f"{path}/".startswith(f"{_root}/") and os.path.isdir(path):
                    _once(f"{AS_TEXT}{path[len(_root) + 1 :] or '.'}/")  # another program may read all of it


def _read(place: object, *, folder: bool = False, known: bool = True, text: bool = False) -> None:
    """Note a file, or a folder that is listed; unless `known`, it is only a word, and may be the name of none.

    With `text` a source is read as such, and is not only imported.
    """
    if not place or not isinstance(place, str | bytes | os.PathLike):
        return
    name, end = os.path.abspath(os.fsdecode(place)), "/" * folder
    text = text and name.endswith(".py")
    if (name + end, text) in _looked:
        return
    if known:
        _looked.add((name + end, text))
    elif not os.path.isfile(name):
        return
    text = text and _has_kernels(name)
    for path in {name, os.path.realpath(name)}:
        above, _, file = path.rpartition("/")
        compiled = file.endswith(".pyc") and above.endswith("/__pycache__")  # <module>.<whoever compiled it>.pyc
        source = f"{above[:-12]}/{file.partition('.')[0]}.py" if compiled else path
        if source.startswith(f"{_root}/") and (folder or os.path.isfile(source)):
            _once(source[len(_root) + 1 :] + end)
        if text:
            inside = path.startswith(f"{_root}/")
            _once(AS_TEXT + (path[len(_root) + 1 :] if inside else name_elsewhere(path)))


def _has_kernels(name: str) -> bool:
    try:
        return b"jit" in bytes_to_compare(name)
    except OSError:
        return False


def _once(name: str) -> None:
    if name not in _noted:
        _noted.add(name)
        _note(name)


def _note(name: str) -> None:
    try:
        # Opened anew each time: a forked child must not share a position in the file.
        descriptor = os.open(f"{_folder}/lists/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, os.fsencode(name) + b"\0")
        finally:
            os.close(descriptor)
    except OSError:  # no room, no more open files: the step goes on, and its record says that it is incomplete
        try:  # noqa: SIM105 - contextlib would be another import in every process
            os.unlink(f"{_folder}/{WHOLE}")
        except OSError:
            pass
