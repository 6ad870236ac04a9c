"""Cached, batched decoding against whole forward passes; sampling against closed forms; the verb.

Legend: B batch, T time, V vocab.
"""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_directories import write_huggingface

import openelm_jax
from openelm_jax import generate as verb
from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation import engine
from openelm_jax.generation.language_model import language_model, read_model
from openelm_jax.generation.sampling import Request, Sampling, choose
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.tokenizer import train_tokenizer
from openelm_jax.weights.load import open_weights

CONFIG = ModelConfig(
    num_layers=2,
    model_dim=64,
    head_dim=16,
    vocab_size=320,
    num_gqa_groups=2,
    ffn_dim_divisor=16,
    context_length=32,
)
GREEDY = Sampling()
WARM = Sampling(temperature=1.0, top_p=0.95, seed=3)
PROMPTS = [[1], [1, 44, 2, 61, 8, 8, 100, 250, 31, 7, 19, 4]]


def random_params(config: ModelConfig):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return jax.tree.map(
        lambda leaf: rng.normal(leaf.ndim == 1, 0.2, leaf.shape).astype(np.float32), shapes
    )


PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))
CHOOSE = jax.jit(choose)
FORWARD = jax.jit(Decoder(CONFIG).apply)


def logits_after(tokens):
    padded_BT = np.zeros((1, 64), np.int32)
    padded_BT[0, : len(tokens)] = tokens
    return FORWARD({"params": PARAMS}, padded_BT)[0, len(tokens) - 1]


# One or two prompts, always 40 tokens: few shapes, few compilations.
def continue_prompts(prompts, sampling=GREEDY, eos_id=-1, **named):
    return engine.generate(
        CONFIG,
        PARAMS,
        prompts,
        max_tokens=40,
        eos_id=eos_id,
        sampling=sampling,
        dtype="float32",
        **named,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    return train_tokenizer(lines, 320, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(scope="module")
def model(tokenizer):
    return language_model(CONFIG, PARAMS, tokenizer, "float32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("exports") / "tiny"
    write_huggingface(path, CONFIG, PARAMS, tokenizer=tokenizer)
    return str(path)


# --- decoding ----------------------------------------------------------------------------------


def test_cached_decoding_takes_the_tokens_of_whole_forward_passes():
    continuations = continue_prompts(PROMPTS)

    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        tokens = list(prompt)
        for _ in range(40):
            tokens.append(int(np.argmax(logits_after(tokens))))
        assert list(continuation.tokens) == tokens[len(prompt) :]
        assert continuation.finish_reason == "length"


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_prompt_is_continued_in_a_batch_as_alone(sampling):
    together = continue_prompts(PROMPTS, sampling)

    alone = [
        continue_prompts([prompt], sampling, first_row=i)[0] for i, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


def test_samples_depend_on_seed_and_row_and_on_nothing_else():
    same_prompt = [PROMPTS[1]] * 2
    first, again = (continue_prompts(same_prompt, WARM) for _ in range(2))
    other_seed = continue_prompts(same_prompt, dataclasses.replace(WARM, seed=4))

    assert first == again
    assert len({c.tokens for c in first + other_seed}) == 4


def test_a_row_ends_at_its_end_token_and_the_others_go_on():
    free = [c.tokens for c in continue_prompts(PROMPTS)]
    eos_id = free[0][10]

    ended = continue_prompts(PROMPTS, eos_id=eos_id)

    for before, after in zip(free, ended, strict=True):
        if eos_id in before:
            assert after.tokens == before[: before.index(eos_id)]
            assert after.finish_reason == "stop"
        else:
            assert after.tokens == before
            assert after.finish_reason == "length"
    assert {c.finish_reason for c in ended} == {"stop", "length"}


def test_a_row_that_has_ended_streams_nothing_but_its_end():
    eos_id = continue_prompts(PROMPTS)[0].tokens[10]

    blocks = engine.stream(
        CONFIG,
        PARAMS,
        PROMPTS,
        max_tokens=40,
        eos_id=eos_id,
        sampling=GREEDY,
        dtype="float32",
    )

    row = np.concatenate(list(blocks), axis=1)[0].tolist()
    assert set(row[row.index(eos_id) :]) == {eos_id}


def test_the_loop_ends_when_every_row_has_ended():
    eos_id = continue_prompts(PROMPTS[:1])[0].tokens[2]

    blocks = engine.stream(
        CONFIG,
        PARAMS,
        PROMPTS[:1],
        max_tokens=40,
        eos_id=eos_id,
        sampling=GREEDY,
        dtype="float32",
    )

    assert sum(block.shape[1] for block in blocks) <= 3


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_ids_without_a_piece_are_never_chosen(sampling):
    likeliest = int(np.argmax(logits_after(PROMPTS[1])))

    (continuation,) = continue_prompts(PROMPTS[1:], sampling, vocab_size=likeliest)

    assert max(continuation.tokens) < likeliest


def test_a_text_past_the_context_length_goes_on_with_one_warning(capsys):
    blocks = engine.stream(
        CONFIG,
        PARAMS,
        PROMPTS[:1],
        max_tokens=40,
        eos_id=-1,
        sampling=GREEDY,
        dtype="float32",
        block=1,
    )
    said_at = []
    for count, _ in enumerate(blocks, start=1):
        if "longer than the 32 tokens" in capsys.readouterr().err:
            said_at.append(count)

    # The prompt is one token; the tokens past the context are those of whole forward passes above.
    assert said_at == [32]
    assert count == 40


def test_bfloat16_decodes_with_a_bfloat16_cache():
    state = jax.eval_shape(
        lambda: engine._prefill(
            CONFIG,
            "bfloat16",
            24,
            None,
            PARAMS,
            np.zeros((1, 16), np.int32),
            Request(np.zeros(1, np.uint32), np.ones(1, np.int32), 320, 2, 15, 0, 0.0, 0, 1.0, 1.0),
        )
    )
    assert {x.dtype for x in jax.tree.leaves(state.cache)} == {jnp.dtype("bfloat16")}
    # 32 and 64 wide keys: as many heads as the layer has.
    assert [layer.key_MSH.shape for layer in state.cache] == [(1, 24, 16), (2, 24, 16)]


@pytest.mark.parametrize(("dtype", "highest"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_not_left_to_the_accelerators_default(dtype, highest):
    decoder = Decoder(CONFIG, dtype=dtype)
    text = str(
        jax.make_jaxpr(lambda tokens: engine.apply(decoder, PARAMS, "__call__", tokens))(
            jnp.zeros((1, 4), jnp.int32)
        )
    )
    assert ("HIGHEST" in text) == highest


@pytest.mark.parametrize(
    ("length", "padded"),
    [(1, 16), (16, 16), (17, 24), (33, 40), (57, 64), (65, 96), (129, 160), (225, 256), (257, 512)],
)
def test_lengths_are_padded_to_few_buckets(length, padded):
    assert engine.bucket(length) == padded


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((1.0, 0, 1.0), [0.5, 0.25, 0.15, 0.1]),
        ((0.5, 0, 1.0), [25 / 34.5, 6.25 / 34.5, 2.25 / 34.5, 1 / 34.5]),
        ((1.0, 2, 1.0), [2 / 3, 1 / 3, 0, 0]),
        ((1.0, 0, 0.6), [2 / 3, 1 / 3, 0, 0]),
        ((1.0, 0, 0.8), [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ((1.0, 2, 0.6), [1, 0, 0, 0]),
        ((1.0, 0, 1e-6), [1, 0, 0, 0]),
        ((0.0, 0, 1.0), [1, 0, 0, 0]),
    ],
    ids=lambda value: (
        "temperature {}, top_k {}, top_p {}".format(*value) if len(value) == 3 else ""
    ),
)
def test_tokens_are_drawn_with_the_probabilities_that_the_settings_leave(settings, expected):
    # The likeliest is last: the order of ids must not matter.
    logits_BV = jnp.log(jnp.broadcast_to(jnp.array([0.1, 0.15, 0.25, 0.5]), (20000, 4)))
    keys_B = jax.random.split(jax.random.key(0), 20000)

    tokens_B = CHOOSE(logits_BV, keys_B, *map(jnp.asarray, settings))

    counts = Counter(np.asarray(tokens_B).tolist())
    shares = [counts[3 - i] / 20000 for i in range(4)]
    np.testing.assert_allclose(shares, expected, atol=0.015)
    assert [share == 0 for share in shares] == [e == 0 for e in expected]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.01), (40, 0.3)], ids=["top_k", "top_p", "both"]
)
def test_of_a_wide_vocabulary_those_are_drawn_that_sorting_leaves(top_k, top_p):
    logits_V = 0.5 * np.random.default_rng(0).normal(size=2000).astype(np.float32)
    order = np.argsort(-logits_V)[: top_k or None]
    shares = np.exp(logits_V[order].astype(np.float64))
    shares /= shares.sum()
    expected = order[np.cumsum(shares) - shares < top_p]
    assert 5 <= len(expected) < 20
    keys_B = jax.random.split(jax.random.key(0), 1000)

    tokens_B = CHOOSE(
        jnp.broadcast_to(logits_V, (1000, 2000)), keys_B, *map(jnp.asarray, (1.0, top_k, top_p))
    )

    assert set(np.asarray(tokens_B).tolist()) == set(expected.tolist())


def test_models_that_think_alike_draw_alike_with_the_same_keys():
    # All nearly as likely: the small differences give every token another rank.
    noise_2BV = 1e-3 * jax.random.normal(jax.random.key(1), (2, 1000, 300))
    keys_B = jax.random.split(jax.random.key(0), 1000)

    ours, theirs = (
        CHOOSE(logits_BV, keys_B, *map(jnp.asarray, (1.0, 0, 1.0))) for logits_BV in noise_2BV
    )

    assert (ours == theirs).mean() > 0.98
    assert len(set(np.asarray(ours).tolist())) > 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-38}, "temperature is 1e-38"),  # float32 has no such quotients
        ({"temperature": 1e39}, "temperature is 1e\\+39"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_more_likely_tokens_than_there_are_cut_nothing():
    free = continue_prompts(PROMPTS, WARM)
    assert continue_prompts(PROMPTS, dataclasses.replace(WARM, top_k=320)) == free
    assert continue_prompts(PROMPTS, dataclasses.replace(WARM, top_k=2**40)) == free


# --- text --------------------------------------------------------------------------------------


def test_generate_returns_the_text_behind_each_prompt(model, tokenizer):
    prompts = ["the a and the i", "are bj"]

    texts = model.generate(prompts, max_tokens=40)

    for prompt, text in zip(prompts, texts, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
        (new,) = continue_prompts([ids], eos_id=tokenizer.eos_id)
        assert prompt + text == tokenizer.decode([*ids, *new.tokens])


def test_streamed_pieces_make_the_same_text(model):
    prompts = ["the a and the i", "are bj"]
    completions = model.complete(prompts, 40, WARM)

    for row, completion in enumerate(completions):
        pieces = list(model.stream(prompts[row], 40, WARM, row))
        assert "".join(pieces) == completion.text
        assert len(pieces) > 1


def test_a_character_is_streamed_when_all_its_bytes_are_there(model, tokenizer, monkeypatch):
    # Characters the tokenizer has no piece for: three bytes, and so three tokens, each.
    new = tokenizer.encode("the 日本 a")[1:].tolist()
    assert len(new) > 7
    monkeypatch.setattr(engine, "stream", lambda *a, **k: (np.array([[t]]) for t in [*new, 2]))

    pieces = list(model.stream("the", 20, GREEDY))

    assert "".join(pieces) == " 日本 a"
    assert [piece for piece in pieces if piece in "日本"] == ["日", "本"]


def test_logits_do_not_need_a_tokenizer_and_text_does(directory):
    model = language_model(CONFIG, PARAMS, None, "float32")

    assert model.logits(np.array([[1, 5, 9]])).shape == (1, 3, 320)
    with pytest.raises(UserError, match=r"needs a tokenizer.*--tokenizer"):
        model.generate(["the"])


@pytest.mark.parametrize("tokens", [[1, 5, 9], [[]], [[1, 320]], [[-1]]], ids=str)
def test_logits_of_what_are_no_rows_of_ids_are_refused(model, tokens):
    with pytest.raises(UserError, match=r"tokens are of the shape .* each from 0 to 319"):
        model.logits(tokens)


@pytest.mark.parametrize(
    ("named", "message"),
    [({"quantize": 5}, "quantize is 5: .* 8 or 4"), ({"dtype": "float16"}, "dtype is float16: .*")],
)
def test_types_and_bits_that_there_are_not_are_refused(directory, named, message):
    with pytest.raises(UserError, match=message):
        openelm_jax.load(directory, **named)


def test_a_text_that_memory_has_no_room_for_is_refused_in_a_sentence(model, monkeypatch):
    message = r"memory has no room for a cache of 2 x .* tokens: take fewer max_tokens"
    with pytest.raises(UserError, match=message):
        model.generate(["the a", "are"], max_tokens=2**31)

    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")

    monkeypatch.setattr(engine, "_prefill", no_room)
    with pytest.raises(UserError, match=message):
        model.generate(["the a", "are"], max_tokens=8)


def test_the_package_loads_a_model_by_its_place(directory, model):
    loaded = openelm_jax.load(directory)

    assert loaded.config == CONFIG
    assert loaded.generate(["the a"], max_tokens=40) == model.generate(["the a"], max_tokens=40)


def test_importing_the_package_imports_no_jax():
    script = (
        "import sys, openelm_jax\n"
        "openelm_jax.load_experiment, openelm_jax.layer_shapes, openelm_jax.parameter_count\n"
        "import openelm_jax.generate, openelm_jax.export\n"
        "print([m for m in ('jax', 'flax', 'torch', 'mlx', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = openelm_jax.lode


@pytest.mark.parametrize(
    ("where", "message"),
    [("nowhere", "there is no .*nowhere"), (".", "no weights are recognised")],
)
def test_what_holds_no_weights_is_refused_with_what_is_accepted(tmp_path, where, message):
    with pytest.raises(UserError, match=f"{message}.*RUN@STEP, .*Hugging Face"):
        openelm_jax.load(tmp_path / where)


# --- the command -------------------------------------------------------------------------------


def test_generate_prints_each_prompt_with_its_continuation(directory, model, capsys):
    flags = ["--from", directory, "--temperature", "0", "--max-tokens", "40"]
    prompts = ["the a", "are bj"]
    expected = [p + t for p, t in zip(prompts, model.generate(prompts, 40), strict=True)]

    verb.main([*flags, "--prompt", prompts[0], "--prompt", prompts[1]])
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"

    verb.main([*flags, "--prompt", prompts[0], "--prompt", prompts[1], "--stream"])
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"


def test_generate_json_has_one_object_a_prompt(directory, tmp_path, capsys, model):
    file = tmp_path / "prompts.txt"
    file.write_text("the a\n\nare\u2028bj\r\n", encoding="utf-8")  # a line, not two
    verb.main(["--from", directory, "--prompt-file", str(file), "--json", "--max-tokens", "40"])
    lines = [json.loads(line) for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    completions = model.complete(
        ["the a", "are\u2028bj"], 40, Sampling(temperature=0.8, top_p=0.95, seed=0)
    )
    assert lines == [
        {**dataclasses.asdict(completion), "tokens": list(completion.tokens)}
        for completion in completions
    ]


def test_generate_needs_a_prompt(capsys):
    with pytest.raises(SystemExit) as exit_:
        verb.main(["--from", "anywhere"])
    assert exit_.value.code == 2
    assert "--prompt TEXT or --prompt-file FILE" in capsys.readouterr().err


def test_no_new_tokens_are_refused_before_the_weights_are_read(capsys):
    with pytest.raises(SystemExit) as exit_:
        verb.main(["--from", "nowhere", "--prompt", "the", "--max-tokens", "0"])
    assert exit_.value.code == 2
    assert "--max-tokens: give a number of new tokens, 1 or more" in capsys.readouterr().err


def test_a_tensor_axis_that_divides_no_matrix_is_refused(directory):
    mesh = jax.sharding.AbstractMesh((1, 3), ("replica", "tensor"))
    with (
        open_weights(directory) as stored,
        pytest.raises(UserError, match=r"mesh tensor 3 does not divide the width \d+ of"),
    ):
        read_model(stored, mesh=mesh)


def test_generate_refuses_a_file_of_no_prompts(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        verb.main(["--from", "anywhere", "--prompt-file", str(tmp_path / "empty.txt")])
    with pytest.raises(UserError, match=r"--prompt-file .*none\.txt"):
        verb.main(["--from", "anywhere", "--prompt-file", str(tmp_path / "none.txt")])


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer):
    config = dataclasses.replace(CONFIG, vocab_size=300)
    write_huggingface(tmp_path / "small", config, PARAMS | {"embedding": PARAMS["embedding"][:300]})
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer.model_bytes)

    with pytest.raises(UserError, match=r"320 pieces exceed .* 300"):
        openelm_jax.load(tmp_path / "small", tokenizer=Path(path))
