"""Exports appear complete or not at all, whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_jax.errors import UserError
from openelm_jax.weights.new_directory import new_directory, require_new


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Be in a directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("out", ["out", "deep/in/out", "empty", "empty/../out"])
def test_the_name_is_taken_when_all_is_there(here, out):
    (here / "empty").mkdir()

    with new_directory(Path(out)) as partial:
        (partial / "file").touch()
        assert not (Path(out) / "file").exists()

    assert names(Path(out)) == ["file"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (".", r"\. is the working directory"),
        ("../here", "here is the working directory"),
        ("file", "file is a file"),
        ("full", "full is not empty"),
        ("dangling", "dangling is a link"),
        ("link", "link is a link"),
    ],
)
def test_what_is_no_new_directory_is_refused_at_once(here, monkeypatch, out, message):
    (here / "here").mkdir()
    (here / "file").touch()
    (here / "full" / "of").mkdir(parents=True)
    (here / "dangling").symlink_to("nowhere")
    (here / "link").symlink_to("here")
    if "working" in message:
        monkeypatch.chdir(here / "here")
    before = names(here)

    with pytest.raises(UserError, match=message):
        require_new(Path(out))

    assert names(here) == before


@pytest.mark.parametrize("out", ["file/out", "x" * 300, "/proc/out"])
def test_where_nothing_can_be_made_is_said_in_one_sentence(here, out):
    (here / "file").touch()

    said = pytest.raises(UserError, match=r"was not written \(.*\); make it possible")
    with said, new_directory(Path(out)):
        pytest.fail("it must not get here")

    assert names(here) == ["file"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(here):
    said = pytest.raises(UserError, match=r"out was not written \(.*No space left on device")
    with said, new_directory(Path("out")) as partial:
        (partial / "begun").write_text("some of it")
        Path("/dev/full").write_text("more than there is room for")

    assert names(here) == []


def test_sigterm_leaves_nothing(here):
    script = (
        "import time\nfrom pathlib import Path\n"
        "from openelm_jax.weights.new_directory import new_directory\n"
        "with new_directory(Path('out')):\n    print('begun', flush=True)\n    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"begun\n"
        assert names(here) == [f".out.partial-{process.pid}"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143

    assert names(here) == []


def test_what_a_killed_process_left_is_cleared_and_nothing_else(here):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [f".out.partial-{process}" for process in (ended.pid, os.getpid(), "9" * 30)]
    kept = [f".out.partial-{os.getppid()}", ".out.partial-mine", f".other.partial-{ended.pid}"]
    for name in left + kept:
        (here / name).mkdir()

    with new_directory(Path("out")):
        assert names(here) == sorted([*kept, f".out.partial-{os.getpid()}"])

    assert names(here) == sorted([*kept, "out"])


def test_signals_mean_afterwards_what_they_meant_before():
    before = signal.getsignal(signal.SIGTERM)
    with new_directory(Path("out")):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
