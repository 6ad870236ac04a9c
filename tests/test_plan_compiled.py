"""What XLA says of a compiled step: read from its text, kept, and close to the estimate."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openelm_jax import plan
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.planning import compiled
from openelm_jax.planning.collectives import Collective, collectives_in
from openelm_jax.planning.compiled import CompiledStep, compile_on, known_steps
from openelm_jax.planning.topologies import parse_topology

# Lines as the TPU compiler of libtpu 0.0.42.1 and the GPU compiler of jaxlib 0.10.2 write them.
PROGRAM = """
HloModule jit_on_mesh, is_scheduled=true
%all-reduce-scatter.1 (input.1: f32[1344,10240]) -> f32[168,10240] {
  %pad.39 = f32[1344,10240]{1,0:T(8,128)} pad(%input.1, %constant), padding=0_64x0_0
  %all-reduce.4 = f32[1344,10240]{1,0:T(8,128)} all-reduce(%pad.39), channel_id=11, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_58.59.clone
  ROOT %slice = f32[168,10240]{1,0} dynamic-slice(%all-reduce.4, %a, %b)
}

ENTRY %main.1 (param: bf16[1280,160]) -> f32[] {
  %all-gather = bf16[32128,1280]{0,1:T(8,128)(2,1)} all-gather(%convert), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, use_global_device_ids=true
  %fusion.2 = f32[168,10240]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %collective-permute-start.1 = (f32[56,10240]{1,0}, f32[56,10240]{1,0}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%slice.53), source_target_pairs={{0,1},{1,2}}
  %done.1 = f32[56,10240]{1,0} collective-permute-done(%collective-permute-start.1)
  %reduce_scatter.77 = f32[160,1920]{1,0:T(8,128)} reduce-scatter(%fusion.212), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%region_54.55
  %all-gather-start.2 = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%y), \
replica_groups=[1,8]<=[8], dimensions={0}
  %all-gather-done.2 = bf16[32,8]{1,0} all-gather-done(%all-gather-start.2)
  %rs = ((f32[64,8]{1,0}, f32[16,8]{1,0}), (f32[8,8]{1,0}, f32[2,8]{1,0})) reduce-scatter-start(\
%u, %v), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%region_1.2
  ROOT %psum.91 = f32[]{:T(128)} all-reduce(%z), replica_groups=[1,8]<=[8], to_apply=%region_10.11
}
"""

SMALL = [
    "--exp", "270m", "--topology", "v5e:2x4", "--model.num-layers", "2",
    "--training.remat", "dots", "--training.accumulation", "4",
]  # fmt: skip


def test_collectives_are_counted_by_kind_and_type_with_the_bytes_of_whole_arrays() -> None:
    counted = {
        (each.kind, each.dtype): (each.count, each.bytes) for each in collectives_in(PROGRAM)
    }
    assert counted == {
        ("all-gather", "bfloat16"): (2, 2 * (32128 * 1280 + 32 * 8)),
        # Spelled as a fusion around an all-reduce, as what it is, and started for two at once.
        ("reduce-scatter", "float32"): (3, 4 * (1344 * 10240 + 8 * 160 * 1920 + 80 * 8)),
        ("collective-permute", "float32"): (1, 4 * 56 * 10240),
        ("all-reduce", "float32"): (1, 4),
    }


def answered(**changes: Any) -> dict[str, Any]:
    """Return what the other process answers."""
    return {
        "mesh": {"replica": 1, "fsdp": 8, "tensor": 1, "context": 1},
        "kernel": "splash",
        "argument_bytes": 100,
        "output_bytes": 90,
        "temporary_bytes": 50,
        "alias_bytes": 90,
        "peak_bytes": 140,
        "needed_bytes": 0,
        "collectives": [{"kind": "all-gather", "dtype": "bfloat16", "count": 9, "bytes": 7}],
        "lowering_seconds": 1.0,
        "compilation_seconds": 2.0,
        **changes,
    }


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Stand in for the process that compiles; return the requests that it was sent."""
    requests: list[str] = []

    def run(interpreter: str, request: str, *_: Any) -> dict[str, Any]:
        requests.append(request)
        return answered()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "_run", run)
    monkeypatch.setattr(compiled, "_versions", lambda *_: {"jax": "1", "libtpu": "2"})
    return requests


def compile_again(**options: Any) -> CompiledStep:
    topology = parse_topology("v5e:2x4")
    return compile_on(topology, load_experiment("270m"), quiet=True, **options)


def test_a_step_is_compiled_once_for_a_topology_and_code(
    other_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_again()
    assert first.memory == 150
    assert first.collectives == (Collective(kind="all-gather", dtype="bfloat16", count=9, bytes=7),)
    assert compile_again() == first
    assert len(other_process) == 1
    compile_again(effort="quick")
    assert len(other_process) == 2
    monkeypatch.setattr(compiled, "code_digest", lambda: "other code")
    compile_again()
    assert len(other_process) == 3
    known = known_steps(load_experiment("270m"), parse_topology("v5e:2x4"))
    assert sorted(step.effort for step in known) == ["full", "full", "quick"]
    assert known_steps(load_experiment("270m"), parse_topology("v5e:4x4")) == []


def test_a_program_that_needs_more_than_there_is_says_how_much(
    other_process: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = answered(argument_bytes=0, temporary_bytes=0, needed_bytes=20 * 2**30)
    monkeypatch.setattr(compiled, "_run", lambda *_: dict(needed))
    assert not compile_again().fits
    plan.main([*SMALL, "--compile"])
    assert "needed, says XLA" in capsys.readouterr().out


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled.PACKAGES, "tpu", (("jax",), ("no-such-package",)))
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[tpu\]'.*--python"):
        compile_again()


@pytest.mark.parametrize("plugin", ["jax-cuda12-plugin", "jax-cuda13-plugin"])
def test_an_environment_of_either_cuda_compiles_for_gpus(plugin: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    found = {"jax": "0.10.2", "jaxlib": "0.10.2", plugin: "0.10.3", "numpy": "2.0"}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    del found["numpy"]
    assert compiled._versions(str(python), "gpu") == found


def test_without_a_plugin_for_cuda_both_are_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"jax": "0.10.2", "jaxlib": "0.10.2"}\'\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"jax-cuda12-plugin or jax-cuda13-plugin.*\[cuda\]"):
        compiled._versions(str(python), "gpu")


def test_the_other_process_gets_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in compiled.UNSET:
        monkeypatch.setenv(name, "whatever the user had")
    environment = compiled._environment("tpu")
    assert not environment.keys() & set(compiled.UNSET)
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_what_the_compiler_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'error: there is no such kernel.' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(compiled, "_versions", lambda *_: {"jax": "1"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"^there is no such kernel\.$"):
        compile_again(python=str(script))


@pytest.mark.heavy
def test_the_estimate_is_near_what_the_tpu_compiler_allots(tmp_path: Path) -> None:
    """Two layers of 270M for eight chips of v5e, by `plan --compile quick`."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "openelm_jax.plan", *SMALL, "--compile", "quick", "--json"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)},
        cwd=Path(__file__).parent.parent,
    )
    assert ran.returncode == 0, ran.stderr
    there = json.loads(ran.stdout)["on_topology"]
    step = there["compiled"]
    assert step["kernel"] == "splash"
    assert step["alias_bytes"] > 0.99 * 3 * 4 * 70_294_016 / 8  # the state is given up
    exact = step["argument_bytes"] + step["temporary_bytes"]
    assert there["estimated_bytes"] == pytest.approx(exact, rel=0.15)
    counted = {(each["kind"], each["dtype"]): each for each in step["collectives"]}
    # Weights travel in the compute type, gradients in float32, and nothing else of any size does.
    large = {key for key, each in counted.items() if each["bytes"] > 2**24}
    assert large <= {
        ("all-gather", "bfloat16"), ("reduce-scatter", "float32"), ("all-reduce", "float32"),
    }  # fmt: skip
    # Four matrices of two layers, forward and backward, and the table.
    assert counted["all-gather", "bfloat16"]["count"] >= 16
