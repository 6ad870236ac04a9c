"""Decode on four devices of this process; print as JSON what came of it.

Run by test_decoding.py, in a process whose XLA_FLAGS make the devices.
"""

from __future__ import annotations

import json
import re

import jax
import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.generation import engine
from openelm_jax.generation.forward import placed
from openelm_jax.generation.placement import decoding_mesh, divided
from openelm_jax.generation.sampling import Sampling
from openelm_jax.generation.speculative import Draft, PromptLookup, Tally
from openelm_jax.model.decoder import Params
from openelm_jax.weights.names import at, named_weights, put
from tests.small_models import random_params, tiny

CONFIG = tiny()
HOST = random_params(CONFIG)
DRAFT_CONFIG = tiny(num_layers=1)
DRAFT_HOST = random_params(DRAFT_CONFIG)
PROMPTS = [[1, 5, 6], [1, 7], [1, 8, 9, 10, 11], [1, 3], [1, 4, 4]]
SETTINGS = {
    "greedy": {"sampling": Sampling()},
    "sampled": {"sampling": Sampling(temperature=0.8, seed=3)},
    "looked up": {"sampling": Sampling(), "speculation": PromptLookup(2)},
}


def on(
    replica: int, tensor: int, quantize, config: ModelConfig = CONFIG, host: Params = HOST
) -> Params:
    mesh = decoding_mesh(replica, tensor)
    params: Params = {}
    for weight in named_weights(config):
        matrix = placed(weight.path, at(host, weight.path), "float32", quantize)
        put(params, weight.path, divided(weight.path, matrix, mesh) if mesh else matrix)
    return params


def texts(params: Params) -> dict[str, list[tuple[int, ...]]]:
    return {name: generated(params, **how) for name, how in SETTINGS.items()}


def generated(params: Params, **how) -> list[tuple[int, ...]]:
    continuations = engine.generate(
        CONFIG, params, PROMPTS, max_tokens=12, eos_id=2, dtype="float32", **how
    )
    return [each.tokens for each in continuations]


def drafted(replica: int, tensor: int) -> dict:
    """Return what comes of a draft model, and how often the token loop is compiled."""
    params = on(replica, tensor, None)
    draft = Draft(DRAFT_CONFIG, on(replica, tensor, None, DRAFT_CONFIG, DRAFT_HOST), "float32", 3)
    tally, before = Tally(), engine._decode._cache_size()
    # Two blocks of calls at least.
    continuations = engine.generate(
        *(CONFIG, params, PROMPTS),
        **{"max_tokens": 90, "eos_id": 2, "dtype": "float32", "sampling": Sampling()},
        **{"speculation": draft, "tally": tally},
    )
    return {
        "tokens": [each.tokens for each in continuations],
        "tally": tally.counts,
        "compiled": engine._decode._cache_size() - before,
    }


def gathered(params: Params) -> int:
    """Return the most elements of what a device gathers in the program of the token loop."""
    mesh = engine.mesh_of(params)
    rows = np.zeros(4, np.uint32), np.full(4, 3, np.int32)
    request = engine.Request(*rows, *np.int32([40, 2, 8]), np.uint32(0), *np.float32([0, 0, 1, 1]))
    tokens_BT, request = engine.divide_rows((np.ones((4, 16), np.int32), request), mesh)
    state = engine._prefill(CONFIG, "float32", 24, mesh, params, tokens_BT, request)
    assert state.cache[0].key_MSH.sharding.spec[0] == "replica"
    program = engine._decode.lower(CONFIG, "float32", params, state, request, np.int32(8))
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", program.compile().as_text())
    return max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


def main() -> None:
    print(
        json.dumps(
            {
                "one": texts(on(1, 1, None)),
                "mesh": texts(on(2, 2, None)),
                "one 8 bits": texts(on(1, 1, 8)),
                "mesh 8 bits": texts(on(1, 4, 8)),
                "one drafted": drafted(1, 1),
                "mesh drafted": drafted(2, 2),
                "gathered": gathered(on(2, 2, None)),
                "devices": len(jax.devices()),
            }
        )
    )


if __name__ == "__main__":
    main()
