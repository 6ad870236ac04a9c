"""Supervised records as tokens: what is learned of them, what is refused; rows of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_jax.data.chat import Encoded, Message, encode
from openelm_jax.data.conversations import encode_record, encode_records
from openelm_jax.data.epochs import batches, epochs, steps_of
from openelm_jax.data.instructions import prompt
from openelm_jax.data.objects import Object
from openelm_jax.data.packed_examples import PackedRows, pack, stack
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "tests" / "data" / "tokenizer-mistral-v1" / "tokenizer.model")


@pytest.mark.parametrize(
    "fields", [{"messages": TURNS}, {"prompt": TURNS[:1], "completion": TURNS[1:]}]
)
def test_messages_are_learned_as_the_template_writes_them(
    fields: dict[str, Any], tokenizer: Tokenizer
) -> None:
    expected = encode(tokenizer, [Message("user", "Hi"), Message("assistant", "Yo")])
    for ours, wanted in zip(encode_record(tokenizer, Object(fields, "f:1")), expected, strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("about", ["", "a thing"])
@pytest.mark.parametrize("form", ["corenet", "llm-adapters"])
def test_an_instruction_stands_in_its_prompt(tokenizer: Tokenizer, about: str, form: Any) -> None:
    fields = {"instruction": "What is it?", "input": about, "output": "true"}
    tokens, learned = encode_record(tokenizer, Object(fields, "f:1"), instruction=form)
    text = prompt("What is it?", about, form) + "true"
    assert tokens.tolist() == [1, *tokenizer.encode(text).tolist(), 2]
    assert tokenizer.decode(tokens[learned]).strip() == "true"
    assert learned[-1]


def test_texts_are_learned_behind_the_prompt(tokenizer: Tokenizer) -> None:
    fields = {"prompt": "one two", "completion": " three"}
    tokens, learned = encode_record(tokenizer, Object(fields, "f:1"))
    assert tokens.tolist() == [1, *tokenizer.encode("one two three").tolist(), 2]
    assert tokenizer.decode(tokens[learned]) == "three"


def test_all_tokens_but_the_first_are_learned_if_asked_for(tokenizer: Tokenizer) -> None:
    (example,), _ = encode_records(tokenizer, [Object({"messages": TURNS}, "")], 99, learn_all=True)
    assert example.learned.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_an_answer_that_is_cut_away_is_counted(tokenizer: Tokenizer) -> None:
    records = [
        Object({"prompt": "a", "completion": "b c"}, "f:1"),
        Object({"prompt": "a " * 50, "completion": "b"}, "f:2"),
    ]
    examples, dropped = encode_records(tokenizer, records, 3)
    assert [len(example.tokens) for example in examples] == [3]
    assert dropped == {"truncated away": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": TURNS[:1]}, "last message of messages is of user: it must be of assistant"),
        ({"messages": [*TURNS, *TURNS[1:]]}, "message 3 of messages is of assistant, but"),
        ({"messages": [{"role": "system", "content": ""}]}, "last message of messages is of sys"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "is empty"),
        ({"messages": "Hi"}, "messages must be a list of messages"),
        ({"instruction": "a", "output": ""}, "output is empty"),
        ({"instruction": "a", "output": "b", "input": 3}, "input is 3: it must be a text"),
        ({"prompt": "a", "completion": 3}, "completion must be a text"),
        ({"text": "a"}, "has the fields text: it needs messages"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(
    fields: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=message) as error:
        encode_record(tokenizer, Object(fields, "train.jsonl:7"))
    assert str(error.value).startswith("train.jsonl:7")


@given(st.lists(st.integers(1, 12), max_size=30))
def test_each_example_is_in_one_row_that_has_room(lengths: list[int]) -> None:
    rows = pack(lengths, 12)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < length <= 12 for length in filled)
    # No two rows would go into one: best fit leaves no such pair.
    assert not rows or sum(sorted(filled)[:2]) > 12 or len(rows) == 1


def test_a_row_counts_what_is_learned_and_no_begin() -> None:
    examples = [
        Encoded(np.array([1, 5, 6, 2]), np.array([False, False, True, True])),
        Encoded(np.array([1, 7, 2]), np.array([True, True, True])),
        Encoded(np.array([1, 8]), np.array([False, True])),
    ]
    rows = PackedRows(examples, 8)
    assert len(rows) == 2
    both = stack([rows[0], rows[1]])
    assert both.tokens_BL.tolist() == [[1, 5, 6, 2, 1, 7, 2, 0], [1, 8, 0, 0, 0, 0, 0, 0]]
    targets_BT = both.tokens_BL[:, 1:]
    assert targets_BT[both.counted_BT].tolist() == [6, 2, 7, 2, 8]


def test_every_epoch_has_each_record_once_in_another_order() -> None:
    order = epochs(range(50), seed=1)
    first, second, third = ([order[50 * epoch + i] for i in range(50)] for epoch in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert len({tuple(epoch) for epoch in (range(50), first, second, third)}) == 4
    assert [epochs(range(50), seed=2)[i] for i in range(50)] != first


@pytest.mark.parametrize("start", [0, 1, 12, 13, 1000])
def test_a_position_is_one_integer(start: int) -> None:
    """Batch i is the same for whoever begins there, and for whoever has come there."""
    one, other = (batches("abcdefghijk", 3, 4, "".join) for _ in range(2))
    walked = iter(one.slice(slice(start, start + 10)).to_iter_dataset())
    assert [next(walked) for _ in range(10)] == [other[start + i] for i in range(10)]


def test_batches_go_over_the_border_of_epochs() -> None:
    dataset = batches("abcdefghijk", 3, 4, "".join)
    text = "".join(dataset[i] for i in range(11))
    assert all(sorted(text[i : i + 11]) == list("abcdefghijk") for i in range(0, 44, 11))


@pytest.mark.parametrize(
    ("records", "batch_size", "num_epochs", "steps"), [(10, 5, 3, 6), (10, 4, 1, 3), (9, 4, 2, 5)]
)
def test_steps_of_epochs_read_every_record(
    records: int, batch_size: int, num_epochs: int, steps: int
) -> None:
    assert steps_of(records, batch_size, num_epochs) == steps
