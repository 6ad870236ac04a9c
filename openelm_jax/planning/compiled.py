"""What XLA makes of a step on a machine that is not here: compiled in another process, and kept.

The process gets its own environment, so that neither the user's nor the machine's matters. Results
lie in ~/.cache/openelm_jax/plans, one file for each experiment, topology, code and versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import to_json
from openelm_jax.planning.collectives import Collective
from openelm_jax.planning.topologies import Topology

PACKAGE = Path(__file__).parent.parent
CODE = (
    "config.py", "xla_flags.py", "model", "parallel", "training",
    "planning/ahead_of_time.py", "planning/cuda_targets.py",
)  # fmt: skip
"""What decides the program that is compiled."""
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "tpu": (("jax",), ("jaxlib",), ("libtpu",)),
    "gpu": (("jax",), ("jaxlib",), ("jax-cuda12-plugin", "jax-cuda13-plugin")),
}
"""What compiles for a platform: of each group one, the first that is there."""
EXTRAS = {"tpu": "tpu", "gpu": "cuda"}
FAULT = re.compile(r"error: |[\w.]*(Error|Exception): ")
UNSET = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What XLA says of one compiled step, in bytes a device; `collectives` as in the program.

    A collective in the loop over the parts of a batch is counted once. Where the program needs
    more memory than there is, `needed_bytes` is what it needs and everything else is 0.
    """

    experiment: str
    topology: str
    mesh: dict[str, int]
    kernel: str
    effort: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    peak_bytes: int
    needed_bytes: int
    collectives: tuple[Collective, ...]
    lowering_seconds: float
    compilation_seconds: float
    versions: dict[str, str]
    code: str
    date: str

    @property
    def fits(self) -> bool:
        return self.argument_bytes > 0

    @property
    def memory(self) -> int:
        """Arguments and temporaries: the state and the batch, and all that a step adds."""
        return self.argument_bytes + self.temporary_bytes if self.fits else self.needed_bytes


def compile_on(
    topology: Topology,
    experiment: Experiment,
    effort: str = "full",
    python: str | None = None,
    quiet: bool = False,
) -> CompiledStep:
    """Return the compiled step of `experiment` on `topology`, from the cache where it is known.

    `effort` is `full`, as a run compiles, or `quick`, which spares optimisations that cost most of
    the time and little of the memory. `python` is the interpreter of an environment with the needed
    extra; None is this one. Raises UserError where the compiler is missing or refuses.
    """
    interpreter = python or sys.executable
    versions = _versions(interpreter, topology.accelerator.platform)
    digest = code_digest()
    path = _path(experiment, topology, effort, versions, digest)
    if path.exists():
        return _read(path)
    request = json.dumps(
        {
            "experiment": to_json(experiment),
            "topology": topology.spelling[0],
            "slices": topology.spelling[1],
            "effort": effort,
        }
    )
    answer = _run(interpreter, request, experiment, topology, quiet)
    compiled = CompiledStep(
        experiment=experiment.name,
        topology=topology.name,
        effort=effort,
        versions=versions,
        code=digest,
        date=time.strftime("%Y-%m-%d"),
        collectives=tuple(Collective(**each) for each in answer.pop("collectives")),
        **answer,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(compiled), indent=1) + "\n")
    partial.replace(path)
    return compiled


def known_steps(experiment: Experiment, topology: Topology) -> list[CompiledStep]:
    """Return what the cache has of an experiment on a topology, whatever the code, newest first."""
    files = plans_folder().glob(f"{_stem(experiment, topology)}-*.json")
    return [_read(path) for path in sorted(files, key=lambda path: -path.stat().st_mtime)]


def plans_folder() -> Path:
    """Return the folder of compiled plans, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "openelm_jax", "plans")


def code_digest() -> str:
    """Return twelve hexadecimal digits that change with the code of the step."""
    digest = hashlib.sha256()
    for name in CODE:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _stem(experiment: Experiment, topology: Topology) -> str:
    """Name the program by what decides it: no learning rate, no seed, no length of the run."""
    training = dataclasses.asdict(experiment.training)
    decisive = {
        "model": dataclasses.asdict(experiment.model),
        "mesh": dataclasses.asdict(experiment.mesh),
        "isolate_documents": experiment.data.isolate_documents,
        "first_moment_dtype": experiment.optimizer.first_moment_dtype,
        **{
            name: training[name]
            for name in (
                "global_batch_size", "accumulation", "dtype", "attention", "remat", "memory_gib",
                "loss_chunk",
            )
        },
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
    name = topology.name.replace(" ", "_").replace(":", "_")
    return f"{experiment.name}-{name}-{digest}"


def _path(
    experiment: Experiment, topology: Topology, effort: str, versions: dict[str, str], code: str
) -> Path:
    tail = hashlib.sha256(
        json.dumps([effort, versions, code], sort_keys=True).encode()
    ).hexdigest()[:12]
    return plans_folder() / f"{_stem(experiment, topology)}-{tail}.json"


def _read(path: Path) -> CompiledStep:
    plain = json.loads(path.read_text())
    plain["collectives"] = tuple(Collective(**each) for each in plain["collectives"])
    return CompiledStep(**plain)


def _versions(interpreter: str, platform: str) -> dict[str, str]:
    script = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version "
        "for d in m.distributions()}))"
    )
    try:
        asked = subprocess.run(
            [interpreter, "-c", script], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as fault:
        raise UserError(f"--python {interpreter}: it does not run ({fault}).") from None
    installed = json.loads(asked.stdout)
    versions = {}
    for group in PACKAGES[platform]:
        name = next((name for name in group if name in installed), None)
        if name is None:
            extra = f"'openelm_jax[{EXTRAS[platform]}]'"
            raise UserError(
                f"--compile needs {' or '.join(group)}, which {interpreter} has not: pip install "
                f"{extra}, or name the interpreter of an environment that has it with --python."
            )
        versions[name] = installed[name]
    return versions


def _environment(platform: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    paths = [str(PACKAGE.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    if platform == "tpu":
        # The first two keep libtpu from asking a metadata server for a TPU that is not here; the
        # third from refusing to start beside another process that has loaded it.
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        }
    return environment


def _run(
    interpreter: str, request: str, experiment: Experiment, topology: Topology, quiet: bool
) -> dict[str, Any]:
    """Run the compilation and return its answer, showing how long it has been at what."""
    process = subprocess.Popen(
        [interpreter, "-m", "openelm_jax.planning.ahead_of_time"],
        env=_environment(topology.accelerator.platform),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    what = f"compiling {experiment.model.num_layers} layers for {topology.name}"
    with _progress(what, quiet):
        answer, said = process.communicate(request)
    if process.returncode:
        faults = [line for line in said.splitlines() if FAULT.match(line)]
        fault = faults[-1] if faults else f"code {process.returncode}"
        if fault.startswith("error: "):
            raise UserError(fault.removeprefix("error: "))
        raise UserError(f"{topology.name}: XLA does not compile {experiment.name} ({fault}).")
    return json.loads(answer.splitlines()[-1])


@contextlib.contextmanager
def _progress(what: str, quiet: bool) -> Iterator[None]:
    if quiet:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
    console.print(f"{what}: {time.perf_counter() - begin:.0f} s", highlight=False)
