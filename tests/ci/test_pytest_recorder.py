# SPDX-License-Identifier: Apache-2.0
"""What the audit hook notes of a Python process and its children: files, folders, and what command lines name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hilgate.run import reads

IMPORTS = "import os, pathlib, shutil, subprocess, sys, tempfile\n"


@pytest.fixture
def root(tmp_path):
    """A folder under test, with a compiled-module folder and files that nothing reads."""
    for name in ("inside/__pycache__/x", "inside/module.py", "ignored/file", "read.txt", "opened.bin", "untouched"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text("")
    return tmp_path / "root"


def notes_of(code: str, root: Path, tmp_path: Path, **env: str) -> tuple[set[str], str]:
    """The notes of a process that runs `code` in `root`, and why they are not all."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    path = os.pathsep.join([reads.record(out, root), *env.values()])
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [sys.executable, "-c", IMPORTS + code]
    subprocess.run(command, cwd=root, env=kept | {"PYTHONPATH": path, "OUT": str(out)}, check=True, timeout=60)
    notes = reads.collect(out)
    return set(notes.files), notes.lost


CODE = """
sys.path.insert(0, 'inside')
import module
open('read.txt').read()
os.close(os.open('opened.bin', os.O_RDONLY))
pathlib.Path('written.txt').write_text('x')
if os.fork() == 0:
    open('ignored/file').read()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', "open('inside/module.py').read()"], check=True)
"""


def test_a_process_and_its_children_note_what_they_read(root, tmp_path):
    expected = {"inside/module.py", "read.txt", "opened.bin", "ignored/file"}
    for _ in range(2):  # the second run imports the compiled module, which counts as its source
        assert notes_of(CODE, root, tmp_path) == (expected, "")
    assert list((root / "inside/__pycache__").glob("module.*.pyc"))
    assert set((tmp_path / "out" / reads.READS_FILE).read_text().splitlines()) == expected


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("open('ignored/file')", "ignored/file"),
        ("pathlib.Path('/proc/self/cwd/read.txt').read_text()", "read.txt"),
        ("os.listdir('ignored')", "ignored/"),
        ("list(pathlib.Path('ignored').glob('*'))", "ignored/"),
        ("os.link('read.txt', tempfile.mkdtemp() + '/x')", "read.txt"),
        (
            "os.chdir('/'); subprocess.run(['cat', 'read.txt'], cwd=sys.argv[0] and os.environ['OUT'] + '/../root')",
            "read.txt",
        ),
        ("subprocess.run('cat <read.txt; true', shell=True)", "read.txt"),
        ("os.system('cat read.txt')", "read.txt"),
        ("os.posix_spawnp('cat', ['cat', 'read.txt'], os.environ); os.wait()", "read.txt"),
        ("subprocess.run(['dd', 'if=read.txt'], stdout=-3, stderr=-3)", "read.txt"),
        ("subprocess.run(['git', 'show', 'HEAD:read.txt'], cwd='inside', stderr=-3)", "read.txt"),
        ("subprocess.run(['git', '-C', os.getcwd(), 'show', 'HEAD:read.txt'], cwd='/', stderr=-3)", "read.txt"),
        # Nothing is read: an option of git, a name of another folder's file, a written file, a digest, no name at all.
        ("subprocess.run(['git', 'ls-files', '--exclude-per-directory=read.txt'], stdout=-3, stderr=-3)", ""),
        ("subprocess.run(['echo', 'read.txt'], cwd='/', stdout=-3)", ""),
        ("pathlib.Path('ignored/written').write_text('x')", ""),
        ("def bytes_to_compare(): open('read.txt')\nbytes_to_compare()", ""),
        ("try: open('a\\0b')\nexcept ValueError: pass", ""),
        ("os.chdir(d := tempfile.mkdtemp()); os.rmdir(d); subprocess.run(['true'])", ""),
    ],
)
def test_each_kind_of_read_is_noted_once(code, note, root, tmp_path):
    assert notes_of(code, root, tmp_path) == ({note} if note else set(), "")


def test_a_recorder_starts_the_one_that_stands_after_it(root, tmp_path):
    """That of an outer run, whose step reads what the steps of an inner one read."""
    (tmp_path / "outer").mkdir()
    outer = reads.record(tmp_path / "outer", root)
    assert notes_of("open('read.txt')", root, tmp_path, outer=outer) == ({"read.txt"}, "")
    assert reads.collect(tmp_path / "outer").files == {"read.txt"}


@pytest.mark.parametrize("gone", ["lists", ""])
def test_a_note_that_cannot_be_written_is_said(root, tmp_path, gone):
    code = f"shutil.rmtree(os.environ['OUT'] + '/recorder/{gone}'); open('read.txt')"
    assert "not all that it read could be noted" in notes_of(code, root, tmp_path)[1]


KERNELS = """
import triton
import triton.language as tl
import helpers
from helpers import added as plus

@triton.jit
def chosen(x):
    return x

@triton.jit
def unused(x):
    return x

TABLE = {"chosen": chosen}

@triton.jit
def given(x):
    return x

@triton.jit
def launched(out, FN: tl.constexpr):
    tl.store(out, FN(helpers.doubled(plus(tl.load(out)))))

@triton.jit
def unlaunched(out):
    tl.store(out, unused(1))
"""
HELPERS = """
import triton
import triton.language as tl

@triton.jit
def inner(x):
    return x + 1

@triton.jit
def added(x):
    return inner(x)

@triton.jit
def doubled(x):
    return x * 2
"""
INTERPRETS = """
import torch
from kernels import given, launched
out = torch.ones(1)
launched[(1,)](out, FN=given)
assert out == 4
"""
COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import given, launched
source = ASTSource(launched, {"out": "*fp32", "FN": "constexpr"}, {"FN": given})
triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
"""
CALLED = {"inside/kernels.py::given", "inside/kernels.py::launched"} | {
    f"inside/helpers.py::{name}" for name in ("inner", "added", "doubled")
}


def kernels_of(code: str, root: Path, tmp_path: Path, **env: str) -> tuple[set[str] | None, list[str]]:
    """The kernels that a process notes that runs `code` in `root`, and the lines of its file for people."""
    (root / "inside/kernels.py").write_text(KERNELS)
    (root / "inside/helpers.py").write_text(HELPERS)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    path = os.pathsep.join([reads.record(out, root), str(root / "inside")])
    env = {"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path, **env}
    command = [sys.executable, "-c", IMPORTS + code]
    subprocess.run(command, cwd=root, env=env, check=True, timeout=120)
    kernels = reads.collect(out, ["inside/kernels.py", "inside/helpers.py", "read.txt"]).kernels
    return None if kernels is None else set(kernels), (out / reads.KERNELS_FILE).read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "interpret"),
    [(INTERPRETS, "1"), (COMPILES, "0"), (COMPILES * 2, "0")],
    ids=["interpreted", "compiled", "cached"],
)
def test_a_launched_kernel_is_noted_with_all_that_it_calls(root, tmp_path, code, interpret):
    """By its name, through a module and another helper, and as a constant; no other function of its file."""
    noted, lines = kernels_of(code, root, tmp_path, TRITON_INTERPRET=interpret)
    assert noted == CALLED
    assert set(lines) == CALLED


SEEDS = "import kernels\nfrom hypothesis.internal.constants_ast import constants_from_module as found\n"
COPY = "sys.path.insert(0, shutil.copytree('inside', os.environ['TMPDIR'] + '/copy/inside'))\n"
WHEEL = """
build-system = {requires = ["hatchling"], build-backend = "hatchling.build"}
project = {name = "inside", version = "1"}
tool.hatch.build.targets.wheel.packages = ["inside"]
"""


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        ("import kernels", set()),
        ("import inspect, kernels; inspect.getsource(kernels.launched.fn)", {"inside/kernels.py"}),
        ("open('inside/kernels.py')", {"inside/kernels.py"}),
        ("pathlib.Path('inside/kernels.py').read_bytes()", {"inside/kernels.py"}),
        ("import tokenize; tokenize.open('inside/kernels.py')", {"inside/kernels.py"}),
        ("subprocess.run(['cat', 'inside/kernels.py'], stdout=-3)", {"inside/kernels.py"}),
        ("subprocess.run(['cp', '-r', 'inside', '../copied'], stdout=-3)", {"inside/"}),
        ("import linecache, kernels; linecache.getlines(kernels.__file__)", set()),
        (f"{SEEDS}found(kernels)", set()),
    ],
    ids=["import", "source", "open", "path", "tokens", "command", "folder", "shown lines", "first examples"],
)
def test_a_source_that_is_read_as_text_is_noted_whole(root, tmp_path, code, noted):
    """Triton reads the source of each kernel that it decorates, which says nothing of what is launched."""
    for _ in range(2):  # with bytecode too
        assert kernels_of(code, root, tmp_path, TRITON_INTERPRET="0")[0] == noted


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        (INTERPRETS, {"*::given", "*::launched", "*::inner", "*::added", "*::doubled"}),
        ("import kernels", set()),
        ("open(sys.path[0] + '/kernels.py')", {"*/inside/kernels.py"}),
        ("subprocess.run(['cat', sys.path[0] + '/kernels.py'], stdout=-3)", {"*/inside/kernels.py"}),
        ("os.mkdir('new'); shutil.copy('inside/kernels.py', 'new/kernels.py')", {"inside/kernels.py"}),
        ("shutil.copy('inside/kernels.py', sys.path[0] + '/other.py')", {"inside/kernels.py"}),
    ],
    ids=["launched", "import", "open", "command", "another folder", "another name"],
)
def test_of_a_copy_the_same_is_noted_by_its_name(root, tmp_path, code, noted):
    """A copy says nothing of what becomes of it, unless that cannot be told from its name."""
    found, _ = kernels_of(COPY + code, root, tmp_path, TRITON_INTERPRET="1", TMPDIR=str(tmp_path))
    assert found == noted


def test_a_wheel_is_a_copy(root, tmp_path):
    """hatchling makes ours."""
    (root / "pyproject.toml").write_text(WHEEL)
    build = [sys.executable, *["-m", "hatchling", "build", "-t", "wheel"]]
    assert kernels_of(f"subprocess.run({build}, check=True, stdout=-3, stderr=-3)", root, tmp_path)[0] == set()
    assert list((root / "dist").glob("inside-1-*.whl"))


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run([sys.executable, '-I', '-c', 'pass'])",
        "subprocess.run([sys.executable, '-B', '-sE', '-c', 'pass'])",
        "subprocess.run(f'{sys.executable} -S -c pass', shell=True)",
        "os.system(sys.executable + ' -I -c pass')",
        "subprocess.run([sys.executable, '-c', 'pass'], env={})",
        "subprocess.run(['sh', '-c', 'true'], env={'PYTHONPATH': '/elsewhere'})",
        "os.environ.pop('PYTHONPATH'); subprocess.run([sys.executable, '-c', 'pass'])",
    ],
)
def test_a_python_that_notes_nothing_is_said(root, tmp_path, code):
    noted, (line, *_) = kernels_of(code, root, tmp_path)
    assert noted is None
    assert line.startswith("not whole: what ")
    assert line.endswith(" did is not noted: its environment or options differ")


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run([sys.executable, '-B', '-c', 'pass', '-I'])",
        "subprocess.run(['git', 'version'], env={}, stdout=-3)",
        "subprocess.run(['true'], env={})",
    ],
)
def test_a_program_of_which_nothing_is_missed_is_not_said(root, tmp_path, code):
    assert kernels_of(code, root, tmp_path)[0] == set()


def test_another_triton_than_the_recorder_knows_is_named(root, tmp_path):
    (root / "inside/triton/runtime").mkdir(parents=True)
    (root / "inside/triton/__init__.py").write_text("")
    (root / "inside/triton/runtime/interpreter.py").write_text("")
    noted, (line, *_) = kernels_of("import triton.runtime.interpreter", root, tmp_path)
    assert noted is None
    assert "triton.runtime.interpreter has no FunctionRewriter.rewrite_ast" in line
