"""Two processes that each read half of the lanes feed the batches that one process feeds.

Real processes, joined by jax.distributed, with two devices each.
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from corpora import tokenizer
from ports import free_port
from small_runs import environment, small_experiment, write_corpus

from openelm_jax.data.pipeline import Position, open_data
from openelm_jax.training.feed import counted_targets

HOSTS = 2
BATCHES = 12
"""Enough to read the small corpus more than once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which both hosts have read the corpus and written what they saw."""
    folder = tmp_path_factory.mktemp("two_hosts")
    write_corpus(folder)
    two_devices = environment(folder) | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, str(Path(__file__).with_name("host.py")), f"localhost:{free_port()}"]
    running = [
        subprocess.Popen(
            [*program, str(host), str(HOSTS), str(folder), str(BATCHES)],
            env=two_devices,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(HOSTS)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    return folder


def open_on_one_host(folder):
    experiment = small_experiment(folder)
    return open_data(
        experiment.data,
        tokenizer(),
        row_length=experiment.model.context_length + 1,
        global_batch_size=experiment.training.global_batch_size,
    )


def results_of(folder, host):
    path = folder / f"host-{host}"
    return np.load(path.with_suffix(".npz")), json.loads(path.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def on_one_host(folder):
    with closing(open_on_one_host(folder)) as data:
        return [next(data) for _ in range(BATCHES)]


@pytest.mark.parametrize("host", range(HOSTS))
def test_every_host_sees_the_rows_of_one_host_and_which_of_their_targets_count(
    folder, on_one_host, host
):
    arrays, _ = results_of(folder, host)

    for index, (rows_BL, _) in enumerate(on_one_host):
        np.testing.assert_array_equal(arrays["rows"][index], rows_BL)
        counted_BT = counted_targets(rows_BL, bos_id=tokenizer().bos_id)
        np.testing.assert_array_equal(arrays["counted"][index], counted_BT)
    assert not arrays["counted"].all()


@pytest.mark.parametrize("host", range(HOSTS))
def test_the_joined_position_is_that_of_one_host(folder, on_one_host, host):
    _, said = results_of(folder, host)

    assert said["positions"] == [position.to_json() for _, position in on_one_host]


def test_one_host_goes_on_where_two_stopped(folder, on_one_host):
    _, said = results_of(folder, 0)

    with closing(open_on_one_host(folder)) as data:
        data.set_state(Position.from_json(said["positions"][4]))
        rows_BL, _ = next(data)

    np.testing.assert_array_equal(rows_BL, on_one_host[5][0])


@pytest.mark.parametrize("host", range(HOSTS))
def test_hosts_with_other_data_are_refused_on_every_host(folder, host):
    _, said = results_of(folder, host)

    assert said["refusal"] == (
        "data: process 1 has other data or settings than process 0; give all of them the same "
        "experiment, tokenizer and files."
    )
