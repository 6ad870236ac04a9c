"""A SentencePiece tokenizer in the files of Hugging Face, ids and all.

`tokenizer.json` is written from the pieces: SentencePiece merges the adjacent pair whose union has
the highest score, so every pair of pieces that makes a piece is a merge, in the order of scores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from openelm_jax.config import ModelConfig
from openelm_jax.tokenizer import (
    BYTE,
    NORMAL,
    TOKENIZER_FILE,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
    differences_from_llama,
)
from openelm_jax.weights.json_files import write_json

SPACE = "\u2581"


def write_tokenizer(directory: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Write tokenizer.model, tokenizer.json and tokenizer_config.json.

    In transformers the text `</s>` is then what it is here, text; the token comes by its id. There
    is no padding token, since the model has none: whoever pads masks by length.
    """
    (directory / TOKENIZER_FILE).write_bytes(tokenizer.model_bytes)
    if differences := _differences(tokenizer):
        print(
            f"warning: the tokenizer is not like LLaMA's, for it {' and '.join(differences)}: only "
            f"{TOKENIZER_FILE} is written, and no tokenizer.json.",
            file=sys.stderr,
        )
        return
    write_json(directory / "tokenizer.json", _tokenizer_fields(tokenizer), sort_keys=False)
    named = _special_texts(tokenizer)
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": named["bos"],
            "clean_up_tokenization_spaces": False,
            "eos_token": named["eos"],
            "model_max_length": config.context_length,
            "split_special_tokens": True,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": named["unk"],
        },
    )


def _differences(tokenizer: Tokenizer) -> list[str]:
    """Return what of a tokenizer no tokenizer.json of this kind expresses."""
    kinds = {piece.kind for piece in tokenizer.pieces}
    differences = differences_from_llama(tokenizer.model_bytes)
    differences += ["has symbols of its user"] if USER_DEFINED in kinds else []
    differences += ["has unused pieces"] if UNUSED in kinds else []
    return differences


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, first to last."""
    ids = {piece.text: i for i, piece in enumerate(tokenizer.pieces) if piece.kind == NORMAL}
    ranked = []
    for text, i in ids.items():
        score = tokenizer.pieces[i].score
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-score, i, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unknown_id}
    return {name: tokenizer.pieces[i].text for name, i in ids.items()}


def _tokenizer_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    named = _special_texts(tokenizer)
    bos = named["bos"]
    special = [i for i, piece in enumerate(tokenizer.pieces) if piece.kind not in (NORMAL, BYTE)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokenizer.pieces[i].text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i in special
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": bos, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": named["unk"],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: i for i, piece in enumerate(tokenizer.pieces)},
            "merges": [list(pair) for pair in merges_of(tokenizer)],
        },
    }
