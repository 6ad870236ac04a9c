"""Checkpoints are atomic, exact to the bit, verified when read, and as many as promised."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from saved_params import saved_params

from openelm_jax.config import CheckpointConfig
from openelm_jax.errors import UserError
from openelm_jax.training.checkpoint import Checkpointer
from openelm_jax.weights.orbax import latest_step, step_directory

KEEP_NONE = CheckpointConfig(every=1, keep_every=None)


def make_state(seed: int, rows: int = 6) -> tuple[dict, dict]:
    """Parameters and an Adam state after one update, none of whose leaves are trivial."""
    rng = np.random.default_rng(seed)
    params = {
        "embedding": jnp.asarray(rng.normal(size=(rows, 8)), jnp.float32),
        "layers_0": {"norm": {"scale": jnp.asarray(rng.normal(size=8), jnp.float32)}},
    }
    optimizer = optax.adamw(1e-3)
    gradients = jax.tree.map(jnp.sin, params)
    _, moments = optimizer.update(gradients, optimizer.init(params), params)
    return params, {"step": jnp.int32(seed), "moments": moments}


def save_steps(run: Path, steps: list[int], config: CheckpointConfig = KEEP_NONE) -> None:
    checkpointer = Checkpointer(run, config)
    for step in steps:
        params, optimizer = make_state(step)
        checkpointer.save(step, params=params, optimizer=optimizer, data={"row": step})
    checkpointer.close()


def restore(run: Path):
    checkpointer = Checkpointer(run, KEEP_NONE)
    restored = checkpointer.restore(*make_state(0))
    checkpointer.close()
    return restored


def assert_equal_bits(actual: object, expected: object) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_restores(run: Path, step: int) -> None:
    restored = restore(run)
    params, optimizer = make_state(step)
    assert restored.step == step
    assert restored.data == {"row": step}
    assert_equal_bits(restored.params, params)
    assert_equal_bits(restored.optimizer, optimizer)


def files_of(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    save_steps(run, [1, 2])
    return run


@pytest.fixture
def run(two_steps: Path, tmp_path: Path) -> Path:
    """A run of its own with the whole steps 1 and 2."""
    return shutil.copytree(two_steps, tmp_path / "run")


def test_parameters_optimizer_and_position_come_back_bit_for_bit(run: Path) -> None:
    assert_restores(run, 2)


def test_a_run_without_checkpoints_restores_nothing(tmp_path: Path) -> None:
    assert restore(tmp_path) is None
    assert latest_step(tmp_path) is None


def test_arrays_may_be_given_away_as_soon_as_save_returns(tmp_path: Path) -> None:
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    checkpointer = Checkpointer(tmp_path, KEEP_NONE)
    state = make_state(3)
    checkpointer.save(3, params=state[0], optimizer=state[1], data={"row": 3})
    jax.block_until_ready(overwrite(state))
    checkpointer.close()
    assert_restores(tmp_path, 3)


def test_a_step_directory_holds_three_items_and_the_sha256_of_every_file(tmp_path: Path) -> None:
    save_steps(tmp_path, [500])
    directory = tmp_path / "checkpoints" / "000500"
    assert directory == step_directory(tmp_path, 500)
    assert {p.name for p in directory.iterdir() if p.is_dir()} == {"params", "optimizer", "data"}
    assert json.loads((directory / "checksums.json").read_text())["files"] == {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in files_of(directory)
        if name != "checksums.json"
    }


def test_one_flipped_bit_in_any_file_is_named_and_the_step_before_is_used(
    two_steps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = files_of(step_directory(two_steps, 2))
    assert len(names) > 15
    for i, name in enumerate(names):
        run = shutil.copytree(two_steps, tmp_path / str(i))
        path = step_directory(run, 2) / name
        content = bytearray(path.read_bytes())
        content[i * 7 % len(content)] ^= 1 << (i % 8)
        path.write_bytes(content)
        assert_restores(run, 1)
        warning = capfd.readouterr().err
        assert "step 2" in warning
        assert f"{name} is " in warning


@pytest.mark.parametrize("harm", ["truncate", "empty", "delete", "add"])
def test_a_shorter_missing_or_added_file_is_named_and_the_step_before_is_used(
    run: Path, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = step_directory(run, 2)
    files = [p for p in (directory / "optimizer").rglob("*") if p.is_file()]
    path = max(files, key=lambda p: p.stat().st_size)
    if harm == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "delete":
        path.unlink()
    else:
        path = path.with_name("added")
        path.write_bytes(b"x")
    assert_restores(run, 1)
    assert path.relative_to(directory).as_posix() in capfd.readouterr().err


def test_a_damaged_step_is_set_aside_and_saved_anew(run: Path) -> None:
    (step_directory(run, 2) / "checksums.json").unlink()
    checkpointer = Checkpointer(run, KEEP_NONE)
    assert checkpointer.restore(*make_state(0)).step == 1
    assert checkpointer.steps() == [1]
    params, optimizer = make_state(2)
    checkpointer.save(2, params=params, optimizer=optimizer, data={"row": 2})
    checkpointer.close()
    assert_restores(run, 2)


def test_with_no_whole_step_the_run_stops_and_keeps_its_files(run: Path) -> None:
    for step in (1, 2):
        next((step_directory(run, step) / "params" / "d").iterdir()).write_bytes(b"")
    for _ in range(2):  # a second start must not find an empty directory and begin anew
        with pytest.raises(UserError, match="no step can be continued from"):
            restore(run)


def test_a_second_save_of_a_step_changes_nothing(run: Path) -> None:
    checkpointer = Checkpointer(run, KEEP_NONE)
    params, optimizer = make_state(7)
    checkpointer.save(2, params=params, optimizer=optimizer, data={"row": 7})
    checkpointer.close()
    assert_restores(run, 2)


def test_three_full_states_stay_and_parameters_of_every_fourth_step(tmp_path: Path) -> None:
    save_steps(tmp_path, list(range(1, 12)), CheckpointConfig(every=1, keep_every=4))
    directory = tmp_path / "checkpoints"
    assert sorted(p.name for p in directory.iterdir()) == [
        f"{step:06}" for step in (4, 8, 9, 10, 11)
    ]
    assert sorted(p.parent.name for p in directory.glob("*/optimizer")) == [
        "000009",
        "000010",
        "000011",
    ]
    # The older ones are still whole as far as they go, and an optimiser deleted is no damage.
    assert_equal_bits(saved_params(step_directory(tmp_path, 4)), make_state(4)[0])
    for step in (9, 10, 11):
        (step_directory(tmp_path, step) / "checksums.json").unlink()
    with pytest.raises(UserError, match="no step can be continued from"):
        restore(tmp_path)


def test_parameters_load_as_numpy_and_only_when_whole(run: Path) -> None:
    params = saved_params(step_directory(run, latest_step(run)))
    assert isinstance(params["layers_0"]["norm"]["scale"], np.ndarray)
    assert_equal_bits(params, make_state(2)[0])
    shutil.rmtree(step_directory(run, 2) / "optimizer")
    assert_equal_bits(saved_params(step_directory(run, 2)), params)
    (step_directory(run, 2) / "params" / "manifest.ocdbt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"params/manifest.ocdbt is damaged"):
        saved_params(step_directory(run, 2))


def run_script(script: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: str):
    """Run Python code with this file's functions at hand, in a process of its own."""
    return subprocess.run(
        [*prefix, sys.executable, "-c", f"from test_checkpoint import *\n{script}", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "JAX_PLATFORMS": "cpu",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


KILLED_WHILE_WRITING = """
import asyncio, openelm_jax.weights.orbax as orbax
async def never(self):
    await asyncio.sleep(60)
orbax.ChecksummedPath.finalize = never
checkpointer = Checkpointer(Path(sys.argv[1]), KEEP_NONE)
params, optimizer = make_state(3)
checkpointer.save(3, params=params, optimizer=optimizer, data={})
os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_BEFORE_THE_RENAME = """
import openelm_jax.weights.orbax as orbax
write = orbax.write_checksums
def write_and_die(directory):
    write(directory)
    os.kill(os.getpid(), signal.SIGKILL)
orbax.write_checksums = write_and_die
save_steps(Path(sys.argv[1]), [3])
"""


@pytest.mark.parametrize("script", [KILLED_WHILE_WRITING, KILLED_BEFORE_THE_RENAME])
def test_a_process_killed_in_a_save_leaves_the_step_before(run: Path, script: str) -> None:
    assert run_script(script, str(run)).returncode == -signal.SIGKILL
    directory = run / "checkpoints"
    assert len(list(directory.iterdir())) == 3, "the kill came too early or too late"
    assert latest_step(run) == 2
    assert_restores(run, 2)
    assert sorted(p.name for p in directory.iterdir()) == ["000001", "000002"]


def test_a_sharded_state_restores_onto_another_number_of_devices(tmp_path: Path) -> None:
    script = """
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
params, optimizer = make_state(1, rows=8)
params["embedding"] = jax.device_put(params["embedding"], rows)
assert len(params["embedding"].sharding.device_set) == 4
checkpointer = Checkpointer(Path(sys.argv[1]), KEEP_NONE)
checkpointer.save(1, params=params, optimizer=optimizer, data={})
checkpointer.close()
"""
    saved = run_script(script, str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert saved.returncode == 0, saved.stderr
    params, optimizer = make_state(1, rows=8)
    checkpointer = Checkpointer(tmp_path, KEEP_NONE)
    restored = checkpointer.restore(jax.eval_shape(lambda: params), optimizer)
    checkpointer.close()
    assert_equal_bits(restored.params, params)
    assert restored.params["embedding"].sharding.device_set == {jax.local_devices()[0]}


def test_a_directory_that_cannot_be_written_is_one_sentence(run: Path) -> None:
    script = """
checkpointer = Checkpointer(Path(sys.argv[1]), KEEP_NONE)
params, optimizer = make_state(3)
try:
    checkpointer.save(3, params=params, optimizer=optimizer, data={})
    checkpointer.wait()
except UserError as error:
    print(error)
"""
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:  # root may write anywhere unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores permissions and setpriv is not installed")
        rights = "-dac_override,-dac_read_search,-fowner"
        prefix = ("setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}")
    directory = run / "checkpoints"
    directory.chmod(0o555)
    try:
        finished = run_script(script, str(run), prefix=prefix)
    finally:
        directory.chmod(0o755)
    assert finished.returncode == 0, finished.stderr
    assert str(directory) in finished.stdout
    assert "cannot save step 3 (Permission denied); earlier checkpoints are intact" in (
        finished.stdout
    )
    assert finished.stderr == ""
    assert_restores(run, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore's
def test_a_full_disk_is_one_sentence_and_costs_no_earlier_step(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can only be mounted by root on Linux")
    try:
        checkpointer = Checkpointer(tmp_path, KEEP_NONE)

        def save(step: int, rows: int) -> None:
            params, optimizer = make_state(step, rows)
            checkpointer.save(step, params=params, optimizer=optimizer, data={"row": step})
            checkpointer.wait()

        save(1, rows=6)
        with pytest.raises(UserError, match=r"cannot save step 2 \(No space left") as error:
            save(2, rows=60_000)
        assert str(tmp_path) in str(error.value)
        assert checkpointer.steps() == [1]
        save(3, rows=6)
        checkpointer.close()
        assert_restores(tmp_path, 3)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
