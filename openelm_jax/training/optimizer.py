"""AdamW and the learning-rate schedule of the paper's pre-training."""

from __future__ import annotations

import math

import jax
import optax

from openelm_jax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """Return the learning rate of update `step` (0-based) of a run of `steps` updates.

    Linear from `initial_lr` over `warmup_steps`, then a cosine to `min_lr`, rounded to eight
    decimals. (`cosine.py` and `base_scheduler.py` of CoreNet; its period has the `+ 1`.)
    """
    peak = config.peak_lr
    floor = peak / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_steps:
        rate = config.initial_lr + step * (peak - config.initial_lr) / config.warmup_steps
    else:
        period = config.cosine_period or max(steps - config.warmup_steps + 1, 1)
        turn = math.pi * (step - config.warmup_steps) / period
        rate = floor + 0.5 * (peak - floor) * (1 + math.cos(turn))
    return round(max(rate, 0.0), 8)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return AdamW up to the factor -learning_rate, which the step applies.

    Weight decay is decoupled and falls on tensors of two and more dimensions: norms have none,
    the embedding does. The first moment is kept in `first_moment_dtype`, the second in float32.
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=config.first_moment_dtype
        ),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )
