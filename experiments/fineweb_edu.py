"""OpenELM-270M on FineWeb-Edu in place of the paper's mixture.

Model, optimiser and steps are those of `270m`. Run it with

    python -m openelm_jax.train --exp fineweb_edu --data.root DIR --tokenizer LLAMA_TOKENIZER.model

DIR is the dataset `HuggingFaceFW/fineweb-edu` as it is published, with
data/CC-MAIN-2013-20 and the other crawls below it; to train on a part of it, name that part's
files with --data.sources.0.files.
"""

import dataclasses

from openelm_jax.config import Experiment
from openelm_jax.experiment_file import load_experiment
from openelm_jax.mixtures import fineweb_edu


def experiment() -> Experiment:
    paper = load_experiment("270m")
    data = dataclasses.replace(paper.data, sources=fineweb_edu())
    return dataclasses.replace(paper, name="fineweb_edu", data=data)
