"""One of two processes that join, disagree, are told to stop, and of which one fails.

python joined.py FOLDER SECONDS [FLAG VALUE ...]
"""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from small_runs import small_experiment

from openelm_jax.command_line import run
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import to_json
from openelm_jax.parallel.processes import (
    agree,
    all_or_none,
    ending_alone,
    join_processes,
    require_same,
    stop_together,
)


def refusal(function, *arguments):
    try:
        function(*arguments)
    except UserError as mistake:
        return str(mistake)
    return None


def fail_on_process_0():
    with all_or_none():
        if jax.process_index() == 0:
            raise UserError("no disk")


def main(argv):
    folder, seconds, *flags = argv
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    number = {name: int(given[name]) for name in ("--processes", "--process") if name in given}
    lines = []
    join_processes(
        given.get("--coordinator"),
        number.get("--processes"),
        number.get("--process"),
        lines.append,
        timeout_s=int(seconds),
    )
    process = jax.process_index()
    with ending_alone():
        ours = small_experiment(Path(folder))
        steps = dataclasses.replace(ours.training, steps=16 + process)
        seen = {
            "lines": lines,
            "same": refusal(require_same, to_json(ours)),
            "different": refusal(require_same, to_json(dataclasses.replace(ours, training=steps))),
            "agreed": refusal(agree, None),
            "one_fails": refusal(agree, "no licence" if process == 1 else None),
            "block_fails": refusal(fail_on_process_0),
        }
        told = stop_together()
        step = 0
        while not told():
            step += 1
            if process == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01 * (1 + process))
        seen["stopped_at"] = step
        Path(folder, f"process-{process}.json").write_text(json.dumps(seen))
        multihost_utils.process_allgather(np.int32(process))
        if process == 1:
            raise UserError("a damaged shard")
        multihost_utils.process_allgather(np.int32(process))  # never answered


run(main)
