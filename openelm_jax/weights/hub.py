"""Weights on the Hugging Face Hub: `hf://apple/OpenELM-1_1B[@REVISION]`."""

from __future__ import annotations

import re
from pathlib import Path

from openelm_jax.errors import UserError

FILES = ["*.json", "*.safetensors", "*.model", "*.gguf"]
"""What is fetched of a repository: no code, no pickles."""


def fetch(where: str) -> Path:
    """Return the directory of a repository's files, fetched unless the Hub's cache has them.

    Raises UserError when the package is missing, the name is none, or the Hub does not give it.
    """
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", where)
    if match is None:
        raise UserError(
            f"{where}: the Hub's names are hf://OWNER/NAME or hf://OWNER/NAME@REVISION."
        )
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise UserError(
            f"{where}: the package huggingface_hub is missing; pip install 'openelm_jax[hub]'."
        ) from None
    name, revision = match.groups()
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=FILES)
        )
    except errors.HFValidationError:
        raise UserError(f"{where}: {name} is no name that the Hub allows; correct it.") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as fault:
        first_line = str(fault).strip().partition("\n")[0]
        raise UserError(
            f"{where}: the Hub does not give it ({first_line}); look at the name, log in with "
            "`hf auth login` if it is closed, or give a directory."
        ) from None
