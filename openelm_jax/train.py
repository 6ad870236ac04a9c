"""Pre-train an experiment, or go on where its run stopped.

python -m openelm_jax.train --exp tiny
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

from openelm_jax.command_line import parse, run
from openelm_jax.config import Experiment, ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.training.clock import Clock
from openelm_jax.xla_flags import set_flags

SAMPLE_TOKENS = 48
PURPOSE = (
    "Pre-train an experiment. The same command again goes on where the run stopped,\n"
    "with the same batches and the same bits as if it had not."
)
EXAMPLES = """\
python -m openelm_jax.train --exp tiny
python -m openelm_jax.train --exp 3b --data.root DIR --tokenizer tokenizer.model
python -m openelm_jax.train --exp tiny --run runs/wide --model.model-dim 256
python -m openelm_jax.train --exp 3b --coordinator HOST:PORT --processes 4 --process 0"""


def main(argv: list[str]) -> None:
    # --- What to run: answered before anything heavy is imported.
    flags, experiment = parse("train", PURPOSE, EXAMPLES, _add_flags, argv)
    if flags.tokenizer is not None:
        chosen = dataclasses.replace(experiment.tokenizer, path=flags.tokenizer)
        experiment = dataclasses.replace(experiment, tokenizer=chosen)
    if flags.adapter and not flags.weights:
        raise UserError(
            f"--adapter {flags.adapter} has no model to go with: give its base in --from."
        )
    _require_data_and_tokenizer(experiment, tokenizer_comes_with=flags.weights)
    directory = Path(flags.run or f"runs/{experiment.name}")
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars: the run has one of its own
    clock = Clock()
    for line in set_flags(flags.processes):
        _say(line)
    from openelm_jax.parallel.processes import ending_alone, join_processes

    join_processes(flags.coordinator, flags.processes, flags.process, _say)
    with ending_alone():
        _train(flags, experiment, directory, clock)


def _train(
    flags: argparse.Namespace, experiment: Experiment, directory: Path, clock: Clock
) -> None:
    """Train in this process, which may be one of several; the first one speaks and writes."""
    import jax

    from openelm_jax.data.audit import audit_position, summary_lines
    from openelm_jax.data.pipeline import Position, open_data, validation_set
    from openelm_jax.evaluation.in_training import evaluate_chosen, open_chosen
    from openelm_jax.experiment_file import to_json
    from openelm_jax.generation.snapshot import snapshot
    from openelm_jax.model.scaling import flops_per_token, parameter_count
    from openelm_jax.parallel.devices import peak_flops
    from openelm_jax.parallel.mesh import (
        check_context,
        check_rows,
        granules_of,
        make_mesh,
        reader_of,
        resolve_mesh,
    )
    from openelm_jax.parallel.processes import all_or_none, require_equal, require_same
    from openelm_jax.parallel.sharding_report import sharding_lines
    from openelm_jax.tokenizer import load_tokenizer
    from openelm_jax.training.checkpoint import Checkpointer
    from openelm_jax.training.compilation import compile_step, keep_compiled_code
    from openelm_jax.training.feed import feed, whole_position
    from openelm_jax.training.loop import Logged, train_loop
    from openelm_jax.training.metrics import MetricWriter, is_logged, progress, speed_figures
    from openelm_jax.training.optimizer import learning_rate
    from openelm_jax.training.profile import Profile
    from openelm_jax.training.program import make_program
    from openelm_jax.training.run_directory import (
        TOKENIZER,
        check_run,
        check_shards,
        open_tokenizer,
        record_run,
    )
    from openelm_jax.training.start import read_start
    from openelm_jax.training.state import TrainState, optimizer_item, state_of
    from openelm_jax.training.validation import validate
    from openelm_jax.weights.orbax import saved_steps
    from openelm_jax.xla_flags import compiler_option_lines, compiler_options

    keep_compiled_code()
    config, training = experiment.model, experiment.training
    row_length = config.context_length + 1
    is_first = jax.process_index() == 0
    say: Callable[[str], None] = _say if is_first else lambda line: None
    require_same(to_json(experiment))
    require_equal({"--run": str(directory), "--from": str(flags.weights)})
    require_equal({"--reweight": str(flags.reweight), "--adapter": str(flags.adapter)})

    # --- The mesh: which device stands where, and which rows are this process's.
    devices = jax.devices()
    with all_or_none():
        shape = resolve_mesh(experiment.mesh, len(devices), granules_of(devices))
        check_rows(shape, training.global_batch_size, training.accumulation)
        check_context(shape, config.context_length)
        mesh = make_mesh(shape, devices)
        reader, readers = reader_of(mesh, jax.process_index())

    # --- Tokens: tokenizer, mixture, held-out text.
    with all_or_none():
        if is_first:
            check_run(directory, experiment)
        begun = bool(saved_steps(directory))
        start_from = (
            None
            if begun or not flags.weights
            else read_start(flags.weights, experiment, flags.exp, say, flags.adapter)
        )
        if is_first:
            given = None if start_from is None else start_from.weights
            tokenizer, origin = open_tokenizer(directory, experiment, given)
            say(f"tokenizer: {tokenizer.vocab_size:,} pieces, {origin}")
    require_equal({"the saved steps": str(saved_steps(directory))})
    with all_or_none():
        if not is_first:
            tokenizer = load_tokenizer(directory / TOKENIZER, config.vocab_size)
        data = open_data(
            experiment.data,
            tokenizer,
            row_length=row_length,
            global_batch_size=training.global_batch_size,
            host=reader,
            hosts=readers,
        )
        check_shards(directory, data.manifest)
        _require_row_for_padding(config, data.pad_id)
        held_out = validation_set(experiment.data, tokenizer, row_length=row_length)
        tasks = open_chosen(training)
    isolating = tokenizer.bos_id if experiment.data.isolate_documents else None
    say(
        "held out: nothing (name shards in data.sources.holdout to validate)"
        if held_out is None
        else f"held out: {held_out.num_documents} documents, {held_out.num_bytes:,} bytes"
    )

    # --- Program and state: new, from weights, or from the last checkpoint.
    with all_or_none():
        program = make_program(experiment, mesh, bos_id=isolating)
    device = devices[0].device_kind
    say(
        f"{len(devices)} {device} device(s) in {jax.process_count()} process(es), mesh {shape}, "
        f"{training.dtype}, attention: {program.kernel.reason}, remat: {_in_words(program.remats)}"
    )
    moment_bytes = 2 if experiment.optimizer.first_moment_dtype == "bfloat16" else 4
    for line in (
        sharding_lines(config, program.layout, 8 + moment_bytes) if len(devices) > 1 else ()
    ):
        say(line)
    checkpointer = Checkpointer(directory, experiment.checkpoint)
    like = program.state_like()
    restored = checkpointer.restore(like.params, optimizer_item(like))
    if restored is not None:
        start = restored.step
        data.set_state(Position.from_json(restored.data), reweight=flags.reweight)
        state = state_of(restored.params, restored.optimizer)
        unused = f"; --from {flags.weights} is for a new run and not used" if flags.weights else ""
        say(f"resumed at step {start:,} of {directory}{unused}")
    elif start_from is not None and start_from.moments is not None:
        start = start_from.step
        state = program.state_after(start, start_from.weights.params, start_from.moments)
        say(f"{flags.weights}: going on at step {start:,} with its moments; the data begins anew")
    else:
        start = 0
        state = program.new_state(None if start_from is None else start_from.weights.params)
    reweighting = restored is not None and flags.reweight
    if is_first and not reweighting:  # else when a checkpoint has these weights
        record_run(directory, experiment, data.manifest)
    looks = {"validation": held_out is not None, "evaluation": bool(tasks)}
    if start == training.steps and all(
        is_logged(directory, start, group) for group, wanted in looks.items() if wanted
    ):
        say(f"{directory} is complete: {start:,} of {training.steps:,} steps")
        return

    tokens_per_step = training.global_batch_size * config.context_length
    flops_per_trained_token = 3 * flops_per_token(config)  # forward, and twice that backward
    rows_at_a_time = training.global_batch_size // training.accumulation
    peak = peak_flops(device)
    looked_at: set[int] = set()
    evaluated_at: set[int] = set()
    saved: Position | None = None

    # --- What happens beside the steps.
    def log(logged: Logged) -> None:
        tokens_per_second = logged.tokens / logged.seconds
        figures = {
            "train/loss": float(logged.metrics.loss),
            "train/z_loss": float(logged.metrics.z_loss),
            "train/grad_norm": float(logged.metrics.grad_norm),
            "train/learning_rate": logged.learning_rate,
            "train/tokens": logged.step * tokens_per_step,
            **speed_figures(tokens_per_second, flops_per_trained_token, len(devices), peak),
            **clock.figures(),
        }
        for source, counts in data.counters(whole_position(logged.position)).items():
            figures |= {f"data/{source}/{name}": value for name, value in counts.items()}
        if writer is not None:
            writer.write(logged.step, figures)
        if bar is not None:
            bar.update(logged.step, figures["train/loss"], tokens_per_second)

    def save(step: int, state: TrainState, position: Position) -> None:
        nonlocal saved
        saved = whole_position(position)
        checkpointer.save(
            step,
            params=state.params,
            optimizer=optimizer_item(state),
            data=saved.to_json(),
        )
        if is_first and reweighting:
            record_run(directory, experiment, data.manifest)

    def look(step: int, params: dict) -> None:
        """Validate and show a sample, unless told to stop before."""
        if held_out is not None:
            loss = validate(validation_step, params, held_out, rows_at_a_time, stop.arrived, mesh)
            if loss is None:
                return
            if writer is not None:
                writer.write(
                    step,
                    {
                        "validation/loss": loss.nats_per_token,
                        "validation/bits_per_byte": loss.bits_per_byte,
                    },
                )
            say(
                f"step {step:,}: {loss.nats_per_token:.4f} nats a token, "
                f"{loss.bits_per_byte:.4f} bits a byte on the held-out text"
            )
        prompts = training.sample_prompts
        if prompts:
            model = snapshot(config, params, tokenizer, training.dtype)
            texts = model.generate(prompts, max_tokens=SAMPLE_TOKENS)
            for prompt, text in zip(prompts, texts, strict=True):
                say(f"step {step:,}: {prompt}{text}")
        looked_at.add(step)

    def evaluate(step: int, params: dict) -> None:
        """Evaluate on the tasks, unless told to stop before."""
        model = snapshot(config, params, tokenizer, training.dtype)
        figures = evaluate_chosen(model, tasks, training.evaluate_limit, stop.arrived)
        if figures is None:
            return
        if writer is not None:
            writer.write(step, figures)
        listed = ", ".join(f"{name.partition('/')[2]} {x:.4f}" for name, x in figures.items())
        say(f"step {step:,}: {listed}")
        evaluated_at.add(step)

    with (
        closing(checkpointer),  # waits for a save in progress, also after a mistake
        closing(data),
        feed(
            data, experiment.data.prefetch, mesh=mesh, pad_id=data.pad_id, bos_id=isolating
        ) as batches,
    ):
        # --- Compile, and say what will run. Unfit data shows before the long wait, not after.
        first = next(batches)
        options = compiler_options(device, granules_of(devices))
        for line in compiler_option_lines(device, options):
            say(line)
        with clock.losing("compile"):
            train_step = compile_step(
                program.train_step,
                state,
                first[0],
                program.rate_like(),
                options=options,
                what=f"{parameter_count(config):,} parameters in {config.num_layers} layers for "
                f"{len(devices)} device(s), {tokens_per_step:,} tokens a step",
                say=say,
            ).function
            if held_out is not None:
                part = program.batch_like(rows_at_a_time)
                validation_step = compile_step(
                    program.validation_step, state.params, part, options=options
                ).function

        # --- The steps.
        stop = _Stop(several=jax.process_count() > 1)
        with ExitStack() as stack:
            writer = bar = None
            if is_first:
                writer = stack.enter_context(closing(MetricWriter(directory, start)))
                bar = stack.enter_context(progress(training.steps, start))
                for note in writer.notes:
                    say(note)
            state, done = train_loop(
                state,
                train_step=train_step,
                batches=chain([first], batches),
                learning_rate=lambda t: learning_rate(experiment.optimizer, training.steps, t),
                start=start,
                steps=training.steps,
                log=log,
                log_every=training.log_every,
                save=save,
                save_every=experiment.checkpoint.every,
                hooks=((training.validate_every, look), (training.evaluate_every, evaluate)),
                should_stop=stop.arrived,
                place=program.place_rate,
                clock=clock,
                profile=Profile(training.profile_steps, directory, say),
            )
            if done == training.steps and done not in looked_at:
                look(done, state.params)
            if done == training.steps and tasks and done not in evaluated_at:
                evaluate(done, state.params)
    for line in [] if saved is None else summary_lines(audit_position(saved)):
        say(line)
    spent = clock.figures()
    say(
        f"{directory}: step {done:,} saved, {spent['time/elapsed']:.0f} s in all, "
        f"{spent['goodput']:.0%} of them in steps"
    )
    finished = done in looked_at and (done in evaluated_at or not tasks)
    if stop.signal and not (done == training.steps and finished):
        sys.exit(128 + stop.signal)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run directory (runs/NAME)")
    parser.add_argument(
        "--from",
        dest="weights",
        metavar="WHERE",
        help="start from these weights at step 0; CoreNet's training checkpoints go on at theirs",
    )
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="merge the LoRA or DoRA that peft saved there, or hf://, into --from",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")
    parser.add_argument(
        "--reweight", action="store_true", help="go on with other weights of data.sources"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 of several listens"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which one this is")


def _require_data_and_tokenizer(experiment: Experiment, tokenizer_comes_with: str | None) -> None:
    missing = []
    unplaced = [
        pattern
        for source in experiment.data.sources
        for pattern in source.files
        if not pattern.startswith("package:")
        and not _says_where(pattern)
        and not _says_where(source.root or "")
    ]
    if experiment.data.root is None and unplaced:
        missing.append("the folder of its text with --data.root DIR")
    tokenizer = experiment.tokenizer
    if not (tokenizer.path or tokenizer.vocab_size or tokenizer_comes_with):
        missing.append("a SentencePiece model with --tokenizer FILE")
    if missing:
        raise UserError(f"--exp {experiment.name} has no data yet: give {' and '.join(missing)}.")


def _says_where(path: str) -> bool:
    return os.path.isabs(path) or "://" in path


def _require_row_for_padding(config: ModelConfig, pad_id: int | None) -> None:
    if pad_id is not None and pad_id >= config.vocab_size:
        raise UserError(
            f"data.packing corenet fills rows up with token {pad_id}, the one above the "
            f"tokenizer's pieces, and model.vocab_size is {config.vocab_size}: set it to "
            f"{pad_id + 1} or more."
        )


def _in_words(remats: tuple[str, ...]) -> str:
    """Return "block" or "none 0-3, block 4-15"."""
    from openelm_jax.parallel.sharding_report import ranges

    if len(set(remats)) == 1:
        return remats[0]
    layers = {kind: [i for i, other in enumerate(remats) if other == kind] for kind in remats}
    return ", ".join(f"{kind} {ranges(numbers)}" for kind, numbers in layers.items())


class _Stop:
    """SIGTERM and SIGINT, remembered until the step in progress is done; a second one kills.

    Of several processes all learn of it at the same step.
    """

    def __init__(self, several: bool) -> None:
        self.signal = 0
        self._reached = None
        if several:
            from openelm_jax.parallel.processes import stop_together

            self._reached = stop_together()  # hears SIGTERM
            signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def arrived(self) -> bool:
        if self._reached is not None and not self.signal and self._reached():
            self._note(signal.SIGTERM)
        return self.signal != 0

    def _remember(self, number: int, _frame) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._note(number)

    def _note(self, number: int) -> None:
        self.signal = int(number)
        again = "" if self._reached is not None else " (once more stops at once)"
        _say(f"{signal.Signals(number).name}: saving, then stopping{again}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
