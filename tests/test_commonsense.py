"""The commonsense sets are answered by the model's own log-likelihoods and words, as in Table 6."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import evaluate
from openelm_jax.data.instructions import instruction_of, prompt
from openelm_jax.data.objects import read_objects
from openelm_jax.errors import UserError
from openelm_jax.evaluation.commonsense import (
    WORDS,
    answer_words,
    first_word,
    open_sets,
    run_commonsense,
)
from openelm_jax.evaluation.paper_results import paper_rows
from openelm_jax.evaluation.suites import COMMONSENSE, Results, Value
from openelm_jax.evaluation.tables import all_rows, to_json
from openelm_jax.generation.language_model import load
from openelm_jax.generation.scoring import Scored
from openelm_jax.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    config = tiny(num_layers=2, vocab_size=32_000, context_length=256)
    directory = tmp_path_factory.mktemp("weights") / "model"
    write_huggingface(directory, config, random_params(config), tokenizer=load_tokenizer(TOKENIZER))
    return directory


def read(path: Path) -> list:
    return [instruction_of(record) for record in read_objects(str(path))]


def write_sets(folder: Path, count: int = 6) -> Path:
    """Write two sets, one of them where LLM-Adapters' own repository has it."""
    sets = {
        "boolq": [
            {
                "instruction": f"Is {i} odd?\n\nAnswer format: true/false",
                "input": "",
                "output": "",
                "answer": "true" if i % 2 else "false",
            }
            for i in range(count)
        ],
        "dataset/winogrande": [
            {
                "instruction": f"_ has {i}.\n\nOption1: A Option2: B "
                "Answer format: option1/option2",
                "output": "",
                "answer": f"option{1 + i % 2}",
            }
            for i in range(count)
        ],
    }
    for name, records in sets.items():
        for record in records:
            record["output"] = f"the correct answer is {record['answer']}"
        (folder / name).mkdir(parents=True)
        (folder / name / "test.json").write_text(json.dumps(records))
    return folder


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("Q?\n\nAnswer format: true/false", ["true", "false"]),
        ("Q?\n\nAnswer format: solution1/solution2", ["solution1", "solution2"]),
        ("Q? Option2: B Answer format: option1/option2", ["option1", "option2"]),
        ("Q?\n\nAnswer format: answer1/answer2/answer3", ["answer1", "answer2", "answer3"]),
        ("Answer format: true/false\nQ?", []),
        ("Q?", []),
    ],
)
def test_the_last_line_says_what_may_be_an_answer(instruction, words):
    assert answer_words(instruction) == words


def test_the_first_word_of_a_response_counts():
    words = WORDS["ARC-Easy"]
    assert first_word("the correct answer is answer3, not answer1", words) == "answer3"
    assert first_word("I do not know ### Response: answer2", words) is None
    assert first_word("true or false", WORDS["boolq"]) == "true"


LONG = {
    "instruction": "So it is. " * 100 + "\n\nAnswer format: true/false",
    "output": "the correct answer is true",
    "answer": "true",
}


@pytest.mark.parametrize("form", [None, "llm-adapters"])
def test_likelihood_is_that_of_the_plain_forward_pass(form, weights, tmp_path, monkeypatch):
    """Of prompts longer than the window of 256 tokens the first tokens are left out."""
    model, tokenizer = load(weights), load_tokenizer(TOKENIZER)
    path = write_sets(tmp_path, count=2) / "boolq/test.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), LONG]))
    asked = []
    score = type(model).score

    def spy(self, requests, **options):
        found = score(self, requests, **options)
        asked.extend(zip(requests, found, strict=True))
        return found

    monkeypatch.setattr(type(model), "score", spy)
    (value,) = run_commonsense(model, open_sets(tmp_path, ["boolq"]), form=form).values

    records = read(path)
    random.Random(83652).shuffle(records)
    right = 0
    for number, record in enumerate(records):
        text, best = prompt(record.instruction, form=form or "corenet"), {}
        before = [tokenizer.bos_id, *tokenizer.encode(text.rstrip()).tolist()]
        for word, (request, said) in zip(("true", "false"), asked[2 * number :], strict=False):
            # The spaces that the prompt ends with belong to what is scored.
            answered = tokenizer.encode(f"{text}the correct answer is {word}").tolist()
            whole = [tokenizer.bos_id, *answered]
            scored = whole[len(before) :]
            row = whole[-257:]
            assert [*request.context, *request.continuation] == row
            assert list(request.continuation) == scored

            logits = model.logits(np.array([row[:-1]]))[0, -len(scored) :].astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            best[word] = log_probs[np.arange(len(scored)), scored].sum()
            assert said.log_probability == pytest.approx(best[word], abs=1e-3)
        right += max(best, key=best.get) == record.answer

    lengths = [len(request.context) + len(request.continuation) for request, _ in asked]
    assert lengths.count(257) == 2  # the long one's, whose last token is not read
    assert (value.value, value.items) == (right / 3, 3)


def test_the_normalized_choice_is_by_characters(weights, tmp_path, monkeypatch):
    """-26.5 nats are more than -27, but of 26 characters, "… true", and 27, less for each."""
    model = load(weights)
    nats = {"true": -26.5, "false": -27.0}

    def score(self, requests, report):
        words = [
            load_tokenizer(TOKENIZER).decode(list(request.continuation)).split()[-1]
            for request in requests
        ]
        return [Scored(nats[word], False) for word in words]

    monkeypatch.setattr(type(model), "score", score)
    (value,) = run_commonsense(
        model, open_sets(write_sets(tmp_path, count=5), ["boolq"])
    ).values  # the answers: two are true, three are false

    assert value.metrics == {"acc": 2 / 5, "acc_norm": 3 / 5}
    assert (value.value, value.metric) == (2 / 5, "acc")
    assert value.stderr == pytest.approx(math.sqrt(2 / 5 * 3 / 5 / 4))


def test_generation_is_judged_by_what_the_model_writes(weights, tmp_path, monkeypatch):
    model = load(weights)
    sets = open_sets(write_sets(tmp_path), ["boolq"])
    asked = []

    def generate(self, prompts, max_tokens):
        asked.extend(prompts)
        assert max_tokens == 32
        return ["it is true" if "Is 1 " in p or "Is 2 " in p else "?" for p in prompts]

    monkeypatch.setattr(type(model), "generate", generate)
    (value,) = run_commonsense(model, sets, way="generation").values

    assert value.value == 1 / 6  # of 1 and 2 the odd one; of the others nothing is right
    texts = [record.instruction for record in read(tmp_path / "boolq/test.json")]
    assert sorted(asked) == sorted(prompt(text, form="llm-adapters") for text in texts)


def test_the_words_of_the_prompt_are_no_answer(weights, tmp_path):
    """A random model writes none, though each prompt ends in true/false."""
    sets = open_sets(write_sets(tmp_path), ["boolq"])
    (value,) = run_commonsense(load(weights), sets, way="generation").values
    assert (value.metrics, value.items) == ({"acc": 0.0}, 6)


def test_a_limit_is_corenets_sample(weights, tmp_path):
    model = load(weights)
    sets = open_sets(write_sets(tmp_path, count=9), ["boolq"])
    (task,) = sets
    order = list(sets[task])
    random.seed(83652)
    random.shuffle(order)
    (few,) = run_commonsense(model, sets, limit=4).values
    (same,) = run_commonsense(model, {task: order[:4]}).values
    assert (few.value, few.items) == (same.value, 4)


def test_the_command_prints_the_table_beside_table_6(weights, tmp_path, capsys):
    command = f"--from {weights} --suite commonsense --data {write_sets(tmp_path / 'data')}"
    out = tmp_path / "out"
    evaluate.main(
        [
            *command.split(),
            *("--sets", "boolq, winogrande,", "--limit", "4", "--out", str(out)),
            *("--beside", "OpenELM-270M LoRA"),
        ]
    )
    printed = capsys.readouterr().out
    assert re.search(r"^\| BoolQ \| 0 \| acc \| 4 \| \d+\.\d\d ± \S+ \| 62.14 \|", printed, re.M)
    assert "| OpenELM-3B DoRA |" in (out / "results.md").read_text()
    found = json.loads((out / "results.json").read_text())
    assert found["tasks"]["winogrande"]["paper"] == 49.88
    assert found["paper"]["averages"] == {"average": pytest.approx((62.14 + 49.88) / 2)}


def test_an_average_stands_beside_the_papers_of_the_same_sets():
    lora, averages_only = paper_rows("commonsense")[:2]
    values = [Value(task, 0.5, 0.1, "acc", 4, {"acc": 0.5}) for task in COMMONSENSE]
    some, whole = Results(tuple(values[:2]), None), Results(tuple(values), None)

    def beside(results, row):
        return to_json("W", "commonsense", results, row)["paper"]["averages"]

    assert beside(whole, lora) == {"average": 38.51}
    assert beside(whole, averages_only) == {"average": 41.6}
    assert beside(some, lora) == {"average": pytest.approx((62.14 + 50.05) / 2)}
    assert beside(some, averages_only) == {}
    lines = all_rows("W", "commonsense", some, [lora, averages_only]).splitlines()
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["50.00 |", "56.09 |", " |"]


def test_sets_that_are_not_there_are_named_before_the_weights_are_read(tmp_path):
    data = write_sets(tmp_path)
    with pytest.raises(UserError, match=r"has no piqa/test.json, .*openbookqa/test.json: fetch"):
        evaluate.main(f"--from {tmp_path} --suite commonsense --data {data}".split())
    with pytest.raises(UserError, match="--sets arc: there is no such set; known are boolq, piqa"):
        open_sets(data, ["arc"])


def test_a_set_without_a_record_is_refused(tmp_path):
    (write_sets(tmp_path) / "boolq/test.json").write_text("[]")
    with pytest.raises(UserError, match=r"boolq/test.json holds no record: fetch it again"):
        open_sets(tmp_path, ["boolq"])


def test_an_answer_that_the_instruction_does_not_allow_is_refused(tmp_path):
    path = write_sets(tmp_path) / "boolq/test.json"
    records = json.loads(path.read_text())
    records[2]["answer"] = "maybe"
    path.write_text(json.dumps(records))
    with pytest.raises(UserError, match=r"boolq/test.json, record 3: the answer 'maybe' is none"):
        open_sets(tmp_path, ["boolq"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--from W --suite commonsense", "give LLM-Adapters' folder dataset with --data"),
        ("--from W --suite openllm --by generation", "are for --suite commonsense"),
        ("--run R --all-checkpoints --suite commonsense --data D", "is for weights"),
    ],
)
def test_a_command_that_cannot_be_meant_is_usage(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        evaluate.main(flags.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
