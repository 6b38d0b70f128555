# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what it shows, that it obeys nothing a model wrote, and what it refuses."""

import html.parser
import json

import pytest

from hileval.gates.analysis import render, visible
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome

GOOD = [i % 9 > 0 for i in range(60)]
EVIL = "</pre><script>alert(1)</script><img src=http://x.test/y onerror=alert(2)>\u202e\x00"


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.rows = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "details":
            self.rows.append(dict(attrs)["class"].split())


@pytest.fixture
def folder(plant, tmp_path):
    now = [right != (i in (3, 18, 17)) for i, right in enumerate(GOOD)]
    again = plant.run(now, texts={7: EVIL, 8: ""})
    (tmp_path / "samples.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in again.samples))
    plant.baseline(GOOD).write(tmp_path / "base.json")
    Check.write_all(tmp_path, [Check(id="g/accuracy", outcome=Outcome.FAIL, message=f"lost\n{EVIL}")])
    return tmp_path


def test_every_question_stands_there_and_flips_come_first(folder):
    text = render(folder, folder / "base.json", "strict")
    page = Page(text)
    assert len(page.rows) == 60
    assert page.rows[:3] == [["is-lost", "is-wrong"]] * 2 + [["is-gained", "is-right"]]
    assert sum("is-flagged" in row for row in page.rows) == 1
    assert "52 of 60 right" in text
    assert "right in 100 % of runs before, 0 % now" in text
    assert "(nothing)" in text


def test_nothing_that_a_model_wrote_is_obeyed(folder):
    text = render(folder, folder / "base.json", "strict")
    assert not {"script", "img", "link", "a", "iframe"} & set(Page(text).tags)
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert text.count("&lt;script&gt;") == 2
    assert "\\u202e\\u0000" in text
    assert "\x00" not in text
    assert visible("a\tb\nc\u200b") == "a\tb\nc\\u200b"


def test_another_run_stands_in_for_a_baseline_and_a_second_run_of_a_gate_is_averaged(folder, plant, tmp_path):
    other = tmp_path / "other.jsonl"
    runs = (plant.run(GOOD), plant.run([not right if i == 5 else right for i, right in enumerate(GOOD)]))
    other.write_text("".join(f"{one.model_dump_json()}\n" for run in runs for one in run.samples))
    assert "right in 50 % of runs before, 100 % now" in render(folder, other, "strict")
    assert "is-new" in render(folder, None, "strict")


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("samples.jsonl", "{", "not stored answers: JSONDecodeError"),
        ("samples.jsonl", "", "no answer of filter"),
        ("findings.jsonl", "{}\n", "not the findings of a gate"),
        ("base.json", "{}", "the baseline is not valid"),
        ("samples.jsonl", None, "not stored answers: FileNotFoundError"),
    ],
)
def test_bad_input_is_named(folder, file, text, why):
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(RecordsError, match=why):
        render(folder, folder / "base.json", "strict")


def test_runs_of_other_questions_are_refused(folder, tmp_path):
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line | {"doc_hash": f"{i:064x}"}) + "\n" for i, line in enumerate(lines)))
    with pytest.raises(RecordsError, match="share no question"):
        render(folder, other, "strict")
