from hileval.gates.judge import flips, side_by_side

GOOD = [True] * 12


def asked(plant, *runs, texts=None):
    stored = plant.baseline(GOOD)
    return stored, plant.asked(stored, *(plant.run(run, texts=texts) for run in runs))


def test_losses_come_before_gains_and_both_answers_are_kept(plant):
    before = [i != 3 for i in range(12)]
    stored = plant.baseline(before)
    now = plant.run([i != 7 for i in range(12)], texts={7: " I do not know\n#### 0"})
    found = flips(plant.asked(stored, now), stored, "strict")
    assert [(flip.doc_id, flip.lost) for flip in found] == [(7, True), (3, False)]
    assert found[0].stored_text.endswith("#### 16")
    assert found[0].new_text.endswith("#### 0")


def test_a_question_that_is_lost_in_one_run_of_three_has_not_flipped(plant):
    stored, one = asked(plant, GOOD, GOOD, [i != 5 for i in range(12)])
    assert flips(one, stored, "strict") == ()
    stored, two = asked(plant, [i != 5 for i in range(12)], GOOD, [i != 5 for i in range(12)])
    assert [flip.doc_id for flip in flips(two, stored, "strict")] == [5]


def test_two_columns_that_fit_and_a_count_of_what_is_left_out(plant):
    text = " word" * 60 + "\n#### 1"
    stored, wrong = asked(plant, [False] * 12, texts=dict.fromkeys(range(12), text))
    shown = side_by_side(flips(wrong, stored, "strict"), 2)
    assert shown.count("question ") == 2
    assert "and 10 more flipped questions in flips.md" in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert "right in 100% of stored runs, 0% now" in shown


def test_an_empty_answer_says_so(plant):
    stored, wrong = asked(plant, [i != 0 for i in range(12)], texts={0: ""})
    assert "(nothing)" in side_by_side(flips(wrong, stored, "strict"), 5)
