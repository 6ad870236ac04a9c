"""Losses of preference pairs, and how likely answers are, without the logits of all tokens.

Legend: P pairs, B rows = 2 P, L tokens of a row, T = L - 1, N = B times T, C tokens of a chunk,
D model, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from openelm_jax.data.preferences import PairRows
from openelm_jax.errors import UserError
from openelm_jax.model.decoder import Decoder, Params, head_of
from openelm_jax.model.memory import loss_chunk_size
from openelm_jax.training.loss import WHOLE, HeadSharding

LossName = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True)
class PreferenceObjective:
    """What is minimised, in terms of h: by how much more the policy prefers the chosen answer than
    the reference does, in nats."""

    loss: LossName = "sigmoid"
    """`sigmoid`: -(1 - e) log s(beta h) - e log s(-beta h), DPO (arXiv 2305.18290) with label
    smoothing e; `hinge`: max(0, 1 - beta h), the paper's rejection sampling (arXiv 2309.06657);
    `ipo`: (h - 1 / (2 beta))^2 of means over the answers' tokens (arXiv 2310.12036)."""
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise UserError(f"loss is {self.loss}: it must be {', '.join(get_args(LossName))}.")
        if not 0 < self.beta < float("inf"):
            raise UserError(f"beta is {self.beta}: it must be above 0.")
        if self.label_smoothing and self.loss != "sigmoid":
            raise UserError(
                f"label_smoothing is {self.label_smoothing}, but {self.loss} has none: leave it at "
                "0, or take the loss sigmoid."
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"label_smoothing is {self.label_smoothing}: it must be from 0 to below 0.5."
            )


def loss_name(loss_type: str | Sequence[str]) -> LossName:
    """Return the loss that TRL's `loss_type` names, which may be a list of one."""
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    if len(names) != 1 or names[0] not in get_args(LossName):
        raise UserError(
            f"loss_type is {', '.join(map(str, names))}: it must be one of "
            f"{', '.join(get_args(LossName))}."
        )
    return names[0]  # type: ignore[return-value]


def preference_loss(
    objective: PreferenceObjective,
    policy_B: jax.Array,
    reference_B: jax.Array,
    length_B: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean loss of the pairs, and its metrics by the names that TRL has for them.

    `policy_B` and `reference_B` are the log-probabilities of answers, float32 sums over their
    `length_B` tokens, in the order of `pair_rows`. Metrics are means over the pairs: rewards are
    beta times policy less reference, whatever the loss.
    """
    ratio_B = policy_B - reference_B
    beta = objective.beta
    if objective.loss == "ipo":
        chosen_P, rejected_P = _halves(ratio_B / jnp.maximum(length_B, 1))
        loss_P = jnp.square(chosen_P - rejected_P - 1 / (2 * beta))
    else:
        chosen_P, rejected_P = _halves(ratio_B)
        scaled_P = beta * (chosen_P - rejected_P)
        if objective.loss == "hinge":
            loss_P = jax.nn.relu(1 - scaled_P)
        else:
            flipped = objective.label_smoothing
            loss_P = -(1 - flipped) * jax.nn.log_sigmoid(scaled_P)
            loss_P -= flipped * jax.nn.log_sigmoid(-scaled_P)
    chosen_P, rejected_P = _halves(beta * ratio_B)
    chosen_log_prob_P, rejected_log_prob_P = _halves(policy_B)
    metrics = {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/accuracies": (chosen_P > rejected_P).astype(jnp.float32),
        "rewards/margins": chosen_P - rejected_P,
        "logps/chosen": chosen_log_prob_P,
        "logps/rejected": rejected_log_prob_P,
    }
    means = {name: jax.lax.stop_gradient(value_P).mean() for name, value_P in metrics.items()}
    return loss_P.mean(), means


def completion_log_probs(
    decoder: Decoder,
    params: Params,
    rows: PairRows,
    chunk: int | None = None,
    sharding: HeadSharding = WHOLE,
    adapters: Params | None = None,
) -> jax.Array:
    """Return the log-probability of each row's answer, float32 [B], summed over its tokens.

    Logits exist for `chunk` tokens at a time, also for the gradient. `adapters` are those that the
    decoder was made with, and drop nothing; without them, from a decoder that has none, the same
    parameters are the reference.
    """
    variables = {"params": params} | ({} if adapters is None else {"adapters": adapters})
    hidden_BTD, _ = decoder.apply(variables, rows.tokens_BL[:, :-1], method="hidden")
    head_VD = head_of(decoder.config, params)
    chunk = chunk or loss_chunk_size(decoder.config, rows.tokens_BL[:, 1:].size)
    return answer_log_probs(hidden_BTD, head_VD, rows, chunk, sharding)


def answer_log_probs(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    rows: PairRows,
    chunk: int,
    sharding: HeadSharding = WHOLE,
) -> jax.Array:
    """Return `completion_log_probs` of hidden states that are at hand."""
    targets_BT = jnp.asarray(rows.tokens_BL)[:, 1:]
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    log_prob_N = token_log_probs(hidden_ND, head_VD, targets_BT.reshape(-1), chunk, sharding)
    return jnp.where(is_answer(rows), log_prob_N.reshape(targets_BT.shape), 0.0).sum(axis=1)


def is_answer(rows: PairRows) -> jax.Array:
    """Return which targets are tokens of the answer, bool [B, T], from the lengths alone.

    The answer's first token is predicted from the prompt's last.
    """
    place_T = jnp.arange(1, rows.tokens_BL.shape[1])
    return (place_T >= rows.prompt_B[:, None]) & (place_T < rows.length_B[:, None])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_log_probs(
    hidden_ND: jax.Array,
    head_VD: jax.Array,
    targets_N: jax.Array,
    chunk: int,
    sharding: HeadSharding = WHOLE,
) -> jax.Array:
    """Return the log-probability of each target, float32 [N]; differentiable by hidden and head.

    The weight of a token in a loss of pairs is known only after all of them, so logits are made
    again for the gradient, chunk by chunk. `head_VD` may be a shard of it.
    """
    return _log_probs(hidden_ND, head_VD, targets_N, chunk, sharding)[0]


def _forward(hidden_ND, head_VD, targets_N, chunk, sharding):
    log_prob_N, log_partition_N = _log_probs(hidden_ND, head_VD, targets_N, chunk, sharding)
    return log_prob_N, (hidden_ND, head_VD, targets_N, log_partition_N)


def _backward(chunk, sharding, residuals, d_log_prob_N):
    hidden_ND, head_VD, targets_N, log_partition_N = residuals
    compute_VD = sharding.gather(head_VD, hidden_ND.dtype)

    def one_chunk(d_head_VD, inputs):
        hidden_CD, target_C, log_partition_C, d_C = inputs
        probability_CV = jnp.exp(_logits(hidden_CD, compute_VD) - log_partition_C[:, None])
        is_target_CV = target_C[:, None] == jnp.arange(compute_VD.shape[0])
        d_logits_CV = (d_C[:, None] * (is_target_CV - probability_CV)).astype(hidden_CD.dtype)
        d_hidden_CD = jnp.einsum("CV,VD->CD", d_logits_CV, compute_VD)
        d_head_VD += jnp.einsum(
            "CV,CD->VD", d_logits_CV, hidden_CD, preferred_element_type=jnp.float32
        )
        return d_head_VD, d_hidden_CD

    parts = _chunks(chunk, hidden_ND, targets_N, log_partition_N, d_log_prob_N)
    d_head_VD, d_hidden = jax.lax.scan(one_chunk, jnp.zeros(compute_VD.shape, jnp.float32), parts)
    d_hidden_ND = d_hidden.reshape(-1, hidden_ND.shape[1])[: len(hidden_ND)]
    return d_hidden_ND, sharding.scatter(d_head_VD).astype(head_VD.dtype), None


token_log_probs.defvjp(_forward, _backward)


def _log_probs(hidden_ND, head_VD, targets_N, chunk, sharding):
    """Return the log-probabilities of the targets and the log-partitions, [N] both."""
    compute_VD = sharding.gather(head_VD, hidden_ND.dtype)

    def one_chunk(_, inputs):
        hidden_CD, target_C = inputs
        logits_CV = _logits(hidden_CD, compute_VD)
        log_partition_C = jax.nn.logsumexp(logits_CV, axis=-1)
        target_logit_C = jnp.take_along_axis(logits_CV, target_C[:, None], axis=-1)[:, 0]
        return None, (target_logit_C - log_partition_C, log_partition_C)

    _, columns = jax.lax.scan(one_chunk, None, _chunks(chunk, hidden_ND, targets_N))
    return tuple(column.reshape(-1)[: len(hidden_ND)] for column in columns)


def _logits(hidden_CD, compute_VD):
    return jnp.einsum("CD,VD->CV", hidden_CD, compute_VD, preferred_element_type=jnp.float32)


def _chunks(chunk, *columns):
    """Return arrays over tokens as arrays over chunks, the last one filled up with zeros."""
    num_tokens = len(columns[0])
    chunk = min(chunk, num_tokens)

    def cut(column):
        widths = ((0, -num_tokens % chunk), *((0, 0),) * (column.ndim - 1))
        return jnp.pad(column, widths).reshape(-1, chunk, *column.shape[1:])

    return tuple(map(cut, columns))


def _halves(value_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the chosen and the rejected rows' part, [P] each."""
    value_P2 = value_B.reshape(-1, 2)
    return value_P2[:, 0], value_P2[:, 1]
