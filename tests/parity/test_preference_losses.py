"""Losses, log-probabilities and gradients of pairs are PyTorch's, and those of TRL itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_models import random_params, tiny

from openelm_jax.data.preferences import Pair, pair_rows
from openelm_jax.model.decoder import Decoder, Params
from openelm_jax.training.preference_loss import (
    PreferenceObjective,
    completion_log_probs,
    preference_loss,
)
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.stored import in_memory
from openelm_jax.weights.torch_model import load_params, torch_model

torch = pytest.importorskip("torch")

CONFIG = tiny(num_layers=2)
POLICY, REFERENCE = (random_params(CONFIG, std=0.125, seed=seed) for seed in (0, 1))
DRAW = np.random.default_rng(2)
PAIRS = [
    Pair(*(np.array([*DRAW.integers(3, 40, length), 2]) for length in lengths))
    for lengths in ((4, 9, 3), (8, 2, 12), (1, 5, 5))
]
ROWS = pair_rows(PAIRS, 24)
OBJECTIVES = [
    PreferenceObjective("sigmoid", 0.1),
    PreferenceObjective("sigmoid", 0.1, 0.2),
    PreferenceObjective("hinge", 0.01),
    PreferenceObjective("ipo", 0.1),
]


def theirs(params: Params) -> Any:
    model = torch_model(CONFIG)
    load_params(model, in_memory(CONFIG, params))
    return model


def log_probs(model: Any) -> list[tuple[Any, Any]]:
    """Return each pair's two sums, a row at a time."""
    sums = []
    for prompt, *answers in PAIRS:
        for answer in answers:
            tokens = torch.from_numpy(np.concatenate([prompt, answer]))
            log_prob_TV = model(tokens[None]).logits[0].log_softmax(-1)
            chosen_T = log_prob_TV[:-1].gather(1, tokens[1:, None])[:, 0]
            sums.append(chosen_T[len(prompt) - 1 :].sum())
    return list(zip(sums[::2], sums[1::2], strict=True))


def loss_in_torch(objective: PreferenceObjective, policy: Any, reference: Any) -> Any:
    losses = []
    pairs = zip(PAIRS, policy, reference, strict=True)
    for (_, chosen, rejected), (better, worse), (base_better, base_worse) in pairs:
        up, down = better - base_better, worse - base_worse
        beta, flipped = objective.beta, objective.label_smoothing
        scaled = beta * (up - down)
        if objective.loss == "sigmoid":
            loss = -(1 - flipped) * torch.log(torch.sigmoid(scaled))
            loss = loss - flipped * torch.log(torch.sigmoid(-scaled))
        elif objective.loss == "hinge":
            loss = torch.clamp(1 - scaled, min=0)
        else:
            loss = (up / len(chosen) - down / len(rejected) - 1 / (2 * beta)) ** 2
        losses.append(loss)
    return torch.stack(losses).mean()


@jax.jit
def pull_back(params: Params, d_log_prob_B: jax.Array) -> tuple[jax.Array, Params]:
    """Return the rows' log-probabilities and the gradient of their sum with these weights."""
    log_prob_B, pull = jax.vjp(
        lambda params: completion_log_probs(Decoder(CONFIG), params, ROWS, chunk=16), params
    )
    return log_prob_B, pull(d_log_prob_B)[0]


ZERO_B = np.zeros(2 * len(PAIRS), np.float32)


def ours(objective: PreferenceObjective):
    """Return our loss, its metrics and its gradient by the policy's log-probabilities."""
    (policy_B, _), (reference_B, _) = (pull_back(each, ZERO_B) for each in (POLICY, REFERENCE))

    def loss(policy_B: jax.Array):
        return preference_loss(objective, policy_B, reference_B, ROWS.length_B - ROWS.prompt_B)

    (value, metrics), d_policy_B = jax.value_and_grad(loss, has_aux=True)(policy_B)
    return value, metrics, d_policy_B


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.loss)
def test_losses_log_probs_and_gradients_are_pytorch_s(objective: PreferenceObjective) -> None:
    policy = theirs(POLICY)
    with torch.no_grad():
        reference = log_probs(theirs(REFERENCE))
    sums = log_probs(policy)
    expected = loss_in_torch(objective, sums, reference)
    expected.backward()

    loss, _, d_policy_B = ours(objective)
    policy_B, gradients = pull_back(POLICY, d_policy_B)

    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    flat = np.array([sum_.item() for pair in sums for sum_ in pair])
    np.testing.assert_allclose(policy_B, flat, rtol=1e-5)
    theirs_by_name = dict(policy.named_parameters())
    for name, gradient in to_reference(CONFIG, in_memory(CONFIG, gradients).read):
        error = np.linalg.norm(theirs_by_name[name].grad.numpy() - gradient)
        assert error <= 1e-5 * np.linalg.norm(gradient), name


@pytest.mark.heavy
@pytest.mark.parametrize(
    "objective",
    [objective for objective in OBJECTIVES if not objective.label_smoothing],
    ids=lambda objective: objective.loss,
)
def test_a_step_of_trl_has_our_loss_and_metrics(
    objective: PreferenceObjective, tmp_path: Path
) -> None:
    """TRL has no label smoothing for this loss any more."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    names = ["<pad>", "<s>", "</s>", *(f"t{i}" for i in range(3, CONFIG.vocab_size))]
    vocabulary = {name: i for i, name in enumerate(names)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>"
    )

    def text(ids: np.ndarray) -> str:
        return " ".join(names[i] for i in ids)

    rows = [
        {"prompt": text(p), "chosen": " " + text(c), "rejected": " " + text(r)} for p, c, r in PAIRS
    ]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(PAIRS),
        max_steps=1,
        logging_steps=1,
        loss_type=[objective.loss],
        beta=objective.beta,
        use_cpu=True,
        report_to=[],
        bf16=False,
        save_strategy="no",
    )
    trainer = trl.DPOTrainer(
        model=theirs(POLICY),
        ref_model=theirs(REFERENCE),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = trainer.state.log_history[0]

    loss, metrics, _ = ours(objective)
    assert logged["loss"] == pytest.approx(float(loss), rel=1e-5)
    for name, value in metrics.items():
        assert logged[name] == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
