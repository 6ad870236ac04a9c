"""What the harness finds with our model is what its own backend `hf` finds with our export.

The rows here are written in the Hub's layouts. With OPENELM_EVALUATION_DATA=DIR, a folder of the
tasks' files as their origins publish them (`hub_folder.write_tasks`), the heavy test compares at
least 200 real items of each of eight tasks.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hub_folder import write_set, write_tasks
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.evaluation.harness import harness_model
from openelm_jax.generation.language_model import load
from openelm_jax.tokenizer import load_tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
LARGEST_DIFFERENCE = 1e-3
WINDOW = 256
NAMES = (
    *("piqa", "hellaswag", "arc_easy", "arc_challenge", "winogrande"),
    *("truthfulqa_mc2", "crows_pairs_english", "mmlu"),
)


@pytest.fixture(scope="module", autouse=True)
def _offline(no_hub, modules_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules_cache)
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of two layers, with more rows than its tokenizer has pieces, as torch has it."""
    folder = tmp_path_factory.mktemp("exported")
    config = tiny(num_layers=2, vocab_size=32_064, context_length=2048)
    tokenizer = load_tokenizer(TOKENIZER)
    write_huggingface(folder / "plain", config, random_params(config), tokenizer=tokenizer)
    directory = folder / "export"
    export.main(
        f"--from {folder / 'plain'} --to hf --dtype float32 --with-code --out {directory}".split()
    )
    return directory


@pytest.fixture(scope="module")
def theirs(exported):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(exported),
        trust_remote_code=True,
        dtype="float32",
        device="cpu",
        batch_size=8,
        max_length=2048,
        add_bos_token=True,
    )


@pytest.fixture(scope="module")
def ours(exported):
    return harness_model(load(exported))


def evaluate(model, names, folder: Path, limit: int | None, monkeypatch, shots: int | None = None):
    """Return the results of the harness on the tasks whose data is in `folder`."""
    monkeypatch.chdir(folder)
    return lm_eval.simple_evaluate(
        model,
        tasks=list(names),
        num_fewshot=shots,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )


def compare(ours, theirs) -> dict[str, tuple[int, float]]:
    """Assert that two results agree; return each task's requests and the largest difference."""
    found = {}
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in ours["samples"].items():
        differences = []
        for our, their in zip(samples, theirs["samples"][task], strict=True):
            assert our["doc_hash"] == their["doc_hash"]
            for (our_sum, our_greedy), (their_sum, their_greedy) in zip(
                our["filtered_resps"], their["filtered_resps"], strict=True
            ):
                differences.append(abs(our_sum - their_sum))
                assert our_greedy == their_greedy, (task, our["doc_id"])
        found[task] = (len(differences), max(differences))
        assert max(differences) < LARGEST_DIFFERENCE, (task, max(differences))
    for task, metrics in ours["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "likelihood_diff" not in name:
                expected = theirs["results"][task][name]
                same = (
                    value == expected if task != "truthfulqa_mc2" else abs(value - expected) < 1e-5
                )
                assert same, (task, name, value, expected)
    return found


LONG = "The committee met on Tuesday and agreed, after some debate, to meet again. " * 24
PAIRS = [
    ("Question: What is water made of?\nAnswer:", " Hydrogen and oxygen"),
    ("Question: What is water made of?\nAnswer:", " Sand"),
    ("Question: What is water made of?\nAnswer: ", "Sand"),
    ("Question: What is water made of?\nAnswer:", " A"),
    ("Question: What is water made of?\nAnswer:", " B"),
    ("", "He said that most people do not know it."),
    ("", "He said that most people do know it."),
    ("It was  ", " so  late"),
    ("Numbers 1234", "5 and €, 漢字, \t tab\n"),
    (LONG, " This is the end."),
    ("Then", " " + LONG[: 75 * 12]),
]


def test_log_likelihoods_of_unusual_texts(ours, theirs, exported, monkeypatch):
    from lm_eval.api.instance import Instance

    monkeypatch.setattr(ours, "max_length", WINDOW)
    monkeypatch.setattr(theirs, "_max_length", WINDOW)

    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    assert len(theirs.tok_encode(LONG)) > WINDOW > len(theirs.tok_encode(PAIRS[-1][1])) > 128
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    found = ours.loglikelihood(requests, disable_tqdm=True)

    for pair, our, their in zip(PAIRS, found, expected, strict=True):
        assert abs(our[0] - their[0]) < LARGEST_DIFFERENCE, pair
        assert our[1] == their[1], pair
    # And of what the model would say itself, whose flag is set, and of what it almost would.
    model, context = load(exported), ours.tok_encode(PAIRS[0][0])
    said: list[int] = []
    for _ in range(3):
        said.append(int(model.logits(np.array([context + said]))[0, -1].argmax()))
    almost = [*said[:2], said[2] - 1]
    asked = [(PAIRS[0], context, tokens) for tokens in (said, almost)]
    for side in (theirs, ours):
        answers = side._loglikelihood_tokens(asked, disable_tqdm=True)
        assert [flag for _, flag in answers] == [True, False]


def test_rolling_log_likelihoods_of_one_two_and_more_windows(ours, exported):
    """Theirs without <s> before the text, which they would score as its first token."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(
        pretrained=str(exported),
        trust_remote_code=True,
        dtype="float32",
        device="cpu",
        batch_size=2,
        max_length=64,
        add_bos_token=False,
    )
    model = harness_model(load(exported), max_length=64)
    texts = [LONG[:200], LONG[:570], LONG[:1000]]
    windows = [len(theirs.tok_encode(text)) / 64 for text in texts]
    assert windows[0] <= 1 < windows[1] <= 2 < 3 < windows[2]
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    np.testing.assert_allclose(
        model.loglikelihood_rolling(requests, disable_tqdm=True),
        theirs.loglikelihood_rolling(requests, disable_tqdm=True),
        atol=LARGEST_DIFFERENCE,
        rtol=0,
    )


def test_greedy_texts_up_to_a_stop_string(ours, theirs):
    from lm_eval.api.instance import Instance

    how = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (context, how), i)
        for i, context in enumerate(["The state of the Union", "A", "One two three four"])
    ]
    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(
        requests, disable_tqdm=True
    )


@pytest.mark.heavy
def test_tasks_whose_rows_are_written_here(ours, theirs, tmp_path, monkeypatch):
    """BoolQ with its passages, SciQ and RACE, in the Hub's columns."""
    passages = [LONG[: 75 * n] for n in range(1, 9)]
    boolq = [
        {"passage": passage, "question": f"did they meet on day {i}", "idx": i, "label": i % 2}
        for i, passage in enumerate(passages)
    ]
    sciq = [
        {
            "support": passage,
            "question": f"How many times ({i})?",
            "correct_answer": "twice",
            **{f"distractor{k}": f"{k} times" for k in (1, 2, 3)},
        }
        for i, passage in enumerate(passages)
    ]
    problems = [
        {"question": "They met on _ .", "answer": "A", "options": ["Tuesday", "Monday", "x", "y"]},
        {"question": "Who met?", "answer": "C", "options": ["men", "dogs", "a committee", "y"]},
    ]
    race = [{"article": passage, "problems": str(problems)} for passage in passages]
    for name, config, rows in (
        ("aps/super_glue", "boolq", boolq),
        ("allenai/sciq", None, sciq),
        ("EleutherAI/race", "high", race),
    ):
        splits = {"train": rows, "validation": rows, "test": rows}
        write_set(tmp_path, name, config, splits)
    names = ("boolq", "sciq", "race")
    found = [evaluate(model, names, tmp_path, None, monkeypatch) for model in (ours, theirs)]
    assert {task: requests for task, (requests, _) in compare(*found).items()} == {
        "boolq": 16,
        "sciq": 32,
        "race": 32,
    }


@pytest.mark.heavy
@pytest.mark.skipif(
    "OPENELM_EVALUATION_DATA" not in os.environ, reason="needs the tasks' files, of 6 MB"
)
def test_two_hundred_real_items_of_eight_tasks(ours, theirs, tmp_path, monkeypatch):
    write_tasks(Path(os.environ["OPENELM_EVALUATION_DATA"]), tmp_path, limit=228)
    # MMLU's limit counts for each of 57 subjects: 228 items in all.
    found = [evaluate(model, NAMES, tmp_path, 228, monkeypatch) for model in (ours, theirs)]
    differences = compare(*found)
    for task, (requests, difference) in differences.items():
        print(f"{task}: {requests} requests, largest difference {difference:.1e}")
