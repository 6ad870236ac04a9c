"""How likely a model finds given continuations of given contexts.

What requests begin with in common is read once, be it the question before four answers, the
examples before a thousand questions, or the first half of two sentences: a row holds a tree of
tokens, each of which sees those on its way from the root, at the position that is its depth.
Requests are sorted, so that neighbours share most, and cut into rows where reading costs least.

Legend: B rows of a batch, T tokens of a row, R groups of rows that lie on one device, P predictions
of a row or group, C predictions at a time, L tokens of a group, D model, V vocab, N query heads,
K kv heads, G query heads of a kv head, S keys, H head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from openelm_jax.config import ModelConfig
from openelm_jax.generation.forward import apply
from openelm_jax.generation.placement import divide_rows, mesh_of, whole_rows
from openelm_jax.model.decoder import Decoder, Params

BATCH_TOKENS = {"cpu": 4096}
"""Tokens of a batch by platform, if no number is given."""
OTHER_BATCH_TOKENS = 32_768
ATTENTION_FREE = 4096
"""Tokens of a row whose attention costs as much as all else: what a longer row must save."""
SHORTEST = 256
"""Tokens of the shortest row."""
LONGEST_SHARED = 1024
"""No row is made longer than this by sharing."""
PREDICTIONS = {"cpu": 256}
"""Rows of logits that are made at a time, by platform: fewer stay in a CPU's caches."""
OTHER_PREDICTIONS = 1024


class Request(NamedTuple):
    """Tokens that are given, at least one of them, and tokens that are scored after them."""

    context: Sequence[int]
    continuation: Sequence[int]


class Scored(NamedTuple):
    """Nats of the continuation, and whether each of its tokens was the likeliest."""

    log_probability: float
    is_greedy: bool


Report = Callable[[int, Scored], None]
"""Told the number of each request with its result, as they come."""


def score(
    config: ModelConfig,
    params: Params,
    dtype: jax.typing.DTypeLike,
    requests: Sequence[Request],
    *,
    vocab_size: int,
    batch_tokens: int | None = None,
    report: Report | None = None,
) -> list[Scored]:
    """Return the score of each request, in their order.

    Ids from `vocab_size` on have no probability. A batch has about `batch_tokens` tokens, which
    changes the results by no more than the compute type rounds. All that a request reads must fit
    the context length: whoever asks cuts. Several processes compute a share each and return all;
    they must be given the same.
    """
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS.get(jax.default_backend(), OTHER_BATCH_TOKENS)
    results: list[Scored | None] = [None] * len(requests)

    def finish(number: int, result: Scored) -> None:
        results[number] = result
        if report is not None:
            report(number, result)

    for number, request in enumerate(requests):
        assert len(request.context), "a context has <s> at least"
        if not len(request.continuation):
            finish(number, Scored(0.0, True))
    mesh = mesh_of(params)
    batches = _batches(_rows(requests), batch_tokens, whole_rows(1, mesh))

    def compute(batch: _Batch) -> tuple[jax.Array, jax.Array]:
        arrays = divide_rows((batch.tokens_BT, batch.depth_BT, batch.end_BT), mesh)
        pairs = divide_rows((batch.slot_RP, batch.target_RP), mesh)
        steps = np.int32(-(-batch.predictions // _at_a_time(len(batch.slot_RP))))
        return _predict(config, dtype, params, *arrays, *pairs, steps, np.int32(vocab_size))

    for batch, log_probability_RP, greedy_RP in _computed(batches, compute):
        for group, spans in enumerate(batch.spans):
            for number, start, stop in spans:
                finish(
                    number,
                    Scored(
                        float(log_probability_RP[group, start:stop].sum(dtype=np.float64)),
                        bool(greedy_RP[group, start:stop].all()),
                    ),
                )
    assert None not in results
    return results  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class _Row:
    """A tree of tokens in the order of a walk through it, branch after branch."""

    tokens_T: np.ndarray
    depth_T: np.ndarray
    end_T: np.ndarray
    """The slot behind the last one that sees this token."""
    slot_P: np.ndarray
    """Where the predictions are made."""
    target_P: np.ndarray
    spans: list[tuple[int, int, int]]
    """Number of a request, and from where to where its predictions are."""


@dataclass(frozen=True, eq=False)
class _Batch:
    tokens_BT: np.ndarray
    depth_BT: np.ndarray
    end_BT: np.ndarray
    slot_RP: np.ndarray
    """Where the predictions of a group are made, in its rows end to end."""
    target_RP: np.ndarray
    predictions: int
    """The most that a group has."""
    spans: list[list[tuple[int, int, int]]]
    """Of each group: number of a request, and from where to where its predictions are."""


def row_length(tokens: int) -> int:
    """Return the padded length of a row: 256, then at most a quarter longer.

    Several short requests stand in one row: there need be no shorter ones, and fewer lengths fill
    their batches better.
    """
    if tokens <= SHORTEST:
        return SHORTEST
    step = max(128, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


def _rows(requests: Sequence[Request]) -> list[_Row]:
    """Return rows that hold all requests with a continuation, equal ones once."""
    alike: dict[tuple[bytes, int], list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        if len(continuation):
            tokens = np.concatenate([context, continuation]).astype(">u4")
            alike.setdefault((tokens.tobytes(), len(context)), []).append(number)
    # The last token is read by nobody; without it, those that differ in it alone are neighbours.
    order = sorted(alike, key=lambda key: (key[0][:-4], key))
    texts = [np.frombuffer(key[0], ">u4").astype(np.int32) for key in order]
    lengths = np.array([len(text) - 1 for text in texts], np.int64)
    shared = np.zeros(len(order), np.int64)
    for i in range(1, len(order)):
        length = min(lengths[i - 1], lengths[i])
        differ = np.flatnonzero(texts[i - 1][:length] != texts[i][:length])
        shared[i] = differ[0] if len(differ) else length
    rows = []
    for start, stop in _cuts(lengths, shared):
        rows.append(
            _tree(
                texts[start:stop],
                shared[start:stop],
                [key[1] for key in order[start:stop]],
                [alike[key] for key in order[start:stop]],
            )
        )
    return rows


def _cuts(lengths: np.ndarray, shared: np.ndarray) -> list[tuple[int, int]]:
    """Return where sorted requests are cut into rows, so that these cost least in all.

    Tokens of request i are `lengths[i]`, of which it has the first `shared[i]` in common with the
    one before. Costs are tokens with their padding, and more for longer rows, whose attention does
    more.
    """
    if not len(lengths):
        return []
    most = max(LONGEST_SHARED, int(lengths.max()))
    padded = np.array([row_length(max(tokens, 1)) for tokens in range(most + 1)], float)
    alone = padded * (1 + padded / ATTENTION_FREE)
    together = np.append(alone, np.inf)
    together[LONGEST_SHARED + 1 :] = np.inf
    before = np.concatenate([[0], np.cumsum(lengths - shared)])
    # tokens of a row from i to j: before[j] + again[i]
    again = shared - before[:-1]
    least = np.zeros(len(lengths) + 1)
    begins = np.zeros(len(lengths) + 1, np.int64)
    for stop in range(1, len(lengths) + 1):
        first = int(np.searchsorted(before[:stop], before[stop] - LONGEST_SHARED))
        first = min(first, stop - 1)
        tokens = before[stop] + again[first:stop]
        total = least[first:stop] + together[np.minimum(tokens, most + 1)]
        total[-1] = least[stop - 1] + alone[lengths[stop - 1]]
        chosen = int(total.argmin())
        least[stop], begins[stop] = total[chosen], first + chosen
    cuts = []
    stop = len(lengths)
    while stop:
        cuts.append((int(begins[stop]), stop))
        stop = int(begins[stop])
    return cuts[::-1]


def _tree(
    texts: Sequence[np.ndarray],
    shared: np.ndarray,
    context_lengths: Sequence[int],
    numbers: Sequence[list[int]],
) -> _Row:
    """Return the row of sorted requests, of which each shares tokens with the one before."""
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    ends = np.zeros(sum(len(text) for text in texts), np.int32)
    slots: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    spans: list[tuple[int, int, int]] = []
    path, used, predictions = np.zeros(0, np.int32), 0, 0
    for i, text in enumerate(texts):
        known = int(shared[i]) if i else 0
        new = text[known:-1]
        ends[path[known:]] = used
        path = np.concatenate([path[:known], np.arange(used, used + len(new), dtype=np.int32)])
        tokens.append(new)
        depths.append(np.arange(known, len(text) - 1, dtype=np.int32))
        used += len(new)
        slots.append(path[context_lengths[i] - 1 :])
        targets.append(text[context_lengths[i] :])
        stop = predictions + len(text) - context_lengths[i]
        spans += [(number, predictions, stop) for number in numbers[i]]
        predictions = stop
    ends[path] = used
    return _Row(
        np.concatenate(tokens),
        np.concatenate(depths),
        ends[:used],
        np.concatenate(slots),
        np.concatenate(targets),
        spans,
    )


def _batches(rows: Sequence[_Row], batch_tokens: int, replica: int) -> list[_Batch]:
    """Return batches of rows of equal padded length, longest first, with a multiple of `replica`.

    Rows join the next longer ones where that makes fewer tokens.
    """
    by_length: dict[int, list[_Row]] = {}
    for row in rows:
        by_length.setdefault(row_length(len(row.tokens_T)), []).append(row)

    def sizes(count: int, length: int) -> list[int]:
        """Return how many rows each batch has: as many as go, and a last one in few sizes."""
        most = max(1, batch_tokens // length // replica) * replica
        step = max(1, most // replica // 4) * replica
        rest = -(-(count % most) // step) * step
        return [most] * (count // most) + ([rest] if rest else [])

    def tokens(count: int, length: int) -> int:
        return sum(sizes(count, length)) * length

    for length, longer in itertools.pairwise(sorted(by_length)):
        few, many = len(by_length[length]), len(by_length[longer])
        apart = tokens(few, length) + tokens(many, longer)
        if tokens(few + many, longer) <= apart:
            by_length[longer] += by_length.pop(length)
    batches = []
    for length in sorted(by_length, reverse=True):
        members = sorted(by_length[length], key=lambda row: -len(row.target_P))
        start = 0
        for size in sizes(len(members), length):
            batches.append(_batch(members[start : start + size], length, size, replica))
            start += size
    return batches


def _batch(rows: Sequence[_Row], length: int, size: int, groups: int) -> _Batch:
    """Return rows as a batch of `size`; they take turns to be of a group, longest first."""
    tokens_BT = np.zeros((size, length), np.int32)
    depth_BT = np.zeros((size, length), np.int32)
    end_BT = np.tile(np.arange(1, length + 1, dtype=np.int32), (size, 1))
    slots: list[list[np.ndarray]] = [[] for _ in range(groups)]
    targets: list[list[np.ndarray]] = [[] for _ in range(groups)]
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(groups)]
    counts = [0] * groups
    for i, row in enumerate(rows):
        place, group = divmod(i, groups)
        index = group * (size // groups) + place
        tokens_BT[index, : len(row.tokens_T)] = row.tokens_T
        depth_BT[index, : len(row.tokens_T)] = row.depth_T
        end_BT[index, : len(row.tokens_T)] = row.end_T
        slots[group].append(row.slot_P + place * length)
        targets[group].append(row.target_P)
        spans[group] += [
            (number, start + counts[group], stop + counts[group])
            for number, start, stop in row.spans
        ]
        counts[group] += len(row.target_P)
    room = _at_a_time(groups)
    while room < max(counts):
        room *= 2
    slot_RP = np.zeros((groups, room), np.int32)
    target_RP = np.zeros((groups, room), np.int32)
    for group, count in enumerate(counts):
        if count:
            slot_RP[group, :count] = np.concatenate(slots[group])
            target_RP[group, :count] = np.concatenate(targets[group])
    return _Batch(tokens_BT, depth_BT, end_BT, slot_RP, target_RP, max(counts), spans)


def _at_a_time(groups: int) -> int:
    """Return of how many predictions of each group the logits are made together."""
    most = PREDICTIONS.get(jax.default_backend(), OTHER_PREDICTIONS)
    return max(8, most // groups)


def _computed(
    batches: Sequence[_Batch], compute: Callable[[_Batch], tuple[jax.Array, jax.Array]]
) -> Iterator[tuple[_Batch, np.ndarray, np.ndarray]]:
    """Yield all batches with what was computed, each process computing every so many.

    The next batch is sent before the last one is waited for.
    """
    processes, own = jax.process_count(), jax.process_index()
    before: tuple[Sequence[_Batch], tuple[jax.Array, jax.Array]] | None = None
    for start in [*range(0, len(batches), processes), None]:
        sent = None
        if start is not None:
            turn = batches[start : start + processes]
            # Where there are fewer batches left than processes, some compute one again.
            sent = turn, compute(turn[own % len(turn)])
        if before is not None:
            turn, found = before
            if processes == 1:
                yield turn[0], np.asarray(found[0]), np.asarray(found[1])
            else:
                yield from _gathered(turn, found)
        before = sent


def _gathered(
    turn: Sequence[_Batch], found: tuple[jax.Array, jax.Array]
) -> Iterator[tuple[_Batch, np.ndarray, np.ndarray]]:
    """Yield the batches of all processes, whose arrays may differ in shape."""
    shapes = [batch.slot_RP.shape for batch in turn]
    rows, columns = (max(sizes) for sizes in zip(*shapes, strict=True))
    own = np.stack([np.asarray(found[0], np.float32), np.asarray(found[1], np.float32)])
    room = np.zeros((2, rows, columns), np.float32)
    room[:, : own.shape[1], : own.shape[2]] = own
    everyone = multihost_utils.process_allgather(room)
    for i, batch in enumerate(turn):
        log_probability_RP, greedy_RP = everyone[i][:, : shapes[i][0], : shapes[i][1]]
        yield batch, log_probability_RP, greedy_RP > 0


@partial(jax.jit, static_argnums=(0, 1))
def _predict(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    params: Params,
    tokens_BT: jax.Array,
    depth_BT: jax.Array,
    end_BT: jax.Array,
    slot_RP: jax.Array,
    target_RP: jax.Array,
    steps: jax.Array,
    vocab_size: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities [R, P] and whether each is the highest, of the first `steps` C."""
    decoder = Decoder(config, dtype=dtype, attend=_attend_to_path)
    hidden_BTD, _ = apply(decoder, params, "hidden", tokens_BT, depth_BT, None, end_BT)
    groups = len(slot_RP)
    hidden_RLD = hidden_BTD.reshape(groups, -1, hidden_BTD.shape[-1])
    step = _at_a_time(groups)

    def some(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot_RC = jax.lax.dynamic_slice_in_dim(slot_RP, i * step, step, axis=1)
        target_RC = jax.lax.dynamic_slice_in_dim(target_RP, i * step, step, axis=1)
        hidden_RCD = jnp.take_along_axis(hidden_RLD, slot_RC[..., None], axis=1)
        logits_RCV = apply(decoder, params, "logits", hidden_RCD)
        id_V = jnp.arange(logits_RCV.shape[-1])
        logits_RCV = jnp.where(id_V < vocab_size, logits_RCV, -jnp.inf)
        chosen_RC = jnp.take_along_axis(logits_RCV, target_RC[..., None], axis=-1)[..., 0]
        log_probability_RC = chosen_RC - jax.nn.logsumexp(logits_RCV, axis=-1)
        # The first of the highest, as argmax has it, which XLA's CPU compiler makes a scalar loop.
        is_highest_RCV = logits_RCV == logits_RCV.max(axis=-1, keepdims=True)
        greedy_RC = jnp.where(is_highest_RCV, id_V, len(id_V)).min(axis=-1) == target_RC
        log_probability_RP = jax.lax.dynamic_update_slice_in_dim(
            found[0], log_probability_RC, i * step, axis=1
        )
        greedy_RP = jax.lax.dynamic_update_slice_in_dim(found[1], greedy_RC, i * step, axis=1)
        return log_probability_RP, greedy_RP

    nothing = (jnp.zeros(slot_RP.shape, jnp.float32), jnp.zeros(slot_RP.shape, bool))
    return jax.lax.fori_loop(0, steps, some, nothing)


def _attend_to_path(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    end_BS: jax.Array | None = None,
) -> jax.Array:
    """Return attention [B, T, N, H] in which slot t sees slot s where s <= t < `end_BS`[s]."""
    assert end_BS is not None
    batch, length, num_heads, head_dim = query_BTNH.shape
    num_kv_heads = key_BSKH.shape[2]
    slot_T = jnp.arange(length)
    visible_BTS = (slot_T <= slot_T[:, None]) & (slot_T[:, None] < end_BS[:, None, :])
    query_BKGTH = query_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim).transpose(
        0, 2, 3, 1, 4
    )
    key_BKSH, value_BKSH = key_BSKH.transpose(0, 2, 1, 3), value_BSKH.transpose(0, 2, 1, 3)
    scores_BKGTS = _product("BKGTH,BKSH->BKGTS", query_BKGTH, key_BKSH) * head_dim**-0.5
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    weights_BKGTS = jnp.exp(scores_BKGTS - scores_BKGTS.max(axis=-1, keepdims=True))
    sum_BKGT1 = weights_BKGTS.sum(axis=-1, keepdims=True)
    mixed_BKGTH = _product("BKGTS,BKSH->BKGTH", weights_BKGTS.astype(value_BKSH.dtype), value_BKSH)
    mixed_BKGTH = (mixed_BKGTH / sum_BKGT1).astype(query_BTNH.dtype)
    return mixed_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)
