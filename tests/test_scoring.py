"""Continuations cost what the model's logits of each text alone say, whatever is read beside it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from small_models import random_params, tiny
from small_runs import environment

from openelm_jax.generation import scoring
from openelm_jax.generation.language_model import language_model
from openelm_jax.generation.scoring import Request, Scored, row_length, score

CONFIG = tiny(vocab_size=48, num_layers=2)
KNOWN = 40
"""Ids of the tokenizer; the others are padding."""


def some_requests(seed: int = 0) -> list[Request]:
    """Return requests of which some share contexts, one is empty, and some differ in a token."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(24):
        context = [1, *rng.integers(0, KNOWN, rng.integers(0, 25)).tolist()]
        for length in rng.integers(1, 12, rng.integers(1, 5)):
            requests.append(Request(context, rng.integers(0, KNOWN, length).tolist()))
        requests += [Request(context, [token]) for token in (3, 4, 5)]
    return [*requests, Request([1], []), Request([1], requests[0].context[1:] or [2])]


@pytest.fixture(scope="module")
def model():
    params = random_params(CONFIG)
    params["embedding"][KNOWN:] *= 30  # padding that would be likelier than any token
    return language_model(CONFIG, params, None, "float32")


def scored(model, requests, **options) -> list[Scored]:
    return score(CONFIG, model.params, "float32", requests, vocab_size=KNOWN, **options)


@pytest.fixture(scope="module")
def expected(model) -> list[Scored]:
    """Each request read alone, its softmax in float64."""
    found = []
    for context, continuation in some_requests():
        tokens = [*context, *continuation]
        row = np.pad(np.array([tokens], np.int32), ((0, 0), (0, 64 - len(tokens))))
        logits_TV = model.logits(row)[0, :, :KNOWN].astype(np.float64)
        log_probability_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        at = np.arange(len(context) - 1, len(tokens) - 1)
        found.append(
            Scored(
                log_probability_TV[at, list(continuation)].sum(),
                bool((logits_TV[at].argmax(-1) == np.array(continuation)).all()),
            )
        )
    return found


def assert_equal(found: list[Scored], expected: list[Scored]) -> None:
    np.testing.assert_allclose(
        [result.log_probability for result in found],
        [result.log_probability for result in expected],
        atol=1e-4,
    )
    assert [result.is_greedy for result in found] == [result.is_greedy for result in expected]


@pytest.mark.parametrize("batch_tokens", [64, 1024])
def test_scores_are_those_of_each_text_alone(model, expected, batch_tokens):
    assert_equal(scored(model, some_requests(), batch_tokens=batch_tokens), expected)
    assert len({result.is_greedy for result in expected}) == 2


def test_order_and_company_do_not_matter(model, expected):
    requests = some_requests()
    order = np.random.default_rng(1).permutation(len(requests))

    found = scored(model, [requests[i] for i in order], batch_tokens=1024)
    assert_equal(found, [expected[i] for i in order])
    # Alone, it is in a row of another length and with nobody to share with.
    assert_equal(scored(model, requests[:1], batch_tokens=64), expected[:1])


def test_equal_requests_have_the_very_same_score(model):
    requests = some_requests()
    found = scored(model, requests + requests, batch_tokens=64)
    assert found[: len(requests)] == found[len(requests) :]


def test_each_result_is_reported_once_when_it_is_there(model):
    reported = {}

    def report(number, result):
        assert number not in reported
        reported[number] = result

    found = scored(model, some_requests(), batch_tokens=64, report=report)
    assert [reported[i] for i in range(len(found))] == found


def test_what_requests_have_in_common_is_read_once():
    preamble = list(range(1, 31))
    answers = [Request([*preamble, 31, q], [a]) for q in range(32, 36) for a in (40, 41, 42, 43)]
    (row,) = scoring._rows(answers)

    assert row.tokens_T.tolist() == [*preamble, 31, 32, 33, 34, 35]
    assert row.depth_T.tolist() == [*range(31), 31, 31, 31, 31]
    assert row.end_T.tolist() == [*[35] * 31, 32, 33, 34, 35]
    assert row.slot_P.tolist() == [31] * 4 + [32] * 4 + [33] * 4 + [34] * 4
    assert row.target_P.tolist() == [40, 41, 42, 43] * 4


def test_rows_are_cut_where_reading_costs_least(monkeypatch):
    monkeypatch.setattr(scoring, "LONGEST_SHARED", 256)
    rng = np.random.default_rng(3)
    for _ in range(5):
        lengths = rng.integers(10, 120, 8)
        shared = np.minimum(rng.integers(0, 110, 8), np.minimum(lengths, np.roll(lengths, 1)))
        shared[0] = 0

        def cost(cuts, lengths=lengths, shared=shared):
            total = 0.0
            for start, stop in itertools.pairwise([0, *cuts, 8]):
                tokens = lengths[start:stop].sum() - shared[start + 1 : stop].sum()
                if tokens > 256:
                    return np.inf
                padded = row_length(int(tokens))
                total += padded * (1 + padded / scoring.ATTENTION_FREE)
            return total

        every = [cuts for n in range(8) for cuts in itertools.combinations(range(1, 8), n)]
        found = [stop for _, stop in scoring._cuts(lengths, shared)]
        assert found[-1] == 8
        assert cost(found[:-1]) == min(map(cost, every))


def test_a_request_longer_than_shared_rows_may_be_has_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(scoring, "LONGEST_SHARED", 64)
    assert scoring._cuts(np.array([20, 200, 30]), np.array([0, 10, 30])) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.heavy
def test_two_processes_score_half_each_and_know_all(tmp_path, expected):
    """Real processes, joined by jax.distributed, with two devices that divide the rows."""
    environ = environment(tmp_path) | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, str(Path(__file__).parent / "multihost" / "scores.py")]
    where = f"localhost:{free_port()}"
    running = [
        subprocess.Popen(
            [*program, where, str(process), str(tmp_path)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    for process in range(2):
        said = json.loads((tmp_path / f"{process}.json").read_text())
        assert_equal([Scored(*result) for result in said["scores"]], expected)
        assert said["computed"] <= said["batches"] / 2 + 1
