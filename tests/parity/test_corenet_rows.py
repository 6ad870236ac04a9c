"""packing=corenet makes the rows that CoreNet's own data code makes, token for token.

`tests/data/corenet-rows` holds 28 documents, the fate of each of their pieces of 2,048 words
(dropped by the character filter, by the token filter, or kept) and the rows of those kept, as
CoreNet made them with ftfy 6.2.0 and the tokenizer in `tests/data/tokenizer-mistral-v1`.
"""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from openelm_jax.config import DataConfig
from openelm_jax.data.normalization import repair
from openelm_jax.data.text import (
    TextRules,
    corenet_row,
    encode_piece,
    passes_char_filter,
    pieces_of,
)
from openelm_jax.tokenizer import Tokenizer, load_tokenizer

ftfy = pytest.importorskip("ftfy")

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "corenet-rows" / "verdicts.json").read_text())
RULES = TextRules.of(
    DataConfig(
        packing="corenet", min_chars=GOLDEN["min_characters"], min_tokens=GOLDEN["min_tokens"]
    ),
    GOLDEN["row_length"],
)


@cache
def documents() -> list[str]:
    with gzip.open(DATA / "corenet-rows" / "documents.jsonl.gz") as file:
        return [json.loads(line)["text"] for line in file]


@cache
def mistral() -> Tokenizer:
    return load_tokenizer(DATA / "tokenizer-mistral-v1" / "tokenizer.model")


def judge(text: str, rules: TextRules = RULES) -> list[tuple[str, np.ndarray]]:
    """Return the fate and the tokens of each piece of a document."""
    judged = []
    for piece in pieces_of(text, rules):
        tokens = np.concatenate(list(encode_piece(piece, mistral(), rules)))
        fate = "kept" if len(tokens) >= rules.min_tokens else "token"
        judged.append((fate if passes_char_filter(piece, rules) else "char", tokens))
    return judged


def test_every_piece_has_corenets_fate_and_every_kept_one_its_row():
    judged = [judge(text) for text in documents()]
    assert [[fate for fate, _ in pieces] for pieces in judged] == GOLDEN["verdicts"]
    kept = [tokens for pieces in judged for fate, tokens in pieces if fate == "kept"]
    made = [corenet_row(tokens, GOLDEN["row_length"], GOLDEN["pad_id"]) for tokens in kept]
    theirs = np.load(DATA / "corenet-rows" / "rows.npz")["rows"]
    assert np.array_equal([row for row, _, _ in made], theirs)
    assert [truncated for _, truncated, _ in made] == [max(0, len(t) - 2049) for t in kept]
    assert [padded for _, _, padded in made] == (theirs == GOLDEN["pad_id"]).sum(axis=1).tolist()


@pytest.mark.parametrize(
    "change", [{"packing": "concat"}, {"char_filter": "raw"}, {"normalize": "nfc"}], ids=str
)
def test_each_of_corenets_rules_decides_something_in_these_documents(change):
    rules = replace(RULES, **change)
    assert any(
        [(fate, tokens.tolist()) for fate, tokens in judge(text)]
        != [(fate, tokens.tolist()) for fate, tokens in judge(text, rules)]
        for text in documents()
    )


def test_the_documents_are_repaired_as_ftfy_repairs_them():
    repaired = [repair(text) for text in documents()]
    assert repaired == [ftfy.fix_text(text, normalization="NFC") for text in documents()]
    assert repaired != documents()
