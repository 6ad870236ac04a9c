"""A run directory belongs to one experiment and one tokenizer from its first checkpoint on."""

import dataclasses

import pytest
from corpora import documents, write, write_shards
from small_runs import small_experiment, write_corpus

from openelm_jax.config import SourceConfig, TokenizerConfig
from openelm_jax.data.manifest import list_manifest
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.tokenizer import load_tokenizer, train_tokenizer
from openelm_jax.training.run_directory import (
    check_run,
    check_shards,
    open_tokenizer,
    record_run,
)
from openelm_jax.weights.load import Weights


@pytest.fixture
def experiment(tmp_path):
    write_corpus(tmp_path / "corpus")
    return small_experiment(tmp_path / "corpus")


def with_changes(experiment, group, **changes):
    part = dataclasses.replace(getattr(experiment, group), **changes)
    return dataclasses.replace(experiment, **{group: part})


def claim(run, experiment, listed=None):
    check_run(run, experiment)
    manifest = list_manifest((listed or experiment).data)
    check_shards(run, manifest)
    record_run(run, experiment, manifest)


def begin(run):
    """Pretend the first checkpoint."""
    (run / "checkpoints" / "000006").mkdir(parents=True)


def test_the_resolved_experiment_is_in_the_directory(experiment, tmp_path):
    claim(tmp_path / "runs" / "new", experiment)

    assert from_json((tmp_path / "runs" / "new" / "experiment.json").read_text()) == experiment


@pytest.mark.parametrize(
    ("group", "changes", "named"),
    [
        ("model", {"num_layers": 3}, "model.num_layers: 2, 3"),
        ("optimizer", {"peak_lr": 0.5}, "optimizer.peak_lr: 0.01, 0.5"),
        ("training", {"steps": 17}, "training.steps: 16, 17"),
        ("training", {"dtype": "bfloat16"}, "training.dtype: 'float32', 'bfloat16'"),
        ("data", {"seed": 5}, "data.seed: 0, 5"),
    ],
)
def test_what_changes_a_result_is_refused_by_name(experiment, tmp_path, group, changes, named):
    claim(tmp_path, experiment)
    begin(tmp_path)

    with pytest.raises(UserError, match="was made by another experiment") as refusal:
        claim(tmp_path, with_changes(experiment, group, **changes))

    assert named in str(refusal.value)
    assert from_json((tmp_path / "experiment.json").read_text()) == experiment


def test_all_differences_are_named_at_once(experiment, tmp_path):
    claim(tmp_path, experiment)
    begin(tmp_path)
    other = with_changes(experiment, "training", steps=17, seed=1)

    with pytest.raises(UserError, match=r"training\.seed: 0, 1; training\.steps: 16, 17\."):
        claim(tmp_path, other)


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("training", {"log_every": 1, "validate_every": 3, "sample_prompts": ("a",)}),
        ("training", {"evaluate_every": 5, "evaluate_tasks": ("a",), "evaluate_limit": None}),
        ("training", {"evaluate_data": "elsewhere"}),
        ("checkpoint", {"every": 1, "keep_every": 2}),
        ("data", {"prefetch": 0, "root": "/elsewhere", "max_bad_fraction": 0.5}),
        ("mesh", {"tensor": 2}),
        ("training", {"accumulation": 2, "remat": "dots", "attention": "portable"}),
        ("training", {"memory_gib": 40.0, "loss_chunk": 512, "profile_steps": "3:4"}),
    ],
)
def test_what_changes_no_result_but_its_last_bits_may_change(experiment, tmp_path, group, changes):
    claim(tmp_path, experiment)
    begin(tmp_path)
    changed = with_changes(experiment, group, **changes)

    claim(tmp_path, changed, listed=experiment)

    assert from_json((tmp_path / "experiment.json").read_text()) == changed


def test_weights_are_left_to_the_position_of_the_data(experiment, tmp_path):
    claim(tmp_path, experiment)
    begin(tmp_path)
    (only,) = experiment.data.sources
    changed = with_changes(experiment, "data", sources=(dataclasses.replace(only, weight=2.0),))
    check_run(tmp_path, changed)


def test_other_shards_are_refused_by_their_names(experiment, tmp_path):
    run = tmp_path / "run"
    claim(run, experiment)
    more = tmp_path / "corpus" / "train" / "more.jsonl"
    write(more, documents(5))
    claim(run, experiment)  # before the first checkpoint everything may change
    begin(run)
    more.unlink()
    with pytest.raises(UserError, match=r"other data files: .*1 file gone \(.*more\.jsonl\)"):
        check_shards(run, list_manifest(experiment.data))


def test_before_the_first_checkpoint_a_mistake_can_be_mended(experiment, tmp_path):
    claim(tmp_path, experiment)
    mended = with_changes(experiment, "training", steps=17)

    claim(tmp_path, mended)

    assert from_json((tmp_path / "experiment.json").read_text()) == mended


def test_a_given_tokenizer_is_copied_and_stays_that_of_the_run(experiment, tmp_path):
    run, given = tmp_path / "run", experiment.tokenizer.path
    claim(run, experiment)
    tokenizer, origin = open_tokenizer(run, experiment)
    assert origin == given
    assert (run / "tokenizer.model").read_bytes() == tokenizer.model_bytes
    begin(run)

    other = tmp_path / "other.model"
    train_tokenizer(documents(100, seed=9), 360, other)
    with pytest.raises(UserError, match=r"tokenizer\.model differs from --tokenizer .*other"):
        open_tokenizer(run, with_changes(experiment, "tokenizer", path=str(other)))
    again, _ = open_tokenizer(run, with_changes(experiment, "tokenizer", path=None))
    assert again.sha256 == tokenizer.sha256


def test_without_one_it_is_trained_on_the_training_text_and_not_a_second_time(experiment, tmp_path):
    run = tmp_path / "run"
    training = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=330))
    claim(run, training)

    tokenizer, origin = open_tokenizer(run, training)
    begin(run)
    again, origin_again = open_tokenizer(run, training)

    assert tokenizer.vocab_size == 330
    assert origin == "trained on the training text"
    assert origin_again == str(run / "tokenizer.model")
    assert again.sha256 == tokenizer.sha256


def test_a_tokenizer_trained_for_a_mistake_is_not_kept(experiment, tmp_path):
    first = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=330))
    mended = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=335))
    for attempt in (first, mended):
        claim(tmp_path, attempt)
        open_tokenizer(tmp_path, attempt)

    assert load_tokenizer(tmp_path / "tokenizer.model").vocab_size == 335


def test_a_tokenizer_trained_on_the_wrong_text_is_not_kept(experiment, tmp_path):
    write_shards(tmp_path / "wrong" / "train", documents(30, seed=77), "jsonl", 1)
    run = tmp_path / "run"
    mended = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=330))
    source = SourceConfig(name="text", files=("train/*.jsonl",))
    mistaken = with_changes(mended, "data", root=str(tmp_path / "wrong"), sources=(source,))
    check_run(run, mistaken)

    wrong, _ = open_tokenizer(run, mistaken)
    right, origin = open_tokenizer(run, mended)

    assert origin == "trained on the training text"
    assert right.sha256 != wrong.sha256


def weights_with(tokenizer):
    return Weights(config=None, params={}, tokenizer=tokenizer, source="W")


def test_a_run_from_weights_keeps_what_their_tokens_mean(experiment, tmp_path):
    with_pieces = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=330))
    theirs = load_tokenizer(experiment.tokenizer.path)
    check_run(tmp_path / "run", with_pieces)

    tokenizer, origin = open_tokenizer(tmp_path / "run", with_pieces, weights_with(theirs))

    assert tokenizer.sha256 == theirs.sha256
    assert origin == "that of W"


def test_weights_and_tokenizer_that_do_not_belong_together_are_refused(experiment, tmp_path):
    other = train_tokenizer(documents(100, seed=9), 360, tmp_path / "other.model")
    with pytest.raises(UserError, match="--tokenizer differs from the tokenizer of --from W"):
        open_tokenizer(tmp_path, experiment, weights_with(other))

    untold = dataclasses.replace(experiment, tokenizer=TokenizerConfig(vocab_size=330))
    with pytest.raises(UserError, match="--from W comes without a tokenizer"):
        open_tokenizer(tmp_path, untold, weights_with(None))
