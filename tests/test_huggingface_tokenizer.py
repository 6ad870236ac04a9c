"""The tokenizer files beside an export make the ids of SentencePiece in transformers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import random_params, tiny

from openelm_jax.tokenizer import UNUSED, load_tokenizer, tokenizer_from_bytes, train_tokenizer
from openelm_jax.weights.huggingface import write_huggingface
from openelm_jax.weights.huggingface_tokenizer import merges_of, write_tokenizer
from openelm_jax.weights.stored import in_memory

transformers = pytest.importorskip("transformers")

LLAMA_LIKE = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"

LINES = [f"the {a} and the {b} are {a}{b} aa aaa 12" for a in "abcdefgh" for b in "ijklmnop"]

TEXTS = [
    "Hello",
    " Hello",
    "  Hello",
    "",
    " ",
    "   ",
    "x</s>Hello",
    "<s>Hello",
    "<unk> <s></s>",
    "two  spaces   three ",
    "a\tb\nc\r\n\n\nd",
    "\x00a",
    "日本語のテキスト",
    "smile 😀👩‍👩‍👧 done",
    "1234567890 3.14",
    "\u2581Hello \u2581 x",
    "<0x0A> is no newline",
    "aaaaaaaaaaaaaaaaaaaaaaaaa",
    "ﬁne “quotes” schön",
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(ours, theirs) of a LLaMA-like model of 32,000 pieces and of one trained here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    directory = tmp_path_factory.mktemp("tokenizers")
    small = train_tokenizer(LINES, 320, directory / "small.model")
    loaded = []
    for name, ours in (("large", load_tokenizer(LLAMA_LIKE)), ("small", small)):
        (directory / name).mkdir()
        write_tokenizer(directory / name, ours, tiny(vocab_size=32000))
        (directory / name / "config.json").write_text('{"model_type": "openelm"}')
        loaded.append((ours, transformers.AutoTokenizer.from_pretrained(directory / name)))
    return loaded


def assert_same(pairs, text: str) -> None:
    for ours, theirs in pairs:
        ids = theirs(text)["input_ids"]
        assert ids == [ours.bos_id, *ours.encode(text).tolist()], repr(text)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece_after_one_begin_token(pairs, text):
    assert_same(pairs, text)


def test_known_ids_of_the_llama_like_model(pairs):
    """Literal text where a special token is spelled: `</s>` is five pieces, not one."""
    _, theirs = pairs[0]
    ids = theirs("x</s>", add_special_tokens=False)["input_ids"]
    assert len(ids) > 2
    assert theirs.eos_token_id not in ids


@given(st.text(max_size=60))
@example("ab aab aaab aaaab")
@settings(max_examples=200, deadline=None)
def test_any_text_has_the_same_ids(pairs, text):
    if "\ud800" <= max(text, default="") <= "\udfff":
        return
    assert_same(pairs, text)


@given(st.text(alphabet="abei t12", max_size=80))
@settings(max_examples=200, deadline=None)
def test_texts_of_few_characters_merge_in_the_same_order(pairs, text):
    assert_same(pairs, text)


def test_real_text_has_the_same_ids(pairs):
    page = (Path(__file__).parent.parent / "README.md").read_text()
    assert_same(pairs, page)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(pairs, text):
    for ours, theirs in pairs:
        decoded = theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
        assert decoded == ours.decode(ours.encode(text)) == text.replace("\u2581", " ")


def test_tokens_come_by_their_text_only_when_asked_for(pairs):
    for ours, theirs in pairs:
        asked = theirs("x</s>", add_special_tokens=False, split_special_tokens=False)["input_ids"]
        assert asked == [*ours.encode("x").tolist(), ours.eos_id]
        assert theirs.convert_tokens_to_ids("</s>") == theirs.eos_token_id == ours.eos_id


def test_a_template_ends_texts_only_if_what_users_write_may_end_them_too(pairs, tmp_path):
    """The two sides of split_special_tokens that docs/weights.md tells of."""
    ours, theirs = pairs[1]
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "openelm"}')
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = "{{ messages[0].content }}{{ eos_token }}"
    chat = [{"role": "user", "content": "the </s> are"}]
    for split, ends in ((True, 0), (False, 2)):
        saved.split_special_tokens = split
        ids = saved.apply_chat_template(chat, chat_template=template, return_dict=False)
        assert list(ids).count(ours.eos_id) == ends


def test_what_transformers_saves_makes_the_same_ids(pairs, tmp_path):
    ours, theirs = pairs[1]
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "openelm"}')

    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)

    for text in TEXTS:
        assert_same([(ours, saved)], text)


def test_there_is_no_padding_token(pairs):
    for _, theirs in pairs:
        assert theirs.pad_token is None


def test_merges_come_by_score():
    ours = load_tokenizer(LLAMA_LIKE)
    scores = {piece.text: piece.score for piece in ours.pieces}
    in_order = [scores[left + right] for left, right in merges_of(ours)]
    assert in_order == sorted(in_order, reverse=True)
    assert len(in_order) > 31_000


@pytest.mark.parametrize(
    ("trained", "reason"),
    [
        ({"model_type": "unigram", "byte_fallback": False, "vocab_size": 30}, "is no BPE model"),
        ({"byte_fallback": False, "vocab_size": 40}, "has no byte_fallback"),
        ({"treat_whitespace_as_suffix": True}, "puts spaces behind words"),
        ({"add_dummy_prefix": False}, "puts no space before a text"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"user_defined_symbols": ["<tool>"]}, "has symbols of its user"),
    ],
    ids=str,
)
def test_a_tokenizer_with_other_rules_is_copied_with_a_warning(tmp_path, capsys, trained, reason):
    write_tokenizer(tmp_path, tokenizer_from_bytes(bpe_model(**trained), "x.model"), tiny())

    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
    said = capsys.readouterr().err
    assert "the tokenizer is not like LLaMA's, for it " in said
    assert reason in said


def test_a_tokenizer_with_unused_pieces_is_copied_with_a_warning(tmp_path, capsys):
    """SentencePiece merges to them and takes them apart again, which no merge list says."""
    model = bpe_model()
    piece = "\u2581the".encode()
    at = model.index(b"\x0a" + bytes([len(piece)]) + piece) - 1
    length = model[at]
    as_unused = model[at + 1 : at + 1 + length] + b"\x18\x05"  # field 3, kind 5
    changed = model[:at] + bytes([len(as_unused)]) + as_unused + model[at + 1 + length :]
    tokenizer = tokenizer_from_bytes(changed, "x.model")
    assert "\u2581the" in [piece.text for piece in tokenizer.pieces if piece.kind == UNUSED]

    write_tokenizer(tmp_path, tokenizer, tiny())

    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
    assert "for it has unused pieces: only" in capsys.readouterr().err


def bpe_model(**changes) -> bytes:
    """Return the file of a LLaMA-like model trained with `changes`."""
    model = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 300,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, minloglevel=3, **(options | changes)
    )
    return model.getvalue()


def test_generation_begins_and_ends_with_the_tokenizers_ids(tmp_path):
    write_huggingface(tmp_path, in_memory(tiny(), random_params(tiny())))
    ids = json.loads((tmp_path / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 1, "eos_token_id": 2}
