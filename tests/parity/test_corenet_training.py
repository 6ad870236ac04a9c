"""A run of PyTorch's AdamW, saved as CoreNet saves it, goes on here as it goes on there."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corenet_files import corenet_names, named_by_fsdp, save_training_checkpoint
from small_models import random_params, tiny

from openelm_jax.config import Experiment, OptimizerConfig, TrainingConfig
from openelm_jax.parallel.mesh import MeshShape, make_mesh
from openelm_jax.training.optimizer import learning_rate
from openelm_jax.training.program import make_program
from openelm_jax.training.start import read_start
from openelm_jax.training.step import Batch
from openelm_jax.weights.corenet_yaml import write_yaml
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.stored import in_memory

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MODEL = tiny(num_layers=2)
EXPERIMENT = Experiment(
    name="continued",
    model=MODEL,
    # A high rate, so that updates are not lost in the rounding of the parameters.
    optimizer=OptimizerConfig(peak_lr=3e-2, warmup_steps=6),
    training=TrainingConfig(steps=20, global_batch_size=4, dtype="float32"),
)
BEFORE, AFTER = 5, 3
NAMES = corenet_names(MODEL.num_layers)


def tokens_BL(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, MODEL.vocab_size, (4, MODEL.context_length + 1))


def rate(step: int) -> float:
    return learning_rate(EXPERIMENT.optimizer, EXPERIMENT.training.steps, step)


def updates_between(history: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    return [
        {name: after[name] - before[name] for name in NAMES} for before, after in pairwise(history)
    ]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Train eight updates in PyTorch; return the folder of its checkpoints after five, and the
    updates after them."""
    from openelm_jax.weights.torch_model import load_params, torch_model

    folder = tmp_path_factory.mktemp("corenet")
    write_yaml(folder / "openelm.yaml", in_memory(MODEL, {}), "float32")
    model = torch_model(MODEL)
    load_params(model, in_memory(MODEL, random_params(MODEL)))
    parameters = {
        name.removeprefix("transformer."): value for name, value in model.named_parameters()
    }
    matrices = [name for name in NAMES if parameters[name].ndim == 2]
    vectors = [name for name in NAMES if parameters[name].ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in names], "weight_decay": decay}
            for names, decay in ((matrices, 0.1), (vectors, 0.0))
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    history = []
    for step in range(BEFORE + AFTER + 1):
        weights = {name: parameters[name].detach() for name in NAMES}
        if step == BEFORE:
            state = optimizer.state_dict()
            named = named_by_fsdp(state, matrices + vectors)
            for kind, written in (("plain", state), ("fsdp", named)):
                path = folder / f"training_checkpoint_{kind}.pt"
                save_training_checkpoint(path, weights, written, iterations=step)
        if step >= BEFORE:
            history.append({name: weights[name].numpy().copy() for name in NAMES})
        tokens = torch.tensor(tokens_BL(step))
        logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
        z_loss = EXPERIMENT.training.z_loss * logits.logsumexp(-1).square().mean()
        (torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) + z_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), EXPERIMENT.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return folder, updates_between(history)


@pytest.fixture(scope="module")
def program():
    return make_program(EXPERIMENT, make_mesh(MeshShape(1, 1, 1, 1), jax.devices()[:1]))


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_the_next_updates_are_pytorch_s(theirs, program, kind):
    folder, expected = theirs
    start = read_start(str(folder / f"training_checkpoint_{kind}.pt"), EXPERIMENT, "tiny", print)
    assert (start.step, start.moments.updates) == (BEFORE, BEFORE)
    state = program.state_after(start.step, start.weights.params, start.moments)

    history = []
    for step in range(BEFORE, BEFORE + AFTER + 1):
        stored = in_memory(MODEL, jax.device_get(state.params))
        history.append(dict(to_reference(MODEL, stored.read, "corenet")))
        rows = jnp.asarray(tokens_BL(step), jnp.int32)
        batch = Batch(rows, jnp.ones((4, MODEL.context_length), bool))
        state, _ = program.train_step(state, batch, program.place_rate(rate(step)))

    for ours, torchs in zip(updates_between(history), expected, strict=True):
        for name in NAMES:
            apart = np.linalg.norm(ours[name] - torchs[name]) / np.linalg.norm(torchs[name])
            assert apart < 1e-5, name
