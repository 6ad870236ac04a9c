"""Four and eight bits a weight: the same tensors as mlx-lm makes, read back without MLX."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.errors import UserError
from openelm_jax.generation.language_model import language_model
from openelm_jax.generation.text_loss import text_loss, text_tokens
from openelm_jax.tokenizer import train_tokenizer
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.mlx_quantized import Quantization, dequantize

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")

CONFIG = tiny(model_dim=128, ffn_dim_divisor=64, vocab_size=96)
TOKENS_BT = np.random.default_rng(1).integers(0, 96, (2, 16))


def tensors_of(directory: Path) -> dict[str, mx.array]:
    return mx.load(str(directory / "model.safetensors"))


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "tied"),
    [
        (4, 64, "bfloat16", True),
        (4, 32, "bfloat16", True),
        (8, 128, "bfloat16", True),
        (4, 64, "bfloat16", False),
        (8, 64, "float16", True),
        (4, 64, "float32", True),
    ],
)
def test_tensors_and_configuration_are_those_of_mlx_lms_own_conversion(
    tmp_path, bits, group_size, dtype, tied
):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = random_params(config)
    write_huggingface(tmp_path / "float32", config, params)
    write_huggingface(tmp_path / "hf", config, params, dtype=dtype)
    model, fields = mlx_utils.load_model(tmp_path / "hf")
    model, fields = mlx_utils.quantize_model(model, fields, group_size, bits)
    mlx_utils.save_model(tmp_path / "theirs", model)

    export.main(
        f"--from {tmp_path}/float32 --to mlx --out {tmp_path}/ours --quantize {bits} "
        f"--group-size {group_size} --dtype {dtype}".split()
    )

    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert mx.array_equal(ours[name], tensor), name
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        assert written[name] == fields[name]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_read_back_is_what_mlx_lm_computes_with(tmp_path, bits):
    params = random_params(CONFIG, std=0.125)
    how = Quantization(bits, 64)
    write_huggingface(tmp_path / "mlx", CONFIG, params, quantization=how)

    config, read = read_huggingface(tmp_path / "mlx")
    model, _ = mlx_utils.load_model(tmp_path / "mlx")

    assert config == CONFIG
    qkv = tensors_of(tmp_path / "mlx")
    name = "transformer.layers.1.attn.qkv_proj"
    theirs = mx.dequantize(
        *(qkv[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 64, bits
    )
    np.testing.assert_allclose(
        read["layers_1"]["attention"]["qkv"].T, np.array(theirs), rtol=0, atol=1e-6
    )
    theirs_BTV = np.array(model(mx.array(TOKENS_BT)))
    ours_BTV = language_model(config, read, None, "float32").logits(TOKENS_BT)
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-4)


def test_words_are_read_from_the_lowest_bits_up():
    """One row in groups of 32: the levels written out as hexadecimal digits, low digit first."""
    digits = "0123456789abcdef" * 4
    words = np.array([[int(digits[i : i + 8][::-1], 16) for i in range(0, 64, 8)]], np.uint32)
    scales, biases = np.array([[0.5, 2.0]], np.float16), np.array([[-1.0, 10.0]], np.float16)

    row = dequantize(words, scales, biases, Quantization(4, 32))

    levels = np.tile(np.arange(16.0), 2)
    np.testing.assert_array_equal(row, [[*(0.5 * levels - 1), *(2 * levels + 10)]])
    assert row.dtype == np.float32
    eight_bits = dequantize(words, scales[:, :1], biases[:, :1], Quantization(8, 32))
    np.testing.assert_array_equal(
        eight_bits[0, :3], [0.5 * 0x10 - 1, 0.5 * 0x32 - 1, 0.5 * 0x54 - 1]
    )


def test_reading_needs_no_mlx(tmp_path, monkeypatch):
    write_huggingface(
        tmp_path / "mlx", CONFIG, random_params(CONFIG), quantization=Quantization(4, 64)
    )
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setitem(sys.modules, "mlx", None)

    config, read = read_huggingface(tmp_path / "mlx")

    assert config == CONFIG
    # Sixteen levels over four standard deviations either way: half a step is the most to lose.
    lost = read["layers_0"]["ffn"]["up"] - random_params(CONFIG)["layers_0"]["ffn"]["up"]
    assert 0 < np.abs(lost).max() < 0.2 * 8 / 15


@pytest.mark.parametrize("bits", [4, 8])
def test_a_text_costs_us_what_it_costs_mlx_lm(tmp_path, bits):
    from mlx_lm.perplexity import eval_ppl

    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    tokenizer = train_tokenizer(lines, 300, tmp_path / "t.model")
    config = dataclasses.replace(CONFIG, vocab_size=300)
    write_huggingface(
        tmp_path / "mlx",
        config,
        random_params(config, std=0.05),
        dtype="bfloat16",
        tokenizer=tokenizer,
        quantization=Quantization(bits, 64),
    )
    length, words = config.context_length, " ".join(lines)
    ids = [tokenizer.bos_id, *tokenizer.encode(words).tolist()]
    rows = [ids[i : i + length + 1] for i in range(0, len(ids) - length, length)]
    (tmp_path / "text.txt").write_text(tokenizer.decode(ids[1 : len(rows) * length + 1]))

    model, _ = mlx_utils.load_model(tmp_path / "mlx")
    model.set_dtype(mx.float32)  # as we compute; scales and biases keep their bfloat16 values
    theirs, _ = eval_ppl(model, mx.array(rows))
    with open_weights(tmp_path / "mlx") as stored:
        ours = math.exp(text_loss(stored, text_tokens(stored, tmp_path / "text.txt")))

    assert len(rows) > 4
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_what_no_group_divides_is_named_and_the_bits_are_mlx_lms(tmp_path, capsys):
    config = tiny(vocab_size=96)  # out_proj of 32 and 64, proj_2 of 32 and more inputs
    write_huggingface(tmp_path / "hf", config, random_params(config))

    export.main(f"--from {tmp_path}/hf --to mlx --out {tmp_path}/ours --quantize 4".split())

    said = capsys.readouterr().err
    assert "groups of 64 do not divide its rows: transformer.layers.0.attn.out_proj.weight" in said
    stored = tensors_of(tmp_path / "ours")
    for line in said.splitlines():
        if "not quantised" in line:
            name = line.rpartition(": ")[2]
            assert stored[name].dtype == mx.bfloat16
            assert stored[name].shape[1] % 64
    model, _ = mlx_utils.load_model(tmp_path / "ours")
    assert f"4 bits, {mlx_utils.compute_bits_per_weight(model):.3f} a weight" in said


def test_a_quantised_model_becomes_any_other(tmp_path):
    write_huggingface(
        tmp_path / "mlx", CONFIG, random_params(CONFIG), quantization=Quantization(4, 32)
    )
    export.main(f"--from {tmp_path}/mlx --to hf --dtype float32 --out {tmp_path}/hf".split())

    for a, b in zip(
        *(jax.tree.leaves(read_huggingface(tmp_path / name)[1]) for name in ("mlx", "hf")),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "given",
    [
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 3, "group_size": 64},
        {"bits": 4, "group_size": 64, "transformer.layers.0": {"bits": 8}},
    ],
)
def test_other_quantisations_are_refused(tmp_path, given):
    write_huggingface(tmp_path / "hf", CONFIG, random_params(CONFIG))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": given}))

    with pytest.raises(UserError, match="give the weights before quantisation"):
        read_huggingface(tmp_path / "hf")


NAME = "transformer.layers.1.attn.qkv_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scales": None}, f"groups of 64, but {NAME}.scales is missing"),
        ({"biases": None}, f"groups of 64, but {NAME}.biases is missing"),
        ({"weight": None}, rf"1 missing \({NAME}.weight\)"),
        ({"scales": np.ones((191, 2), np.float32)}, rf"{NAME}.scales is \[191, 2\]"),
        ({"scales": np.ones((192, 1), np.float32)}, rf"{NAME}.scales is \[192, 1\]"),
        ({"biases": np.ones((192, 1), np.float32)}, rf"{NAME}.biases is \[192, 1\]"),
        ({"scales": np.ones((192, 2), np.int32)}, f"{NAME}.scales is stored as I32"),
        ({"weight": np.ones((192, 16), np.int32)}, "2 unexpected"),
        ({"weight": np.ones(192, np.uint32)}, "2 unexpected"),
        ({"weight": np.ones((192, 17), np.uint32)}, f"groups of 64, but {NAME}.scales"),
        ({"more.scales": np.ones((192, 2), np.float32)}, rf"unexpected \({NAME}.more.scales\)"),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(quantised, tmp_path, change, says):
    """Scales of another width would multiply without an error, and make another model."""
    shutil.copy(quantised / "config.json", tmp_path)
    tensors = safetensors.numpy.load_file(quantised / "model.safetensors")
    for part, tensor in change.items():
        tensors[f"{NAME}.{part}"] = tensor
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.numpy.save_file(kept, tmp_path / "model.safetensors")

    with pytest.raises(UserError, match=says):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization": {"bits": 4, "group_size": 32}}, "quantised in groups of 32, but"),
        ({"quantization": {"bits": 8, "group_size": 64}}, "quantised in groups of 64, but"),
        ({}, "24 unexpected"),
        (
            {
                "quantization": {"bits": 4, "group_size": 64},
                "quantization_config": {"bits": 8, "group_size": 64},
            },
            "correct one of them",
        ),
    ],
    ids=["another group", "other bits", "no field", "two that differ"],
)
def test_a_configuration_that_is_not_of_these_tensors_is_refused(quantised, tmp_path, fields, says):
    shutil.copy(quantised / "model.safetensors", tmp_path)
    written = json.loads((quantised / "config.json").read_text())
    del written["quantization"], written["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(written | fields))

    with pytest.raises(UserError, match=says):
        read_huggingface(tmp_path)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quantised") / "mlx"
    write_huggingface(directory, CONFIG, random_params(CONFIG), quantization=Quantization(4, 64))
    return directory


def test_without_mlx_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setitem(sys.modules, "mlx", None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[mlx\]'"):
        write_huggingface(
            tmp_path / "out", CONFIG, random_params(CONFIG), quantization=Quantization(4, 64)
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", [None, Quantization(4, 64)], ids=["whole", "quantised"])
def test_float16_says_once_what_it_cannot_hold(tmp_path, capsys, how):
    params = random_params(CONFIG)
    params["layers_0"]["ffn"]["down"][3, 5] = -70000.0
    params["layers_0"]["ffn"]["down"][3, 6] = np.nan  # which is larger than nothing
    params["layers_1"]["ffn"]["down"][3, 5] = 65519.0  # rounds down to the largest

    write_huggingface(tmp_path / "hf", CONFIG, params, dtype="float16", quantization=how)

    said = capsys.readouterr().err
    assert "transformer.layers.0.ffn.proj_2.weight reaches 70000" in said
    assert "take bfloat16, the default" in said
    assert said.count("warning") == 1
    if how is None:
        tensors = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
        assert np.isinf(tensors["transformer.layers.0.ffn.proj_2.weight"]).sum() == 1
        assert np.isfinite(tensors["transformer.layers.1.ffn.proj_2.weight"]).all()
