"""mlx-lm loads the adapters that we write for it, and computes and fuses the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import corpora
import jax
import numpy as np
import pytest
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax import export, load
from openelm_jax.model.adapters import AdapterShape
from openelm_jax.model.decoder import init_adapters
from openelm_jax.weights.adapters import choose_adapters
from openelm_jax.weights.load import load_weights
from openelm_jax.weights.peft import write_peft

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")

TOKENS_BT = np.random.default_rng(1).integers(0, 40, (2, 12))
LORA = AdapterShape(rank=3, alpha=6)
CHOICES = {
    "LoRA": ("all-linear", LORA, {}),
    "DoRA": ("all-linear", AdapterShape(rank=3, alpha=6, dora=True), {}),
    "patterns": (
        ["qkv_proj", "proj_1"],
        LORA,
        {"ranks": {"proj_1": 5}, "alphas": {"attn.qkv_proj": 2.0}},
    ),
    "the first layer": (["out_proj", "proj_2"], LORA, {"layers": [0]}),
    "an untied embedding": (["token_embeddings", "out_proj"], LORA, {}),
}


def write_adapters(directory: Path, config, params, targets, shape, options) -> None:
    """Write drawn adapters for peft, and with `export` for mlx-lm, of the model beside them."""
    adapters = choose_adapters(config, targets, shape, **options)
    rng = np.random.default_rng(0)
    tree = init_adapters(config, adapters, params, seed=0)
    tree = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), tree)
    (directory / "peft").mkdir()
    write_peft(directory / "peft", config, adapters, tree)
    where = f"--from {directory}/model --adapter {directory}/peft"
    export.main(f"{where} --to mlx-adapter --out {directory}/mlx".split())


@pytest.fixture(params=CHOICES)
def exported(request, tmp_path):
    """A model, peft's adapters beside it, and the same for mlx-lm."""
    config = tiny(num_layers=2, tie_embeddings="embedding" not in request.param)
    params = random_params(config, std=0.125)
    write_huggingface(tmp_path / "model", config, params)
    write_adapters(tmp_path, config, params, *CHOICES[request.param])
    return tmp_path


def test_logits_with_the_adapters_in_mlx_lm_are_ours(exported) -> None:
    from mlx_lm.tuner.utils import load_adapters

    model, _ = mlx_utils.load_model(exported / "model")
    plain_BTV = np.array(model(mx.array(TOKENS_BT)))
    model = load_adapters(model, str(exported / "mlx"))
    model.eval()
    theirs_BTV = np.array(model(mx.array(TOKENS_BT)))
    ours_BTV = load(exported / "model", adapter=exported / "peft").logits(TOKENS_BT)
    assert np.abs(theirs_BTV - plain_BTV).max() > 0.1
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=2e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["LoRA", "DoRA"])
def test_mlx_lms_programs_generate_and_fuse_with_them(name, tmp_path) -> None:
    tokenizer = corpora.tokenizer()
    config = tiny(num_layers=2, vocab_size=tokenizer.vocab_size)
    params = random_params(config, std=0.125)
    write_huggingface(tmp_path / "model", config, params, tokenizer=tokenizer)
    write_adapters(tmp_path, config, params, *CHOICES[name])

    prompt = "the state of"
    text = mlx_lm(
        *("generate", "--model", "model", "--adapter-path", "mlx", "--prompt", prompt),
        *("--temp", "0", "--max-tokens", "16", "--verbose", "False", "--ignore-chat-template"),
        cwd=tmp_path,
    )
    ours = load(tmp_path / "model", adapter=tmp_path / "peft").generate([prompt], 16)[0]
    assert text.strip() == ours.strip()
    mlx_lm(
        *("fuse", "--model", "model", "--adapter-path", "mlx", "--save-path", "fused"),
        cwd=tmp_path,
    )
    config_read, fused = read_huggingface(tmp_path / "fused")
    merged = load_weights(tmp_path / "model", adapter=tmp_path / "peft").params
    assert config_read == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), fused, merged)


def mlx_lm(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(cwd)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
