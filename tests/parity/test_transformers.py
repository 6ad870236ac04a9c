"""What transformers and peft do with an export that has the model's code beside it."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax.generation import engine
from openelm_jax.generation.sampling import Sampling
from openelm_jax.weights.torch_model import write_code

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = tiny(vocab_size=300)
PROMPT = [1, 5, 9, 30, 17, 2, 44, 100]


@pytest.fixture(scope="module", autouse=True)
def _no_hub(tmp_path_factory):
    """Copies of the code that transformers runs stay in a directory of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.dynamic_module_utils.HF_MODULES_CACHE",
            str(tmp_path_factory.mktemp("modules")),
        )
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, std=0.125)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, params):
    directory = tmp_path_factory.mktemp("exports") / "tiny"
    write_huggingface(directory, CONFIG, params)
    write_code(directory)
    return directory


@pytest.fixture(scope="module")
def model(exported):
    return load(exported)


def load(directory, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, **options
    ).eval()


def ours_greedy(params, prompt, max_tokens):
    (new,) = engine.generate(
        CONFIG,
        params,
        [prompt],
        max_tokens=max_tokens,
        eos_id=-1,
        vocab_size=CONFIG.vocab_size,
        sampling=Sampling(temperature=0, top_k=0, top_p=1.0, seed=0),
        dtype="float32",
    )
    return list(new.tokens)


def theirs_greedy(model, prompts, max_tokens, **options):
    return model.generate(
        torch.tensor(prompts),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_greedy_continuations_are_ours(model, params, options):
    theirs = theirs_greedy(model, [PROMPT], 64, **options)[0, len(PROMPT) :].tolist()

    assert theirs == ours_greedy(params, PROMPT, 64)
    assert len(set(theirs)) > 1


def test_a_row_padded_on_the_left_goes_on_as_it_does_alone(model):
    short = PROMPT[:5]
    batch = [[0, 0, 0, *short], PROMPT]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])

    together = theirs_greedy(model, batch, 12, attention_mask=mask)
    for row, prompt in enumerate([short, PROMPT]):
        alone = theirs_greedy(model, [prompt], 12)
        assert together[row, 8:].tolist() == alone[0, len(prompt) :].tolist()
    with torch.no_grad():
        padded = model(torch.tensor(batch), attention_mask=mask).logits
        alone = model(torch.tensor([short])).logits
    assert torch.isfinite(padded).all()
    assert (padded[0, 3:] - alone[0]).abs().max() < 1e-5


def test_it_loads_in_bfloat16_and_counts_the_head_once(exported):
    model = load(exported, dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.transformer.token_embeddings.weight
    assert model.config.num_hidden_layers == CONFIG.num_layers
    assert model.config.hidden_size == CONFIG.model_dim


def test_what_transformers_saves_reads_back_bit_for_bit(model, params, tmp_path):
    model.save_pretrained(tmp_path / "saved")

    config, read = read_huggingface(tmp_path / "saved")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_an_untied_model_has_a_head_of_its_own(tmp_path):
    config = tiny(tie_embeddings=False)
    params = random_params(config)
    write_huggingface(tmp_path / "untied", config, params)
    write_code(tmp_path / "untied")

    model = load(tmp_path / "untied")

    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), params["head"])
    np.testing.assert_array_equal(
        model.transformer.token_embeddings.weight.detach().numpy(), params["embedding"]
    )


def test_checkpointed_gradients_are_the_same_and_the_loss_is_the_mean_of_the_shifted(exported):
    tokens = torch.tensor([PROMPT])
    gradients = []
    for checkpointing in (False, True):
        model = load(exported).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], tokens[0, 1:])
    assert abs(out.loss.item() - expected.item()) < 1e-6
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_peft_trains_and_merges_adapters_on_all_four_matrices(exported):
    peft = pytest.importorskip("peft")
    modules = ["qkv_proj", "out_proj", "proj_1", "proj_2"]
    model = peft.get_peft_model(
        load(exported), peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    )
    tokens = torch.tensor([PROMPT])
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    losses = []
    for _ in range(4):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        unmerged = model(tokens).logits
        merged = model.merge_and_unload()(tokens).logits

    assert losses[-1] < losses[0]
    assert (merged - unmerged).abs().max() < 1e-4


def test_without_the_code_nothing_asks_whether_to_run_it(tmp_path):
    write_huggingface(tmp_path / "plain", CONFIG, random_params(CONFIG))

    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises((ValueError, KeyError), match="openelm"):
        transformers.AutoConfig.from_pretrained(tmp_path / "plain")
