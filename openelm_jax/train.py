"""Pre-train an experiment, or go on where its run stopped.

python -m openelm_jax.train --exp tiny
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_jax.command_line import parse, run
from openelm_jax.config import Experiment, ModelConfig
from openelm_jax.errors import UserError

if TYPE_CHECKING:
    from openelm_jax.weights.load import Weights

PURPOSE = (
    "Pre-train an experiment. The same command again goes on where the run stopped,\n"
    "with the same batches and the same bits as if it had not."
)
EXAMPLES = """\
python -m openelm_jax.train --exp tiny
python -m openelm_jax.train --exp 3b --data.root DIR --tokenizer tokenizer.model
python -m openelm_jax.train --exp tiny --run runs/wide --model.model-dim 256"""


def main(argv: list[str]) -> None:
    # --- What to run: answered before anything heavy is imported.
    flags, experiment = parse("train", PURPOSE, EXAMPLES, _add_flags, argv)
    if flags.tokenizer is not None:
        chosen = dataclasses.replace(experiment.tokenizer, path=flags.tokenizer)
        experiment = dataclasses.replace(experiment, tokenizer=chosen)
    _require_data_and_tokenizer(experiment, tokenizer_comes_with=flags.weights)
    directory = Path(flags.run or f"runs/{experiment.name}")
    began = time.perf_counter()

    import jax
    import jax.numpy as jnp

    from openelm_jax.data.audit import audit_position, summary_lines
    from openelm_jax.data.pipeline import Position, open_data, validation_set
    from openelm_jax.model.decoder import Decoder, init_params
    from openelm_jax.model.scaling import flops_per_token, parameter_count
    from openelm_jax.parallel.devices import peak_flops
    from openelm_jax.training.checkpoint import Checkpointer
    from openelm_jax.training.compilation import compile_step, keep_compiled_code
    from openelm_jax.training.feed import feed, whole_position
    from openelm_jax.training.loop import Logged, train_loop
    from openelm_jax.training.metrics import MetricWriter, is_validated, progress
    from openelm_jax.training.optimizer import learning_rate, make_optimizer
    from openelm_jax.training.run_directory import (
        check_run,
        check_shards,
        open_tokenizer,
        record_run,
    )
    from openelm_jax.training.state import TrainState, new_state, optimizer_item, state_of
    from openelm_jax.training.step import make_train_step, make_validation_step
    from openelm_jax.training.validation import validate
    from openelm_jax.weights.orbax import saved_steps

    keep_compiled_code()
    config, training = experiment.model, experiment.training
    row_length = config.context_length + 1

    # --- Tokens: tokenizer, mixture, held-out text.
    check_run(directory, experiment)
    begun = bool(saved_steps(directory))
    start_from = None if begun or not flags.weights else _starting_weights(flags.weights, config)
    tokenizer, origin = open_tokenizer(directory, experiment, start_from)
    _say(f"tokenizer: {tokenizer.vocab_size:,} pieces, {origin}")
    data = open_data(
        experiment.data,
        tokenizer,
        row_length=row_length,
        global_batch_size=training.global_batch_size,
        host=jax.process_index(),
        hosts=jax.process_count(),
    )
    check_shards(directory, data.manifest)
    _require_row_for_padding(config, data.pad_id)
    isolating = tokenizer.bos_id if experiment.data.isolate_documents else None
    held_out = validation_set(experiment.data, tokenizer, row_length=row_length)
    _say(
        "held out: nothing (name shards in data.sources.holdout to validate)"
        if held_out is None
        else f"held out: {held_out.num_documents} documents, {held_out.num_bytes:,} bytes"
    )

    # --- Model and state: new, from weights, or from the last checkpoint.
    decoder = Decoder(config, dtype=jnp.dtype(training.dtype), remat=training.remat)
    optimizer = make_optimizer(experiment.optimizer)
    checkpointer = Checkpointer(directory, experiment.checkpoint)
    like = jax.eval_shape(lambda: new_state(init_params(config, training.seed), optimizer))
    restored = checkpointer.restore(like.params, optimizer_item(like))
    if restored is not None:
        start = restored.step
        data.set_state(Position.from_json(restored.data), reweight=flags.reweight)
        state = state_of(restored.params, restored.optimizer)
        unused = f"; --from {flags.weights} is for a new run and not used" if flags.weights else ""
        _say(f"resumed at step {start:,} of {directory}{unused}")
    else:
        start = 0
        given = None if start_from is None else jax.device_put(start_from.params)
        state = new_state(given or init_params(config, training.seed), optimizer)
    reweighting = restored is not None and flags.reweight
    if not reweighting:  # else when a checkpoint has these weights
        record_run(directory, experiment, data.manifest)
    if start == training.steps and (held_out is None or is_validated(directory, start)):
        _say(f"{directory} is complete: {start:,} of {training.steps:,} steps")
        return
    # Placed alike whether new or restored: another placement would be compiled anew.
    state = jax.device_put(state, jax.devices()[0])

    tokens_per_step = training.global_batch_size * config.context_length
    flops_per_trained_token = 3 * flops_per_token(config)  # forward, and twice that backward
    device = jax.devices()[0].device_kind
    peak = peak_flops(device)
    looked_at: set[int] = set()
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
            "speed/tokens_per_second": tokens_per_second,
            "time/elapsed": time.perf_counter() - began,
        }
        if peak is not None:
            figures["speed/mfu"] = flops_per_trained_token * tokens_per_second / peak
        for source, counts in data.counters(whole_position(logged.position)).items():
            figures |= {f"data/{source}/{name}": value for name, value in counts.items()}
        writer.write(logged.step, figures)
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
        if reweighting:
            record_run(directory, experiment, data.manifest)

    def look(step: int, params: dict) -> None:
        """Validate and show a sample, unless told to stop before."""
        if held_out is not None:
            loss = validate(
                validation_step, params, held_out, training.global_batch_size, signals.arrived
            )
            if loss is None:
                return
            writer.write(
                step,
                {
                    "validation/loss": loss.nats_per_token,
                    "validation/bits_per_byte": loss.bits_per_byte,
                },
            )
            _say(
                f"step {step:,}: {loss.nats_per_token:.4f} nats a token, "
                f"{loss.bits_per_byte:.4f} bits a byte on the held-out text"
            )
        for prompt, text in _samples(experiment, params, tokenizer):
            _say(f"step {step:,}: {prompt}{text}")
        looked_at.add(step)

    with (
        closing(checkpointer),  # waits for a save in progress, also after a mistake
        closing(data),
        feed(data, experiment.data.prefetch, pad_id=data.pad_id, bos_id=isolating) as batches,
    ):
        # --- Compile, and say what will run. Unfit data shows before the long wait, not after.
        first = next(batches)
        train_step = make_train_step(
            decoder, optimizer, training, experiment.optimizer.clip_norm, bos_id=isolating
        )
        # Accelerators take float32 to mean less unless they are told.
        with jax.default_matmul_precision("highest" if training.dtype == "float32" else "default"):
            compiled = compile_step(
                jax.jit(train_step, donate_argnums=0), state, first[0], jnp.float32(0)
            )
            validation_step = compile_step(
                jax.jit(make_validation_step(decoder, training)), state.params, first[0]
            ).function
        _say(
            f"1 of {jax.device_count()} {device} device(s), "
            f"{parameter_count(config):,} parameters, {tokens_per_step:,} tokens a step, "
            f"{training.dtype}, attention: XLA, "
            f"compiled in {compiled.seconds:.1f} s (cache {compiled.cache})"
        )

        # --- The steps.
        signals = _Signals()
        with (
            closing(MetricWriter(directory, start)) as writer,
            progress(training.steps, start) as bar,
        ):
            for note in writer.notes:
                _say(note)
            state, done = train_loop(
                state,
                train_step=compiled.function,
                batches=chain([first], batches),
                learning_rate=lambda t: learning_rate(experiment.optimizer, training.steps, t),
                start=start,
                steps=training.steps,
                log=log,
                log_every=training.log_every,
                save=save,
                save_every=experiment.checkpoint.every,
                hooks=((training.validate_every, look),),
                should_stop=signals.arrived,
            )
            if done == training.steps and done not in looked_at:
                look(done, state.params)
    for line in [] if saved is None else summary_lines(audit_position(saved)):
        _say(line)
    _say(f"{directory}: step {done:,} saved, {time.perf_counter() - began:.0f} s in all")
    if signals.arrived() and not (done == training.steps and done in looked_at):
        sys.exit(128 + signals.number)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run directory (runs/NAME)")
    parser.add_argument(
        "--from", dest="weights", metavar="WHERE", help="start from these weights, at step 0"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")
    parser.add_argument(
        "--reweight", action="store_true", help="go on with other weights of data.sources"
    )


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


def _starting_weights(where: str, wanted: ModelConfig) -> Weights:
    """Return the weights in `where`, with rows added to the vocabulary of the model `wanted`."""
    from openelm_jax.model.scaling import differing_widths
    from openelm_jax.weights.load import load_weights
    from openelm_jax.weights.vocabulary import resize_vocabulary

    weights = load_weights(where)
    differences = differing_widths(weights.config, wanted)
    if differences:
        raise UserError(
            f"--from {where} is another model (field: there, here): {'; '.join(differences)}."
        )
    rows = weights.config.vocab_size
    if rows > wanted.vocab_size:
        raise UserError(
            f"--from {where} has {rows:,} rows of vocabulary and model.vocab_size is "
            f"{wanted.vocab_size:,}: rows are added, never cut; raise model.vocab_size to {rows}."
        )
    if rows < wanted.vocab_size:
        _say(f"{where}: {wanted.vocab_size - rows:,} rows added to its vocabulary of {rows:,}")
    config, params = resize_vocabulary(weights.config, weights.params, wanted.vocab_size)
    return dataclasses.replace(weights, config=config, params=params)


def _samples(experiment: Experiment, params, tokenizer):
    """Return (prompt, greedy continuation) of the experiment's prompts."""
    from openelm_jax.generation.language_model import LanguageModel

    prompts = experiment.training.sample_prompts
    model = LanguageModel(experiment.model, params, tokenizer, experiment.training.dtype)
    return list(zip(prompts, model.generate(prompts, max_tokens=48), strict=True))


class _Signals:
    """SIGTERM and SIGINT, remembered until the step in progress is done; a second one kills."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def arrived(self) -> bool:
        return self.number != 0

    def _remember(self, number: int, _frame) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
        _say(f"{signal.Signals(number).name}: saving, then stopping (once more stops at once)")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
