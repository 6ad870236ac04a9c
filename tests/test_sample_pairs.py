"""Candidates are accepted as often as the paper says, always in the end, and ranked into pairs."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import load
from openelm_jax import sample_pairs as verb
from openelm_jax.data.chat import Message, encode_prompt
from openelm_jax.data.objects import read_objects
from openelm_jax.data.preferences import read_preference
from openelm_jax.errors import UserError
from openelm_jax.generation.rejection_sampling import accept, ranked_pairs, sample_candidates
from openelm_jax.generation.sampling import Sampling
from openelm_jax.tokenizer import train_tokenizer


def kept(scores: list[float], keep: int, beta: float) -> dict[frozenset[int], float]:
    """Return with which probability which candidates are kept, by going through every course."""
    outcomes: dict[frozenset[int], float] = {}

    def one_pass(remaining: tuple[int, ...], accepted: frozenset[int], weight: float) -> None:
        if len(accepted) == min(keep, len(scores)):
            outcomes[accepted] = outcomes.get(accepted, 0) + weight
            return
        best = max(scores[i] for i in remaining)
        orders = list(itertools.permutations(remaining))
        for order in orders:
            visit(order, 0, best, accepted, weight / len(orders))

    def visit(order, place: int, best: float, accepted: frozenset[int], weight: float) -> None:
        if weight == 0:
            return
        if place == len(order) or len(accepted) == keep:
            one_pass(tuple(sorted(set(order) - accepted)), accepted, weight)
            return
        chance = math.exp((scores[order[place]] - best) / beta)
        visit(order, place + 1, best, accepted | {order[place]}, weight * chance)
        visit(order, place + 1, best, accepted, weight * (1 - chance))

    one_pass(tuple(range(len(scores))), frozenset(), 1.0)
    return outcomes


@pytest.mark.parametrize(
    ("scores", "keep"), [([0.0, 0.2, 0.5], 1), ([0.0, 0.2, 0.5], 2), ([0.3, 0.0, 0.3, 0.1], 2)]
)
def test_candidates_are_kept_with_the_probabilities_of_the_paper(
    scores: list[float], keep: int
) -> None:
    expected = kept(scores, keep, beta=0.5)
    assert sum(expected.values()) == pytest.approx(1)
    draws = 20_000
    rng = np.random.default_rng(0)
    counts = Counter(frozenset(accept(scores, keep, 0.5, rng)) for _ in range(draws))
    assert counts.keys() == expected.keys()
    chi_square = sum((counts[k] - draws * p) ** 2 / (draws * p) for k, p in expected.items())
    assert chi_square < 20  # of at most 5 degrees of freedom: one in a thousand is above


def test_one_of_two_is_kept_by_the_closed_form() -> None:
    """The worse is accepted only where it comes first: with half of exp(-difference / beta)."""
    rng = np.random.default_rng(1)
    worse = sum(accept([1.0, 0.0], 1, 0.5, rng) == [1] for _ in range(20_000))
    assert worse / 20_000 == pytest.approx(math.exp(-2) / 2, abs=0.005)
    assert kept([1.0, 0.0], 1, 0.5)[frozenset({1})] == pytest.approx(math.exp(-2) / 2)


def test_equal_scores_are_kept_alike_and_a_far_better_one_always() -> None:
    rng = np.random.default_rng(2)
    counts = Counter(i for _ in range(4000) for i in accept([1.0] * 4, 2, 0.5, rng))
    assert all(abs(counts[i] - 2000) < 150 for i in range(4))
    assert all(2 in accept([0.0, 0.0, 5.0, 0.0], 2, 0.5, rng) for _ in range(1000))


@pytest.mark.parametrize("beta", [0.0, 1e-300])
def test_beta_zero_keeps_the_best(beta: float) -> None:
    scores = [3.0, -1e308, 5.0, 1e308, 4.0]
    accepted = accept(scores, 3, beta, np.random.default_rng(0))
    assert accepted == [3, 2, 4]


RESPONSES = [f"answer {i}" for i in range(10)]
SCORES = [float(i % 7) / 3 for i in range(10)]


def test_pairs_are_in_the_order_of_their_scores_and_of_different_answers() -> None:
    pairs, told = ranked_pairs(RESPONSES, list(map(float, range(10))), 6, 0.5, (0, 0))
    assert len(pairs) == 3
    assert not told
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    assert len(set(answers)) == 6
    for pair in pairs:
        assert pair.score_chosen > pair.score_rejected
        assert pair.chosen == f"answer {pair.score_chosen:.0f}"
        assert pair.rejected == f"answer {pair.score_rejected:.0f}"


def test_the_same_key_gives_the_same_pairs_and_another_others() -> None:
    drawn = [
        ranked_pairs(RESPONSES, SCORES, 6, 0.5, key) for key in [(0, 0), (0, 0), (1, 0), (0, 1)]
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0] != drawn[3]


NAN, INFINITE = math.nan, math.inf
FEWER, NO_PAIR, NO_SCORE, REPEATED = (
    "prompts with fewer usable answers than --keep",
    "prompts without two answers to rank",
    "answers without a finite score",
    "answers that repeat another",
)


@pytest.mark.parametrize(
    ("responses", "scores", "keep", "num_pairs", "expected"),
    [
        (["a", "b"], [1, 2], 8, 1, {FEWER: 1}),
        (["a", "b", "c"], [1, 2, 3], 3, 1, {}),
        (["a", "a", "a"], [1, 1, 1], 2, 0, {REPEATED: 2, FEWER: 1, NO_PAIR: 1}),
        (["a", "b", "a"], [1, 2, 9], 2, 1, {REPEATED: 1}),
        (["a", "b"], [1, 1], 2, 0, {"pairs of equal scores": 1}),
        (["a", "b"], [-INFINITE] * 2, 2, 0, {NO_SCORE: 2, FEWER: 1, NO_PAIR: 1}),
        (["a", "b"], [NAN] * 2, 2, 0, {NO_SCORE: 2, FEWER: 1, NO_PAIR: 1}),
        (["a", "b", "c"], [INFINITE, 0, 1], 2, 1, {NO_SCORE: 1}),
        (["a", " ", "c"], [2, 0, 1], 2, 1, {"answers that are empty": 1}),
        ([], [], 2, 0, {FEWER: 1, NO_PAIR: 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_degenerate_answers_end_and_are_told(
    responses: list[str],
    scores: list[float],
    keep: int,
    num_pairs: int,
    expected: dict[str, int],
    beta: float,
) -> None:
    start = time.monotonic()
    pairs, told = ranked_pairs(responses, scores, keep, beta, (0, 0))
    assert time.monotonic() - start < 1
    assert len(pairs) == num_pairs
    assert told == expected


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    tokenizer = train_tokenizer(["the state of the union is strong " * 20], 280, folder / "t.model")
    config = tiny(vocab_size=280, num_layers=1)
    write_huggingface(folder / "hf", config, random_params(config), tokenizer=tokenizer)
    return folder / "hf"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_candidate_depends_on_its_number_and_not_on_its_batch(directory: Path) -> None:
    model = load(directory)
    warm = Sampling(temperature=0.7, top_k=40, seed=5)
    some = []
    for batch_size in (6, 3):
        sampled = sample_candidates(model, ["a", "bc"], 3, 6, warm, batch_size)
        some.append([completion.text for part in sampled for completion in part])
    assert some[0] == some[1]
    assert len(set(some[0])) == 6


def test_candidates_then_scores_then_pairs(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, candidates = tmp_path / "prompts.txt", tmp_path / "candidates.jsonl"
    prompts.write_text("the state\nof the union\n")
    sample = (
        f"--from {directory} --prompts {prompts} --chat --num-candidates 6 --max-tokens 6 "
        f"--batch-size 6 --out {candidates}"
    )
    verb.main(sample.split())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 prompts with 6 candidates each" in captured.err
    assert "end with --max-tokens 6" in captured.err
    rows = lines(candidates)
    assert [row["prompt"][0]["content"] for row in rows] == ["the state", "of the union"]
    model = load(directory)
    asked = [Message("user", "of the union")]
    prompt = encode_prompt(model.require_tokenizer(), asked).tolist()
    alone = model.complete([prompt] * 6, 6, Sampling(temperature=0.7, top_k=40), row=6)
    assert rows[1]["responses"] == [each.text for each in alone]

    scored = tmp_path / "scored.jsonl"
    scored.write_text(
        "".join(json.dumps(row | {"scores": [*range(5), None]}) + "\n" for row in rows)
    )
    out = [tmp_path / f"pairs{i}.jsonl" for i in range(3)]
    for path, seed in zip(out, (0, 0, 1), strict=True):
        verb.main(f"--scores {scored} --keep 4 --out {path} --seed {seed}".split())
    told = capsys.readouterr().err
    assert "4 pairs of 2 prompts" in told
    assert "note: 2 answers without a finite score" in told
    assert out[0].read_bytes() == out[1].read_bytes() != out[2].read_bytes()
    for record in read_objects(str(out[0])):
        preference = read_preference(record)
        assert preference.prompt in ((Message("user", "the state"),), (Message(*asked[0]),))
        assert preference.ratings is not None
        assert preference.ratings[0] > preference.ratings[1]
        assert preference.chosen in {text for row in rows for text in row["responses"]}
    assert not list(tmp_path.glob("*.partial"))


def test_a_function_scores_in_the_same_command(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by_length.py").write_text(
        "def score(prompt, responses):\n    return [len(prompt + text) for text in responses]\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    verb.main(
        f"--from {directory} --prompts prompts.jsonl --num-candidates 6 --max-tokens 5 --keep 6 "
        "--scores by_length:score --out deep/pairs.jsonl".split()
    )
    pairs = lines(tmp_path / "deep" / "pairs.jsonl")
    assert pairs
    for pair in pairs:
        assert pair["prompt"] == "the"
        assert len(pair["chosen"]) > len(pair["rejected"])
        assert pair["score_chosen"] == 3 + len(pair["chosen"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "responses": ["b"]}, "scores.jsonl:1: scores must be a list of numbers"),
        ({"prompt": "a", "responses": ["b"], "scores": [1, 2]}, "2 scores for 1 responses"),
        ({"prompt": "a", "responses": ["b"], "scores": ["good"]}, "must be a list of numbers"),
        ({"prompt": "a", "responses": "b", "scores": [1]}, "responses must be a list of texts"),
        ({"prompt": [], "responses": ["b"], "scores": [1]}, "prompt must be a list of messages"),
        (None, "holds no prompt"),
    ],
)
def test_what_are_no_scored_candidates_is_refused(
    line: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    scores = tmp_path / "scores.jsonl"
    scores.write_text(json.dumps(line) if line else "")
    with pytest.raises(UserError, match=message):
        verb.main(f"--scores {scores} --out {tmp_path / 'out.jsonl'}".split())
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep 1", "--keep is 1: a pair needs 2"),
        ("--num-candidates 1", "--num-candidates is 1"),
        ("--beta -1", "--beta is -1.0"),
        ("--beta nan", "--beta is nan"),
        ("--scores judge", "give a file of candidates"),
        ("--scores no_such_module:score", "No module named 'no_such_module'"),
        ("--scores json:score", "json has no score"),
        ("--prompts no/such.txt", "--prompts no/such.txt"),
    ],
)
def test_settings_without_a_meaning_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    line = f"--from x --prompts {tmp_path / 'prompts.txt'} --out {tmp_path / 'out.jsonl'} {flags}"
    with pytest.raises(UserError, match=message):
        verb.main(line.split())


@pytest.mark.parametrize("line", ["--out x", "--out x --from w", "--out x --scores a:b --from w"])
def test_a_model_and_prompts_or_candidates_are_needed(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        verb.main(line.split())
    assert exit_.value.code == 2
    assert "give --from WHERE and --prompts FILE" in capsys.readouterr().err
