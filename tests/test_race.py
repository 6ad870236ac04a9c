"""RACE is asked as in April 2024, and in the place of the harness' own task."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_folder import write_set

from openelm_jax.evaluation import harness
from openelm_jax.evaluation.harness_tasks import open_tasks, run
from openelm_jax.evaluation.suites import parse_tasks
from openelm_jax.evaluation.tasks import race_prompts
from openelm_jax.generation.scoring import Scored
from openelm_jax.tokenizer import load_tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("no_hub")

TOKENIZER = load_tokenizer(
    Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
)
RECORD = {
    "article": "Ann met Bob.\nThey ate.",
    "problems": str(
        [
            {
                "question": "Ann met  _  .",
                "answer": "B",
                "options": ["Al", "Bob", "Cid", "Dan"],
            },
            {
                "question": "What did they do?",
                "answer": "D",
                "options": ["They ran", "They sat", "They sang", "They ate"],
            },
            {
                "question": "They met at _  .",
                "answer": "C",
                "options": ["sea", "work", "home", "noon"],
            },
            {
                "question": "Bob met  _  .",
                "answer": "A",
                "options": ["Ann", "Eve", "Fay", "Gwen"],
            },
        ]
    ),
}
PROMPT = """\
Article: Ann met Bob.
They ate.

 _  .Bob
Question: What did they do?
Answer: They ate
Question: They met at _  .
Answer: home
Bob met  _  ."""


def test_of_an_earlier_blank_only_the_last_five_characters_stay():
    """A blank has two spaces before it; with one a question is a question."""
    assert race_prompts.prompt(RECORD) == PROMPT
    assert race_prompts.options(RECORD) == ["Ann", "Eve", "Fay", "Gwen"]
    assert race_prompts.answer(RECORD) == 0


def test_an_article_with_one_problem_is_the_article_and_its_question():
    problems = [{"question": "Who?", "answer": "C", "options": ["a", "b", "c", "d"]}]
    record = {"article": "They met.", "problems": str(problems)}
    assert race_prompts.prompt(record) == "Article: They met.\n\nWho?"
    assert race_prompts.answer(record) == 2


def test_the_task_race_is_ours(tmp_path):
    write_set(tmp_path, "EleutherAI/race", "high", {"test": [RECORD]})
    (opened,) = open_tasks(parse_tasks("race"), tmp_path)
    asked = []

    def score(requests, report):
        for number, request in enumerate(requests):
            asked.append(TOKENIZER.decode([*request.context, *request.continuation]))
            report(number, Scored(-float(number), False))
        return []

    lm = harness.harness_class()(score, TOKENIZER, 2048)
    (value,) = run(lm, [opened]).values

    assert asked == [f"{PROMPT} {name}" for name in ("Ann", "Eve", "Fay", "Gwen")]
    assert (value.value, value.version) == (1.0, "2.0")
