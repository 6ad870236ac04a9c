"""What a text costs: each token once, by an independent count of windows and probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import evaluate
from openelm_jax.errors import UserError
from openelm_jax.evaluation.text import TextCost, text_costs, text_table
from openelm_jax.generation.language_model import LanguageModel, language_model, load
from openelm_jax.generation.text_loss import windows
from openelm_jax.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
LENGTH = 16
WINDOWS = (1, 2, 3.5)


def test_windows_side_by_side_begin_where_the_one_before_ends():
    tokens = np.arange(100, 109)
    assert [(r.context, r.continuation) for r in windows(tokens, 4)] == [
        ([100], [101, 102, 103, 104]),
        ([104], [105, 106, 107, 108]),
    ]
    assert [len(r.continuation) for r in windows(tokens[:7], 4)] == [4, 2]


def test_with_a_stride_a_window_reads_all_that_fits_before_it():
    tokens = np.arange(100, 108)
    assert [(r.context, r.continuation) for r in windows(tokens, 4, 2)] == [
        ([100], [101, 102, 103, 104]),
        ([102, 103, 104], [105, 106]),
        ([103, 104, 105, 106], [107]),
    ]


@pytest.mark.parametrize("stride", [None, 1, 5, LENGTH])
@pytest.mark.parametrize("number", WINDOWS)
def test_every_token_but_the_first_is_scored_once(number: float, stride: int | None):
    tokens = np.arange(1 + int(number * LENGTH))
    requests = windows(tokens, LENGTH, stride)
    np.testing.assert_array_equal(np.concatenate([r.continuation for r in requests]), tokens[1:])
    for context, continuation in requests:
        assert context[-1] + 1 == continuation[0]
        assert len(context) + len(continuation) - 1 <= LENGTH


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny(num_layers=1, vocab_size=32_000, context_length=LENGTH)
    directory = tmp_path_factory.mktemp("weights") / "model"
    write_huggingface(directory, config, random_params(config), tokenizer=load_tokenizer(TOKENIZER))
    return directory


@pytest.fixture(scope="module")
def model(weights: Path) -> LanguageModel:
    return load(weights)


def text_of(model: LanguageModel, num_tokens: int) -> str:
    """Return a text of so many tokens, not all of them ASCII."""
    assert model.tokenizer is not None
    text = "A naïve ship sails by day, and the wide sea carries it on. " * 5
    while len(model.tokenizer.encode(text)) > num_tokens:
        text = text[:-1]
    assert len(model.tokenizer.encode(text)) == num_tokens
    return text


def textbook(model: LanguageModel, text: str, stride: int) -> float:
    """Return the nats of a text, a token at a time: each after all that its window reads of it."""
    tokens = [model.tokenizer.bos_id, *model.tokenizer.encode(text).tolist()]
    total = 0.0
    for place in range(1, len(tokens)):
        beyond = max(0, place - LENGTH)
        moved = -(-beyond // stride) * stride  # windows that were passed
        last = min(LENGTH + moved, len(tokens) - 1)
        begin = moved if stride == LENGTH else max(0, last - LENGTH)
        read = np.zeros((1, LENGTH), np.int32)
        read[0, : place - begin] = tokens[begin:place]
        logits_V = model.logits(read)[0, place - begin - 1].astype(np.float64)
        logits_V = logits_V[: model.tokenizer.vocab_size]
        total += math.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max()
        total -= logits_V[tokens[place]]
    return total


@pytest.mark.parametrize("stride", [None, 5])
def test_a_text_of_several_windows_costs_what_its_tokens_cost_one_by_one(model, stride, tmp_path):
    text = text_of(model, int(3.5 * LENGTH))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (cost,) = text_costs(model, [tmp_path / "text.txt"], stride)
    assert cost.nats == pytest.approx(textbook(model, text, stride or LENGTH), rel=1e-5)
    assert cost.tokens == int(3.5 * LENGTH)
    assert cost.bytes == len(text.encode()) > len(text)


def test_figures_follow_from_nats_tokens_and_bytes():
    cost = TextCost("a.txt", nats=8 * math.log(2), tokens=4, bytes=16)
    assert cost.nats_per_token == pytest.approx(2 * math.log(2))
    assert cost.perplexity == pytest.approx(4)
    assert cost.bits_per_byte == pytest.approx(0.5)
    assert text_table([cost]).splitlines()[-1] == "| a.txt | 4 | 16 | 1.3863 | 4.000 | 0.5000 |"


def test_the_command_prints_and_writes_texts(weights, model, tmp_path, capsys):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, number in zip(files, (5, 20), strict=True):
        file.write_text(text_of(model, number), encoding="utf-8")
    texts = [flag for file in files for flag in ("--text", str(file))]
    evaluate.main(["--from", str(weights), *texts, "--json", "--out", str(tmp_path / "out")])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [each["tokens"] for each in printed["texts"]] == [5, 20]
    expected = [cost.nats for cost in text_costs(model, files)]
    assert [each["nats"] for each in printed["texts"]] == pytest.approx(expected)
    assert "| bits per byte |" in (tmp_path / "out" / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
def test_a_file_without_text_is_refused(model, content, tmp_path):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"text\.txt.*give a (text file in UTF-8|file that does)"):
        text_costs(model, [tmp_path / "text.txt"])


def test_a_file_that_is_not_there_a_long_stride_and_no_tokenizer_are_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"none\.txt.*give a text file"):
        text_costs(model, [tmp_path / "none.txt"])
    for stride in (0, LENGTH + 1):
        with pytest.raises(UserError, match=f"--stride is {stride}: give 1 to {LENGTH}"):
            text_costs(model, [tmp_path / "none.txt"], stride)
    bare = language_model(tiny(), random_params(tiny()), None, "float32")
    with pytest.raises(UserError, match="--tokenizer FILE"):
        text_costs(bare, [tmp_path / "none.txt"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "piqa", "--stride", "4"], "--stride moves over texts"),
        (["--text", "a.txt", "--limit", "4"], "--limit and --data are for tasks"),
        (["--text", "a.txt", "--tasks", "piqa"], "not allowed with"),
    ],
)
def test_flags_that_do_not_go_together_are_told(flags, message, capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--from", "W", *flags])
    assert message in capsys.readouterr().err
