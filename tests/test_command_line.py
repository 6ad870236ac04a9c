"""The command line: quick, forgiving in order, exact in its complaints and exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_jax.command_line import VERBS, openelm, parse, run
from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import differing_fields, experiment_names, load_experiment

ROOT = Path(__file__).parent.parent


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run directory")


def parse_line(line: str) -> tuple[argparse.Namespace, Experiment]:
    return parse("train", "Train.", "python -m openelm_jax.train", add_flags, line.split())


def changes(line: str) -> list[str]:
    _, experiment = parse_line(line)
    return differing_fields(load_experiment("tiny"), experiment)


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a refused command line prints on stderr, after checking its exit code."""
    with pytest.raises(SystemExit) as exit_:
        parse_line(line)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_without_overrides_the_experiment_is_the_file_s() -> None:
    arguments, experiment = parse_line("--exp 3b")
    assert experiment == load_experiment("3b")
    assert arguments.run is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--exp tiny --optimizer.peak-lr 1e-3", ["optimizer.peak_lr: 0.008, 0.001"]),
        ("--optimizer.peak_lr=1e-3 --exp tiny", ["optimizer.peak_lr: 0.008, 0.001"]),
        ("--training.accumulation 2 --exp tiny --run x", ["training.accumulation: 1, 2"]),
        ("--exp=tiny --model.no-tie-embeddings", ["model.tie_embeddings: True, False"]),
        ("--exp tiny --data.lanes None", ["data.lanes: 4, None"]),
        (
            "--exp tiny --model.ffn-multipliers 1 2 3",
            ["model.ffn_multipliers: (0.5, 4.0), (1.0, 2.0, 3.0)"],
        ),
        ("--exp tiny --name other", ["name: 'tiny', 'other'"]),
    ],
)
def test_any_field_is_overridden_by_its_path_at_any_place(line: str, expected: list[str]) -> None:
    assert changes(line) == expected


def test_a_field_of_a_source_is_reached_by_its_number() -> None:
    _, experiment = parse_line("--exp tiny --data.sources.0.weight 2.5")
    assert experiment.data.sources[0].weight == 2.5


def test_the_verb_s_own_flags_stand_anywhere() -> None:
    for line in ("--run x --exp tiny --training.seed 1", "--training.seed 1 --exp tiny --run x"):
        arguments, experiment = parse_line(line)
        assert (arguments.run, experiment.training.seed) == ("x", 1)


def test_two_fields_that_only_fit_together_are_set_together() -> None:
    assert changes("--exp tiny --data.lanes 3 --training.global-batch-size 6") == [
        "data.lanes: 4, 3",
        "training.global_batch_size: 8, 6",
    ]


def test_a_path_to_a_file_is_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (ROOT / "experiments" / "tiny.py").read_text()
    file.write_text(text.replace('name="tiny"', 'name="mine"'))
    assert parse_line(f"--exp {file}")[1].name == "mine"


def test_an_unknown_experiment_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(UserError) as error:
        parse_line("--exp tinny")
    assert "did you mean tiny?" in str(error.value)
    assert ", ".join(experiment_names()) in str(error.value)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("--training.stpes 5", "--training.steps"),
        ("--model.num-layer 5", "--model.num-layers"),
        ("--peak-lr 5", "--optimizer.peak-lr"),
        ("--rnu x", "--run"),
    ],
)
def test_an_unknown_flag_or_field_is_answered_with_the_nearest(
    typo: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(f"--exp tiny {typo}", capsys)
    assert f"no flag or field {typo.split()[0]}; did you mean {nearest}?" in message


def test_a_missing_experiment_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"known are {', '.join(experiment_names())}" in refusal("--run x", capsys)


@pytest.mark.parametrize("line", ["--training.steps many", "--training.dtype float8", "stray"])
def test_a_value_that_cannot_be_read_is_usage(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line.split()[-1] in refusal(f"--exp tiny {line}", capsys)


def test_a_value_that_the_experiment_refuses_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"data\.lanes 3 does not divide .*: use one of 1, 2, 4, 8"):
        parse_line("--exp tiny --data.lanes 3")


@pytest.mark.parametrize("line", ["--help", "--help --exp tiny"])
def test_help_fits_one_screen(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        parse_line(line)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    for part in ("Train.", "python -m openelm_jax.train", "--run DIR", "--help-fields"):
        assert part in text
    for group in ("model", "tokenizer", "data", "optimizer", "training", "checkpoint"):
        assert group in text
    assert ", ".join(experiment_names()) in text


def test_help_fields_lists_every_field_with_the_experiment_s_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_line("--exp 1_1b --help-fields")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    experiment = load_experiment("1_1b")
    for group in dataclasses.fields(experiment):
        part = getattr(experiment, group.name)
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            if field.name != "sources":
                assert f"--{group.name}.{field.name.replace('_', '-')}" in text
    assert "Number of transformer layers. (default: 28)" in text
    assert "(default: 0.0024)" in text


def end_of(main: object, argv: list[str] | None = None) -> int:
    with pytest.raises(SystemExit) as exit_:
        run(main, [] if argv is None else argv)  # type: ignore[arg-type]
    code = exit_.value.code
    assert isinstance(code, int)
    return code


def test_exit_codes_say_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(argv: list[str]) -> None:
        raise UserError("a.jsonl:3: no text; add it.")

    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    assert end_of(lambda argv: None) == 0
    assert capsys.readouterr().err == ""
    assert end_of(mistaken) == 1
    assert capsys.readouterr().err == "error: a.jsonl:3: no text; add it.\n"
    assert end_of(interrupted) == 130
    assert end_of(lambda argv: sys.exit(143)) == 143


def test_our_own_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda argv: print(1 / 0), [])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = "from openelm_jax.command_line import run; run(lambda argv: print('x' * 10**6))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_openelm_runs_a_verb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["openelm", "plan", "--exp", "tiny", "--json"])
    with pytest.raises(SystemExit) as exit_:
        openelm()
    assert exit_.value.code == 0
    assert '"experiment": "tiny"' in capsys.readouterr().out


def test_openelm_lists_its_verbs_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["openelm"])
    with pytest.raises(SystemExit, match="0"):
        openelm()
    listed = capsys.readouterr().out
    verbs = {
        path.stem for path in (ROOT / "openelm_jax").glob("*.py") if "def main(" in path.read_text()
    }
    assert verbs == set(VERBS)
    assert all(f"\n  {verb} " in listed for verb in verbs)
    monkeypatch.setattr(sys, "argv", ["openelm", "trian"])
    with pytest.raises(SystemExit, match="2"):
        openelm()
    assert "no verb trian; did you mean train?" in capsys.readouterr().err


WHAT_IS_LOADED = """
import contextlib, importlib, sys
with contextlib.suppress(SystemExit):
    importlib.import_module("openelm_jax." + sys.argv[1]).main(sys.argv[2:])
heavy = {"jax", "flax", "optax", "orbax", "grain", "torch", "mlx", "transformers"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("verb", list(VERBS))
@pytest.mark.parametrize("argv", [["--help"], ["--no-such-flag"]])
def test_arguments_are_parsed_before_jax_is_loaded(verb: str, argv: list[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", WHAT_IS_LOADED, verb, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert finished.stderr.splitlines()[-1] == "[]", finished.stderr
    if argv == ["--help"]:
        assert f"usage: python -m openelm_jax.{verb}" in finished.stdout


@pytest.mark.parametrize("line", ["--exp tiny --training.steps 5", "--exp tiny --data.lanes 3"])
def test_overrides_are_parsed_before_jax_is_loaded(line: str) -> None:
    script = WHAT_IS_LOADED.replace("SystemExit", "Exception")
    finished = subprocess.run(
        [sys.executable, "-c", script, "plan", *line.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert finished.stderr.splitlines()[-1] == "[]", finished.stderr


def test_a_verb_run_as_a_module_exits_with_one_for_a_mistake() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "openelm_jax.plan", "--exp", "tiny", "--model.head-dim", "48"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr == (
        "error: model.head_dim 48 does not divide model.model_dim 128: "
        "use one of 1, 2, 4, 8, 16, 32, 64, 128.\n"
    )
