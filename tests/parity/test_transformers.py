"""What transformers and peft do with an export that has the model's code beside it."""

from __future__ import annotations

import json
import os

import corpora
import jax
import numpy as np
import pytest
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.generation import engine
from openelm_jax.generation.sampling import Sampling
from openelm_jax.generation.speculative import PromptLookup
from openelm_jax.model.decoder import Decoder
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.weights.huggingface_config import fields_of_config
from openelm_jax.weights.torch_model import write_code

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = tiny(vocab_size=300)
PROMPT = [1, 5, 9, 30, 17, 2, 44, 100]


@pytest.fixture(scope="module", autouse=True)
def _no_hub(modules_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules_cache)
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, std=0.125)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, params):
    plain = tmp_path_factory.mktemp("plain") / "tiny"
    write_huggingface(plain, CONFIG, params)
    directory = tmp_path_factory.mktemp("exports") / "tiny"
    export.main(f"--from {plain} --to hf --dtype float32 --with-code --out {directory}".split())
    return directory


@pytest.fixture(scope="module")
def model(exported):
    return load(exported)


def load(directory, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, **options
    ).eval()


@pytest.fixture(scope="module")
def ours_greedy(params):
    (new,) = engine.generate(
        CONFIG,
        params,
        [PROMPT],
        max_tokens=64,
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 4},
    ],
    ids=str,
)
def test_greedy_continuations_are_ours(model, ours_greedy, options):
    theirs = theirs_greedy(model, [PROMPT], 64, **options)[0, len(PROMPT) :].tolist()

    assert theirs == ours_greedy
    assert len(set(theirs)) > 1


@pytest.mark.heavy
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_looking_up_proposals_and_penalising_repetition_are_ours_too(model, params, penalty):
    theirs = theirs_greedy(
        model, [PROMPT], 64, prompt_lookup_num_tokens=10, repetition_penalty=penalty
    )
    (ours,) = engine.generate(
        CONFIG,
        params,
        [PROMPT],
        max_tokens=64,
        eos_id=-1,
        sampling=Sampling(repetition_penalty=penalty),
        dtype="float32",
        speculation=PromptLookup(10),
    )
    assert theirs[0, len(PROMPT) :].tolist() == list(ours.tokens)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_a_row_padded_on_the_left_goes_on_as_it_does_alone(model, options):
    short = PROMPT[:5]
    batch = [[0, 0, 0, *short], PROMPT]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])

    together = theirs_greedy(model, batch, 12, attention_mask=mask, **options)
    for row, prompt in enumerate([short, PROMPT]):
        alone = theirs_greedy(model, [prompt], 12)
        assert together[row, 8:].tolist() == alone[0, len(prompt) :].tolist()
    with torch.no_grad():
        padded = model(torch.tensor(batch), attention_mask=mask).logits
        alone = model(torch.tensor([short])).logits
    assert torch.isfinite(padded).all()
    assert (padded[0, 3:] - alone[0]).abs().max() < 1e-5


def test_several_tokens_after_a_cache_see_what_they_see_without(model):
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        whole = model(tokens).logits
        cached = model(tokens[:, :3], use_cache=True)
        cache = cached.get("cache", cached.get("past_key_values"))
        rest = model(tokens[:, 3:], past_key_values=cache, use_cache=True).logits
    assert (rest - whole[:, 3:]).abs().max() < 1e-5


def test_padding_hides_nothing_from_the_others_and_leaves_no_nan(model):
    batch = torch.tensor([PROMPT, PROMPT, PROMPT])
    mask = torch.tensor([[1] * 8, [1, 1, 1, 1, 1, 0, 0, 0], [0] * 8])
    with torch.no_grad():
        alone = model(batch[:1]).logits[0]
        padded = model(batch, attention_mask=mask).logits
    assert torch.isfinite(padded).all()
    assert (padded[0] - alone).abs().max() < 1e-5
    assert (padded[1, :5] - alone[:5]).abs().max() < 1e-5


@pytest.mark.heavy
def test_in_bfloat16_it_is_as_near_to_float32_as_ours(exported, params, model):
    tokens = torch.tensor([PROMPT])
    in_bfloat16 = load(exported, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = model(tokens).logits.numpy()
        theirs = in_bfloat16(tokens).logits
    decoder = Decoder(CONFIG, dtype="bfloat16")
    ours = jax.jit(decoder.apply)({"params": params}, np.array([PROMPT]))

    assert theirs.dtype == torch.bfloat16
    error = np.abs(theirs.float().numpy() - exact).mean()
    assert 0 < error < 1.5 * np.abs(np.asarray(ours, np.float32) - exact).mean()
    dynamic, static = (
        theirs_greedy(in_bfloat16, [PROMPT], 16, cache_implementation=kind).tolist()
        for kind in (None, "static")
    )
    assert dynamic == static


def test_it_loads_in_bfloat16_and_counts_the_head_once(exported):
    model = load(exported, dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.transformer.token_embeddings.weight
    assert model.config.num_hidden_layers == CONFIG.num_layers
    assert model.config.hidden_size == CONFIG.model_dim


@pytest.mark.parametrize("tied", [True, False])
def test_automodel_is_the_model_without_its_head(tmp_path, tied):
    config = tiny(tie_embeddings=tied)
    write_huggingface(tmp_path / "hf", config, random_params(config))
    write_code(tmp_path / "hf")
    tokens = torch.tensor([PROMPT[:4]]) % config.vocab_size

    whole, options = load(tmp_path / "hf"), {"trust_remote_code": True}
    inner = transformers.AutoModel.from_pretrained(tmp_path / "hf", **options).eval()

    with torch.no_grad():
        hidden = inner(tokens).last_hidden_state
        assert torch.equal(whole.lm_head(hidden), whole(tokens).logits)


def test_tuples_and_hidden_states_come_by_argument_and_by_configuration(exported, model):
    tokens = torch.tensor([PROMPT])
    configured = load(exported, return_dict=False, output_hidden_states=True)
    with torch.no_grad():
        named = model(tokens, labels=tokens, output_hidden_states=True, use_cache=False)
        asked = model(
            tokens, labels=tokens, output_hidden_states=True, use_cache=False, return_dict=False
        )
        unasked = configured(tokens, labels=tokens, use_cache=False)

    assert len(named.hidden_states) == CONFIG.num_layers + 1
    for loss, logits, hidden_states in (asked, unasked):
        assert torch.equal(loss, named.loss)
        assert torch.equal(logits, named.logits)
        assert all(map(torch.equal, hidden_states, named.hidden_states))


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
    add_the_matrix_that_apples_code_never_calls(tmp_path / "untied" / "model.safetensors")

    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "untied", trust_remote_code=True, output_loading_info=True
    )

    assert not any(loaded.values())
    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), params["head"])
    np.testing.assert_array_equal(
        model.transformer.token_embeddings.weight.detach().numpy(), params["embedding"]
    )


def add_the_matrix_that_apples_code_never_calls(file):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(file)
    tensors["transformer.classifier.weight"] = tensors["lm_head.weight"] * 0
    save_file(tensors, file, {"format": "pt"})


def test_a_new_model_is_drawn_as_ours_is(exported):
    config = transformers.AutoConfig.from_pretrained(exported, trust_remote_code=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)

    width, layers = CONFIG.model_dim, CONFIG.num_layers
    into_residual = ("attn.out_proj.weight", "ffn.proj_2.weight")
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all(), name
            continue
        expected = width**-0.5 * ((2 * layers) ** -0.5 if name.endswith(into_residual) else 1)
        assert abs(weight.std().item() / expected - 1) < 0.1, name
        assert abs(weight.mean().item()) < 0.1 * expected, name
    assert model.lm_head.weight is model.transformer.token_embeddings.weight


@pytest.mark.parametrize(
    "changes",
    [  # numbers that rounding at the wrong place would turn into other shapes
        {"num_layers": 2, "qkv_multipliers": 1.118, "ffn_multipliers": 0.504},
        {"num_layers": 2, "qkv_multipliers": (0.678, 1.07), "ffn_multipliers": (0.5, 3.765)},
        {"qkv_multipliers": 0.504, "ffn_multipliers": 1.344},
        {"qkv_multipliers": (0.51, 2.515), "ffn_multipliers": (0.51, 2.515)},
        {"qkv_multipliers": (0.513, 0.9, 0.777), "ffn_multipliers": (1.111, 2.0, 3.333)},
        {"num_layers": 1, "qkv_multipliers": (0.513, 0.9), "ffn_multipliers": 1.111},
    ],
    ids=str,
)
def test_its_configuration_makes_our_shapes_of_our_fields(changes):
    from openelm_jax.weights.remote_code.configuration_openelm import OpenELMConfig

    config = tiny(model_dim=1280, head_dim=4, ffn_dim_divisor=8, **changes)
    theirs = OpenELMConfig(**json.loads(json.dumps(fields_of_config(config, "float32"))))
    shapes = layer_shapes(config)
    assert theirs.ffn_dims == [shape.ffn_dim for shape in shapes]
    assert theirs.num_query_heads == [shape.num_query_heads for shape in shapes]
    assert theirs.num_kv_heads == [shape.num_kv_heads for shape in shapes]


def test_its_configuration_refuses_heads_that_the_multipliers_do_not_make():
    from openelm_jax.weights.remote_code.configuration_openelm import OpenELMConfig

    fields = fields_of_config(CONFIG, "float32")
    with pytest.raises(ValueError, match=r"num_query_heads is \[9, 9, 9\], but the multipliers"):
        OpenELMConfig(**fields | {"num_query_heads": [9, 9, 9]})


def test_checkpointed_gradients_are_the_same_and_the_loss_is_the_mean_of_the_shifted(exported):
    tokens = torch.tensor([PROMPT])
    gradients = []
    for checkpointing in (False, True):
        model = load(exported).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        # With checkpoints a cache would be filled twice: asking for one changes nothing.
        out = model(tokens, labels=tokens, use_cache=checkpointing)
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


def test_the_tokenizer_beside_the_code_needs_none_of_it(tmp_path):
    """Without a word on the code transformers would ask, whatever it is for."""
    tokenizer = corpora.tokenizer()
    config = tiny(vocab_size=tokenizer.vocab_size)
    write_huggingface(tmp_path / "hf", config, random_params(config), tokenizer=tokenizer)
    write_code(tmp_path / "hf")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False)

    text = "the people  of 1790</s>"
    assert theirs(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)]


def test_without_the_code_nothing_asks_whether_to_run_it(tmp_path):
    write_huggingface(tmp_path / "plain", CONFIG, random_params(CONFIG))

    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises((ValueError, KeyError), match="openelm"):
        transformers.AutoConfig.from_pretrained(tmp_path / "plain")
