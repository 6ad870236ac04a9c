"""Statistical rejection sampling (arXiv 2309.06657): candidates, which are accepted, ranked pairs.

Everything drawn for a prompt is a function of the seed and the prompt's number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from openelm_jax.errors import UserError
from openelm_jax.generation.language_model import Completion, LanguageModel
from openelm_jax.generation.sampling import Sampling

REASONS = (
    "prompts with fewer usable answers than --keep",
    "prompts without two answers to rank",
    "answers without a finite score",
    "answers that are empty",
    "answers that repeat another",
    "pairs of equal scores",
)
"""What `ranked_pairs` counts."""


class Ranked(NamedTuple):
    """Two answers and their scores, the first above the second."""

    chosen: str
    rejected: str
    score_chosen: float
    score_rejected: float


def sample_candidates(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]],
    num_candidates: int,
    max_tokens: int,
    sampling: Sampling,
    batch_size: int = 64,
) -> Iterator[list[Completion]]:
    """Yield `num_candidates` continuations of each prompt, a text or ids with <s>.

    Candidate c of prompt p depends on the seed and p * num_candidates + c alone: `batch_size`, the
    texts that are written at a time, changes none.
    """
    rows = [prompt for prompt in prompts for _ in range(num_candidates)]
    waiting: list[Completion] = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        waiting += model.complete(part, max_tokens, sampling, row=start)
        while len(waiting) >= num_candidates:
            yield waiting[:num_candidates]
            waiting = waiting[num_candidates:]


def ranked_pairs(
    responses: Sequence[str],
    scores: Sequence[float],
    keep: int,
    beta: float,
    key: tuple[int, ...],
) -> tuple[list[Ranked], Counter[str]]:
    """Return pairs of `keep` accepted responses to a prompt, and what is to be told, by
    `REASONS`.

    The paper's first round: accepted answers are put into pairs at random, and each pair in the
    order of its scores. `key` is the seed and the prompt's number. With fewer distinct responses
    than `keep` all of them are taken, with an odd number the last one accepted has no partner.
    """
    told: Counter[str] = Counter()
    scored: dict[str, float] = {}
    for response, score in zip(responses, scores, strict=True):
        if not math.isfinite(score):
            told["answers without a finite score"] += 1
        elif not response.strip():
            told["answers that are empty"] += 1
        elif response in scored:
            told["answers that repeat another"] += 1
        else:
            scored[response] = score
    texts = list(scored)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    accepted = accept([scored[text] for text in texts], keep, beta, rng)
    if len(texts) < keep:
        told["prompts with fewer usable answers than --keep"] += 1
    if len(accepted) < 2:
        told["prompts without two answers to rank"] += 1
    accepted = accepted[: len(accepted) // 2 * 2]
    order = rng.permutation(len(accepted)).reshape(-1, 2)
    pairs = []
    for first, second in order:
        one, other = texts[accepted[first]], texts[accepted[second]]
        if scored[one] == scored[other]:
            told["pairs of equal scores"] += 1
            continue
        if scored[one] < scored[other]:
            one, other = other, one
        pairs.append(Ranked(one, other, scored[one], scored[other]))
    return pairs, told


def accept(scores: Sequence[float], keep: int, beta: float, rng: np.random.Generator) -> list[int]:
    """Return the numbers of `keep` candidates, in the order in which they were accepted.

    Passes over the candidates that remain, in random order; each is accepted with the probability
    exp((its score - the highest that remained before the pass) / beta), until there are `keep`:
    the paper's algorithm, which goes through them in the order they came in. beta 0 takes the
    highest scores. The best is accepted in every pass that reaches it, so that this ends; where
    there are no more than `keep` it accepts all. Scores must be finite.
    """
    remaining, accepted = list(range(len(scores))), list[int]()
    while remaining and len(accepted) < keep:
        highest = max(scores[i] for i in remaining)
        taken = set()
        for place in rng.permutation(len(remaining)):
            if len(accepted) == keep:
                break
            i = remaining[place]
            if rng.random() < acceptance(scores[i], highest, beta):
                accepted.append(i)
                taken.add(i)
        remaining = [i for i in remaining if i not in taken]
    return accepted


def acceptance(score: float, highest: float, beta: float) -> float:
    """Return the probability with which a candidate is accepted, where `highest` is the best."""
    if score == highest:
        return 1.0
    return math.exp((score - highest) / beta) if beta else 0.0


def check_settings(num_candidates: int, keep: int, beta: float) -> None:
    """Raise UserError for numbers with which there is nothing to rank."""
    if num_candidates < 2:
        raise UserError(f"--num-candidates is {num_candidates}: it must be at least 2.")
    if keep < 2:
        raise UserError(f"--keep is {keep}: a pair needs 2 at least.")
    if not 0 <= beta < math.inf:
        raise UserError(f"--beta is {beta}: it must be 0 or above.")
