"""Suites are the paper's, their figures those that hand-made rows and a known scorer must give.

The rows of BoolQ, SciQ, RACE and MMLU are written here, in the Hub's columns.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hub_folder import write_set

from openelm_jax.errors import UserError
from openelm_jax.evaluation import harness, harness_tasks
from openelm_jax.evaluation.suites import SUITES, Task, averages, parse_tasks
from openelm_jax.generation.scoring import Scored
from openelm_jax.tokenizer import load_tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("no_hub")

TOKENIZER = load_tokenizer(
    Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
)


class PrefersShort:
    """Costs a token one nat, so that the shortest continuation wins; remembers its requests."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.requests: list = []
        self.stop_after = stop_after

    def __call__(self, requests, report):
        results = [Scored(-float(len(request.continuation)), False) for request in requests]
        for number, result in enumerate(results):
            if number == self.stop_after:
                raise KeyboardInterrupt
            self.requests.append(requests[number])
            report(number, result)
        return results


def run(lm, tasks, data=None, **how):
    return harness_tasks.run(lm, harness_tasks.open_tasks(tasks, data), **how)


def model(scores):
    return harness.harness_class()(scores, TOKENIZER, 2048)


SHORT, LONG = "no", "a very long answer that nobody would choose"


def sciq(correct: list[bool]) -> list[dict]:
    """Rows whose right answer is the shortest one where `correct`."""
    return [
        {
            "support": "",
            "question": f"Which of them ({i})?",
            "correct_answer": SHORT if right else LONG,
            "distractor1": LONG if right else SHORT,
            "distractor2": f"{LONG} of all",
            "distractor3": f"{LONG} at all",
        }
        for i, right in enumerate(correct)
    ]


def write_sciq(folder: Path, correct: list[bool]) -> None:
    rows = sciq(correct)
    write_set(folder, "allenai/sciq", None, {"train": rows, "validation": rows, "test": rows})


def test_suites_are_those_of_the_papers_table_3():
    """And TruthfulQA in (c), which Tables 4 (c) and 5 (c) show and average over."""

    def shown(suite):
        return {task.name: (task.shots, task.metric) for task in SUITES[suite]}

    assert shown("zero-shot") == {
        "arc_challenge": (0, "acc_norm"),
        "arc_easy": (0, "acc_norm"),
        "boolq": (0, "acc"),
        "hellaswag": (0, "acc_norm"),
        "piqa": (0, "acc_norm"),
        "sciq": (0, "acc"),
        "winogrande": (0, "acc"),
    }
    openllm = {
        "arc_challenge": (25, "acc_norm"),
        "hellaswag": (10, "acc_norm"),
        "mmlu": (5, "acc"),
        "truthfulqa_mc2": (0, "acc"),
        "winogrande": (5, "acc"),
    }
    assert shown("openllm") == openllm
    assert shown("llm360") == openllm | {
        "crows_pairs_english": (25, "pct_stereotype"),
        "piqa": (0, "acc_norm"),
        "race": (0, "acc"),
    }


def test_an_average_without_sciq_is_shown_where_sciq_is():
    figures = dict(zip(SUITES["zero-shot"], (10, 20, 30, 40, 50, 94, 60), strict=True))
    assert averages(figures) == {
        "average": pytest.approx(304 / 7),
        "average without SciQ": pytest.approx(35),
    }
    assert averages({Task("piqa"): 1.0, Task("race"): 2.0}) == {"average": 1.5}
    assert averages({Task("sciq"): 1.0}) == {}


def test_tasks_are_named_with_or_without_examples():
    piqa, wiki, arc = parse_tasks("piqa, wikitext ,arc_challenge:25")
    assert (piqa.shots, piqa.metric, piqa.label) == (0, "acc_norm", "PIQA")
    assert (wiki.name, wiki.shots, wiki.metric) == ("wikitext", None, None)
    assert (arc.name, arc.shots, arc.metric) == ("arc_challenge", 25, "acc_norm")


@pytest.mark.parametrize(
    ("text", "message"),
    [("piqa:few", "few is no number"), ("piqa,piqa:5", "piqa twice"), (" , ", "names no task")],
)
def test_tasks_that_cannot_be_meant_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_tasks(text)


def test_figures_of_boolq_sciq_and_race_are_those_of_their_rows(tmp_path):
    boolq = [
        {"passage": "They met.", "question": f"did they ({i})", "idx": i, "label": int(i == 0)}
        for i in range(5)
    ]
    write_set(tmp_path, "aps/super_glue", "boolq", {"train": boolq, "validation": boolq})
    write_sciq(tmp_path, [True, True, False, True])
    race = [
        {
            "article": "They met.",
            "problems": str([{"question": "Who?", "answer": answer, "options": options}]),
        }
        for answer, options in (
            ("A", [SHORT, *[LONG] * 3]),
            ("B", [SHORT, *[LONG] * 3]),
            ("D", [*[LONG] * 3, SHORT]),
        )
    ]
    write_set(tmp_path, "EleutherAI/race", "high", {"test": race})

    found = run(model(PrefersShort()), parse_tasks("boolq,sciq,race"), data=tmp_path)

    # "no" and "yes" are a token each, and the first of equals is chosen: BoolQ's four that are no.
    expected = {"boolq": (4, 5), "sciq": (3, 4), "race": (2, 3)}
    assert [value.task.name for value in found.values] == list(expected)
    for value in found.values:
        right, items = expected[value.task.name]
        share = right / items
        assert (value.value, value.items, value.metric) == (share, items, "acc")
        assert value.stderr == pytest.approx(math.sqrt(share * (1 - share) / (items - 1)))
    shares = [100 * right / items for right, items in expected.values()]
    assert found.averages["average"] == pytest.approx(sum(shares) / 3)
    assert found.averages["average without SciQ"] == pytest.approx((shares[0] + shares[2]) / 2)


def test_a_limit_takes_the_first_items(tmp_path):
    write_sciq(tmp_path, [True, False, False, False])
    (value,) = run(model(PrefersShort()), parse_tasks("sciq"), limit=2, data=tmp_path).values
    assert (value.value, value.items) == (0.5, 2)


def test_examples_stand_before_the_question(tmp_path):
    write_sciq(tmp_path, [True, False])
    scores = PrefersShort()
    (value,) = run(model(scores), parse_tasks("sciq:1"), data=tmp_path).values
    assert value.notes == ()
    texts = [TOKENIZER.decode(list(request.context)) for request in scores.requests]
    assert {text.count("Question:") for text in texts} == {2}


def test_examples_from_the_scored_split_are_told_and_are_not_the_question(tmp_path):
    write_set(tmp_path, "allenai/sciq", None, {"test": sciq([True, False])})
    scores = PrefersShort()
    (value,) = run(model(scores), parse_tasks("sciq:1"), data=tmp_path).values
    assert value.notes == ("examples are from the scored split, since train is not here",)
    for request in scores.requests:
        text = TOKENIZER.decode(list(request.context))
        assert "(0)" in text
        assert "(1)" in text


def test_a_tag_is_each_of_its_tasks(tmp_path):
    for part in ("ARC-Easy", "ARC-Challenge"):
        rows = [
            {
                "question": "Which?",
                "choices": {"text": [SHORT, LONG], "label": ["A", "B"]},
                "answerKey": "B",  # a nat a token is less a character for the long one
            }
        ] * 2
        write_set(tmp_path, "allenai/ai2_arc", part, {"test": rows})
    found = run(model(PrefersShort()), parse_tasks("ai2_arc"), data=tmp_path)
    assert {value.task.name: value.value for value in found.values} == {
        "arc_challenge": 1.0,
        "arc_easy": 1.0,
    }
    # Shown as when they are named themselves.
    assert [(value.metric, value.label) for value in found.values] == [
        ("acc_norm", "ARC-c"),
        ("acc_norm", "ARC-e"),
    ]


@pytest.mark.heavy
def test_mmlu_is_the_mean_over_the_questions_of_57_subjects(tmp_path):
    def rows(*answers):
        choices = ["one", "two", "three", "four"]
        return [{"question": "Which?", "choices": choices, "answer": a} for a in answers]

    index = harness_tasks._manager().task_index
    subjects = [name.removeprefix("mmlu_") for name in harness_tasks._leaves(index, "mmlu")]
    assert len(subjects) == len(set(subjects)) == 57
    for subject in subjects:
        # The letters cost the same, and A is first; anatomy has as many questions as three others.
        test = rows(0, 0, 0) if subject == "anatomy" else rows(1)
        write_set(tmp_path, "cais/mmlu", subject, {"dev": rows(0, 1, 2, 3, 0), "test": test})
    scores = PrefersShort()
    (value,) = run(model(scores), parse_tasks("mmlu:5"), data=tmp_path).values
    assert (value.items, value.metric) == (59, "acc")
    assert value.value == pytest.approx(3 / 59)
    text = TOKENIZER.decode(list(scores.requests[0].context))
    assert text.count("Answer:") == 6


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    write_sciq(tmp_path, [True, False])
    cache = tmp_path / "answers" / "model"
    with pytest.raises(KeyboardInterrupt):
        run(model(PrefersShort(3)), parse_tasks("sciq"), data=tmp_path, cache=cache)
    scores = PrefersShort()
    (value,) = run(model(scores), parse_tasks("sciq"), data=tmp_path, cache=cache).values
    assert (len(scores.requests), value.value) == (8 - 3, 0.5)
    again = PrefersShort()
    (value,) = run(model(again), parse_tasks("sciq"), data=tmp_path, cache=cache).values
    assert (again.requests, value.value) == ([], 0.5)


def test_a_task_that_does_not_exist_is_refused_with_near_ones(tmp_path):
    with pytest.raises(UserError, match=r"no task winograd; did you mean .*winogrande"):
        run(model(PrefersShort()), parse_tasks("winograd"), data=tmp_path)


def test_data_that_is_not_there_is_named_before_anything_is_scored(tmp_path):
    write_sciq(tmp_path, [True])
    scores = PrefersShort()
    with pytest.raises(UserError) as refusal:
        run(model(scores), parse_tasks("sciq,piqa"), data=tmp_path)
    assert str(refusal.value) == (
        f"there is no data of piqa (the Hub's baber/piqa): looked for {tmp_path}/baber/piqa, "
        f"{tmp_path}/datasets--baber--piqa, {tmp_path}/piqa/dev.jsonl[.gz], "
        f"{tmp_path}/piqa/dev-labels.lst[.gz], {tmp_path}/piqa/train.jsonl[.gz], "
        f"{tmp_path}/piqa/train-labels.lst[.gz]."
    )
    assert scores.requests == []


def test_splits_and_configurations_that_are_not_there_are_named(tmp_path):
    write_set(tmp_path, "allenai/sciq", None, {"train": sciq([True])})
    with pytest.raises(UserError, match=r"sciq is scored on the split test .* has train: add it"):
        run(model(PrefersShort()), parse_tasks("sciq"), data=tmp_path)
    write_set(tmp_path, "EleutherAI/race", "middle", {"test": sciq([True])})
    with pytest.raises(UserError, match=r"configuration high of EleutherAI/race.* has middle"):
        run(model(PrefersShort()), parse_tasks("race"), data=tmp_path)


def test_all_that_is_missing_of_local_copies_is_named_at_once(tmp_path):
    write_sciq(tmp_path, [True])
    with pytest.raises(UserError) as refusal:
        run(model(PrefersShort()), parse_tasks("boolq,sciq,race"), data=tmp_path)
    sentence = str(refusal.value)
    assert "no data of boolq (the Hub's aps/super_glue)" in sentence
    assert "no data of race (the Hub's EleutherAI/race)" in sentence
    assert "sciq" not in sentence
    assert sentence.count(".; ") == 0
    assert sentence.endswith(".")


def test_a_task_that_a_group_has_too_would_count_twice():
    with pytest.raises(UserError, match="arc_easy is asked with arc_easy and with ai2_arc"):
        harness_tasks.open_tasks(parse_tasks("arc_easy,ai2_arc"))
    with pytest.raises(UserError, match="mmlu_anatomy is asked with mmlu_stem and with mmlu_anat"):
        harness_tasks.open_tasks(parse_tasks("mmlu_stem,mmlu_anatomy"))


def test_a_configuration_that_copies_of_the_origin_lack_is_told_by_their_place(tmp_path):
    rows = "sent_more,sent_less,stereo_antistereo,bias_type\nA,B,stereo,age\n"
    (tmp_path / "crows_pairs").mkdir()
    (tmp_path / "crows_pairs/crows_pairs_anonymized.csv").write_text(rows)
    with pytest.raises(UserError) as refusal:
        harness_tasks.open_tasks(parse_tasks("crows_pairs_french"), tmp_path)
    assert str(refusal.value) == (
        "crows_pairs_french reads the configuration french of jannalu/crows_pairs_multilingual, "
        f"and {tmp_path}/crows_pairs has english: add it there, or give the Hub's folder "
        "jannalu/crows_pairs_multilingual."
    )


def test_without_a_hub_and_a_copy_the_sentence_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"the data of sciq could not be read .*--data DIR"):
        run(model(PrefersShort()), parse_tasks("sciq"))


def test_copies_of_the_same_name_and_configuration_are_not_taken_for_one(tmp_path):
    """As the library's own cache would take them."""
    race = {"article": "They met.", "problems": str([{"question": "Who?", "answer": "A"}])}
    race["problems"] = race["problems"].replace("}", ", 'options': ['no', 'a b', 'c d', 'e f']}")
    for name, count in (("first", 1), ("second", 3)):
        write_set(tmp_path / name, "EleutherAI/race", "high", {"test": [race] * count})
        (value,) = run(model(PrefersShort()), parse_tasks("race"), data=tmp_path / name).values
        assert value.items == count
    write_set(tmp_path / "second", "EleutherAI/race", "high", {"test": [race] * 2})
    (value,) = run(model(PrefersShort()), parse_tasks("race"), data=tmp_path / "second").values
    assert value.items == 2


def test_other_copies_do_not_stay_after_a_run(tmp_path):
    for name, correct in (("first", [True]), ("second", [False])):
        write_sciq(tmp_path / name, correct)
        (value,) = run(model(PrefersShort()), parse_tasks("sciq"), data=tmp_path / name).values
        assert value.value == float(correct[0])
