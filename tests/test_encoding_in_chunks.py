"""Encoding in chunks gives what SentencePiece makes of the whole text, for every tokenizer."""

import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from corpora import FRAGMENTS, documents, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import openelm_jax.tokenizer
from openelm_jax.tokenizer import Tokenizer, load_tokenizer

MISTRAL = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
# "of the" is so frequent that it becomes a piece where a piece may hold a space.
PHRASES = [text.replace("of", "of the") for text in documents(100)]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def _many_short_chunks(monkeypatch):
    monkeypatch.setattr(openelm_jax.tokenizer, "CHUNK_CHARS", 3)
    monkeypatch.setattr(openelm_jax.tokenizer, "PART_CHUNKS", 2)


def whole(tok: Tokenizer, text: str) -> list[int]:
    return sentencepiece.SentencePieceProcessor(model_proto=tok.model_bytes).encode(text)


def train(**changes) -> Tokenizer:
    """Return a tokenizer like the project's own, but for `changes`."""
    model = io.BytesIO()
    spelled = {
        "model_type": "bpe",
        "vocab_size": 400,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PHRASES), model_writer=model, **{**spelled, **changes}
    )
    return openelm_jax.tokenizer._from_bytes(model.getvalue())


@pytest.mark.parametrize("tok", [tokenizer(), load_tokenizer(MISTRAL)], ids=["trained", "mistral"])
def test_every_text_has_the_ids_of_the_whole(tok):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tok.model_bytes)
    assert tok.splits_at_spaces

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(texts)
    def check(text):
        ids = tok.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == processor.encode(text)

    check()


@pytest.mark.parametrize("text", ["", " ", "abcdef ", "abcdef  ", "  abcdef", "abcdef ghijkl "])
def test_the_spaces_at_the_ends_keep_their_tokens(text):
    assert tokenizer().encode(text).tolist() == whole(tokenizer(), text)
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_documents_are_encoded_alike_with_the_chunks_of_a_run(monkeypatch):
    monkeypatch.undo()
    text = " ".join(documents(60)) + " "
    parts = list(tokenizer().encode_in_parts(text))
    assert len(parts) > 2
    assert np.concatenate(parts).tolist() == whole(tokenizer(), text)


def test_parts_are_made_when_they_are_asked_for(monkeypatch):
    encoded = []

    class Listening:
        def encode(self, text, **kwargs):
            encoded.append(text)
            return np.zeros(1, dtype=np.int32)

    tok = replace(tokenizer())
    tok.__dict__["_processor"] = Listening()
    parts = tok.encode_in_parts("one two three four five six seven")
    assert encoded == []
    next(parts)
    assert encoded == ["one", "two"]
    next(parts)
    assert encoded == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    "changes",
    [
        {"split_by_whitespace": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"treat_whitespace_as_suffix": True},
        {"model_type": "unigram"},
        {"user_defined_symbols": ["of the"]},
    ],
    ids=str,
)
def test_a_tokenizer_without_the_property_encodes_whole_documents(changes):
    tok = train(**changes)
    assert train().splits_at_spaces
    assert not tok.splits_at_spaces
    text = " the  state of  the union \uff11 \ufb01 nation" + " ".join(PHRASES[:3])
    assert [part.tolist() for part in tok.encode_in_parts(text)] == [whole(tok, text)]


@pytest.mark.parametrize(
    "changes",
    [
        {"split_by_whitespace": False},
        {"add_dummy_prefix": False},
    ],
    ids=str,
)
def test_without_the_property_chunks_would_give_other_ids(changes):
    tok = replace(train(**changes), splits_at_spaces=True)
    text = " ".join(PHRASES[:3]) + "  of  the  union"
    assert tok.encode(text).tolist() != whole(tok, text)


def test_without_a_piece_for_the_space_unknown_characters_on_both_sides_are_one_token():
    model = train(byte_fallback=False, vocab_size=300).model_bytes
    piece = b"\n\x03\xe2\x96\x81"
    assert model.count(piece) == 1
    tok = openelm_jax.tokenizer._from_bytes(model.replace(piece, b"\n\x03\xe2\x96\x83"))
    text = "漢漢漢 漢漢漢 漢漢漢"
    assert not tok.splits_at_spaces
    assert tok.encode(text).tolist() == whole(tok, text) == [0]
    assert replace(tok, splits_at_spaces=True).encode(text).tolist() == [0, 0, 0]


def test_a_tokenizer_is_sent_to_another_process_as_its_file_alone():
    tok = load_tokenizer(MISTRAL)
    tok.encode("loaded")
    sent = pickle.dumps(tok)
    assert len(sent) < len(tok.model_bytes) + 1000
    assert pickle.loads(sent).encode("a state").tolist() == whole(tok, "a state")
