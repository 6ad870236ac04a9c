"""Adapters beside weights that devices share: their gradients are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_gradients_beside_shared_weights_are_those_of_one_device() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.meshes.adapt"],
        env=os.environ | flags,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("devices") == 4
    assert len(found) == 3
    assert max(found.values()) < 5e-6
