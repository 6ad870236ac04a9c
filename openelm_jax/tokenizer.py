"""Text to token ids and back: a SentencePiece model, given or trained like LLaMA's.

A document is encoded without <s> and </s>; whoever needs them adds `bos_id` and `eos_id`.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from openelm_jax.errors import UserError

TOKENIZER_FILE = "tokenizer.model"
"""What a tokenizer's file is called in every directory that holds one."""

# SentencePiece drops longer training lines without a word, so they are cut at spaces before.
MAX_LINE_CHARS = 1000
MAX_TRAINING_CHARS = 500_000_000
# Short chunks are encoded faster for each character, until the calls cost more than that saves.
CHUNK_CHARS = 500
PART_CHUNKS = 16
_SPACES = " \u2581"  # the second is what a space is in a piece
_SPACE_AFTER_CHARACTER = re.compile("[^\u2581]\u2581| ")


class Piece(NamedTuple):
    """A token: its text, with U+2581 for a space, its score, and which of the kinds below it is."""

    text: str
    score: float
    kind: int


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of a piece."""
BPE = 2
"""SentencePiece's number for models that merge pairs."""
NO_BYTES = "has no byte_fallback"
NO_SPACE_BEFORE = "puts no space before a text"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A SentencePiece model and the ids that frame a document."""

    model_bytes: bytes = field(repr=False)
    """The model file's content."""
    vocab_size: int
    """Pieces of the model; ids are below it."""
    bos_id: int
    eos_id: int
    sha256: str
    """Of `model_bytes`."""
    splits_at_spaces: bool
    """Whether the text between two spaces has the same tokens whatever stands around it."""

    @cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=self.model_bytes)

    @cached_property
    def _ends(self) -> tuple[bytes, bytes]:
        return np.int32(self.bos_id).tobytes(), np.int32(self.eos_id).tobytes()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_processor", "pieces")
        }

    def encode(self, text: str) -> np.ndarray:
        """Return the int32 ids of `text`, without <s> and </s>."""
        return np.concatenate(list(self.encode_in_parts(text)))

    def encode_in_parts(self, text: str, *, framed: bool = False) -> Iterator[np.ndarray]:
        """Yield the ids of `text` in order, int32, each part when it is asked for.

        Parts are of some thousands of characters, or the whole where a tokenizer does not split
        at spaces. Their concatenation is what SentencePiece makes of the whole text; `framed`, with
        <s> before and </s> after.
        """
        encode = self._processor.encode
        begin, end = self._ends if framed else (b"", b"")
        part: list[Any] = [begin]
        for chunk in _chunks(text) if self.splits_at_spaces else (text,):
            if len(part) > PART_CHUNKS:
                yield _join(part)
                part = [b""]
            part.append(encode(chunk, out_type="numpy"))
        part.append(end)
        yield _join(part)

    @property
    def unknown_id(self) -> int:
        return self._processor.unk_id()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces by id."""
        fields = [
            dict(protobuf_fields(value))
            for number, value in protobuf_fields(self.model_bytes)
            if number == 1
        ]
        return tuple(
            Piece(
                piece.get(1, b"").decode(),
                struct.unpack("<f", piece.get(2, 0).to_bytes(4, "little"))[0],
                piece.get(3, NORMAL),
            )
            for piece in fields
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; <s> and </s> add nothing to it."""
        return self._processor.decode([int(i) for i in ids])


def load_tokenizer(path: str | os.PathLike, model_vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer in the SentencePiece file `path`.

    Raises UserError when the file cannot be used, or has more pieces than `model_vocab_size`.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"tokenizer {path}: this is a directory; give a SentencePiece .model.")
    if not path.is_file():
        raise UserError(f"tokenizer {path}: there is no such file; give a SentencePiece .model.")
    try:
        model_bytes = path.read_bytes()
    except OSError as error:
        raise _unreadable(path) from error
    return tokenizer_from_bytes(model_bytes, path, model_vocab_size)


def tokenizer_from_bytes(
    model_bytes: bytes, where: str | Path, model_vocab_size: int | None = None
) -> Tokenizer:
    """Return the tokenizer that is the content of a SentencePiece file; `where` is for errors.

    Raises UserError as `load_tokenizer` does.
    """
    try:
        tokenizer = _from_bytes(model_bytes)
    except RuntimeError as error:
        raise _unreadable(where) from error
    _check(tokenizer, where, model_vocab_size)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | os.PathLike) -> Tokenizer:
    """Train a LLaMA-like BPE model of `vocab_size` pieces on `texts`, write it to `path`.

    The same texts give the same file. Digits are split, unknown characters become bytes, and the
    text is not normalised (trainer_spec of LLaMA's tokenizer.model). At most the first
    `MAX_TRAINING_CHARS` characters are used. Raises UserError when the texts are too few, and what
    `texts` raises.
    """
    path = Path(path)
    model = io.BytesIO()
    # SentencePiece makes a RuntimeError of whatever is raised while it asks for a line.
    raised: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_keeping_what_is_raised(_training_lines(texts), raised),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            character_coverage=0.99995,
            normalization_rule_name="identity",
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # written into the file: the machine's count would change its hash
            minloglevel=3,
        )
    except RuntimeError as error:
        if raised:
            raise raised[0] from None
        raise UserError(_training_failure(str(error), vocab_size)) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(model.getvalue())
    temporary.replace(path)
    return load_tokenizer(path)


def _from_bytes(model_bytes: bytes) -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    return Tokenizer(
        model_bytes=model_bytes,
        vocab_size=processor.get_piece_size(),
        bos_id=processor.bos_id(),
        eos_id=processor.eos_id(),
        sha256=hashlib.sha256(model_bytes).hexdigest(),
        splits_at_spaces=_splits_at_spaces(model_bytes, processor),
    )


def _join(part: list[Any]) -> np.ndarray:
    return np.frombuffer(b"".join(part), dtype=np.int32)  # np.concatenate takes longer


def _chunks(text: str) -> Iterator[str]:
    """Yield the text cut at spaces, which are left out: SentencePiece puts them back as the
    prefix of the chunk after.

    No cut at a space after a space, which may be one piece with it, nor at the end, since nothing
    has no prefix.
    """
    start, last = 0, len(text) - 1
    while (cut := text.find(" ", start + CHUNK_CHARS, last)) >= 0:
        while cut >= 0 and text[cut - 1] in _SPACES:
            cut = text.find(" ", cut + 1, last)
        if cut < 0:
            break
        yield text[start:cut]
        start = cut + 1
    yield text[start:]


def differences_from_llama(model_bytes: bytes) -> list[str]:
    """Return what of a SentencePiece file is not as LLaMA's, of what decides a text's tokens.

    LLaMA's merges pairs (BPE) of a text that it changes only in writing each space as U+2581 and
    putting one before, and writes unknown characters as bytes. Each difference is a part of a
    sentence: the tokenizer has, does, is. (Field numbers of sentencepiece_model.proto.)
    """
    model = dict(protobuf_fields(model_bytes))
    trainer, normalizer = (dict(protobuf_fields(model.get(field, b""))) for field in (2, 3))
    differences = {
        "is no BPE model": trainer.get(3, 1) != BPE,  # model_type
        NO_BYTES: not trainer.get(35),
        "puts spaces behind words": trainer.get(24),  # treat_whitespace_as_suffix
        "normalises text": normalizer.get(2),  # precompiled_charsmap
        NO_SPACE_BEFORE: not normalizer.get(3, 1),  # add_dummy_prefix
        "removes spaces": normalizer.get(4, 1),  # remove_extra_whitespaces
        "keeps spaces as they are": not normalizer.get(5, 1),  # escape_whitespaces
    }
    return [difference for difference, holds in differences.items() if holds]


def _splits_at_spaces(model_bytes: bytes, processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether no token can reach across a space that follows another character.

    It cannot where a text is merged as LLaMA's is, and no piece has U+2581 after another character:
    no merge crosses the space, so that those on either side are the same without the other side.
    The space itself must be a piece, since unknown characters that touch become one token.
    """
    pieces = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    return (
        not set(differences_from_llama(model_bytes)) - {NO_BYTES}
        and "\u2581" in pieces
        and not any(_SPACE_AFTER_CHARACTER.search(piece) for piece in pieces)
    )


def protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the (number, value) of the fields of a Protocol Buffers message.

    Values are integers, or bytes where the length is given: texts, nested messages. Reading them
    takes no package. Raises ValueError when it is no such message.
    """
    position = 0

    def take(length: int) -> bytes:
        nonlocal position
        taken = message[position : position + length]
        position += length
        if len(taken) < length:
            raise ValueError("the message breaks off")
        return taken

    def varint() -> int:
        value = shift = 0
        while True:
            byte = take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 2:
                yield key >> 3, take(varint())
            case 1 | 5 as kind:
                yield key >> 3, int.from_bytes(take(8 if kind == 1 else 4), "little")
            case _:
                raise ValueError("no such wire type")


def _unreadable(where: str | Path) -> UserError:
    return UserError(
        f"tokenizer {where}: not a readable SentencePiece model; give the .model file "
        "(not tokenizer.json)."
    )


def _check(tokenizer: Tokenizer, where: str | Path, model_vocab_size: int | None) -> None:
    if tokenizer.vocab_size == 0 or len(tokenizer.encode("Hello, world 1")) == 0:
        raise UserError(f"tokenizer {where}: it encodes text to nothing; give a complete .model.")
    if tokenizer.bos_id < 0 or tokenizer.eos_id < 0:
        raise UserError(
            f"tokenizer {where}: it has no <s> or no </s>, which frame every document; "
            "give a model with both."
        )
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"tokenizer {where}: its {tokenizer.vocab_size} pieces exceed model.vocab_size "
            f"{model_vocab_size}; raise model.vocab_size or give a smaller tokenizer."
        )


def _keeping_what_is_raised(lines: Iterator[str], raised: list[BaseException]) -> Iterator[str]:
    try:
        yield from lines
    except (Exception, KeyboardInterrupt) as error:
        raised.append(error)
        raise


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines of bounded length; the space lost at a cut returns as the next line's prefix."""
    chars = 0
    for text in texts:
        for line in text.split("\n"):
            while len(line) > MAX_LINE_CHARS:
                cut = line.rfind(" ", 1, MAX_LINE_CHARS)
                if cut < 0:
                    yield line[:MAX_LINE_CHARS]
                    line = line[MAX_LINE_CHARS:]
                else:
                    yield line[:cut]
                    line = line[cut + 1 :]
            if line:
                yield line
        chars += len(text)
        if chars > MAX_TRAINING_CHARS:
            return


def _training_failure(message: str, vocab_size: int) -> str:
    limit = re.search(r"value <= (\d+)", message)
    if limit:
        return (
            f"tokenizer.vocab_size {vocab_size} is more than the training text has pieces for; "
            f"use at most {limit[1]}, or more text."
        )
    needed = re.search(r"smaller than required_chars\. (\d+) vs (\d+)", message)
    if needed:
        return (
            f"tokenizer.vocab_size {vocab_size} leaves no room beside the 256 bytes and the "
            f"characters of the text; use at least {int(needed[2])}."
        )
    reason = "there is none" if "sentences_.empty" in message else message.strip()
    return (
        f"tokenizer.vocab_size {vocab_size}: no tokenizer can be trained on the training text "
        f"({reason}); give more text or a tokenizer.path."
    )
