"""Prompts and matrices divided among devices: the text is that of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_jax.errors import UserError
from openelm_jax.generation.placement import decoding_mesh
from tests.small_models import tiny


@pytest.fixture(scope="module")
def decoded() -> dict:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.meshes.decode"],
        env=os.environ | flags,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.heavy
@pytest.mark.parametrize("bits", ["", " 8 bits"])
@pytest.mark.parametrize("how", ["greedy", "sampled", "looked up"])
def test_several_devices_write_the_text_of_one(decoded: dict, how: str, bits: str) -> None:
    assert decoded["devices"] == 4
    assert decoded[f"mesh{bits}"][how] == decoded[f"one{bits}"][how]
    assert len(set(map(tuple, decoded[f"one{bits}"][how]))) > 1


@pytest.mark.heavy
def test_a_draft_model_helps_several_devices_as_it_does_one(decoded: dict) -> None:
    """Rows that only fill up a batch are not counted, and the token loop is compiled once."""
    assert decoded["mesh drafted"] == decoded["one drafted"]
    assert decoded["mesh drafted"]["compiled"] == 1
    _, tokens, *_ = decoded["mesh drafted"]["tally"]
    # All but those that the prompts' own pass chose, and with the end of those that have one.
    texts = decoded["mesh drafted"]["tokens"]
    assert tokens == sum(len(text) - (len(text) == 90) for text in texts)


@pytest.mark.heavy
def test_no_device_gathers_a_matrix(decoded: dict) -> None:
    """Activations only: no more than the logits of the rows of a device."""
    config = tiny()
    smallest = config.model_dim * 2 * config.head_dim
    assert decoded["gathered"] < smallest


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="mesh replica 99 x tensor 2 makes 198 devices"):
        decoding_mesh(99, 2)
