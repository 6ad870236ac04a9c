"""One run in several processes: finding one another, agreeing, and never waiting for the dead.

jax ends a process that cannot join with a stack trace, or by a crash of its own, and lets one that
fails later wait for all others before it may go. Here both end with a sentence.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from openelm_jax.errors import UserError
from openelm_jax.experiment_file import differing_fields, from_json
from openelm_jax.xla_flags import platform

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


class SharedError(UserError):
    """A mistake that every process raises, so that they can end together."""


@dataclass(frozen=True)
class Processes:
    """What is known of the processes before they join; None is left to jax to find out."""

    found_by: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    own_gpus: tuple[int, ...] | None = None


def join_processes(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    say: Callable[[str], None],
    timeout_s: int = 300,
) -> None:
    """Join the other processes of this run, if there are any; call it before jax computes.

    Which there are is said by the flags `--coordinator HOST:PORT --processes N --process I`, by
    the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, by Slurm, by Open
    MPI or by the TPU's host. Raises UserError for flags that do not fit; ends the process with a
    sentence when not all processes have come within `timeout_s` seconds.
    """
    found = find_processes(coordinator, processes, process, os.environ)
    if found is None and platform() == "tpu" and _workers_of_tpu_vm() > 1:
        found = Processes("the metadata of the TPU")
    if found is None:
        return
    if found.process == 0 and found.coordinator:
        _require_free_port(found.coordinator)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if found.process not in (None, 0):
        say(f"waiting for process 0 at {found.coordinator or 'the address of ' + found.found_by}")
    watch = threading.Timer(timeout_s, _give_up, (found, timeout_s))
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.processes,
            found.process,
            local_device_ids=found.own_gpus,
            # Else it asks each service it knows, also where everything is given.
            cluster_detection_method="deactivate" if found.coordinator else None,
            initialization_timeout=timeout_s + 60,  # it would end this process with a trace
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{found.found_by} has several processes, and jax cannot find them ({_line(error)}): "
            "name them with --coordinator HOST:PORT --processes N --process I."
        ) from None
    finally:
        watch.cancel()
    # What jax counts, for it does not compare the counts that the processes were given.
    if found.processes not in (None, jax.process_count()):
        raise UserError(
            f"process {jax.process_index()} was told of {found.processes} processes and "
            f"{jax.process_count()} have come: give all of them the same --processes."
        )
    say(f"process {jax.process_index()} of {jax.process_count()}, by {found.found_by}")


def find_processes(
    coordinator: str | None, processes: int | None, process: int | None, environ: Mapping[str, str]
) -> Processes | None:
    """Return what flags and environment say of several processes; None for one process alone.

    Raises UserError for half of what is needed.
    """
    given = (coordinator, processes, process) != (None, None, None)
    address = coordinator or environ.get("JAX_COORDINATOR_ADDRESS") or None
    launcher = _launcher(environ)
    if given or address:
        found_by = "the flags" if given else "JAX_COORDINATOR_ADDRESS"
        number = processes if processes is not None else _number(environ, "JAX_NUM_PROCESSES")
        index = process if process is not None else _number(environ, "JAX_PROCESS_ID")
        if launcher is None:
            return _complete(Processes(found_by, address, number, index))
        if None in (number, index):
            found_by = f"{found_by} and {launcher.found_by}"
        number = launcher.processes if number is None else number
        index = launcher.process if index is None else index
        return _complete(Processes(found_by, address, number, index, launcher.own_gpus))
    if launcher is not None:
        if launcher.found_by == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in environ:
            raise UserError(
                f"Open MPI started {launcher.processes} processes without saying where the first "
                "one is: give all of them --coordinator HOST:PORT, with its host and a free port."
            )
        return launcher
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    slices = _number(environ, "MEGASCALE_NUM_SLICES") or 1
    may_be_tpu = environ.get("JAX_PLATFORMS", "").partition(",")[0] in ("", "tpu")
    if may_be_tpu and (len(hosts.split(",")) > 1 or slices > 1):
        return Processes("TPU_WORKER_HOSTNAMES" if slices == 1 else "MEGASCALE_NUM_SLICES")
    return None


def require_same(experiment_json: str) -> None:
    """Refuse, in all processes, an experiment that is not everywhere that of process 0.

    All processes must call it. The sentence names the first process that differs, and its fields.
    """
    texts = _gather(experiment_json)
    for process, text in enumerate(texts):
        if json.loads(text) != json.loads(texts[0]):
            differences = differing_fields(from_json(texts[0]), from_json(text))
            raise SharedError(
                f"process {process} has another experiment than process 0 "
                f"(field: of 0, of {process}): {'; '.join(differences)}; "
                "give all processes the same command."
            )


def require_equal(values: Mapping[str, str]) -> None:
    """Refuse, in all processes, values (by what they are) that are not everywhere those of process
    0; all processes must call it."""
    for process, text in enumerate(texts := _gather(json.dumps(dict(values)))):
        there, first = json.loads(text), json.loads(texts[0])
        for what in first:
            if there[what] != first[what]:
                raise SharedError(
                    f"process {process} has {what} {there[what]} and process 0 {first[what]}; give "
                    "all processes the same command, and a run directory that all of them see."
                )


def agree(problem: str | None) -> None:
    """Raise in all processes what is wrong in any of them; all processes must call it."""
    problems = _gather(problem or "")
    wrong = [process for process, text in enumerate(problems) if text]
    if wrong:
        where = f"process {wrong[0]}: " if len(problems) > 1 else ""
        raise SharedError(where + problems[wrong[0]])


@contextmanager
def all_or_none() -> Iterator[None]:
    """Raise the UserError of any process's block in all of them, when all have left it.

    The block must hold nothing for which processes wait on one another.
    """
    problem = None
    try:
        yield
    except UserError as mistake:
        if jax.process_count() == 1:
            raise
        problem = str(mistake)
    agree(problem)


@contextmanager
def ending_alone() -> Iterator[None]:
    """Let a process that fails in the block end at once, where others would wait for it.

    Changes nothing for one process alone, nor for what all processes raise.
    """
    try:
        yield
    except (SharedError, SystemExit):
        raise
    except BaseException as failure:
        if jax.process_count() == 1:
            raise
        if isinstance(failure, UserError):
            print(f"error: process {jax.process_index()}: {failure}", file=sys.stderr)
        else:
            traceback.print_exc()
        if jax.process_index() == 0:
            time.sleep(1)  # its end aborts the others, which may have something to say too
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(failure, KeyboardInterrupt) else 1)


def stop_together() -> Callable[[], bool]:
    """Return a function that becomes true in all processes at the same call after any has SIGTERM.

    All must call it equally often, once a step say. jax itself listens for the signal in
    processes that have joined, so nothing else may.
    """
    calls = itertools.count()
    return lambda: multihost_utils.reached_preemption_sync_point(next(calls))


def _launcher(environ: Mapping[str, str]) -> Processes | None:
    """Return what Slurm or Open MPI say, if they have started several processes."""
    # A batch script has SLURM_NTASKS as well, but is no step of its job.
    if "SLURM_STEP_NODELIST" in environ and "SLURM_LOCALID" in environ:
        number = _number(environ, "SLURM_NTASKS")
        name, index = "Slurm", _number(environ, "SLURM_PROCID")
        local, node = _number(environ, "SLURM_LOCALID"), _number(environ, "SLURM_NODEID")
        neighbours = _tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node or 0)
    else:
        number = _number(environ, "OMPI_COMM_WORLD_SIZE")
        name, index = "Open MPI", _number(environ, "OMPI_COMM_WORLD_RANK")
        local = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
        neighbours = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if number is None or number == 1:
        return None
    visible = len([gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    gpus = None
    if visible and neighbours and local is not None:
        # jax would give each process one; a process alone on its node takes all of them.
        share = visible // neighbours
        gpus = range(local * share, (local + 1) * share) if share else range(visible)
    return Processes(name, None, number, index, None if gpus is None else tuple(gpus))


def _tasks_of_node(tasks_per_node: str, node: int) -> int | None:
    """Return the tasks of a node in Slurm's notation, "4(x2),3": 4, 4, 3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
        for _ in range(int(times or 1))
    ]
    return counts[node] if node < len(counts) else None


def _complete(found: Processes) -> Processes | None:
    needed = {
        "--coordinator HOST:PORT": found.coordinator,
        "--processes N": found.processes,
        "--process I": found.process,
    }
    if found.processes == 1 and found.process in (None, 0):
        return None
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise UserError(
            f"{found.found_by}: of several processes each needs all of {', '.join(needed)}; "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
        )
    assert found.coordinator is not None
    assert found.processes is not None
    assert found.process is not None
    host, _, port = found.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"{found.found_by}: the coordinator is {found.coordinator}: give HOST:PORT, the host "
            "of process 0 and a free port of it."
        )
    if not 0 <= found.process < found.processes:
        raise UserError(
            f"{found.found_by}: process {found.process} of {found.processes}: "
            f"processes are numbered from 0 to {found.processes - 1}."
        )
    return found


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name) or None
    if value is not None and not value.isdecimal():
        raise UserError(f"{name} is {value!r}: set it to a whole number or unset it.")
    return None if value is None else int(value)


def _workers_of_tpu_vm() -> int:
    """Return of how many hosts this one's TPU slice has, as Google's machines say themselves."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") or os.environ.get("TPU_WORKER_HOSTNAMES"):
        return 1
    query = urllib.request.Request(
        METADATA + "worker-network-endpoints", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(query, timeout=3) as answer:
            return len(answer.read().decode().split(","))
    except OSError:
        return 1


def _require_free_port(coordinator: str) -> None:
    """Raise UserError if another program has the port; jax would crash."""
    port = int(coordinator.rpartition(":")[2])
    try:
        listener = socket.socket(socket.AF_INET6)
    except OSError:  # a machine without it
        listener = socket.socket(socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {coordinator} ({error.strerror}): another program, or "
                "a second process 0, has the port; choose another one."
            ) from None


def _give_up(found: Processes, timeout_s: int) -> None:
    """End this process, whose main thread waits in jax, with the reason."""
    who = f"process {found.process}" if found.process is not None else "this process"
    where = found.coordinator or f"the address that {found.found_by} names"
    if found.process in (None, 0) or _answers(where):
        number = f"all {found.processes}" if found.processes else "all"
        trouble = f"not {number} processes came to {where}; see that each of them was started"
    else:
        trouble = (
            f"nothing answered at {where}; see that process 0 runs there and that no firewall is "
            "between"
        )
    print(f"error: {who} waited {timeout_s} s and {trouble}.", file=sys.stderr, flush=True)
    os._exit(1)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError):
        return False
    return True


def _gather(text: str) -> list[str]:
    """Return the texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.pad(own, (0, int(lengths.max()) - len(own)))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else repr(error)
