"""peft's adapters on the model's PyTorch code: the same logits, gradients, merges and files."""

from __future__ import annotations

import filecmp
import json

import jax
import numpy as np
import pytest
from small_models import random_params, tiny

from openelm_jax.model.adapters import AdapterShape
from openelm_jax.model.decoder import Decoder, init_adapters
from openelm_jax.weights.adapters import StoredAdapters, choose_adapters, merge_adapters
from openelm_jax.weights.peft import read_peft, write_peft
from openelm_jax.weights.stored import in_memory, read_params
from openelm_jax.weights.torch_model import load_params, torch_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

CONFIG = tiny(num_layers=2)
PARAMS = random_params(CONFIG, std=0.125)
TOKENS_BT = np.random.default_rng(1).integers(0, 40, (2, 12))
PEFT = {
    "LoRA": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "DoRA": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": r".*(qkv_proj|ffn\.proj_\d)",
        "rank_pattern": {"proj_1": 5, r"layers\.1\.attn.qkv_proj": 1},
        "alpha_pattern": {"ffn.proj_[12]": 7},
    },
    "embedding": {"r": 3, "lora_alpha": 6, "target_modules": ["token_embeddings", "out_proj"]},
    "a layer": {"target_modules": ["attn.out_proj", "proj_2"], "layers_to_transform": [1]},
    "but": {"target_modules": ["qkv_proj", "proj_2"], "exclude_modules": ["layers.0.ffn.proj_2"]},
}


def torch_base():
    model = torch_model(CONFIG)
    load_params(model, in_memory(CONFIG, PARAMS))
    return model.eval()


def peft_model(**fields):
    """Return a model whose adapters are drawn, B and the lengths too."""
    model = peft.get_peft_model(torch_base(), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def logits_of(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS_BT)).logits.numpy()


def our_logits(given: StoredAdapters) -> np.ndarray:
    decoder = Decoder(CONFIG, adapters=given.adapters)
    return jax.jit(decoder.apply)({"params": PARAMS, "adapters": given.tree}, TOKENS_BT)


@pytest.fixture(scope="module", params=PEFT, ids=str)
def saved(request, tmp_path_factory):
    """A directory that peft wrote, and the model that it is of."""
    model = peft_model(**PEFT[request.param])
    directory = tmp_path_factory.mktemp("peft")
    model.save_pretrained(directory)
    return directory, model


def test_logits_are_pefts_with_the_adapters_beside_the_weights_and_merged(saved) -> None:
    directory, model = saved
    given = read_peft(directory, CONFIG)
    theirs_BTV = logits_of(model)
    assert np.abs(theirs_BTV - logits_of(torch_base())).max() > 0.1
    np.testing.assert_allclose(our_logits(given), theirs_BTV, rtol=0, atol=1e-5)

    whole = merge_adapters(in_memory(CONFIG, PARAMS), given)
    merged_BTV = jax.jit(Decoder(whole.config).apply)({"params": read_params(whole)}, TOKENS_BT)
    np.testing.assert_allclose(merged_BTV, theirs_BTV, rtol=0, atol=1e-5)


def test_what_we_write_is_byte_for_byte_what_peft_wrote_and_it_loads_it(saved, tmp_path) -> None:
    directory, model = saved
    given = read_peft(directory, CONFIG)
    write_peft(tmp_path, CONFIG, given.adapters, given.tree, base="somewhere")

    name = "adapter_model.safetensors"
    assert filecmp.cmp(directory / name, tmp_path / name, shallow=False)
    loaded = peft.PeftModel.from_pretrained(torch_base(), tmp_path).eval()
    np.testing.assert_array_equal(logits_of(loaded), logits_of(model))
    again = read_peft(tmp_path, CONFIG)
    assert again.adapters == given.adapters
    jax.tree.map(np.testing.assert_array_equal, again.tree, given.tree)


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "embedding"])
def test_a_steps_gradients_are_pefts(name, tmp_path) -> None:
    model = peft_model(**PEFT[name])
    model.save_pretrained(tmp_path)
    given = read_peft(tmp_path, CONFIG)
    model.train()
    model(torch.from_numpy(TOKENS_BT)).logits.logsumexp(-1).mean().backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    model.save_pretrained(tmp_path / "gradients")
    theirs = read_peft(tmp_path / "gradients", CONFIG).tree

    def loss(tree):
        variables = {"params": PARAMS, "adapters": tree}
        logits_BTV = Decoder(CONFIG, adapters=given.adapters).apply(variables, TOKENS_BT)
        return jax.nn.logsumexp(logits_BTV, axis=-1).mean()

    ours = jax.jit(jax.grad(loss))(given.tree)
    for ours_leaf, theirs_leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(ours_leaf, theirs_leaf, rtol=0, atol=1e-5)
        assert np.linalg.norm(ours_leaf - theirs_leaf) < 1e-5 * np.linalg.norm(theirs_leaf)


def test_new_adapters_begin_as_pefts_do(tmp_path) -> None:
    shape = AdapterShape(rank=4, alpha=8, dora=True)
    adapters = choose_adapters(CONFIG, "all-linear", shape)
    tree = init_adapters(CONFIG, adapters, PARAMS, seed=0)
    model = peft.get_peft_model(
        torch_base(), peft.LoraConfig(task_type="CAUSAL_LM", **PEFT["DoRA"])
    )
    model.save_pretrained(tmp_path)
    given = read_peft(tmp_path, CONFIG)

    assert given.adapters == adapters
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(given.tree), strict=True
    ):
        if path[-1].key == "down_IR":
            assert abs(np.std(ours) / np.std(theirs) - 1) < 0.2
            assert np.abs(ours).max() <= len(ours) ** -0.5
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_adapters_in_bfloat16_are_read_to_the_bit(tmp_path) -> None:
    model = peft_model(**PEFT["LoRA"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tree = read_peft(tmp_path, CONFIG).tree
    theirs = model.base_model.model.transformer.layers[1].ffn.proj_1.lora_B.default.weight
    np.testing.assert_array_equal(
        tree["layers_1"]["ffn"]["up"]["up_RO"], theirs.detach().float().numpy().T
    )


@pytest.mark.parametrize("name", ["norm", "proj_2", "token_embeddings"])
def test_modules_that_were_trained_whole_take_the_place_of_the_models(name, tmp_path) -> None:
    model = peft.get_peft_model(
        torch_base(), peft.LoraConfig(target_modules=["qkv_proj"], modules_to_save=[name])
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(tmp_path)
    theirs_BTV = logits_of(model)

    whole = merge_adapters(in_memory(CONFIG, PARAMS), read_peft(tmp_path, CONFIG))
    ours_BTV = jax.jit(Decoder(whole.config).apply)({"params": read_params(whole)}, TOKENS_BT)
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == [name]
