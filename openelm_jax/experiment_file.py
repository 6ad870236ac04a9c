"""Experiments by name, in files and as JSON.

`load_experiment("3b")` finds `experiments/3b.py` or `experiments/openelm_3b.py`; each such file has
one function, `experiment()`, that returns an `Experiment`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import typing
from pathlib import Path
from typing import Any

from openelm_jax.config import UNIONS, Experiment
from openelm_jax.errors import UserError


def load_experiment(name: str) -> Experiment:
    """Return the experiment called `name` ("3b", "tiny"), or the one in the file `name` ("my.py").

    Looked for in `experiments/` of the working directory, then beside the package, then in it.
    Raises UserError with the nearest names when there is none.
    """
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"--exp {name}: there is no such file.")
        return _run_experiment_file(path)
    known: dict[str, Path] = {}
    for folder in reversed(_experiment_folders()):
        for file in sorted(folder.glob("*.py")):
            known[file.stem] = file
            known[file.stem.removeprefix("openelm_")] = file
    if name in known:
        return _run_experiment_file(known[name])
    names = experiment_names()
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"--exp {name}: no such experiment; {hint}Known: {', '.join(names)}.")


def experiment_names() -> list[str]:
    """Return the names that `load_experiment` knows, sorted, in their short form."""
    return sorted(
        {
            file.stem.removeprefix("openelm_")
            for folder in _experiment_folders()
            for file in folder.glob("*.py")
            if not file.stem.startswith("_")
        }
    )


def to_json(experiment: Experiment) -> str:
    """Return `experiment` as indented JSON; `from_json` gives back an equal one."""
    return json.dumps(dataclasses.asdict(experiment), indent=2) + "\n"


def from_json(text: str | bytes, where: str = "experiment") -> Experiment:
    """Return the experiment that `to_json` wrote.

    Raises UserError, beginning with `where`, for text that is no JSON, an unknown or missing
    field and a value that the experiment refuses.
    """
    try:
        plain = json.loads(text)
    except ValueError as fault:
        raise UserError(f"{where} is no JSON ({fault}); restore it from a copy.") from None
    try:
        return _from_plain(Experiment, plain, "")
    except UserError as mistake:
        raise UserError(f"{where}: {mistake}") from None


def differing_fields(a: Experiment, b: Experiment) -> list[str]:
    """Return one line for each dotted field in which two experiments differ: `field: a, b`.

    A source's fields go by its name: `data.sources.web.weight`.
    """
    flat_a, flat_b = _flatten(dataclasses.asdict(a)), _flatten(dataclasses.asdict(b))
    return [
        f"{name}: {flat_a.get(name)!r}, {flat_b.get(name)!r}"
        for name in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(name) != flat_b.get(name)
    ]


def _experiment_folders() -> list[Path]:
    package = Path(__file__).parent
    places = [Path.cwd() / "experiments", package.parent / "experiments", package / "experiments"]
    return [place for place in places if place.is_dir()]


def _run_experiment_file(path: Path) -> Experiment:
    spec = importlib.util.spec_from_file_location(f"openelm_jax_experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "experiment"):
        raise UserError(f"{path}: an experiment file defines a function `experiment()`; add one.")
    return module.experiment()


def _from_plain(kind: Any, value: Any, where: str) -> Any:
    """Rebuild a dataclass (nested, with tuples and optional fields) from JSON's plain values."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            name = where.rstrip(".") or "the whole"
            raise UserError(f"{name} is {repr(value)[:40]}: it must be an object of fields.")
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            near = difflib.get_close_matches(unknown[0], hints, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; take it out."
            raise UserError(f"unknown field {where}{unknown[0]}{hint}")
        given = {name: _from_plain(hints[name], v, f"{where}{name}.") for name, v in value.items()}
        for known in dataclasses.fields(kind):
            required = known.default is known.default_factory is dataclasses.MISSING
            if required and known.name not in given:
                raise UserError(f"the field {where}{known.name} is missing; add it.")
        return kind(**given)
    origin = typing.get_origin(kind)
    if origin is tuple and isinstance(value, list):
        (element, _) = typing.get_args(kind)
        return tuple(_from_plain(element, v, f"{where}{i}.") for i, v in enumerate(value))
    if origin in UNIONS:
        for option in typing.get_args(kind):
            if typing.get_origin(option) is tuple and isinstance(value, list):
                return _from_plain(option, value, where)
    return value


def _flatten(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            name: leaf
            for key, inner in value.items()
            for name, leaf in _flatten(inner, f"{where}.{key}" if where else key).items()
        }
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        by_name = {element["name"]: element for element in value}
        return {where: tuple(by_name), **_flatten(by_name, where)}
    return {where: value}
