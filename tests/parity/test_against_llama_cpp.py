"""llama.cpp loads what we export and computes the same; and we read what its quantiser writes.

Needs llama-cpp-python, which is compiled when it is installed (8 to 15 minutes, cmake and a C++
compiler) and therefore in no extra: `tests/parity/llama_cpp.sh` installs it and runs this file.
"""

import ctypes
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from corpora import FRAGMENTS, documents
from small_models import random_params, tiny

from openelm_jax.generation.language_model import language_model, load
from openelm_jax.generation.sampling import Sampling
from openelm_jax.tokenizer import Tokenizer, train_tokenizer
from openelm_jax.weights.gguf_file import open_gguf, write_gguf
from openelm_jax.weights.huggingface import open_huggingface
from openelm_jax.weights.stored import in_memory, read_params

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = pytest.mark.heavy

FIXTURE = Path(__file__).parent.parent / "data" / "tiny-openelm"
PIECES = 512
TOKENS = np.random.default_rng(1).integers(3, PIECES, 48)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """As many pieces as the fixture has rows."""
    return train_tokenizer(documents(200), PIECES, tmp_path_factory.mktemp("t") / "512.model")


@pytest.fixture(scope="module")
def fixture_file(tokenizer, tmp_path_factory) -> Path:
    """Apple's model in miniature, exported as float32."""
    folder = tmp_path_factory.mktemp("fixture")
    with open_huggingface(FIXTURE) as stored:
        write_gguf(folder, dataclasses.replace(stored, tokenizer=tokenizer), outtype="f32")
    return folder / "model.gguf"


def their(file: Path, context: int = 128):
    """Return llama.cpp's model with keys and values kept in float32."""
    return llama_cpp.Llama(
        str(file),
        n_ctx=context,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def their_logits(file: Path, tokens: np.ndarray) -> np.ndarray:
    model = their(file)
    model.eval(tokens.tolist())
    return np.array(model.scores[: len(tokens)])


def quantize(file: Path, kind: str) -> Path:
    """Return the file that llama.cpp's own quantiser makes; ALL_F32 undoes it."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    params.allow_requantize = True
    params.nthread = 1
    out = file.with_name(f"{kind}.gguf")
    assert not llama_cpp.llama_model_quantize(
        str(file).encode(), str(out).encode(), ctypes.byref(params)
    )
    return out


def test_the_fixtures_logits_are_ours_and_apples(fixture_file):
    tokens = np.load(FIXTURE / "ref_ids.npy").reshape(-1)[:96]
    apples = np.load(FIXTURE / "ref_logits.npy").reshape(-1, PIECES)[:96]
    theirs = their_logits(fixture_file, tokens)
    ours = load(fixture_file, dtype="float32").logits(tokens[None])[0]

    print(f"ours {np.abs(theirs - ours).max():.2e}, Apple's {np.abs(theirs - apples).max():.2e}")
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)
    np.testing.assert_allclose(theirs, apples, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_gqa_groups": 1, "rope_base": 500000.0},
        {"num_gqa_groups": 4, "qkv_multipliers": (0.25, 1.0, 0.5)},
        {"head_dim": 32, "num_gqa_groups": 1, "ffn_multipliers": (3.0, 0.25, 1.0)},
        {"num_layers": 1},
    ],
    ids=[
        "as published",
        "no groups, rope 500000",
        "layers of their own",
        "wide heads",
        "one layer",
    ],
)
def test_norms_away_from_1_and_other_widths(tmp_path, tokenizer, changes):
    config = tiny(vocab_size=PIECES, **changes)
    params = random_params(config, std=0.125)
    write_gguf(tmp_path, in_memory(config, params, tokenizer), outtype="f32")

    theirs = their_logits(tmp_path / "model.gguf", TOKENS)

    ours = language_model(config, params, None, "float32").logits(TOKENS[None])[0]
    assert ours.std() > 0.5
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * ours.std())


def test_sixty_four_greedy_tokens_are_the_same(fixture_file):
    model = their(fixture_file)
    ours = load(fixture_file, dtype="float32")
    for prompt in ("the people of", "1790 ", ""):
        greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
        (completion,) = ours.complete([prompt], 64, greedy)
        model.reset()
        model.eval(model.tokenize(prompt.encode(), add_bos=True))
        chosen = []
        for _ in completion.tokens:
            chosen.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(chosen[-1:])
        assert chosen == list(completion.tokens)
        assert len(chosen) == 64 or completion.finish_reason == "stop"


def test_its_completion_of_a_text_is_ours(fixture_file):
    theirs = their(fixture_file)("the people of", max_tokens=32, temperature=0, repeat_penalty=1.0)
    ours = load(fixture_file, dtype="float32").generate(["the people of"], 32)

    # Bytes that are no text: it leaves them out, we show that there are some.
    assert theirs["choices"][0]["text"] == ours[0].replace("\ufffd", "")
    assert len(ours[0]) > 32


def test_text_has_the_same_ids_and_one_bos(fixture_file, tokenizer):
    model = their(fixture_file)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    assert llama_cpp.llama_vocab_get_add_bos(vocabulary)
    assert not llama_cpp.llama_vocab_get_add_eos(vocabulary)
    assert (model.token_bos(), model.token_eos()) == (tokenizer.bos_id, tokenizer.eos_id)

    rng = np.random.default_rng(0)
    texts = ["Hello", " Hello", "  Hello", "x</s>Hello", *FRAGMENTS]
    texts += ["".join(rng.choice(FRAGMENTS, 12)) for _ in range(200)]
    for text in texts:
        ids = model.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text).tolist()], repr(text)


@pytest.mark.parametrize("outtype", ["bf16", "f16", "q8_0"])
def test_smaller_types_stand_for_the_same_numbers_and_run(tmp_path, tokenizer, outtype):
    config = tiny(vocab_size=PIECES, ffn_dim_divisor=32)
    params = random_params(config, std=0.125)
    write_gguf(tmp_path, in_memory(config, params, tokenizer), outtype=outtype)
    ours = load(tmp_path, dtype="float32").logits(TOKENS[None])[0]

    as_float32 = their_logits(quantize(tmp_path / "model.gguf", "ALL_F32"), TOKENS)
    directly = their_logits(tmp_path / "model.gguf", TOKENS)

    np.testing.assert_allclose(as_float32, ours, rtol=0, atol=2e-5 * ours.std())
    # It rounds activations to the type of the weights as well, we do not.
    off = np.sqrt(np.mean((directly - ours) ** 2)) / ours.std()
    print(f"{outtype}: {off:.2e} of the standard deviation")
    assert off < 0.1


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_0", "Q6_K", "Q8_0"])
def test_what_its_quantiser_writes_is_read_as_it_reads_it(tmp_path, tokenizer, kind):
    config = tiny(vocab_size=PIECES, model_dim=256, ffn_dim_divisor=256, qkv_multipliers=1.0)
    params = random_params(config)
    write_gguf(tmp_path, in_memory(config, params, tokenizer), outtype="f32")
    file = quantize(tmp_path / "model.gguf", f"MOSTLY_{kind}")

    with open_gguf(file) as ours, open_gguf(quantize(file, "ALL_F32")) as theirs:
        for stored in (ours, theirs):
            assert stored.config == config
            text = "the people of 1790"
            np.testing.assert_array_equal(stored.tokenizer.encode(text), tokenizer.encode(text))
        ours_params, theirs_params = read_params(ours), read_params(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours_params, theirs_params)
    assert np.abs(ours_params["embedding"] - params["embedding"]).max() > 0
