"""The loop between rule, engine and journal, with an engine of planted answers."""

import pytest

from hileval.ask.conduct import Heading, Journal, code_fingerprint, conduct
from hileval.ask.evaluation import IdentityMismatchError
from hileval.gates.rule import Rule
from hilgate.errors import NothingSelectedError

N = 200
RULE = Rule(
    questions=N, seed=1, look_every=25, first_look=50, alpha=0.01, margin=0.05, beta=0.03, baseline_runs=5,
    extensions=1, unresolved="flag",
)  # fmt: skip


class Planted:
    """Questions whose answers are known; remembers what it was asked."""

    def __init__(self, plant, correct, *, dies_after=None, **kwargs):
        self.run = plant.run(correct, **kwargs)
        self.identity, self.available = plant.identity, len(correct)
        self.asked = []
        self.dies_after = dies_after

    def ask(self, ids, run):
        if self.dies_after is not None and len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.asked += [(run, one) for one in ids]
        return [self.run.samples[one] for one in ids]


class Silent:
    def asked(self, *_):
        pass


def conducted(plant, gate, questions, baseline=..., limit=None):
    stored = plant.baseline([True] * N) if baseline is ... else baseline
    return conduct(gate, RULE, stored, questions, Silent(), limit)


def test_an_unchanged_model_costs_75_questions_of_200(plant, gate):
    questions = Planted(plant, [True] * N)
    asked = conducted(plant, gate, questions)
    assert len(questions.asked) == len(asked.runs[0].samples) == 75
    assert asked.base.shape == (5, N)


def test_a_wreck_costs_50(plant, gate):
    questions = Planted(plant, [i % 3 == 0 for i in range(N)])
    assert len(conducted(plant, gate, questions).runs[0].samples) == 50


def test_broken_output_stops_at_once_whatever_the_score(plant, gate):
    questions = Planted(plant, [True] * N, texts=dict.fromkeys(range(N), "!" * 40))
    assert len(conducted(plant, gate, questions).runs) == 1
    assert len(questions.asked) == 50


def test_undecided_asks_all_and_then_all_again(plant, gate):
    """Two hundred right answers cannot exclude a drop of one point."""
    questions = Planted(plant, [True] * N)
    strict = RULE.model_copy(update={"margin": 0.01})
    asked = conduct(gate, strict, plant.baseline([True] * N), questions, Silent())
    assert [len(run.samples) for run in asked.runs] == [N, N]
    assert {run for run, _ in questions.asked} == {0, 1}


def test_without_a_baseline_every_question_is_asked_once(plant, gate):
    questions = Planted(plant, [True] * N)
    assert [len(run.samples) for run in conducted(plant, gate, questions, None).runs] == [N]


def test_a_limit_of_zero_is_refused(plant, gate):
    with pytest.raises(NothingSelectedError):
        conducted(plant, gate, Planted(plant, [True] * N), limit=0)


def test_questions_that_the_baseline_lacks_are_refused_before_the_engine_starts(plant, gate):
    questions = Planted(plant, [True] * N)
    with pytest.raises(IdentityMismatchError, match="are not in it"):
        conducted(plant, gate, questions, plant.baseline([True] * 150))
    assert questions.asked == []


def heading(plant, **changes):
    return Heading(gate="g", identity=plant.identity, engine="vllm", code="c").model_copy(update=changes)


def test_what_was_answered_before_a_crash_is_not_asked_again(plant, gate, tmp_path):
    path = tmp_path / "journal.jsonl"
    first = Planted(plant, [True] * N, dies_after=50)
    with pytest.raises(KeyboardInterrupt):
        conducted(plant, gate, Journal(first, path, heading(plant)))
    second = Planted(plant, [True] * N)
    journal = Journal(second, path, heading(plant))
    assert journal.resumed == 50
    assert len(conducted(plant, gate, journal).runs[0].samples) == 75
    assert set(first.asked).isdisjoint(second.asked)
    assert len(second.asked) == 25
    journal.finish()
    assert not path.exists()


def test_a_line_cut_short_is_asked_again(plant, gate, tmp_path):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        conducted(plant, gate, Journal(Planted(plant, [True] * N, dies_after=50), path, heading(plant)))
    path.write_bytes(path.read_bytes()[:-40])
    assert Journal(Planted(plant, [True] * N), path, heading(plant)).resumed == 49
    assert Journal(Planted(plant, [True] * N), path, heading(plant)).resumed == 49  # and the file is sound again


@pytest.mark.parametrize("change", [{"code": "d"}, {"engine": "transformers"}, {"gate": "h"}], ids=str)
def test_answers_of_something_else_are_set_aside(plant, gate, tmp_path, change):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        conducted(plant, gate, Journal(Planted(plant, [True] * N, dies_after=50), path, heading(plant)))
    assert Journal(Planted(plant, [True] * N), path, heading(plant, **change)).resumed == 0
    assert len(path.with_name("journal.jsonl.before").read_text().splitlines()) == 51


def test_fingerprint_sees_code_and_tables_only(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = code_fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert code_fingerprint(tmp_path) == before
    (tmp_path / "t.toml").write_text("x")
    assert code_fingerprint(tmp_path) != before
