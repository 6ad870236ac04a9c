"""OpenELM-1.1B: column "1.1B" of the paper's Table 9 (arXiv 2404.14619).

1,079,891,456 parameters at the tokenizer's 32,000 pieces. Apple trained it for 11 days on
128 NVIDIA A100 80 GB, with data parallelism with activation checkpointing. Run it with

    python -m openelm_jax.train --exp 1_1b --data.root DIR --tokenizer LLAMA_TOKENIZER.model

DIR holds the folders refinedweb, redpajama, pile and dolma-v1_6, with the files that
`openelm_jax/mixtures.py` names; --data.sources.NUMBER.root gives one of them another place.
"""

from openelm_jax.config import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from openelm_jax.mixtures import openelm


def experiment() -> Experiment:
    return Experiment(
        name="1_1b",
        model=ModelConfig(
            num_layers=28,
            model_dim=2048,
            head_dim=64,
            vocab_size=32128,  # 32,000 pieces and a pad id, rounded up; export cuts to 32,000
            context_length=2048,
        ),
        data=DataConfig(sources=openelm(), lanes=256),
        optimizer=OptimizerConfig(peak_lr=2.4e-3, warmup_steps=5000),
        training=TrainingConfig(
            steps=350_000,
            global_batch_size=2048,  # 4,194,304 tokens a step
            remat="block",
        ),
        checkpoint=CheckpointConfig(every=5000, keep_every=5000),
    )
