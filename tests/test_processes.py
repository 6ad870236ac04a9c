"""Processes find one another or say why not, agree before they start, and do not wait for the dead.

What flags and environment mean is a table; joining is done by real processes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port
from small_runs import environment

from openelm_jax.errors import UserError
from openelm_jax.parallel.processes import (
    Processes,
    agree,
    all_or_none,
    ending_alone,
    find_processes,
    join_processes,
    require_same,
)

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
NONE = (None, None, None)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        # A batch script, or a shell of salloc: the job has tasks, this is none of them.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"},
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1"},
    ],
)
def test_a_process_alone_has_no_others_to_find(environ) -> None:
    assert find_processes(*NONE, environ) is None


def test_one_process_by_flags_is_alone() -> None:
    assert find_processes("a:1", 1, 0, {}) is None


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (("a:1", 4, 0), {}, Processes("the flags", "a:1", 4, 0)),
        (
            NONE,
            {
                "JAX_COORDINATOR_ADDRESS": "a:1",
                "JAX_NUM_PROCESSES": "4",
                "JAX_PROCESS_ID": "3",
            },
            Processes("JAX_COORDINATOR_ADDRESS", "a:1", 4, 3),
        ),
        (  # flags win
            ("a:1", 4, 0),
            {"JAX_COORDINATOR_ADDRESS": "b:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            Processes("the flags", "a:1", 4, 0),
        ),
        (NONE, SLURM, Processes("Slurm", None, 8, 5)),
        (("n1:1", None, None), SLURM, Processes("the flags and Slurm", "n1:1", 8, 5)),
        (
            ("n1:1", None, None),
            OPEN_MPI,
            Processes("the flags and Open MPI", "n1:1", 4, 0),
        ),
        (
            NONE,
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"},
            Processes("Open MPI", None, 4, 0),
        ),
        (NONE, {"TPU_WORKER_HOSTNAMES": "a,b"}, Processes("TPU_WORKER_HOSTNAMES")),
        (NONE, {"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, Processes("TPU_WORKER_HOSTNAMES")),
        (
            NONE,
            {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
            Processes("MEGASCALE_NUM_SLICES"),
        ),
    ],
)
def test_several_processes_are_found_by_flags_variables_and_launchers(
    flags, environ, expected
) -> None:
    assert find_processes(*flags, environ) == expected


@pytest.mark.parametrize(
    ("tasks_per_node", "visible", "expected"),
    [
        ("4(x2)", "0,1,2,3", (1,)),  # a GPU for each of the node's tasks
        ("4,2", "0,1,2,3", (2, 3)),  # two for each
        ("4(x2)", "0", (0,)),  # Slurm shows each task its own only
        ("4(x2)", "", None),
    ],
)
def test_the_tasks_of_a_node_share_its_gpus(tasks_per_node, visible, expected) -> None:
    environ = SLURM | {
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "CUDA_VISIBLE_DEVICES": visible,
    }

    assert find_processes(*NONE, environ).own_gpus == expected


def test_a_task_alone_on_its_node_has_all_its_gpus() -> None:
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0", "SLURM_NODEID": "5"}

    found = find_processes(*NONE, SLURM | alone | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})

    assert found.own_gpus == tuple(range(8))


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (("a:1", None, None), {}, "--processes N and --process I are missing"),
        ((None, 2, 0), {}, "--coordinator HOST:PORT is missing"),
        ((None, None, 1), {}, "--coordinator HOST:PORT and --processes N are missing"),
        (NONE, {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS: of several processes"),
        (("a", 2, 0), {}, "the coordinator is a: give HOST:PORT"),
        (("a:b", 2, 0), {}, "the coordinator is a:b: give HOST:PORT"),
        (("a:1", 2, 2), {}, "process 2 of 2: processes are numbered from 0 to 1"),
        (NONE, {"JAX_NUM_PROCESSES": "two", "JAX_COORDINATOR_ADDRESS": "a:1"}, "whole number"),
        (NONE, OPEN_MPI, "give all of them --coordinator HOST:PORT"),
    ],
)
def test_half_of_what_is_needed_is_one_sentence(flags, environ, said) -> None:
    with pytest.raises(UserError) as mistake:
        find_processes(*flags, environ)

    assert said in str(mistake.value)
    assert str(mistake.value).endswith(".")


def test_a_port_that_another_program_has_is_one_sentence() -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("", 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"^process 0 cannot listen at {address} \("):
            join_processes(address, 2, 0, print)


def test_one_process_agrees_with_itself_and_raises_what_it_meets() -> None:
    require_same("{}")
    agree(None)
    with pytest.raises(UserError, match=r"^no disk$"):
        agree("no disk")
    with pytest.raises(UserError, match=r"^no disk$"), all_or_none(), ending_alone():
        raise UserError("no disk")


# --- Real processes.


def start(folder: Path, seconds: int, *flags: str, **variables: str) -> subprocess.Popen:
    program = str(Path(__file__).parent / "multihost" / "joined.py")
    return subprocess.Popen(
        [sys.executable, program, str(folder), str(seconds), *flags],
        env=environment(folder) | variables,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, said


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Return what two processes saw, and how each ended: (seen, code, stderr, seconds)."""
    folder = tmp_path_factory.mktemp("pair")
    address = f"localhost:{free_port()}"
    begin = time.monotonic()
    running = [
        start(folder, 60, "--coordinator", address, "--processes", "2", "--process", "0"),
        start(
            folder,
            60,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID="1",
        ),
    ]
    ends = [end(process) for process in running]
    seconds = time.monotonic() - begin
    for process, (_, said) in enumerate(ends):
        assert (folder / f"process-{process}.json").exists(), said
    seen = [json.loads((folder / f"process-{i}.json").read_text()) for i in range(2)]
    return seen, ends, seconds, address


def test_each_says_which_it_is_of_how_many_and_by_what(pair) -> None:
    (first, second), _, _, address = pair

    assert first["lines"] == ["process 0 of 2, by the flags"]
    assert second["lines"] == [
        f"waiting for process 0 at {address}",
        "process 1 of 2, by JAX_COORDINATOR_ADDRESS",
    ]


def test_what_one_says_against_all_refuse(pair) -> None:
    for seen in pair[0]:
        assert seen["same"] is None
        assert seen["different"] == (
            "process 1 has another experiment than process 0 (field: of 0, of 1): "
            "training.steps: 16, 17; give all processes the same command."
        )
        assert seen["agreed"] is None
        assert seen["one_fails"] == "process 1: no licence"
        assert seen["block_fails"] == "process 0: no disk"


def test_a_signal_to_one_stops_all_at_the_same_step(pair) -> None:
    first, second = (seen["stopped_at"] for seen in pair[0])

    assert first == second >= 3


def test_one_that_fails_says_so_and_ends_and_the_other_does_not_wait(pair) -> None:
    _, ((first_code, _), (second_code, said)), seconds, _ = pair

    assert second_code == 1
    assert "error: process 1: a damaged shard" in said.splitlines()
    assert first_code != 0
    assert seconds < 60  # jax alone: five minutes at a barrier


ALONE = """
import sys
from openelm_jax.command_line import run
from openelm_jax.parallel.processes import join_processes
run(lambda argv: join_processes(argv[0], 2, int(argv[1]), print, timeout_s=2))
"""


def test_one_that_stays_alone_gives_up_in_one_sentence(tmp_path: Path) -> None:
    """Process 0 to which nobody comes, and process 1 without a process 0."""
    addresses = [f"localhost:{free_port()}" for _ in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, address, str(process)],
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, address in enumerate(addresses)
    ]
    ends = [end(process) for process in running]

    for process, (address, trouble) in enumerate(
        zip(addresses, ("not all 2 processes came to", "nothing answered at"), strict=True)
    ):
        code, said = ends[process]
        assert code == 1
        assert said.splitlines()[-1].startswith(
            f"error: process {process} waited 2 s and {trouble} {address}; "
        )
        assert "Traceback" not in said
