"""Preference pairs: every form of a record gives the same pair, and what is no pair is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_jax.data.chat import ChatForm, Message, encode_prompt
from openelm_jax.data.objects import Object, read_objects
from openelm_jax.data.preferences import (
    Pair,
    Preference,
    Truncation,
    encode_preference,
    encode_preferences,
    pair_rows,
    read_preference,
    truncate,
)
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "tests" / "data" / "tokenizer-mistral-v1" / "tokenizer.model")


def user(text: str) -> dict[str, str]:
    return {"content": text, "role": "user"}


def assistant(text: str) -> dict[str, str]:
    return {"content": text, "role": "assistant"}


CHOSEN, REJECTED = [user("Hi"), assistant("Yo")], [user("Hi"), assistant("No")]
FORMS: dict[str, dict[str, Any]] = {
    "argilla": {
        "source": "evol",
        "prompt": "Hi",
        "chosen": CHOSEN,
        "chosen-rating": 5.0,
        "chosen-model": "a",
        "rejected": REJECTED,
        "rejected-rating": 3.0,
        "rejected-model": "b",
    },
    "HuggingFaceH4": {
        "prompt": "Hi",
        "prompt_id": "0",
        "chosen": CHOSEN,
        "rejected": REJECTED,
        "messages": CHOSEN,
        "score_chosen": 5.0,
        "score_rejected": 3.0,
    },
    "explicit prompt": {
        "prompt": [user("Hi")],
        "chosen": [assistant("Yo")],
        "rejected": [assistant("No")],
    },
    "explicit prompt, repeated": {
        "prompt": [user("Hi")],
        "chosen": CHOSEN,
        "rejected": REJECTED,
    },
    "implicit prompt": {"chosen": CHOSEN, "rejected": REJECTED},
    "messages and texts": {"prompt": [user("Hi")], "chosen": "Yo", "rejected": "No"},
    "a text and messages": {
        "prompt": "Hi",
        "chosen": [assistant("Yo")],
        "rejected": [assistant("No")],
    },
}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    """Write records in the format that the file's ending says."""
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz", "pairs.parquet"])
def test_every_form_of_a_record_gives_the_same_pair(form: str, name: str, tmp_path: Path) -> None:
    (record,) = read_objects(write(tmp_path / name, [FORMS[form]]))
    preference = read_preference(record)
    assert preference[:3] == ((Message("user", "Hi"),), "Yo", "No")
    rated = form in ("argilla", "HuggingFaceH4")
    assert preference.ratings == ((5.0, 3.0) if rated else None)


def test_of_a_longer_conversation_all_but_the_last_answer_is_the_prompt() -> None:
    turns = [{"role": "system", "content": "Be kind."}, *CHOSEN, user("And?")]
    record = {"prompt": "And?", "chosen": [*turns, assistant("a")]}
    record["rejected"] = [*turns, assistant("b")]
    prompt, *answers = read_preference(Object(record, "f:1"))[:3]
    assert [message.role for message in prompt] == ["system", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert answers == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"chosen": [user("Hi"), user("Yo"), assistant("a")]},
            "different prompts",
        ),
        (
            {name: [user("Hi"), user("Yo"), assistant(name)] for name in ("chosen", "rejected")},
            r"message 2 of the prompt is of user, but the roles must alternate: .*assistant",
        ),
        (
            {
                name: [assistant("x"), user("Yo"), assistant(name)]
                for name in ("chosen", "rejected")
            },
            "message 1 of the prompt is of assistant",
        ),
        (
            {"rejected": [user("Hi")]},
            "last message of rejected is of user: it must be of assistant",
        ),
        ({"rejected": [user("Ho"), assistant("No")]}, "different prompts"),
        ({"rejected": None}, "rejected must be a text or a list of messages"),
        ({"chosen": [assistant("x")], "rejected": [assistant("y")]}, "chosen answers nothing"),
        ({"chosen": [user("Hi"), {"role": "assistant"}]}, "message 2 of chosen needs a role and a"),
        ({"chosen": [user("Hi"), {"role": "tool", "content": "x"}]}, "of the role 'tool'"),
        ({"chosen": []}, "chosen must be a list of messages, one at least"),
        ({"score_chosen": "good", "score_rejected": 1}, "must be numbers"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(
    change: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    good = FORMS["implicit prompt"]
    path = write(tmp_path / "pairs.jsonl", [good, good | change])
    with pytest.raises(UserError, match=message) as error:
        encode_preferences(tokenizer, read_objects(path))
    assert f"{path}:2" in str(error.value)


def test_candidates_are_sent_to_sample_pairs() -> None:
    with pytest.raises(UserError, match=r"candidates, not a pair: .*sample_pairs"):
        read_preference(Object({"prompt": "a", "responses": ["b"], "scores": [1]}, "f:1"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "a.jsonl:3 is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1 is '.1.': it must be an object"),
        ("a.jsonl.gz", b"text", "cannot be decompressed"),
        ("a.json", b"{}", "is no list of records"),
        ("a.csv", b"", "records are read from .jsonl"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_a_file_of_no_records_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_objects(str(tmp_path / name)))


def test_pairs_that_teach_nothing_are_left_out_and_counted(tokenizer: Tokenizer) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": " "},
        {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": 1.0},
        {"prompt": "a " * 40, "chosen": "b", "rejected": "c"},
    ]
    objects = [Object(record, f"f:{i}") for i, record in enumerate(records, 1)]
    truncation = Truncation("keep_start", max_length=20)
    pairs, dropped = encode_preferences(tokenizer, objects, truncation)
    assert len(pairs) == 1
    assert set(dropped.values()) == {1}
    assert len(dropped) == 4
    pairs, dropped = encode_preferences(tokenizer, objects, truncation, drop_equal_ratings=False)
    assert (len(pairs), dropped["equal ratings"]) == (2, 0)


def test_a_conversation_is_one_begin_and_an_end_for_each_answer(tokenizer: Tokenizer) -> None:
    preference = Preference((Message("user", "Hi"),), "Yo", "No </s>")
    form = ChatForm(learn_tag=False)
    prompt, chosen, rejected = encode_preference(tokenizer, preference, form)
    np.testing.assert_array_equal(prompt, encode_prompt(tokenizer, preference.prompt, form))  # type: ignore[arg-type]
    assert tokenizer.decode(chosen) == "Yo"
    assert [ids.tolist().count(2) for ids in (chosen, rejected)] == [1, 1]
    assert [ids.tolist().count(1) for ids in (prompt, chosen, rejected)] == [1, 0, 0]
    with_tag = encode_preference(tokenizer, preference)
    assert tokenizer.decode(with_tag.chosen).startswith("<|assistant|>\n")
    np.testing.assert_array_equal(np.concatenate(with_tag[:2]), np.concatenate([prompt, chosen]))


def test_of_an_earlier_answer_nothing_is_of_the_pair(tokenizer: Tokenizer) -> None:
    turns = (Message("user", "Hi"), Message("assistant", "Yo"), Message("user", "And"))
    pair = encode_preference(tokenizer, Preference(turns, "a", "b"))
    assert tokenizer.decode(pair.prompt).count("<|assistant|>") == 1
    assert tokenizer.decode(pair.chosen).strip() == "<|assistant|>\na"


@pytest.mark.parametrize("end", ["", "</s>"])
def test_texts_are_taken_as_they_are_and_end_once(tokenizer: Tokenizer, end: str) -> None:
    prompt, chosen, rejected = encode_preference(
        tokenizer, Preference("The cat", " sat" + end, "egory" + end)
    )
    for answer, text in ((chosen, "The cat sat"), (rejected, "The category")):
        whole = np.concatenate([prompt, answer])
        assert whole.tolist() == [1, *tokenizer.encode(text).tolist(), 2]
    assert len(chosen) >= 2


def pair(prompt: int, chosen: int, rejected: int) -> Pair:
    """Return a pair of so many tokens, the prompt's 1, 2, ..., the answers' from 1000 and 2000."""
    parts = (np.arange(1, prompt + 1), np.arange(1000, 1000 + chosen))
    return Pair(*parts, np.arange(2000, 2000 + rejected))


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((500, 524, 10), (500, 524, 10)),  # fits
        ((2000, 100, 20), (512, 100, 20)),  # the prompt is cut
        ((600, 424, 1), (600, 424, 1)),  # over the prompt's most, but it fits
        ((600, 425, 1), (512, 425, 1)),
        ((2000, 600, 20), (512, 512, 20)),  # then the answers
        ((100, 1000, 20), (100, 512, 20)),  # TRL cut to 512 however short the prompt is
    ],
)
def test_keep_end_cuts_as_trl_of_april_2024_did(
    lengths: tuple[int, int, int], kept: tuple[int, int, int]
) -> None:
    cut = truncate(pair(*lengths))
    assert cut is not None
    assert tuple(map(len, cut)) == kept
    assert (cut.prompt[0], cut.prompt[-1]) == (1, lengths[0])  # <s>, and the end
    assert (cut.chosen[0], cut.rejected[0]) == (1000, 2000)


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((500, 600, 10), (500, 524, 10)),
        ((1023, 9, 9), (1023, 1, 1)),
        ((1024, 9, 9), None),
        ((3000, 9, 9), None),
    ],
)
def test_keep_start_cuts_as_trl_does_now(
    lengths: tuple[int, int, int], kept: tuple[int, int, int] | None
) -> None:
    cut = truncate(pair(*lengths), Truncation("keep_start"))
    assert (None if cut is None else tuple(map(len, cut))) == kept


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "middle"}, "truncation_mode is middle"),
        ({"max_prompt_length": 1024}, "max_prompt_length is 1024 and max_length 1024"),
        ({"mode": "keep_start", "max_length": 1}, "max_length is 1"),
    ],
)
def test_lengths_that_leave_no_answer_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Truncation(**fields)


def test_a_batch_has_the_rows_of_a_pair_together_and_their_lengths_apart() -> None:
    rows = pair_rows([pair(2, 3, 1), pair(1, 1, 2)], 6)
    assert rows.tokens_BL.tolist() == [
        [1, 2, 1000, 1001, 1002, 0],
        [1, 2, 2000, 0, 0, 0],
        [1, 1000, 0, 0, 0, 0],
        [1, 2000, 2001, 0, 0, 0],
    ]
    assert rows.prompt_B.tolist() == [2, 2, 1, 1]
    assert rows.length_B.tolist() == [5, 3, 2, 3]
