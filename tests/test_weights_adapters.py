"""Which matrices adapters are for, what is refused of peft's directories, and the merged model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import random_params, tiny

from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.adapters import AdapterShape
from openelm_jax.model.decoder import init_adapters
from openelm_jax.weights.adapters import (
    StoredAdapters,
    adaptable,
    choose_adapters,
    merge_adapters,
)
from openelm_jax.weights.names import at
from openelm_jax.weights.peft import read_peft, write_peft
from openelm_jax.weights.stored import in_memory

CONFIG = tiny(num_layers=2)
PARAMS = random_params(CONFIG, std=0.125)
LORA = AdapterShape(rank=2, alpha=4)
DORA = AdapterShape(rank=2, alpha=4, dora=True)


def drawn(adapters, config=CONFIG) -> StoredAdapters:
    """Return adapters with all their arrays drawn."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_adapters(config, adapters, random_params(config), seed=0))
    tree = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    return StoredAdapters(adapters=adapters, tree=tree, source="here")


def written(directory: Path, targets="all-linear", shape=LORA, **fields) -> Path:
    """Write drawn adapters as peft does, with other fields of the configuration."""
    given = drawn(choose_adapters(CONFIG, targets, shape))
    directory.mkdir(exist_ok=True)
    write_peft(directory, CONFIG, given.adapters, given.tree)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ["qkv", "out", "up", "down"] * 2),
        (["qkv_proj"], ["qkv", "qkv"]),
        ("qkv_proj", ["qkv", "qkv"]),
        (["attn.out_proj", "layers.1.ffn.proj_2"], ["out", "out", "down"]),
        (r".*layers\.0.*proj_[12]", ["up", "down"]),
        (["token_embeddings", "proj_1"], ["embedding", "up", "up"]),
    ],
    ids=str,
)
def test_targets_are_names_their_ends_or_a_regular_expression(targets, expected) -> None:
    chosen = choose_adapters(CONFIG, targets, LORA)
    assert [path.rpartition("/")[2] for path, _ in chosen] == expected
    assert {shape for _, shape in chosen} == {LORA}


def test_layers_ranks_and_alphas_are_chosen_apart() -> None:
    chosen = choose_adapters(
        CONFIG,
        ["qkv_proj", "proj_1"],
        LORA,
        layers=[1],
        ranks={"proj_1": 5},
        alphas={r"layers\.\d\.ffn\.proj_1": 7.5},
    )
    assert chosen == (
        ("layers_1/attention/qkv", LORA),
        ("layers_1/ffn/up", AdapterShape(rank=5, alpha=7.5)),
    )


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (
            ["q_proj", "v_proj"],
            {},
            "no matrix fits the target q_proj: there are token_embeddings, and attn.qkv_proj, "
            "attn.out_proj, ffn.proj_1, ffn.proj_2 of each layer",
        ),
        (["qkv_proj", "lm_head"], {}, "no matrix fits the target lm_head"),
        (".*q_proj", {}, "no matrix fits the target .*q_proj"),
        ("(", {}, "is no regular expression"),
        ("all-linear", {"layers": [2]}, "there is no layer 2 to adapt: 0 to 1 are"),
        (["token_embeddings"], {"layers": [1]}, "no matrix has an adapter"),
        (["qkv_proj"], {"ranks": {"proj_1": 4}}, "no adapted matrix fits the pattern proj_1"),
        (["qkv_proj"], {"alphas": {"(": 4}}, "is no regular expression"),
    ],
    ids=str,
)
def test_a_target_that_fits_nothing_is_refused(targets, options, message) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        choose_adapters(CONFIG, targets, LORA, **options)


def test_dora_of_the_embedding_is_refused() -> None:
    with pytest.raises(UserError, match=r"DoRA is for linear layers.*leave token_embeddings out"):
        choose_adapters(CONFIG, ["token_embeddings", "qkv_proj"], DORA)


def test_the_head_of_an_untied_model_has_no_adapter() -> None:
    names = adaptable(tiny(tie_embeddings=False, num_layers=1))
    assert "lm_head" not in names
    assert len(names) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is LOHA: only LORA"),
        ({"bias": "all"}, "bias is all: OpenELM has no biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the model's"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which is not computed here"),
        ({"use_qalora": True}, "use_qalora is True, which is not computed here"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config is .*, which is not computed here"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is .*, which is not computed here"),
        ({"of_a_later_peft": 1}, "of_a_later_peft is 1, which is not computed here"),
        ({"r": "8"}, "r is '8', which peft would not write"),
        ({"use_dora": 1}, "use_dora is 1, which peft would not write"),
        ({"r": 0}, "the rank of an adapter is 0"),
        (
            {"r": 4},
            r"not trained beside this model: .*layers.0.attn.qkv_proj.lora_A.weight is \[2, 64\], "
            r"and here it would be \[4, 64\]",
        ),
        (
            {"target_modules": ["qkv_proj"]},
            "layers.0.attn.out_proj is in its adapter_model.safetensors and not in its adapter_con",
        ),
        (
            {"use_dora": True},
            "has no base_model.model.transformer.layers.0.attn.qkv_proj.lora_magnitude_vector",
        ),
    ],
    ids=str,
)
def test_what_another_adapter_would_need_is_refused(tmp_path, fields, message) -> None:
    with pytest.raises(UserError, match=message):
        read_peft(written(tmp_path, **fields), CONFIG)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (tiny(num_layers=1), "it holds base_model.model.transformer.layers.1.attn.*, and this mod"),
        (
            tiny(num_layers=3),
            "layers.2.* is in its adapter_config.json and not in its adapter_model",
        ),
        (tiny(num_layers=2, model_dim=128), r"lora_A.weight is \[2, 64\], and here .* \[2, 128\]"),
        (tiny(num_layers=2, ffn_multipliers=2.0), r"ffn.proj_1.lora_B.weight is \[\d+, 2\], and"),
    ],
    ids=["fewer layers", "more layers", "wider", "another feed-forward"],
)
def test_adapters_for_another_base_are_refused_in_one_sentence(tmp_path, other, message) -> None:
    with pytest.raises(UserError, match=f"was not trained beside this model: .*({message})"):
        read_peft(written(tmp_path), other)


def test_adapters_of_a_llama_are_refused_with_this_models_names(tmp_path) -> None:
    file = written(tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {key: np.zeros((2, 64), np.float32)}, file)
    with pytest.raises(
        UserError, match=r"self_attn.q_proj.*there are token_embeddings, and attn.q"
    ):
        read_peft(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no such directory"),
        ([], "holds no adapter_config.json and adapter_model.safetensors"),
        (["adapter_config.json", "adapters.safetensors"], "is of mlx-lm: merge it with mlx_lm.fus"),
        (["adapter_config.json", "adapter_model.bin"], "adapter_model.bin is a pickle, which is"),
    ],
    ids=str,
)
def test_what_is_no_directory_of_peft_is_refused(tmp_path, files, message) -> None:
    directory = tmp_path / "adapters"
    if files is not None:
        directory.mkdir()
    for name in files or ():
        (directory / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        read_peft(directory, CONFIG)


def test_a_damaged_file_is_named(tmp_path) -> None:
    file = written(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"adapter_model.safetensors is damaged or cut short"):
        read_peft(tmp_path, CONFIG)


@pytest.mark.parametrize("shape", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_what_is_written_is_read_to_the_bit(tmp_path, shape) -> None:
    given = drawn(
        choose_adapters(CONFIG, ["qkv_proj", "proj_2"], shape, ranks={"layers.1.ffn.proj_2": 3})
    )
    write_peft(tmp_path, CONFIG, given.adapters, given.tree, base="apple/OpenELM-270M")
    read = read_peft(tmp_path, CONFIG)
    assert read.adapters == given.adapters
    jax.tree.map(np.testing.assert_array_equal, read.tree, given.tree)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["proj_2", "qkv_proj"]
    assert fields["rank_pattern"] == {"transformer.layers.1.ffn.proj_2": 3}
    assert fields["base_model_name_or_path"] == "apple/OpenELM-270M"


def test_each_layer_has_an_adapter_of_its_own_width(tmp_path) -> None:
    """The paper's layers differ: an adapter is not stacked over them."""
    tensors = load_file(written(tmp_path) / "adapter_model.safetensors")
    name = "base_model.model.transformer.layers.{}.attn.qkv_proj.lora_B.weight"
    assert [tensors[name.format(layer)].shape for layer in (0, 1)] == [(64, 2), (128, 2)]


def test_merging_is_in_float32_and_casts_nothing() -> None:
    """In bfloat16 a change of a thousandth of the weights would be lost."""
    adapters = choose_adapters(CONFIG, ["qkv_proj"], AdapterShape(rank=1, alpha=1))
    weights = jax.tree.map(lambda x: np.ones(x.shape, ml_dtypes.bfloat16), PARAMS)
    tree = jax.tree.map(lambda x: np.full(x.shape, 0.001**0.5, np.float32), drawn(adapters).tree)
    given = StoredAdapters(adapters=adapters, tree=tree, source="here")
    whole = merge_adapters(in_memory(CONFIG, weights), given)
    qkv = whole.read(("layers_1", "attention", "qkv"))
    assert qkv.dtype == np.float32
    np.testing.assert_allclose(qkv, 1.001, rtol=1e-6)
    assert whole.read(("layers_1", "attention", "out")).dtype == ml_dtypes.bfloat16


def test_a_merged_magnitude_twice_as_large_makes_outputs_twice_as_large() -> None:
    adapters = choose_adapters(CONFIG, ["qkv_proj"], DORA)
    tree = drawn(adapters).tree
    path = ("layers_0", "attention", "qkv")
    doubled = jax.tree.map(lambda x: 2 * x if x.ndim == 1 else x, tree)
    once, twice = (
        merge_adapters(
            in_memory(CONFIG, PARAMS),
            StoredAdapters(adapters=adapters, tree=of, source="here"),
        ).read(path)
        for of in (tree, doubled)
    )
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)
    lengths = np.linalg.norm(once.astype(float), axis=0)
    np.testing.assert_allclose(lengths, np.abs(at(tree, path)["magnitude_O"]), rtol=1e-5)


def test_a_merged_embedding_leaves_the_head_as_it_was() -> None:
    given = drawn(choose_adapters(CONFIG, ["token_embeddings"], LORA))
    whole = merge_adapters(in_memory(CONFIG, PARAMS), given)
    assert not whole.config.tie_embeddings
    np.testing.assert_array_equal(whole.read(("head",)), PARAMS["embedding"])
    low = given.tree["embedding"]
    np.testing.assert_allclose(
        whole.read(("embedding",)),
        PARAMS["embedding"] + 2 * low["down_IR"] @ low["up_RO"],
        rtol=0,
        atol=1e-6,
    )


def test_rows_of_no_token_may_differ_in_an_embeddings_adapters(tmp_path) -> None:
    """A model trains with more rows than are published."""
    directory = written(tmp_path, ["token_embeddings"])
    more, fewer = (tiny(num_layers=2, vocab_size=rows) for rows in (48, 36))
    whole = read_peft(directory, CONFIG).tree["embedding"]["down_IR"]
    padded = read_peft(directory, more, pieces=40).tree["embedding"]["down_IR"]
    np.testing.assert_array_equal(padded, np.pad(whole, ((0, 8), (0, 0))))
    cut = read_peft(directory, fewer, pieces=36).tree["embedding"]["down_IR"]
    np.testing.assert_array_equal(cut, whole[:36])
    with pytest.raises(UserError, match=r"lora_embedding_A is \[2, 40\], and here .* \[2, 48\]"):
        read_peft(directory, more, pieces=48)
    with pytest.raises(UserError, match="lora_embedding_A is"):
        read_peft(directory, fewer)


def test_the_papers_models_have_as_many_adapted_matrices_as_peft_counts() -> None:
    """Four of each of 16 layers, and the embedding."""
    assert len(adaptable(load_experiment("270m").model)) == 65
