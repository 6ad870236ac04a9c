"""Texts become requests as lm-evaluation-harness wants it, each token scored once; texts end where
a task says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hub_folder import write_set
from huggingface_directories import write_huggingface
from small_models import random_params, tiny
from small_runs import environment

from openelm_jax.errors import UserError
from openelm_jax.evaluation import harness
from openelm_jax.generation.language_model import language_model, load
from openelm_jax.generation.scoring import Scored
from openelm_jax.tokenizer import load_tokenizer

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

TOKENIZER = load_tokenizer(
    Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
)
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
WINDOW = 8


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).tolist()


class Scores:
    """Costs each token its id, finds all continuations of two tokens greedy, and remembers."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.requests: list = []
        self.stop_after = stop_after

    def __call__(self, requests, report):
        self.requests = requests
        results = [Scored(-float(sum(r.continuation)), len(r.continuation) == 2) for r in requests]
        for number, result in enumerate(results):
            if number == self.stop_after:
                raise KeyboardInterrupt
            report(number, result)
        return results


@pytest.fixture
def scores():
    return Scores()


@pytest.fixture
def model(scores):
    return harness.harness_class()(scores, TOKENIZER, WINDOW)


def instances(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


def loglikelihood(model, *pairs):
    return model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(model, scores):
    first, second = loglikelihood(model, ("Answer: ", "B"), ("Answer:", " B"))

    assert first == second
    assert scores.requests[0] == scores.requests[1] == ([BOS, *ids("Answer:")], ids("B"))


@pytest.mark.parametrize(
    ("add_bos", "context", "continuation", "expected"),
    [
        (True, "", "Hello", ([BOS], ids("Hello"))),
        (False, "", "Hello", ([BOS], ids("Hello"))),
        (True, "A", " B", ([BOS, *ids("A")], ids("B"))),
        (False, "A", " B", (ids("A"), ids("B"))),
        (True, "<s>A", " B", ([BOS, *ids("A")], ids("B"))),
        (False, "<s>A", " B", ([BOS, *ids("A")], ids("B"))),
        (True, "", "<s>Hello", ([BOS], ids("Hello"))),
        (False, " ", "B", ([BOS], ids(" B"))),
    ],
)
def test_a_text_has_the_first_token_once_if_it_shall(
    scores, add_bos, context, continuation, expected
):
    model = harness.harness_class()(scores, TOKENIZER, WINDOW, add_bos=add_bos)
    loglikelihood(model, (context, continuation))

    assert scores.requests == [expected]


def test_what_is_too_long_loses_the_beginning_of_its_context(model, scores):
    context, continuation = "one two three four five six seven eight nine ten", " eleven twelve"
    loglikelihood(model, (context, continuation))

    whole = [BOS, *ids(context + continuation)]
    (request,) = scores.requests
    assert request.continuation == ids("eleven twelve")
    # The model reads a window's tokens and predicts the one behind them.
    assert [*request.context, *request.continuation] == whole[-(WINDOW + 1) :]


def test_a_continuation_longer_than_the_window_is_scored_whole(model, scores):
    continuation = "".join(f" {word}" for word in "abcdefghijklmnopqrst")
    ((nats, is_greedy),) = loglikelihood(model, ("A", continuation))

    expected = ids(continuation[1:])
    assert nats == -sum(expected)
    assert not is_greedy
    assert [t for request in scores.requests for t in request.continuation] == expected
    assert all(
        len(request.context) + len(request.continuation) <= WINDOW + 1
        for request in scores.requests
    )


@pytest.mark.parametrize("tokens", [1, WINDOW, 2 * WINDOW, 2 * WINDOW + 1, int(3.5 * WINDOW)])
def test_rolling_windows_score_each_token_once_as_those_of_the_harness(model, scores, tokens):
    text = " ".join("abcdefghijklmnopqrstuvwxyzABC"[:tokens])
    assert len(ids(text)) == tokens
    (nats,) = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", (text,)), disable_tqdm=True
    )

    assert nats == -sum(ids(text))
    windows = map(make_disjoint_window, get_rolling_token_windows(ids(text), BOS, WINDOW, 1))
    assert [tuple(request) for request in scores.requests] == list(windows)
    counted = Counter(t for request in scores.requests for t in request.continuation)
    assert counted == Counter(ids(text))


def test_no_text_costs_nothing(model):
    assert model.loglikelihood_rolling(
        instances("loglikelihood_rolling", ("",)), disable_tqdm=True
    ) == [0.0]


def test_what_was_scored_before_an_interruption_is_not_scored_again(tmp_path):
    from lm_eval.api.model import CachingLM

    pairs = [("A", f" {word}") for word in ("one", "two", "three", "four")]
    file = str(tmp_path / "scores.db")
    interrupted = harness.harness_class()(Scores(stop_after=2), TOKENIZER, WINDOW)
    with pytest.raises(KeyboardInterrupt):
        CachingLM(interrupted, file).loglikelihood(instances("loglikelihood", *pairs))

    scores = Scores()
    again = CachingLM(harness.harness_class()(scores, TOKENIZER, WINDOW), file)
    found = again.loglikelihood(instances("loglikelihood", *pairs))
    assert [request.continuation for request in scores.requests] == [ids("three"), ids("four")]
    assert found == [(-float(sum(ids(pair[1][1:]))), False) for pair in pairs]


class Completes:
    """Continues every prompt with the same text, two tokens at a time, and remembers."""

    def __init__(self, text: str) -> None:
        self.tokens = [*ids(text), *[EOS] * 64]
        self.calls: list = []
        self.blocks = 0

    def __call__(self, prompts, max_tokens, sampling):
        self.calls.append((prompts, max_tokens, sampling))
        for start in range(0, max_tokens, 2):
            self.blocks += 1
            yield np.tile(self.tokens[start : min(start + 2, max_tokens)], (len(prompts), 1))


def generate(completes, *arguments):
    model = harness.harness_class()(Scores(), TOKENIZER, 64, complete=completes)
    return model.generate_until(instances("generate_until", *arguments), disable_tqdm=True)


def test_generated_text_ends_before_the_first_of_its_stop_strings():
    completes = Completes("four. Question: what is next? Answer: five, and so on and on")
    found = generate(
        completes,
        ("2 + 2 =", {"until": ["Question:", "next"], "max_gen_toks": 40}),
        ("2 + 2 =", {"until": ["."], "max_gen_toks": 40}),
        ("2 + 2 =", {"until": "five", "max_gen_toks": 4}),
    )

    assert found == ["four. ", "four", TOKENIZER.decode(completes.tokens[:4])]
    assert [most for _, most, _ in completes.calls] == [40, 40, 4]
    # Nobody asks for what stands behind the stop string.
    assert completes.blocks < 10


def test_generation_stops_at_the_end_of_the_text():
    assert generate(Completes("four"), ("2 + 2 =", {"until": ["\n"], "max_gen_toks": 30})) == [
        "four"
    ]


def test_prompts_are_cut_from_the_left_to_leave_room_for_new_tokens():
    completes = Completes("four")
    text = " ".join("abcdefghijklmnopqrstuvwxyz" * 4)
    generate(completes, (text, {"until": ["\n"], "max_gen_toks": 40}))

    assert completes.calls[0][0] == [ids(text)[-24:]]
    with pytest.raises(UserError, match="asks for 64 new tokens, and the model's context has 64"):
        generate(completes, (text, {"until": ["\n"], "max_gen_toks": 64}))


def test_sampling_is_what_a_task_asks_for():
    completes = Completes("four")
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_gen_toks": 8}
    generate(completes, ("A", sampled), ("A", {"temperature": 0.7, "max_gen_toks": 8}))
    generate(completes, ("A", {"do_sample": False, "temperature": 0.7, "max_gen_toks": 8}))

    temperatures = [call[2].temperature for call in completes.calls]
    assert temperatures == [0.7, 0.7, 0.0]
    assert completes.calls[0][2].top_p == 0.9


def test_whoever_asks_between_may_end_a_generation():
    """After the second block of new tokens, long before the limit."""
    asked = []

    def between():
        asked.append(True)
        if len(asked) == 2:
            raise KeyboardInterrupt

    config = tiny(num_layers=1, vocab_size=TOKENIZER.vocab_size, context_length=512)
    weights = language_model(config, random_params(config), TOKENIZER, "float32")
    model = harness.harness_model(weights, between=between)
    with pytest.raises(KeyboardInterrupt):
        model.generate_until(
            instances("generate_until", ("A", {"until": [], "max_gen_toks": 400})),
            disable_tqdm=True,
        )
    assert len(asked) == 2


def test_a_model_that_only_scores_says_so(model):
    with pytest.raises(UserError, match="asks for generated text"):
        model.generate_until(instances("generate_until", ("A", {})))


def test_weights_without_a_tokenizer_are_refused():
    config = tiny()
    weights = language_model(config, random_params(config), None, "float32")
    with pytest.raises(UserError, match="give a SentencePiece file with --tokenizer"):
        harness.harness_model(weights)


def test_a_missing_harness_is_named_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.utils", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[eval\]'"):
        harness._lm_eval()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("from=W,colour=red", "no argument colour"), ("dtype=float32", "from=WHERE is missing")],
)
def test_arguments_that_do_not_exist_are_refused(arguments, said):
    with pytest.raises(UserError, match=f"--model_args: {said}; known are from, tokenizer"):
        harness.harness_class().create_from_arg_string(arguments)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights") / "tiny"
    config = tiny(num_layers=2, vocab_size=32_064)
    write_huggingface(directory, config, random_params(config), tokenizer=TOKENIZER)
    return directory


def test_a_loaded_model_scores_and_generates(weights):
    language = load(weights)
    model = harness.harness_model(language)
    ((nats, _),) = loglikelihood(model, ("The state of", " the Union"))

    tokens = [BOS, *ids("The state of the Union")]
    logits_TV = language.logits(np.array([tokens]))[0].astype(np.float64)
    log_probability_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    expected = log_probability_TV[[3, 4], tokens[4:]].sum()
    assert nats == pytest.approx(expected, abs=1e-4)

    (text,) = model.generate_until(
        instances("generate_until", ("The state of", {"until": [], "max_gen_toks": 5})),
        disable_tqdm=True,
    )
    new = language.complete(["The state of"], 5, harness._sampling({}))[0].tokens
    assert text == TOKENIZER.decode(new)


@pytest.mark.heavy
def test_the_command_line_of_the_harness_knows_the_model(weights, tmp_path):
    rows = [
        {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0},
        {"goal": "Boil an egg", "sol1": "Use sand.", "sol2": "Use water.", "label": 1},
    ]
    write_set(tmp_path, "baber/piqa", None, {"train": rows, "validation": rows, "test": rows})
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "openelm_jax.evaluation.harness", "--model", "openelm_jax"]
    finished = subprocess.run(
        [*command, "--model_args", f"from={weights}", "--tasks", "piqa", "--output_path", "out"],
        env=environment(tmp_path) | offline,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert finished.returncode == 0, finished.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["piqa"]["acc,none"] in (0.0, 0.5, 1.0)
    assert found["n-samples"]["piqa"]["effective"] == 2
