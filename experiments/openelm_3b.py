"""OpenELM-3B: column "3B" of the paper's Table 9 (arXiv 2404.14619).

3,036,647,424 parameters at the tokenizer's 32,000 pieces. Apple trained it for 13 days on
128 NVIDIA H100 80 GB, with FSDP with activation checkpointing. Run it with

    python -m openelm_jax.train --exp 3b --data.root DIR --tokenizer LLAMA_TOKENIZER.model

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
        name="3b",
        model=ModelConfig(
            num_layers=36,
            model_dim=3072,
            head_dim=128,
            vocab_size=32128,  # 32,000 pieces and a pad id, rounded up; export cuts to 32,000
            context_length=2048,
        ),
        data=DataConfig(sources=openelm(), lanes=256),
        optimizer=OptimizerConfig(peak_lr=1.2e-3, warmup_steps=5000),
        training=TrainingConfig(
            steps=350_000,
            global_batch_size=2048,  # 4,194,304 tokens a step
            remat="block",
        ),
        checkpoint=CheckpointConfig(every=5000, keep_every=5000),
    )
