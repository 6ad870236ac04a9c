"""One update of the same model by us and by PyTorch, for `benchmark train`.

Legend: B batch, L = T + 1 tokens of a row, T time, V vocab, N counted targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from openelm_jax.benchmarks.report import num_cores
from openelm_jax.config import Experiment
from openelm_jax.model.decoder import init_params
from openelm_jax.parallel.mesh import MeshShape, make_mesh
from openelm_jax.training.compilation import Compiled, compile_step, keep_compiled_code
from openelm_jax.training.feed import to_batch
from openelm_jax.training.program import Program, make_program
from openelm_jax.training.state import TrainState
from openelm_jax.training.step import TrainStep

Step = Callable[[np.ndarray], float]
"""One update on tokens [B, L], waited for; returns the loss before it, z-loss included."""

LEARNING_RATE = 1e-4


def our_step(experiment: Experiment) -> Step:
    """Return the update that `train` runs."""
    program, compiled, state = compiled_program(experiment)
    rate = program.place_rate(LEARNING_RATE)

    def step(tokens_BL: np.ndarray) -> float:
        nonlocal state
        state, metrics = compiled(state, to_batch(tokens_BL, mesh=program.mesh), rate)
        return float(metrics.loss) + float(metrics.z_loss)

    return step


def compiled_program(
    experiment: Experiment, bos_id: int | None = None
) -> tuple[Program, TrainStep, TrainState]:
    """Return an experiment's program on one device, its compiled update, and the first state."""
    program, compiled = compile_program(experiment, bos_id)
    return program, compiled.function, program.new_state()


def compile_program(experiment: Experiment, bos_id: int | None = None) -> tuple[Program, Compiled]:
    """Return the same without a state, and how the update was compiled."""
    keep_compiled_code()
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    program = make_program(experiment, mesh, bos_id=bos_id)
    like = (program.state_like(), program.batch_like(), program.rate_like())
    return program, compile_step(program.train_step, *like)


def torch_step(experiment: Experiment) -> Step:
    """Return the same update in PyTorch eager, as it is usually written.

    Compute in bfloat16 is autocast over float32 parameters; AdamW is the fused one.
    """
    import torch

    from openelm_jax.weights.stored import in_memory
    from openelm_jax.weights.torch_model import load_params, torch_model

    config, optimizer_config, training = (
        experiment.model,
        experiment.optimizer,
        experiment.training,
    )
    torch.set_num_threads(num_cores())
    decoder = torch_model(config).train()
    load_params(decoder, in_memory(config, init_params(config, training.seed)))
    parameters = list(decoder.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=LEARNING_RATE,
        betas=(optimizer_config.b1, optimizer_config.b2),
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
        fused=True,
    )
    in_bfloat16 = training.dtype == "bfloat16"

    def step(tokens_BL: np.ndarray) -> float:
        tokens = torch.from_numpy(tokens_BL.astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            logits_NV = decoder(tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
        loss = torch_loss(logits_NV, tokens[:, 1:].flatten(), training.z_loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, optimizer_config.clip_norm, foreach=True)
        optimizer.step()
        return loss.item()

    return step


def torch_loss(logits_NV: Any, targets_N: Any, z_loss: float) -> Any:
    """Return mean cross-entropy and z-loss, both from one log-partition in float32."""
    logits_NV = logits_NV.float()
    log_partition_N = logits_NV.logsumexp(dim=-1)
    target_logit_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
    return (log_partition_N - target_logit_N + z_loss * log_partition_N.square()).mean()
