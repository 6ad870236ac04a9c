"""`--adapter DIR` in every command that has --from: the base with its trained adapters merged."""

from __future__ import annotations

import json
from pathlib import Path

import corpora
import jax
import numpy as np
import pytest
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax import evaluate, export, generate, load, train
from openelm_jax.config import Experiment, OptimizerConfig, TrainingConfig
from openelm_jax.errors import UserError
from openelm_jax.model.adapters import AdapterShape
from openelm_jax.model.decoder import Decoder, init_adapters
from openelm_jax.training.start import read_start
from openelm_jax.weights.adapters import choose_adapters
from openelm_jax.weights.load import load_weights
from openelm_jax.weights.peft import write_peft

TOKENIZER = corpora.tokenizer()
CONFIG = tiny(num_layers=1, vocab_size=TOKENIZER.vocab_size)
PARAMS = random_params(CONFIG, std=0.125)
TOKENS_BT = np.random.default_rng(1).integers(0, 300, (2, 12))
DORA = AdapterShape(rank=2, alpha=4, dora=True)
LORA = AdapterShape(rank=2, alpha=4)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A base, and two directories of adapters for it as peft writes them."""
    root = tmp_path_factory.mktemp("places")
    write_huggingface(root / "base", CONFIG, PARAMS, tokenizer=TOKENIZER)
    for name, targets, shape in (
        ("dora", "all-linear", DORA),
        ("lookup", ["token_embeddings", "proj_1"], LORA),
    ):
        (root / name).mkdir()
        write_peft(root / name, CONFIG, *drawn(targets, shape))
    return root


def drawn(targets, shape):
    adapters = choose_adapters(CONFIG, targets, shape)
    rng = np.random.default_rng(0)
    tree = init_adapters(CONFIG, adapters, PARAMS, seed=0)
    return adapters, jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype("f4"), tree)


def unmerged_logits(targets, shape) -> np.ndarray:
    adapters, tree = drawn(targets, shape)
    variables = {"params": PARAMS, "adapters": tree}
    return np.asarray(jax.jit(Decoder(CONFIG, adapters=adapters).apply)(variables, TOKENS_BT))


def test_a_loaded_model_computes_what_the_adapters_beside_the_weights_do(places) -> None:
    model = load(places / "base", adapter=places / "dora")
    expected_BTV = unmerged_logits("all-linear", DORA)
    assert np.abs(load(places / "base").logits(TOKENS_BT) - expected_BTV).max() > 0.1
    np.testing.assert_allclose(model.logits(TOKENS_BT), expected_BTV, rtol=0, atol=1e-5)


def test_adapters_of_a_tied_embedding_make_a_head_of_its_own_and_it_is_said(places, capsys) -> None:
    model = load(places / "base", adapter=places / "lookup")
    said = capsys.readouterr().err
    assert "adapts the embedding for the lookup alone: merged, the model has a head of its" in said
    assert not model.config.tie_embeddings
    expected_BTV = unmerged_logits(["token_embeddings", "proj_1"], LORA)
    np.testing.assert_allclose(model.logits(TOKENS_BT), expected_BTV, rtol=0, atol=1e-5)


def test_generate_and_evaluate_take_them(places, tmp_path, capsys) -> None:
    model = load(places / "base", adapter=places / "dora")
    flags = ["--from", str(places / "base"), "--adapter", str(places / "dora")]
    generate.main([*flags, "--prompt", "the state of", "--max-tokens", "6", "--temperature", "0"])
    ours = capsys.readouterr().out
    assert ours.rstrip("\n") == "the state of" + model.generate(["the state of"], 6)[0]

    text = tmp_path / "text.txt"
    text.write_text("the state of the union and the people of a nation")
    costs = []
    for adapter in ([], ["--adapter", str(places / "dora")]):
        evaluate.main([*flags[:2], *adapter, "--text", str(text), "--json"])
        costs.append(json.loads(capsys.readouterr().out))
    assert costs[0] != costs[1]


@pytest.mark.parametrize("name", ["dora", "lookup"])
def test_an_export_is_the_merged_model(places, tmp_path, name) -> None:
    out = tmp_path / "merged"
    where = f"--from {places}/base --adapter {places}/{name}"
    export.main(f"{where} --to hf --dtype float32 --out {out}".split())
    config, params = read_huggingface(out)
    expected = load_weights(places / "base", adapter=places / name)
    assert config.tie_embeddings == expected.config.tie_embeddings == (name == "dora")
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)
    assert f"with the adapters of {places}/{name}" in (out / "README.md").read_text()


def test_training_starts_from_the_merged_weights(places) -> None:
    experiment = Experiment(
        name="here",
        model=CONFIG,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        training=TrainingConfig(steps=2, global_batch_size=2),
    )
    start = read_start(
        str(places / "base"), experiment, "here", print, adapter=str(places / "dora")
    )
    expected = load_weights(places / "base", adapter=places / "dora").params
    jax.tree.map(np.testing.assert_array_equal, start.weights.params, expected)
    assert start.step == 0


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (
            train.main,
            "--exp tiny --adapter {0}/dora",
            "dora has no model to go with: give its base in --from",
        ),
        (
            generate.main,
            "--from {0}/base --adapter {0}/base --prompt a",
            "base holds no adapter_config.json and adapter_model.safetensors",
        ),
        (
            export.main,
            "--from {0}/base --adapter {0}/lookup --to mlx-adapter --out {0}/out",
            "lookup adapts the embedding, for the lookup alone; mlx-lm would apply that",
        ),
    ],
    ids=["train", "generate", "export"],
)
def test_what_cannot_be_is_refused_in_one_sentence(places, main, flags, message) -> None:
    with pytest.raises(UserError, match=message):
        main(flags.format(places).split())
    assert not (places / "out").exists()


def test_an_export_of_adapters_needs_adapters(places, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        export.main(f"--from {places}/base --to mlx-adapter --out {places}/out".split())
    assert end.value.code == 2
    assert "--to mlx-adapter writes the adapters of --adapter DIR" in capsys.readouterr().err
