"""OpenELM-270M on DCLM-Baseline in place of the paper's mixture.

Model, optimiser and steps are those of `270m`. Run it with

    python -m openelm_jax.train --exp dclm --data.root DIR --tokenizer LLAMA_TOKENIZER.model

DIR is the dataset `mlfoundations/dclm-baseline-1.0` as it is published, with
global-shard_01_of_10 and the others in it; to train on a part of it, name that part's
files with --data.sources.0.files.
"""

import dataclasses

from openelm_jax.config import Experiment
from openelm_jax.experiment_file import load_experiment
from openelm_jax.mixtures import dclm


def experiment() -> Experiment:
    paper = load_experiment("270m")
    data = dataclasses.replace(paper.data, sources=dclm())
    return dataclasses.replace(paper, name="dclm", data=data)
