"""Speculation changes the speed of a text, never the text: against plain decoding, token by token.

Legend: B batch, S length of a row's text, K proposed tokens, V vocab.
"""

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_directories import write_huggingface
from jax.sharding import NamedSharding, PartitionSpec
from small_models import random_params, tiny

from openelm_jax import generate as verb
from openelm_jax.errors import UserError
from openelm_jax.generation import engine
from openelm_jax.generation.language_model import LanguageModel
from openelm_jax.generation.sampling import Sampling
from openelm_jax.generation.speculative import Draft, PromptLookup, Tally, look_up
from openelm_jax.parallel.mesh import MeshShape, make_mesh
from openelm_jax.tokenizer import train_tokenizer

CONFIG = tiny(num_layers=2, vocab_size=50)
PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))
PROMPTS = [[1], [1, 44, 2, 31, 8, 8, 10, 25, 31, 7, 19, 4, 8, 8]]

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, top_p=0.95, seed=3),
    "penalised": Sampling(temperature=0.7, top_k=20, seed=5, repetition_penalty=1.3),
}


# Few shapes, few compilations: every draft model has a head and padded rows of the vocabulary.
DRAFT_CONFIG = replace(CONFIG, tie_embeddings=False, vocab_size=64)


def draft(head, params=PARAMS):
    """A draft model that says what `params` say, of a `head` that may say something else."""
    padding = jnp.ones((14, 64))
    tables = {"embedding": params["embedding"], "head": head}
    tables = {name: jnp.concatenate([table, padding]) for name, table in tables.items()}
    return Draft(DRAFT_CONFIG, params | tables, "float32", 3)


def nearly(params):
    """The weights with some noise: a model that often thinks the same."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [
        x + 0.02 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)
    ]
    return tree.unflatten(noisy)


def one_off(embedding):
    """A head that gives each token's logit to the one after it."""
    return jnp.roll(embedding, 1, axis=0)


SPECULATIONS = {
    "prompt lookup": PromptLookup(3),
    "the model itself": draft(PARAMS["embedding"]),
    "a model like it": draft(nearly(PARAMS)["embedding"], nearly(PARAMS)),
    "a model that is always wrong": draft(one_off(PARAMS["embedding"])),
}


def continue_prompts(sampling, speculation=None, *, prompts=PROMPTS, max_tokens=41, **named):
    return engine.generate(
        CONFIG,
        PARAMS,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        dtype="float32",
        speculation=speculation,
        **({"eos_id": -1} | named),
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS)
def test_the_text_is_that_of_plain_decoding_whatever_is_proposed(speculation, sampling):
    assert continue_prompts(sampling, speculation) == continue_prompts(sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_of_proposals_that_are_all_right_each_call_takes_one_token_more(sampling):
    tally = Tally()
    continue_prompts(sampling, SPECULATIONS["the model itself"], max_tokens=1 + 10 * 4, tally=tally)

    # Two rows, ten calls each; the prefill chose the first token.
    assert tally.counts == (20, 80, 60, 60)
    assert str(tally) == (
        "speculation: 100% of 60 proposed tokens accepted, 4.00 tokens per call of the model"
    )


def test_of_proposals_that_are_all_wrong_each_call_takes_one_token():
    tally = Tally()
    wrong = SPECULATIONS["a model that is always wrong"]
    continue_prompts(SAMPLINGS["greedy"], wrong, tally=tally)

    assert tally.counts == (80, 80, 240, 0)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_model_that_thinks_alike_is_right_part_of_the_time_drawing_with_the_same_numbers(
    sampling,
):
    tally = Tally()
    continue_prompts(sampling, SPECULATIONS["a model like it"], tally=tally)

    calls, tokens, proposed, accepted = tally.counts
    assert tokens == 80
    assert 0.1 * proposed < accepted < proposed
    # Each call adds what was right and a token of the model's own, but for the last of each row.
    assert tokens - 2 <= calls + accepted <= tokens + 2


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS)
def test_a_text_ends_at_its_end_token_inside_a_proposal_too(speculation, sampling):
    free = [continuation.tokens for continuation in continue_prompts(sampling)]
    # Three in a row: whatever the calls, one of them does not end where a call does.
    for eos_id in free[0][10:13]:
        ended = continue_prompts(sampling, speculation, eos_id=eos_id)
        for before, after in zip(free, ended, strict=True):
            stops = eos_id in before
            assert after.tokens == (before[: before.index(eos_id)] if stops else before)
            assert after.finish_reason == ("stop" if stops else "length")


@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS)
def test_max_tokens_may_lie_inside_a_proposal(speculation):
    sampling = SAMPLINGS["sampled"]
    free = continue_prompts(sampling)
    for max_tokens in (36, 37, 38, 39):  # one cache length
        short = continue_prompts(sampling, speculation, max_tokens=max_tokens)
        assert [c.tokens for c in short] == [c.tokens[:max_tokens] for c in free]


# --- a model that counts ------------------------------------------------------------------------

COUNTING = replace(CONFIG, tie_embeddings=False)


def counting_params():
    """Layers that add nothing, and a head in which each token's own row is the next one's."""
    params = random_params(COUNTING)
    for layer in (params[f"layers_{i}"] for i in range(COUNTING.num_layers)):
        layer["attention"]["out"] = np.zeros_like(layer["attention"]["out"])
        layer["ffn"]["down"] = np.zeros_like(layer["ffn"]["down"])
    params["final_norm"]["scale"] = np.ones_like(params["final_norm"]["scale"])
    params["embedding"] = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))[0][:50]
    params["head"] = one_off(params["embedding"])
    return jax.tree.map(jnp.float32, params)


COUNTS = counting_params()


def count_on(prompts, tally=None, **named):
    return engine.stream(
        COUNTING,
        COUNTS,
        prompts,
        sampling=Sampling(),
        dtype="float32",
        speculation=PromptLookup(4),
        tally=tally,
        **({"eos_id": -1, "max_tokens": 21} | named),
    )


def test_a_repetition_is_read_from_the_text():
    tally = Tally()
    blocks = list(count_on([[*range(8, 30), 8]], tally))

    assert np.concatenate(blocks, axis=1)[0].tolist() == list(range(9, 30))
    # The first token is the prefill's: 20 others in calls of five.
    assert tally.counts == (4, 20, 16, 16)


def test_rows_go_on_by_their_own_numbers_of_tokens_and_are_streamed_side_by_side():
    repeating, new = [*range(8, 30), 8], [30]
    blocks = list(count_on([repeating, new], block=1, max_tokens=18))

    assert np.concatenate(blocks, axis=1).tolist() == [
        list(range(9, 27)),
        list(range(31, 49)),
    ]
    # The slower row, which repeats nothing, sets the pace: a token a call.
    assert [block.shape for block in blocks] == [(2, 1)] * 18


def test_a_single_row_is_streamed_in_the_pieces_of_its_calls():
    blocks = list(count_on([[*range(8, 30), 8]], block=1))

    assert [block.shape for block in blocks] == [(1, 1), (1, 5), (1, 5), (1, 5), (1, 5)]


def test_nothing_comes_after_an_end_inside_an_accepted_proposal():
    tally = Tally()
    repeating, new = [*range(8, 30), 8], [30]
    blocks = list(count_on([repeating, new], tally, block=1, eos_id=12))

    rows = np.concatenate(blocks, axis=1).tolist()
    assert rows[0] == [9, 10, 11] + [12] * 18
    assert rows[1] == [(31 + i) % 50 for i in range(21)][:21]
    # The ended row: one call, of whose four proposals three were in the text, its end included.
    # The other: twenty calls, and no proposals.
    assert tally.counts == (21, 23, 4, 3)


# --- prompt lookup ------------------------------------------------------------------------------


def proposals(text, count, slots=16):
    text_BS = np.full((1, slots), 9)  # what stands behind a text has no meaning: all nines
    text_BS[0, : len(text)] = text
    return look_up(jnp.asarray(text_BS), jnp.array([len(text)]), count)[0].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),  # two tokens match
        ([7, 2, 8, 8, 1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),  # two that match before one
        ([7, 2, 8, 6, 5, 1, 2], [8, 6, 5]),  # one, where no two do
        ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2]),  # the first place of several
        ([5, 1, 2, 1, 2], [1, 2, 1]),  # what follows is short: again
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3], [-1, -1, -1]),
        ([1, 9, 2], [-1, -1, -1]),  # nothing is read behind the text
        ([1, 2, 3, 9], [-1, -1, -1]),
    ],
)
def test_the_tokens_behind_the_first_place_that_reads_like_the_end_are_proposed(text, expected):
    assert proposals(text, 3) == expected


def test_proposals_begin_with_those_of_transformers():
    torch = pytest.importorskip("torch")
    candidates = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = candidates.PromptLookupCandidateGenerator(num_output_tokens=4, max_length=1000)
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(60):
        text = rng.integers(0, rng.integers(3, 12), rng.integers(2, 16)).tolist()
        found = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
        ours = proposals(text, 4)
        assert ours[: len(found)] == found
        assert (ours == [-1] * 4) == (not found)
        lengths.add(len(found))
    assert lengths == {0, 1, 2, 3, 4}


# --- compilation and memory ---------------------------------------------------------------------

KINDS = {"plain": None} | {
    name: SPECULATIONS[name] for name in ("prompt lookup", "the model itself")
}


@pytest.mark.parametrize("speculation", KINDS.values(), ids=KINDS)
def test_decoding_compiles_once_a_batch_and_bucket(speculation):
    def compiled():
        return engine._prefill._cache_size(), engine._decode._cache_size()

    continue_prompts(SAMPLINGS["greedy"], speculation)
    before = compiled()
    for max_tokens, sampling in zip((40, 35, 39), SAMPLINGS.values(), strict=True):
        continue_prompts(sampling, speculation, max_tokens=max_tokens, vocab_size=49, eos_id=3)
    continue_prompts(SAMPLINGS["greedy"], speculation, prompts=PROMPTS[::-1], max_tokens=38)
    assert compiled() == before
    if speculation is None:
        continue_prompts(SAMPLINGS["greedy"], prompts=PROMPTS[1:])
        assert compiled() == (before[0] + 1, before[1] + 1)


@pytest.fixture
def decode_calls(monkeypatch):
    """The arguments that the loop on the device is called with, and its own function."""
    calls = []
    decode = engine._decode
    monkeypatch.setattr(engine, "_decode", lambda *a: calls.append(a) or decode(*a))
    return calls, decode


@pytest.mark.parametrize("speculation", KINDS.values(), ids=KINDS)
def test_the_loop_is_given_the_cache_and_writes_into_it(speculation, decode_calls):
    calls, _ = decode_calls
    continue_prompts(SAMPLINGS["greedy"], speculation)

    assert len(calls) >= 1
    for _, _, _, state, *_ in calls:
        cache = jax.tree.leaves((state.cache, state.kept))
        assert len(cache) == 2 * 2 * (2 if isinstance(speculation, Draft) else 1)
        assert all(array.is_deleted() for array in cache)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["plain", "the model itself"])
def test_the_loop_holds_no_second_cache(name, decode_calls):
    calls, decode = decode_calls
    continue_prompts(SAMPLINGS["greedy"], KINDS[name])
    config, dtype, params, state, *rest = calls[0]
    slots = state.text_BS.shape[1]

    def longer(array):  # a cache that no activation comes near
        shape = tuple(2048 if size == slots else size for size in array.shape)
        return jax.ShapeDtypeStruct(shape, array.dtype)

    state = jax.tree.map(longer, state)
    assert state.text_BS.shape[1] == state.cache[0].key_MSH.shape[1] == 2048
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.cache, state.kept)))
    memory = decode.lower(config, dtype, params, state, *rest).compile().memory_analysis()

    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held


# --- text ---------------------------------------------------------------------------------------

TEXT_CONFIG = tiny(num_layers=1, vocab_size=320)
TEXT_PARAMS = random_params(TEXT_CONFIG)


def trained(folder, letters="ijklmnop"):
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in letters]
    return train_tokenizer(lines, 320, folder / "tokenizer.model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer):
    return LanguageModel(TEXT_CONFIG, TEXT_PARAMS, tokenizer, "float32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("exports") / "tiny"
    write_huggingface(path, TEXT_CONFIG, TEXT_PARAMS, tokenizer=tokenizer)
    return str(path)


@pytest.mark.heavy
def test_generate_proposes_by_lookup_or_by_a_model(model):
    plain = model.generate(["the a and"], max_tokens=24, temperature=1.0, seed=1)
    for way in ({"prompt_lookup": 3}, {"draft": model, "draft_tokens": 3}):
        assert model.generate(["the a and"], 24, temperature=1.0, seed=1, **way) == plain


@pytest.mark.heavy
@pytest.mark.parametrize("output", ["--stream", "--json"])
@pytest.mark.parametrize(
    "flags", [["--prompt-lookup", "3"], ["--draft", "itself", "--draft-tokens", "3"]]
)
def test_the_command_prints_the_same_text_and_one_line_on_what_was_accepted(
    directory, capsys, flags, output
):
    flags = [directory if flag == "itself" else flag for flag in flags]
    command = ["--from", directory, "--prompt", "the a and", "--max-tokens", "25"]

    verb.main([*command, output])
    plain = capsys.readouterr()
    verb.main([*command, output, *flags])
    spoken = capsys.readouterr()

    assert spoken.out == plain.out
    assert plain.err == ""
    assert spoken.err.startswith("speculation: ")
    assert spoken.err.endswith(" tokens per call of the model\n")
    assert spoken.err.count("\n") == 1
    if "--draft" in flags:
        assert "100% of" in spoken.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-lookup", "4", "--draft", "there"], "prompt_lookup and draft are both given"),
        (["--prompt-lookup", "0"], "prompt_lookup is 0: .* at least 1"),
        (["--draft", "there", "--draft-tokens", "0"], "draft_tokens is 0: .* at least 1"),
        (["--draft-tokens", "3"], "draft_tokens is 3, but no draft is given"),
    ],
)
def test_proposals_without_a_meaning_are_refused_before_anything_is_loaded(flags, message):
    with pytest.raises(UserError, match=message):
        verb.main(["--from", "nowhere", "--prompt", "the", *flags])


def test_a_draft_model_on_other_devices_is_refused(model):
    on_a_mesh = jax.device_put(
        TEXT_PARAMS, NamedSharding(make_mesh(MeshShape(), jax.devices()[:1]), PartitionSpec())
    )
    other = dataclasses.replace(model, params=on_a_mesh)
    with pytest.raises(UserError, match=r"lies on other devices: .* same replica and tensor"):
        model.generate(["the"], draft=other)


def test_a_draft_model_of_another_vocabulary_is_refused(model, tokenizer, tmp_path):
    other = dataclasses.replace(model, tokenizer=trained(tmp_path, "qrstuvwx"))
    with pytest.raises(UserError, match=r"another vocabulary \(id \d+ is '.*', not '.*'\)"):
        model.generate(["the"], draft=other)
    fewer = train_tokenizer(["the a and the b are ab"], 280, tmp_path / "fewer.model")
    with pytest.raises(UserError, match=r"another vocabulary \(280 pieces, not 320\)"):
        model.generate(["the"], draft=dataclasses.replace(model, tokenizer=fewer))
    with pytest.raises(UserError, match="needs a tokenizer"):
        model.generate(["the"], draft=dataclasses.replace(model, tokenizer=None))


def test_the_same_pieces_in_another_file_are_the_same_vocabulary(model, tokenizer):
    # An unknown field behind the model: other bytes, and another hash, of the same pieces.
    longer = tokenizer.model_bytes + b"\xf8\x07\x01"
    other = dataclasses.replace(tokenizer, model_bytes=longer, sha256="another")

    assert model.speculation(draft=dataclasses.replace(model, tokenizer=other)).count == 4
