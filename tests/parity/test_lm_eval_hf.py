"""What the harness finds with our model is what its own backend `hf` finds with our export.

The rows here are written in the Hub's layouts. With OPENELM_EVALUATION_DATA=DIR, a folder of the
tasks' files as their origins publish them (`hub_folder.write_tasks`), the heavy test compares at
least 200 real items of each of eight tasks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hub_folder import write_tasks
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.evaluation.harness import harness_model
from openelm_jax.generation.language_model import load
from openelm_jax.tokenizer import load_tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
LARGEST_DIFFERENCE = 1e-3
NAMES = (
    *("piqa", "hellaswag", "arc_easy", "arc_challenge", "winogrande"),
    *("truthfulqa_mc2", "crows_pairs_english", "mmlu"),
)


@pytest.fixture(scope="module", autouse=True)
def _no_hub(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        for flag in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setitem(os.environ, flag, "1")
        cache = str(tmp_path_factory.mktemp("datasets"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of two layers, with more rows than its tokenizer has pieces, as torch has it."""
    folder = tmp_path_factory.mktemp("exported")
    config = tiny(num_layers=2, vocab_size=32_064, context_length=2048)
    tokenizer = load_tokenizer(TOKENIZER)
    write_huggingface(folder / "plain", config, random_params(config), tokenizer=tokenizer)
    directory = folder / "export"
    export.main(
        f"--from {folder / 'plain'} --to hf --dtype float32 --with-code --out {directory}".split()
    )
    return directory


@pytest.fixture(scope="module")
def theirs(exported):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(exported),
        trust_remote_code=True,
        dtype="float32",
        device="cpu",
        batch_size=8,
        max_length=2048,
        add_bos_token=True,
    )


@pytest.fixture(scope="module")
def ours(exported):
    return harness_model(load(exported))


def evaluate(model, names, folder: Path, limit: int | None, monkeypatch, shots: int | None = None):
    """Return the results of the harness on the tasks whose data is in `folder`."""
    monkeypatch.chdir(folder)
    return lm_eval.simple_evaluate(
        model,
        tasks=list(names),
        num_fewshot=shots,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )


def compare(ours, theirs) -> dict[str, tuple[int, float]]:
    """Assert that two results agree; return each task's requests and the largest difference."""
    found = {}
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in ours["samples"].items():
        differences = []
        for our, their in zip(samples, theirs["samples"][task], strict=True):
            assert our["doc_hash"] == their["doc_hash"]
            for (our_sum, our_greedy), (their_sum, their_greedy) in zip(
                our["filtered_resps"], their["filtered_resps"], strict=True
            ):
                differences.append(abs(our_sum - their_sum))
                assert our_greedy == their_greedy, (task, our["doc_id"])
        found[task] = (len(differences), max(differences))
        assert max(differences) < LARGEST_DIFFERENCE, (task, max(differences))
    for task, metrics in ours["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "likelihood_diff" not in name:
                expected = theirs["results"][task][name]
                same = (
                    value == expected if task != "truthfulqa_mc2" else abs(value - expected) < 1e-5
                )
                assert same, (task, name, value, expected)
    return found


@pytest.mark.heavy
@pytest.mark.skipif(
    "OPENELM_EVALUATION_DATA" not in os.environ, reason="needs the tasks' files, of 6 MB"
)
def test_two_hundred_real_items_of_eight_tasks(ours, theirs, tmp_path, monkeypatch):
    write_tasks(Path(os.environ["OPENELM_EVALUATION_DATA"]), tmp_path, limit=228)
    # MMLU's limit counts for each of 57 subjects: 228 items in all.
    found = [evaluate(model, NAMES, tmp_path, 228, monkeypatch) for model in (ours, theirs)]
    differences = compare(*found)
    for task, (requests, difference) in differences.items():
        print(f"{task}: {requests} requests, largest difference {difference:.1e}")
