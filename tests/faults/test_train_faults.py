"""Whatever goes wrong in training is one sentence with exit code 1, and what was saved stays whole.

Each fault is put into a small corpus, a run directory or an experiment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import documents, write, write_shards
from small_runs import (
    assert_equal_bits,
    assert_one_sentence,
    call,
    environment,
    params_of,
    read_metrics,
    train_command,
    write_corpus,
)

from openelm_jax.weights.orbax import TEMPORARY, find_damage, saved_steps, step_directory

WITHOUT_CAPABILITIES = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search,-fowner",
    "--inh-caps=-dac_override,-dac_read_search,-fowner",
)
"""Makes file modes count for root too."""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def assert_whole(run: Path, steps: list[int]) -> None:
    """Check that exactly these steps are saved, and nothing half under a step's name.

    A write still under way when its save has failed may leave a temporary directory, which the
    next start clears away.
    """
    assert saved_steps(run) == steps
    names = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert [name for name in names if TEMPORARY not in name] == [f"{step:06}" for step in steps]
    for step in steps:
        assert find_damage(step_directory(run, step), ("params", "optimizer", "data")) is None


# --- The corpus.


def test_a_file_that_is_not_there_is_named(experiment: Path, tmp_path: Path, train_here) -> None:
    flags = ("--data.sources.0.files", "train/00.jsonl", "train/missing.jsonl")

    said = train_here(experiment, tmp_path / "run", *flags, code=1)

    assert_one_sentence(said, "data.sources text", "there is no file", "train/missing.jsonl")


def test_a_pattern_that_matches_nothing_is_named(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    shutil.rmtree(experiment.parent / "train")

    said = train_here(experiment, tmp_path / "run", code=1)

    assert_one_sentence(said, "no file matches train/*.jsonl below", "--data.root DIR")


def test_empty_files_are_told(experiment: Path, tmp_path: Path, train_here) -> None:
    for path in (experiment.parent / "train").iterdir():
        path.write_bytes(b"")

    said = train_here(experiment, tmp_path / "run", code=1)

    assert_one_sentence(said, "all 2 files that match are empty", "train/00.jsonl")


@pytest.mark.heavy
def test_a_missing_text_field_names_the_fields_there_are_and_can_be_mended_in_place(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    shutil.rmtree(experiment.parent / "train")
    write_shards(experiment.parent / "train", documents(10, seed=1), "jsonl", 2)
    for path in (experiment.parent / "train").iterdir():
        path.write_text(path.read_text().replace('"text"', '"content"'))
    run, brief = tmp_path / "run", ("--training.steps", "1")

    said = train_here(experiment, run, *brief, code=1)

    assert_one_sentence(
        said, "00.jsonl:1", "no field 'text' but 'id', 'content'", "set the source's text_key"
    )
    no_holdout = ("--data.sources.0.text-key", "content", "--data.sources.0.holdout")
    train_here(experiment, run, *brief, *no_holdout)
    assert_whole(run, [1])


def test_a_corpus_of_which_the_filters_leave_nothing_ends_with_the_counts(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    run = tmp_path / "run"

    said = train_here(experiment, run, "--data.min-chars", "100000", code=1)

    assert_one_sentence(
        said,
        "data.sources text: no training text in all records",
        "of 5 records 5 have fewer characters than data.min_chars 100000",
        "0 fewer tokens than data.min_tokens 10, 0 are bad",
        "lower the thresholds",
    )
    assert saved_steps(run) == []


def test_too_much_broken_json_stops_the_run_and_a_higher_limit_lets_it_go_on(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    """Judged when a small corpus has been read once; the batches made by then are trained on."""
    path = experiment.parent / "train" / "01.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], '{"text": "half a docu']) + "\n")
    run, flags = tmp_path / "run", ("--checkpoint.every", "100")

    said = train_here(experiment, run, *flags, code=1)

    assert_one_sentence(
        said,
        "data.sources text: ",
        " records are bad, the last at ",
        "01.jsonl:5 (not JSON",
        "raise data.max_bad_fraction (0.001)",
    )
    [done] = saved_steps(run)
    assert 0 < done < 16
    assert_whole(run, [done])

    said = train_here(experiment, run, *flags, "--data.max-bad-fraction", "0.2")

    assert f"resumed at step {done} of" in said
    assert_whole(run, [done, 16])
    counted = [line["data/text/bad_json"] for line in read_metrics(run) if "train/loss" in line]
    assert counted[-1] >= 1


# --- The run directory.


def test_a_run_directory_that_cannot_be_written_is_told(
    experiment: Path, tmp_path: Path, compiled_code: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o555)
    prefix = WITHOUT_CAPABILITIES if os.geteuid() == 0 else ()
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("file modes do not count for root, and setpriv cannot make them")

    said = call([*prefix, *train_command(experiment, run)], compiled_code, code=1)

    assert_one_sentence(said, f"{run}: Permission denied", "choose another --run")
    assert list(run.iterdir()) == []


def test_a_run_directory_that_is_a_file_is_told(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    (tmp_path / "run").write_text("a file")

    said = train_here(experiment, tmp_path / "run", code=1)

    assert_one_sentence(said, f"{tmp_path / 'run'}: ", "choose another --run")


@pytest.mark.heavy
def test_a_full_disk_is_told_and_the_checkpoint_before_is_whole(
    experiment: Path, tmp_path: Path, compiled_code: Path, train_here
) -> None:
    """The run lies on a disk of its own, seen by the command alone, and is copied out after it."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    script = f"""
        mount -t tmpfs -o size=$1 tmpfs {run} || exit 77
        shift
        "$@"
        code=$?
        cp -r {run} {copy}
        exit $code
    """

    def on_disk_of(size: str, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["unshare", "--mount", "bash", "-c", script, "bash", size, *command],
            env=environment(compiled_code),
            capture_output=True,
            text=True,
        )

    if not shutil.which("unshare") or on_disk_of("1m", "true").returncode:
        pytest.skip("mounting a small disk is not permitted here")
    shutil.rmtree(copy)
    train_here(experiment, tmp_path / "unbroken")
    used = sum(p.stat().st_size for p in (tmp_path / "unbroken").rglob("*") if p.is_file())

    done = on_disk_of(str(used * 6 // 10), *train_command(experiment, run))

    assert done.returncode == 1, done.stderr
    assert_one_sentence(
        done.stderr,
        f"{run / 'checkpoints'}: cannot save step ",
        "(No space left on device); earlier checkpoints are intact",
        "Free space there",
    )
    assert saved_steps(copy) in ([6], [6, 12])  # of three
    assert_whole(copy, saved_steps(copy))
    said = train_here(experiment, copy)  # the disk has room again
    assert "resumed at step " in said
    assert_equal_bits(params_of(copy, 16), params_of(tmp_path / "unbroken", 16))


# --- The numbers.


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_steps_before(
    experiment: Path, tmp_path: Path, train_here
) -> None:
    run = tmp_path / "run"
    wild = ("--optimizer.peak-lr", "1e30", "--optimizer.warmup-steps", "2")

    said = train_here(experiment, run, *wild, "--checkpoint.every", "1", code=1)

    # Update 1 has the initial rate, update 2 half the peak: step 3 is past all bounds.
    assert_one_sentence(said, "step 3: ", "the gradient norm nan", "lower optimizer.peak_lr")
    assert_whole(run, [1, 2])
    for line in read_metrics(run):
        assert line["step"] < 3
        json.dumps(line, allow_nan=False)


# --- None of it shows a traceback where nobody watches.


def test_in_a_process_of_its_own_a_mistake_is_one_line_on_stderr(
    experiment: Path, tmp_path: Path, compiled_code: Path
) -> None:
    write(experiment.parent / "train" / "00.jsonl", documents(3), key="body")
    (experiment.parent / "train" / "01.jsonl").unlink()
    command = train_command(experiment, tmp_path / "run")
    assert command[0] == sys.executable

    said = call(command, compiled_code, code=1)

    assert_one_sentence(said, "no field 'text' but 'id', 'body'")
