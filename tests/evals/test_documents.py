"""Documents and task files with one mistake each."""

import json
import shutil

import pytest
import yaml
from PIL import Image

from hileval.ask.documents import DocumentError, picture, read_documents, read_task, sound
from hileval.ask.harness import TaskError
from hileval.gates.declare import EVALS
from hilgate.errors import CannotRunHereError, Exit

PARSE = EVALS / "tasks/nemotron_parse.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three pages, one of them a JPEG."""
    pages = tmp_path / "pages"
    pages.mkdir()
    for number, suffix in enumerate(("png", "png", "jpg")):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(pages / f"page-{number}.{suffix}")
        (pages / f"page-{number}.md").write_text(f"# Page {number}\n\nText.\n")
    monkeypatch.setenv("HILEVAL_DOCUMENTS", str(pages))
    return pages


def read(path=PARSE):
    return read_documents(read_task(path), path)


def test_pages_with_their_texts(folder):
    documents = read()
    assert [document.id for document in documents] == ["page-0", "page-1", "page-2"]
    assert documents[1].text == "# Page 1\n\nText.\n"
    assert picture(documents[1].data).getpixel((0, 0)) == (1, 0, 0)
    assert len({document.digest for document in documents}) == 3
    again = {document.id: document.digest for document in read()}
    (folder / "page-0.md").write_text("# Another\n")
    assert read()[0].digest != again["page-0"]
    assert read()[1].digest == again["page-1"]


def twice(folder):
    shutil.copy(folder / "page-0.png", folder / "again.png")
    shutil.copy(folder / "page-0.md", folder / "again.md")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "page-1.md").unlink(), r"text: no page-1\.md beside page-1\.png"),
        (lambda f: (f / "page-1.png").unlink(), r"image: none beside page-1\.md"),
        (lambda f: (f / "page-1.md").write_text(" \n\n"), r"text: that of 'page-1' is empty"),
        (lambda f: (f / "page-1.md").write_bytes(b"\xff\xfe"), r"text: page-1\.md is not UTF-8"),
        (lambda f: (f / "page-1.png").write_bytes(b"\x89PNG\r\n"), r"image: page-1\.png cannot be read"),
        (lambda f: (f / "page-2.jpg").write_bytes((f / "page-2.jpg").read_bytes()[:300]), r"image: page-2\.jpg"),
        (lambda f: shutil.copy(f / "page-2.jpg", f / "page-2.jpeg"), r"id: 'page-2' occurs twice"),
        (twice, r"id: '.*' and '.*' are the same document"),
        (lambda f: [file.unlink() for file in f.iterdir()], "no document"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_field_named(folder, damage, why):
    damage(folder)
    with pytest.raises(DocumentError, match=why) as caught:
        read()
    assert caught.value.exit_status is Exit.INVALID_DECLARATION
    assert caught.value.where == str(folder)


@pytest.mark.parametrize("value", [None, "", "/nowhere/at/all"])
def test_without_a_folder_nothing_runs(monkeypatch, value):
    monkeypatch.delenv("HILEVAL_DOCUMENTS", raising=False)
    if value is not None:
        monkeypatch.setenv("HILEVAL_DOCUMENTS", value)
    with pytest.raises(CannotRunHereError, match="HILEVAL_DOCUMENTS names no folder"):
        read()


def spoken(tmp_path, *lines):
    texts, task = tmp_path / "texts.jsonl", tmp_path / "task.yaml"
    texts.write_text("\n".join(lines) + "\n")
    task.write_text(yaml.safe_dump({"task": "t", "modality": "audio", "prompt": "<s>", "texts": str(texts)}))
    return task


def row(name, text):
    return json.dumps({"id": name, "text": text})


def test_spoken_documents(tmp_path):
    (document,) = read(spoken(tmp_path, row("a", "Tom 7 pens")))
    heard = sound(document.data)
    assert heard.shape == (16_000,)
    assert heard.dtype == "float32"
    assert 0.4 < abs(heard).max() < 0.5


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([row("a", "Tom 7 pens"), row("a", "Tom 8 pens")], "id: 'a' occurs twice"),
        ([row("a", "Tom 7 pens"), row("b", "Tom 7 pens")], "the same document"),
        ([row("a", " ")], "text: that of 'a' is empty"),
        ([row(3, "Tom 7 pens")], "id: 3 is no string"),
        ([row("a", None)], "text: None is no string"),
        (['{"id": "a"}'], "not a document"),
        (["[1]"], "not a document"),
        (["{"], "not a document"),
        ([row("a", "Tom 7 pelicans")], "no chord for 'pelicans'"),
        ([row("a", "Tom 7 pens\n" * 9)], "27 words where 1 to 25 can be heard"),
    ],
)
def test_damaged_texts_are_refused_and_the_field_named(tmp_path, lines, why):
    with pytest.raises(Exception, match=why) as caught:
        read(spoken(tmp_path, *lines))
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


def test_missing_texts(tmp_path):
    task = spoken(tmp_path)
    (tmp_path / "texts.jsonl").unlink()
    with pytest.raises(DocumentError, match="cannot be read"):
        read(task)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"propmt": "x"}, "propmt"),
        ({"prompt": ""}, "prompt"),
        ({"modality": "video"}, "modality"),
        ({"modality": "image"}, "image needs `data_folder` alone"),
        ({"data_folder": "X"}, "audio needs `texts` alone"),
        ({"texts": None}, "audio needs `texts` alone"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"scoring": 2}, "scoring"),
    ],
)
def test_one_mistake_in_a_task_is_named(tmp_path, change, why):
    task = spoken(tmp_path, row("a", "Tom 7 pens"))
    task.write_text(yaml.safe_dump(yaml.safe_load(task.read_text()) | change))
    with pytest.raises(TaskError, match=why):
        read_task(task)


@pytest.mark.parametrize("text", ["", "[", "- a"])
def test_not_a_task(tmp_path, text):
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(TaskError):
        read_task(path)
    with pytest.raises(TaskError, match="FileNotFoundError"):
        read_task(tmp_path / "none.yaml")
