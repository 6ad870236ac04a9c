"""What the tests against other programs share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where transformers copies the code of models to: one place, since it imports from the first
    that it was given, whatever is said later."""
    return str(tmp_path_factory.mktemp("modules"))
