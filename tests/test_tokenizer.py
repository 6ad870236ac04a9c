"""Text survives the tokenizer, a trained one is LLaMA-like, and a useless one is refused."""

import pickle

import numpy as np
import pytest
import sentencepiece
from corpora import documents, tokenizer

from openelm_jax.errors import UserError
from openelm_jax.tokenizer import load_tokenizer, train_tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing  ",
        "runs   of    spaces\tand\ttabs\r\n\n\nand lines",
        "e\u0301 is not \u00e9, \ufb01 is not fi, \u00bd is not 1/2",
        "\u00a0no-break\u3000wide \u200bzero",
        "emoji \U0001f600 \U0001f468\u200d\U0001f469, 漢字, العربية",
        "<s> </s> <unk> are plain text here",
        "NUL \x00 and \x7f",
    ],
)
def test_text_comes_back_character_for_character(text):
    ids = tokenizer().encode(text)
    assert ids.dtype == np.int32
    assert tokenizer().decode(ids) == text


def test_special_ids_are_llamas_and_never_come_from_text():
    tok = tokenizer()
    assert (tok.bos_id, tok.eos_id) == (1, 2)
    assert not {0, 1, 2} & set(tok.encode("<s>a</s><unk>").tolist())
    assert tok.decode([1, *tok.encode("a b"), 2]) == "a b"


def test_every_digit_is_a_token_and_unknown_characters_are_bytes():
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model_bytes)
    assert processor.encode("1790", out_type=str)[-4:] == ["1", "7", "9", "0"]
    assert processor.encode("漢", out_type=str)[-3:] == ["<0xE6>", "<0xBC>", "<0xA2>"]
    assert all(
        sum(c.isdigit() for c in processor.id_to_piece(i)) <= 1
        for i in range(259, processor.get_piece_size())
    )


def test_the_same_texts_give_the_same_file(tmp_path):
    first = train_tokenizer(documents(30), 330, tmp_path / "a.model")
    second = train_tokenizer(documents(30), 330, tmp_path / "folder" / "b.model")
    assert (tmp_path / "a.model").read_bytes() == first.model_bytes == second.model_bytes
    assert first.sha256 == second.sha256
    assert first.vocab_size == 330
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "folder"]


def test_a_long_line_counts_as_much_as_its_parts(tmp_path):
    paragraph = " ".join(documents(60, words=(50, 60)))
    assert len(paragraph) > 10_000  # SentencePiece alone would drop it
    whole = train_tokenizer([paragraph], 330, tmp_path / "a.model")
    parts = train_tokenizer(documents(60, words=(50, 60)), 330, tmp_path / "b.model")
    assert whole.model_bytes == parts.model_bytes


def test_training_is_silent(tmp_path, capfd):
    train_tokenizer(documents(30), 330, tmp_path / "a.model")
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_can_be_sent_to_another_process():
    tok = tokenizer()
    tok.encode("loaded")
    assert (pickle.loads(pickle.dumps(tok)).encode("a state") == tok.encode("a state")).all()


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [(100_000, r"vocab_size 100000 .* use at most \d+"), (100, r"vocab_size 100 .* at least \d+")],
)
def test_an_impossible_vocabulary_size_is_refused_with_a_possible_one(
    tmp_path, vocab_size, message
):
    with pytest.raises(UserError, match=message) as refusal:
        train_tokenizer(documents(5), vocab_size, tmp_path / "a.model")
    possible = int(str(refusal.value).split("use at")[1].split()[1].strip(".,"))
    assert train_tokenizer(documents(5), possible, tmp_path / "a.model").vocab_size == possible


def test_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is none"):
        train_tokenizer([], 300, tmp_path / "a.model")


@pytest.mark.parametrize("error", [UserError("a.jsonl:3: mend it."), KeyboardInterrupt()])
def test_what_the_texts_raise_comes_through_as_it_is(tmp_path, error):
    def texts():
        yield from documents(5)
        raise error

    with pytest.raises(type(error)) as raised:
        train_tokenizer(texts(), 300, tmp_path / "a.model")
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_or_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.model: there is no such file"):
        load_tokenizer(tmp_path / "none.model")
    with pytest.raises(UserError, match=r"this is a directory; give a SentencePiece \.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="not a readable SentencePiece model"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_model_that_encodes_to_nothing_is_refused(tmp_path):
    (tmp_path / "empty.model").write_bytes(b"")
    with pytest.raises(UserError, match="encodes text to nothing"):
        load_tokenizer(tmp_path / "empty.model")


def test_a_model_without_document_marks_is_refused(tmp_path):
    with open(tmp_path / "bare.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents(30)),
            model_writer=file,
            vocab_size=60,
            bos_id=-1,
            minloglevel=3,
        )
    with pytest.raises(UserError, match="no <s>"):
        load_tokenizer(tmp_path / "bare.model")


def test_ids_must_fit_the_models_vocabulary(tmp_path):
    train_tokenizer(documents(30), 330, tmp_path / "a.model")
    assert load_tokenizer(tmp_path / "a.model", 330).vocab_size == 330
    with pytest.raises(UserError, match=r"330 pieces exceed model\.vocab_size 329"):
        load_tokenizer(tmp_path / "a.model", 329)
