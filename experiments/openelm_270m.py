"""OpenELM-270M: column "270M" of the paper's Table 9 (arXiv 2404.14619).

271,527,168 parameters at the tokenizer's 32,000 pieces. Apple trained it for 3 days on
128 NVIDIA A100 80 GB, with plain data parallelism. Run it with

    python -m openelm_jax.train --exp 270m --data.root DIR --tokenizer LLAMA_TOKENIZER.model

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
        name="270m",
        model=ModelConfig(
            num_layers=16,
            model_dim=1280,
            head_dim=64,
            vocab_size=32128,  # 32,000 pieces and a pad id, rounded up; export cuts to 32,000
            context_length=2048,
        ),
        data=DataConfig(sources=openelm(), lanes=256),
        optimizer=OptimizerConfig(peak_lr=5.3e-3, warmup_steps=5000),
        training=TrainingConfig(
            steps=350_000,
            global_batch_size=2048,  # 4,194,304 tokens a step
            remat="none",
        ),
        checkpoint=CheckpointConfig(every=5000, keep_every=5000),
    )
