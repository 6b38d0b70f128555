"""The files of the history: written whole or set aside, by one writer at a time, and believed line by line."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from support.builds import bytes_of, entry, remembered

from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.history import store
from hilgate.history.store import BUILDS, CHECKS, STEPS


@pytest.mark.parametrize("name", [BUILDS, STEPS, CHECKS])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999], ids=["nothing", "half", "all but the end of the line"])
def test_an_interrupted_write_loses_nothing_and_is_repeated_whole(tmp_path, name, kept):
    """A crash while one of the files was written: the files after it never got theirs."""
    store.append(tmp_path, entry(0))
    before = bytes_of(tmp_path)
    store.append(tmp_path, entry(1))
    order = [CHECKS, STEPS, BUILDS]
    for other in order[order.index(name) + 1 :]:
        (tmp_path / other).write_bytes(before[other])
    after = (tmp_path / name).read_bytes()[len(before[name]) :]
    cut = before[name] + after[: int(len(after) * kept)]
    (tmp_path / name).write_bytes(cut)
    broken = bytes_of(tmp_path)

    history = remembered(tmp_path)
    assert [line.build for line in history.builds] == [entry(0).build.build]
    assert {line.build for line in (*history.steps, *history.checks)} == {entry(0).build.build}
    assert bytes_of(tmp_path) == broken, "reading changes nothing"

    added, notes = store.append(tmp_path, entry(1))
    assert added
    assert len(notes) == len(history.notes)
    damaged = b"".join(content for file, content in bytes_of(tmp_path).items() if file.endswith(".damaged"))
    for file, content in broken.items():
        assert content[len(before[file]) :].strip() in damaged
    assert [line.build for line in remembered(tmp_path).builds] == [entry(0).build.build, entry(1).build.build]
    assert len(remembered(tmp_path).steps) == 2
    assert remembered(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "Field required"),
        ("nonsense", "Invalid JSON"),
        ("", "Invalid JSON"),
        ('{"kind": "build", "surprise": 1}', "Field required"),
    ],
    ids=["empty object", "no JSON", "empty line", "unknown key"],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, words):
    store.append(tmp_path, entry(0))
    path = tmp_path / STEPS
    path.write_text(f"{line}\n" + path.read_text())
    before = bytes_of(tmp_path)
    with pytest.raises(RecordsError) as caught:
        store.append(tmp_path, entry(1))
    assert f"{STEPS}:1" in str(caught.value)
    assert words in str(caught.value)
    assert bytes_of(tmp_path) == before
    with pytest.raises(RecordsError), store.opened(tmp_path):
        pass


def test_another_schema_version_is_refused(tmp_path):
    store.append(tmp_path, entry(0))
    path = tmp_path / BUILDS
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(RecordsError, match="schema_version"):
        remembered(tmp_path)


def test_lines_of_an_unknown_build_among_whole_ones_are_no_interrupted_write(tmp_path):
    store.append(tmp_path, entry(0))
    store.append(tmp_path, entry(1))
    path = tmp_path / BUILDS
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    with pytest.raises(RecordsError, match="stands before whole builds"):
        remembered(tmp_path)


def test_a_build_that_is_there_twice_is_refused(tmp_path):
    store.append(tmp_path, entry())
    path = tmp_path / BUILDS
    path.write_text(path.read_text() * 2)
    with pytest.raises(RecordsError, match="twice"):
        remembered(tmp_path)


def test_a_full_disk_is_said_and_the_next_add_repairs_it(tmp_path, monkeypatch):
    real = store._write

    def write(path, lines):
        if path.name == STEPS:
            real(path, lines[:0])
            raise OSError(28, "No space left on device")
        real(path, lines)

    monkeypatch.setattr(store, "_write", write)
    with pytest.raises(RecordsError, match="No space left"):
        store.append(tmp_path, entry())
    monkeypatch.undo()
    added, notes = store.append(tmp_path, entry())
    assert (added, len(notes)) == (True, 1)
    assert len(remembered(tmp_path).checks) == 2


def test_an_empty_history_says_what_to_do(tmp_path):
    with pytest.raises(NothingSelectedError, match="no build") as caught, store.opened(tmp_path / "none"):
        pass
    assert "hilgate history add" in str(caught.value)


def add_many(folder, numbers):
    for number in numbers:
        store.append(Path(folder), entry(number))


def test_two_writers_and_a_build_that_both_add(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(str(tmp_path), range(start, start + 12))) for start in (0, 6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    history = remembered(tmp_path)
    assert sorted(line.build for line in history.builds) == sorted(entry(number).build.build for number in range(18))
    assert len(history.steps) == 18
    assert list(tmp_path.glob("*.damaged")) == []


def test_a_held_lock_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    with store.locked(tmp_path, fcntl.LOCK_EX), pytest.raises(MisuseError, match="held"):
        store.append(tmp_path, entry())


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MisuseError, match="cannot be written"):
        store.append(tmp_path / "file", entry())


def test_a_history_that_nobody_may_write_to_can_be_remembered(tmp_path, monkeypatch):
    store.append(tmp_path, entry())
    (tmp_path / store.LOCK_FILE).unlink()

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert len(remembered(tmp_path).builds) == 1
    with pytest.raises(MisuseError, match="Permission denied"):
        store.append(tmp_path, entry(1))
