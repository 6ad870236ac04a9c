"""Lets the tests of every folder import what stands beside this file, and share compiled code."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the commands of a session keep what they compile."""
    return tmp_path_factory.mktemp("compiled_code")
