"""Saving and continuing: one atomic step directory, written in the background, verified on return.

A step holds three items: `params`, `optimizer` (everything else that a step changes) and `data`
(the position of the next batch, JSON). A save that is cut short leaves the earlier steps as they
were; a step that has gone bad since is set aside and the one before it used.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from openelm_jax.config import CheckpointConfig
from openelm_jax.errors import UserError
from openelm_jax.weights.orbax import (
    CHECKPOINTS,
    STEP_DIGITS,
    TEMPORARY,
    ChecksummedPath,
    find_damage,
    saved_steps,
    step_directory,
)

FULL_STATES = 3
"""Steps whose optimiser state is kept."""

ITEMS = ("params", "optimizer", "data")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state to continue from, on the devices that were asked for."""

    step: int
    params: Any
    optimizer: Any
    data: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run directory, which nobody else writes.

    Keeps the last three full states, and the parameters of every step that
    `config.keep_every` divides; deletes the rest.
    """

    def __init__(self, run_directory: str | Path, config: CheckpointConfig) -> None:
        # Orbax logs tracebacks of what it raises, and leaves the other writes of a failed save to
        # asyncio, which logs theirs.
        absl.logging.set_verbosity(absl.logging.FATAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        _hide_late_writes()
        self.run_directory = Path(run_directory).absolute()
        self.directory = self.run_directory / CHECKPOINTS
        self._saving: int | None = None
        keep: list[policies.PreservationPolicy] = [policies.LatestN(FULL_STATES)]
        if config.keep_every is not None:
            keep.append(policies.EveryNSteps(config.keep_every))
        with self._explained("open it"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    step_format_fixed_length=STEP_DIGITS,
                    temporary_path_class=ChecksummedPath,
                    preservation_policy=policies.AnyPreservationPolicy(keep),
                    save_root_metadata=False,
                    # Made in the background, a directory that cannot be made is waited for for
                    # minutes.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                ),
            )

    def steps(self) -> list[int]:
        """Return the finished steps, first to last."""
        return saved_steps(self.run_directory)

    def save(self, step: int, *, params: Any, optimizer: Any, data: dict[str, Any]) -> None:
        """Begin to save a step, and return when the arrays may be changed again.

        A step that is saved, or being saved, is left alone. Raises UserError if this save or the
        one before it cannot be written; earlier steps are intact.
        """
        if step == self._saving or step in self.steps():
            return
        self.wait()
        self._manager.reload()  # it also counts steps that failed or were set aside
        self._saving = step
        with self._explained(f"save step {step}"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    optimizer=ocp.args.StandardSave(optimizer),
                    data=ocp.args.JsonSave(data),
                ),
                force=True,
            )

    def restore(self, params_like: Any, optimizer_like: Any) -> Restored | None:
        """Return the newest state that is whole, or None if nothing was saved yet.

        `params_like` and `optimizer_like` are trees of arrays or ShapeDtypeStructs that say where
        each array goes; a struct without a sharding goes to the first device. A damaged step is
        named in a warning and set aside. Raises UserError if no step can be continued from.
        """
        self.wait()
        if not self.steps():
            return None
        step = self._newest_whole_step()
        if step is None:
            raise UserError(
                f"{self.directory}: no step can be continued from (see the warnings above); start "
                "anew in another run directory, or copy a whole step there from a backup."
            )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(jax.tree.map(_target, params_like)),
                optimizer=ocp.args.StandardRestore(jax.tree.map(_target, optimizer_like)),
                data=ocp.args.JsonRestore(),
            ),
        )
        return Restored(
            step=step,
            params=restored["params"],
            optimizer=restored["optimizer"],
            data=restored["data"],
        )

    def wait(self) -> None:
        """Return when the save in progress is on disk; raises UserError if it cannot be."""
        with self._explained(f"save step {self._saving}"):
            self._manager.wait_until_finished()
            self._saving = None
            self._delete_old_optimizers()

    def close(self) -> None:
        """Wait for the save in progress and let go of the directory."""
        self.wait()
        self._manager.close()
        if self.directory.is_dir():
            self._clear_leftovers()  # writes of a failed save may have ended after it had failed

    def _newest_whole_step(self) -> int | None:
        """Return the newest step that is whole, the damaged ones above it set aside."""
        whole, damaged = None, []
        if jax.process_index() == 0:
            for step in reversed(self.steps()):
                directory = step_directory(self.run_directory, step)
                if not (directory / "optimizer").is_dir():
                    continue
                damage = find_damage(directory, ITEMS)
                if damage is None:
                    whole = step
                    break
                damaged.append(directory)
                print(f"warning: step {step} is damaged: {directory}: {damage}", file=sys.stderr)
            # With no whole step all stay where they are: an empty directory would start anew.
            for directory in damaged if whole is not None else []:
                aside = directory.with_name(f"damaged-{directory.name}")
                shutil.rmtree(aside, ignore_errors=True)
                directory.rename(aside)
                print(
                    f"warning: {directory} is now {aside.name}; step {whole} is used.",
                    file=sys.stderr,
                )
        agreed = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if whole is None else whole)))
        return None if agreed < 0 else agreed

    def _delete_old_optimizers(self) -> None:
        if jax.process_index() != 0:
            return
        for step in self.steps()[:-FULL_STATES]:
            optimizer = step_directory(self.run_directory, step) / "optimizer"
            if optimizer.is_dir():
                # Half a deletion must not look like damage: away in one move, then deleted.
                doomed = self.directory / f"{optimizer.parent.name}{TEMPORARY}.optimizer"
                optimizer.rename(doomed)
                shutil.rmtree(doomed)

    def _clear_leftovers(self) -> None:
        if jax.process_index() == 0:
            for leftover in self.directory.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn what the file system refuses into a UserError, and give back the space it took."""
        try:
            yield
        except (OSError, ValueError) as error:
            # TensorStore's errors are ValueErrors that begin with a status: "RESOURCE_EXHAUSTED: ".
            if isinstance(error, ValueError) and not re.match(r"[A-Z_]+: ", str(error)):
                raise
            self._saving = None
            code = re.search(r"os_error_code='(\d+)'", str(error))
            reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
            if self.directory.is_dir():
                self._clear_leftovers()
            raise UserError(
                f"{self.directory}: cannot {doing} ({reason or str(error)[:200]}); earlier "
                "checkpoints are intact. Free space there or make it writable, then start again."
            ) from error


def _hide_late_writes() -> None:
    """Keep off stderr what TensorStore prints of each write that ends after its save has failed."""
    shown = sys.unraisablehook
    if not isinstance(shown, _WithoutLateWrites):
        sys.unraisablehook = _WithoutLateWrites(shown)


@dataclass(frozen=True)
class _WithoutLateWrites:
    shown: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.shown(unraisable)


def _target(like: Any) -> jax.ShapeDtypeStruct:
    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
