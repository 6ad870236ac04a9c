"""Repetition penalty against transformers' own, and whatever a row shares a batch with.

Legend: B batch, T time, S length of a row's text, V vocab.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import generate as verb
from openelm_jax.errors import UserError
from openelm_jax.generation import engine
from openelm_jax.generation.language_model import LanguageModel
from openelm_jax.generation.sampling import Sampling, occurs, penalise
from openelm_jax.model.decoder import Decoder
from openelm_jax.tokenizer import train_tokenizer

CONFIG = tiny(num_layers=1, vocab_size=320)
PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))
# No 0 in them: it is what the first is padded with.
PROMPTS = [[1, 5], [1, 44, 2, 61, 8, 8, 100, 250, 31, 7, 19, 4]]
PENALISED = Sampling(repetition_penalty=1.5)


def continue_prompts(prompts, sampling, params=PARAMS, **named):
    return engine.generate(
        CONFIG,
        params,
        prompts,
        max_tokens=30,
        eos_id=-1,
        sampling=sampling,
        dtype="float32",
        **named,
    )


def test_positive_logits_are_divided_and_others_multiplied_once_however_often_a_token_occurs():
    text_BS = jnp.array([[2, 0, 2, 1, 1]])  # the last two stand behind the text
    logits_V = jnp.array([3.0, -1.0, -4.0, 5.0])

    penalised = penalise(logits_V, occurs(text_BS, jnp.array([[3]]), 4)[0, 0], 2.0)

    np.testing.assert_array_equal(penalised, [1.5, -1.0, -8.0, 5.0])


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_logits_become_those_of_transformers(penalty):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    rng = np.random.default_rng(0)
    text_BS = rng.integers(0, 50, (4, 40)).astype(np.int32)
    length_BT = np.array([[1, 2, 3], [7, 8, 9], [20, 21, 22], [38, 39, 40]])
    logits_BTV = rng.normal(size=(4, 3, 50)).astype(np.float32)

    ours = penalise(logits_BTV, occurs(jnp.asarray(text_BS), length_BT, 50), penalty)

    for row, lengths in enumerate(length_BT):
        for place, length in enumerate(lengths):
            text = torch.tensor(text_BS[row : row + 1, :length], dtype=torch.int64)
            expected = theirs(text, torch.tensor(logits_BTV[row : row + 1, place]))[0]
            np.testing.assert_allclose(ours[row, place], expected, rtol=1e-6)


def test_prompt_and_generated_tokens_are_penalised_and_padding_is_not():
    first = continue_prompts(PROMPTS, PENALISED)[0].tokens[0]
    assert first not in PROMPTS[0]
    # Now the padding is the token that the shorter row would go on with.
    rows = jnp.arange(320).at[jnp.array([0, first])].set(jnp.array([first, 0]))
    params = PARAMS | {"embedding": PARAMS["embedding"][rows]}

    together = continue_prompts(PROMPTS, PENALISED, params)

    assert together[0].tokens[0] == 0
    forward = jax.jit(Decoder(CONFIG).apply)
    for prompt, continuation in zip(PROMPTS, together, strict=True):
        tokens = list(prompt)
        for _ in range(30):
            padded_BT = np.zeros((1, 48), np.int32)
            padded_BT[0, : len(tokens)] = tokens
            logits_V = np.array(forward({"params": params}, padded_BT)[0, len(tokens) - 1])
            for token in set(tokens):
                logits_V[token] *= 1 / 1.5 if logits_V[token] > 0 else 1.5
            tokens.append(int(np.argmax(logits_V)))
        assert list(continuation.tokens) == tokens[len(prompt) :]
    assert together != continue_prompts(PROMPTS, Sampling(), params)


def test_a_strong_penalty_repeats_nothing():
    for continuation, prompt in zip(
        continue_prompts(PROMPTS, Sampling(repetition_penalty=1e6)), PROMPTS, strict=True
    ):
        assert len(set(continuation.tokens) - set(prompt)) == 30


def test_no_penalty_compiles_anew():
    continue_prompts(PROMPTS, Sampling())
    before = engine._prefill._cache_size(), engine._decode._cache_size()
    for penalty in (1.1, 0.9, 2.0):
        continue_prompts(PROMPTS, Sampling(repetition_penalty=penalty))
    assert (engine._prefill._cache_size(), engine._decode._cache_size()) == before


@pytest.mark.parametrize("penalty", [0.0, -1.0, 1e-50, 1e39, float("nan"), float("inf")])
def test_a_penalty_without_a_meaning_is_refused(penalty):
    with pytest.raises(UserError, match=r"repetition_penalty is .*: it must be 1"):
        Sampling(repetition_penalty=penalty)


@pytest.mark.heavy
def test_the_command_and_the_package_take_it(tmp_path, capsys):
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    tokenizer = train_tokenizer(lines, 320, tmp_path / "tokenizer.model")
    write_huggingface(tmp_path / "tiny", CONFIG, PARAMS, tokenizer=tokenizer)
    model = LanguageModel(CONFIG, PARAMS, tokenizer, "float32")
    ids = [tokenizer.bos_id, *tokenizer.encode("the a and").tolist()]
    (expected,) = engine.generate(
        CONFIG,
        PARAMS,
        [ids],
        max_tokens=40,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        sampling=PENALISED,
        dtype="float32",
    )
    text = tokenizer.decode([*ids, *expected.tokens])

    (new,) = model.generate(["the a and"], max_tokens=40, repetition_penalty=1.5)
    assert "the a and" + new == text
    command = ["--from", str(tmp_path / "tiny"), "--prompt", "the a and", "--max-tokens", "40"]
    verb.main([*command, "--temperature", "0", "--repetition-penalty", "1.5"])
    assert capsys.readouterr().out == text + "\n"
