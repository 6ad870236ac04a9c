"""The data pipeline as `train` uses it: workers, modes, other weights, files that fail or end.

A run that is continued begins in a copy of a whole run, of which only the first checkpoint is left.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import documents, write, write_shards
from fsspec.implementations.memory import MemoryFileSystem
from small_runs import (
    assert_equal_bits,
    assert_one_sentence,
    call,
    environment,
    params_of,
    read_metrics,
    small_experiment,
    train_command,
    write_corpus,
)

from openelm_jax.data.pipeline import open_data
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import from_json
from openelm_jax.model.decoder import Decoder, init_params
from openelm_jax.tokenizer import load_tokenizer
from openelm_jax.weights.orbax import saved_steps, step_directory

STEPS, FIRST = 16, 6
"""Steps of a run, and its first checkpoint."""
MIXTURE_FILE = '''"""Two sources."""

import dataclasses
from pathlib import Path

from small_runs import small_experiment

from openelm_jax.config import SourceConfig


def experiment():
    small = small_experiment(Path(__file__).parent)
    sources = (
        SourceConfig(name="web", files=("train/*.jsonl",), weight=3.0),
        SourceConfig(name="books", files=("books/*.jsonl",)),
    )
    return dataclasses.replace(small, data=dataclasses.replace(small.data, sources=sources))
'''


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(experiment: Path, tmp_path_factory: pytest.TempPathFactory, compiled_code: Path) -> Path:
    """Return a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("alone") / "run"
    call(train_command(experiment, run), compiled_code)
    return run


def until_first(run: Path, copy: Path) -> Path:
    """Return a copy of a run as it was with its first checkpoint."""
    shutil.copytree(run, copy)
    for step in saved_steps(copy):
        if step > FIRST:
            shutil.rmtree(step_directory(copy, step))
    assert saved_steps(copy) == [FIRST]
    return copy


def figures(run: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in read_metrics(run) if name in line}


def position_of(run: Path, step: int) -> bytes:
    return (step_directory(run, step) / "data" / "metadata").read_bytes()


def weights_recorded(run: Path) -> list[float]:
    experiment = from_json((run / "experiment.json").read_bytes())
    return [source.weight for source in experiment.data.sources]


def assert_same_end(run: Path, expected: Path) -> None:
    """Check losses, parameters and the position of the data at the last step, to the bit."""
    for name in ("train/loss", "validation/loss", "data/text/kept_tokens"):
        ours, theirs = figures(run, name), figures(expected, name)
        assert theirs.items() <= ours.items()  # a restart logs its first step besides
    assert_equal_bits(params_of(run, STEPS), params_of(expected, STEPS))
    assert position_of(run, STEPS) == position_of(expected, STEPS)


# --- Workers.


@pytest.mark.heavy
def test_with_workers_and_any_number_of_them_after_a_restart_it_is_the_same_run(
    experiment: Path, alone: Path, tmp_path: Path, train_here
) -> None:
    run = tmp_path / "run"

    train_here(experiment, run, "--data.workers", "2")

    assert_same_end(run, alone)
    for workers, begun_with in (("1", run), ("2", alone)):
        again = until_first(begun_with, tmp_path / workers)
        said = train_here(experiment, again, "--data.workers", workers)
        assert f"resumed at step {FIRST} of" in said
        assert_same_end(again, alone)


@pytest.mark.heavy
@pytest.mark.parametrize("whom", ["the process", "all of its processes"])
def test_sigterm_with_workers_ends_clean(
    experiment: Path, tmp_path: Path, compiled_code: Path, whom: str
) -> None:
    run = tmp_path / "run"
    flags = ("--training.steps", "1000", "--checkpoint.every", "1", "--data.workers", "2")
    process = subprocess.Popen(
        train_command(experiment, run, *flags),
        env=environment(compiled_code),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not (run / "metrics.jsonl").is_file():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        if whom == "the process":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 143, said
        deadline = time.monotonic() + 10
        while is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(process.pid)
    finally:
        if is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    beginnings = ("tokenizer: ", "held out: ", "1 cpu device(s)", "compiling ", "compiled ")
    beginnings += ("SIGTERM: saving", "text: ", f"{run}: step ")
    assert len(said.splitlines()) == len(beginnings)
    for line, beginning in zip(said.splitlines(), beginnings, strict=True):
        assert line.startswith(beginning), said
    assert f"step {saved_steps(run)[-1]} saved" in said


def is_alive(group: int) -> bool:
    """Return whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- Modes.


@pytest.mark.heavy
def test_rows_as_corenet_has_them_train_and_their_padding_does_not_count(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    pytest.importorskip("ftfy")
    write_shards(experiment.parent / "short", documents(40, words=(3, 12)), "jsonl", 2)
    whole, files = tmp_path / "whole", ("short/*.jsonl",)
    flags = ("--data.packing", "corenet", "--data.sources.0.files", *files)

    train_here(experiment, whole, *flags)

    assert figures(whole, "data/text/padded_tokens")[STEPS] > 0
    small = small_experiment(experiment.parent)
    losses = losses_of_first_batch(experiment.parent, files)
    counted = losses.pop("counted")
    assert figures(whole, "train/loss")[1] == pytest.approx(losses["mean of counted"], abs=2e-5)
    assert abs(losses["mean of all"] - losses["mean of counted"]) > 1e-3
    assert 0 < counted < small.training.global_batch_size * small.model.context_length
    again = until_first(whole, tmp_path / "again")
    train_here(experiment, again, *flags, "--data.workers", "1")
    assert_same_end(again, whole)


def losses_of_first_batch(folder: Path, files: tuple[str, ...]) -> dict[str, float]:
    small = small_experiment(folder)
    sources = (dataclasses.replace(small.data.sources[0], files=files),)
    settings = dataclasses.replace(small.data, sources=sources, packing="corenet")
    tokenizer = load_tokenizer(small.tokenizer.path)
    data = open_data(settings, tokenizer, row_length=33, global_batch_size=4)
    rows_BL, _ = next(data)
    logits = Decoder(small.model).apply(
        {"params": init_params(small.model, 0)}, jnp.asarray(rows_BL[:, :-1])
    )
    losses_BT = -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32))), rows_BL[:, 1:, None], -1
    )[..., 0]
    counted_BT = rows_BL[:, 1:] != tokenizer.vocab_size
    return {
        "mean of all": float(losses_BT.mean()),
        "mean of counted": float(losses_BT[counted_BT].mean()),
        "counted": int(counted_BT.sum()),
    }


def test_a_model_without_a_row_for_padding_is_refused(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    pytest.importorskip("ftfy")
    pieces = load_tokenizer(experiment.parent / "tokenizer.model").vocab_size
    flags = ("--data.packing", "corenet", "--model.vocab-size", str(pieces))

    said = train_here(experiment, tmp_path / "run", *flags, code=1)

    assert_one_sentence(
        said,
        f"data.packing corenet fills rows up with token {pieces}",
        f"model.vocab_size is {pieces}: set it to {pieces + 1} or more",
    )


def test_documents_kept_apart_train_to_another_loss_and_resume_to_the_bit(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    whole, flags = tmp_path / "whole", ("--data.isolate-documents",)

    train_here(experiment, whole, *flags)

    losses = figures(whole, "train/loss")
    assert losses[STEPS] < losses[1] - 0.5
    again = until_first(whole, tmp_path / "again")
    train_here(experiment, again, *flags)
    assert_same_end(again, whole)
    mixed = until_first(whole, tmp_path / "mixed")
    said = train_here(experiment, mixed, code=1)
    assert_one_sentence(said, "data.isolate_documents: True, False")


# --- Other weights, other files.


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_corpus(tmp_path_factory.mktemp("mixture"))
    write_shards(path.parent / "books", documents(10, seed=3, words=(10, 60)), "jsonl", 2)
    path.write_text(MIXTURE_FILE)
    return path


def test_other_weights_are_refused_by_name_unless_that_is_said_and_then_change_the_draw(
    mixture: Path, tmp_path: Path, train_here
) -> None:
    whole, weights = tmp_path / "whole", ("--data.sources.0.weight", "1.0")
    train_here(mixture, whole)
    assert figures(whole, "data/web/rows")[STEPS] == 3 * STEPS
    run = until_first(whole, tmp_path / "run")

    said = train_here(mixture, run, *weights, code=1)

    assert_one_sentence(said, "data.sources.web.weight was 3.0 and is 1.0", "by --reweight")
    assert saved_steps(run) == [FIRST]

    train_here(mixture, run, *weights, "--reweight")

    assert figures(run, "data/web/rows")[STEPS] == 3 * FIRST + 2 * (STEPS - FIRST)
    assert figures(run, "data/books/rows")[STEPS] == FIRST + 2 * (STEPS - FIRST)
    assert "is complete" in train_here(mixture, run, *weights)  # the new weights are the run's
    said = train_here(mixture, run, code=1)
    assert_one_sentence(said, "data.sources.web.weight was 1.0 and is 3.0", "by --reweight")
    assert weights_recorded(run) == [1.0, 1.0]


def test_other_weights_that_no_checkpoint_has_yet_are_not_those_of_the_run(
    mixture: Path, tmp_path: Path, train_here, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights = tmp_path / "whole", ("--data.sources.0.weight", "1.0")
    train_here(mixture, whole)
    run = until_first(whole, tmp_path / "run")

    def killed(*arguments, **options):
        raise UserError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("openelm_jax.training.loop.train_loop", killed)
        said = train_here(mixture, run, *weights, "--reweight", code=1)
    assert said.endswith("killed\n")
    assert saved_steps(run) == [FIRST]
    assert weights_recorded(run) == [3.0, 1.0]

    said = train_here(mixture, run, *weights, code=1)
    assert_one_sentence(said, "data.sources.web.weight was 3.0 and is 1.0", "by --reweight")
    old, new = (Path(shutil.copytree(run, tmp_path / name)) for name in ("old", "new"))
    train_here(mixture, old)
    assert position_of(old, STEPS) == position_of(whole, STEPS)
    train_here(mixture, new, *weights, "--reweight")
    assert figures(new, "data/web/rows")[STEPS] == 3 * FIRST + 2 * (STEPS - FIRST)
    assert weights_recorded(new) == [1.0, 1.0]


def test_other_files_are_refused_by_their_names(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(experiment.parent, corpus)
    here = corpus / experiment.name
    train_here(here, run, "--training.steps", "2")
    (corpus / "train" / "00.jsonl").rename(corpus / "train" / "renamed.jsonl")
    write(corpus / "train" / "01.jsonl", documents(3))

    said = train_here(here, run, "--training.steps", "2", code=1)

    assert_one_sentence(
        said,
        f"{run} was begun with other data files: text: 1 file gone (train/00.jsonl), "
        "1 new (train/renamed.jsonl), 1 of another size (train/01.jsonl)",
        "put them back as they were, or start a new run",
    )


# --- Files that end the run: it keeps what it has, and can go on.


def stopped(run: Path) -> int:
    """Return the step at which a run was saved when its data gave out."""
    [done] = saved_steps(run)
    assert 0 < done < STEPS
    return done


def test_a_store_that_fails_for_ever_ends_the_run_and_it_goes_on_when_it_is_back(
    experiment: Path, alone: Path, tmp_path: Path, train_here, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    root = f"memory://{tmp_path.name}"
    for path in experiment.parent.rglob("*.jsonl"):
        name = f"{root}/{path.relative_to(experiment.parent)}"
        fsspec.filesystem("memory").pipe_file(name, path.read_bytes())
    reads, real = itertools.count(), MemoryFileSystem.cat_file

    def cat_file(*arguments, **options):
        if next(reads) >= 5:  # two to look, one of the held-out text, two of the first epoch
            raise ConnectionResetError("reset by peer")
        return real(*arguments, **options)

    monkeypatch.setattr("openelm_jax.data.storage.WAITS", (0.0, 0.0))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    flags = ("--data.root", root, "--checkpoint.every", "100")

    said = train_here(experiment, run, *flags, code=1)

    assert_one_sentence(said, f"{root}/train/0", "it cannot be read (reset by peer) in 3 tries")
    done = stopped(run)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", real)
    said = train_here(experiment, run, *flags)
    assert f"resumed at step {done} of" in said
    assert_same_end(run, alone)


def test_a_damaged_file_ends_the_run_and_skipping_it_lets_it_go_on(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    corpus, whole, run = tmp_path / "corpus", tmp_path / "whole", tmp_path / "run"
    shutil.copytree(experiment.parent, corpus)
    here = corpus / experiment.name
    shutil.rmtree(corpus / "train")
    write_shards(corpus / "train", documents(16, words=(10, 60)), "jsonl.gz", 4)
    damaged = corpus / "train" / "01.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    flags = ("--data.sources.0.files", "train/*", "--data.lanes", "1", "--checkpoint.every", "100")
    skipping = ("--data.on-damaged-shard", "skip_rest")
    train_here(here, whole, *flags, *skipping)
    assert figures(whole, "data/text/damaged_shards")[STEPS] >= 1

    said = train_here(here, run, *flags, code=1)

    assert_one_sentence(
        said, f"{damaged}: the file cannot be read as jsonl.gz", "data.on_damaged_shard skip_rest"
    )
    done = stopped(run)
    said = train_here(here, run, *flags, *skipping)
    assert f"resumed at step {done} of" in said
    assert_same_end(run, whole)


def test_a_source_that_may_not_be_read_again_ends_the_run_and_more_epochs_let_it_go_on(
    experiment: Path, alone: Path, tmp_path: Path, train_here
) -> None:
    run, flags = tmp_path / "run", ("--checkpoint.every", "100")

    said = train_here(experiment, run, *flags, "--data.sources.0.max-epochs", "1", code=1)

    assert_one_sentence(said, "data.sources text: lane ", "max_epochs (1) times")
    done = stopped(run)
    said = train_here(experiment, run, *flags, "--data.sources.0.max-epochs", "9")
    assert f"resumed at step {done} of" in said
    assert_same_end(run, alone)
