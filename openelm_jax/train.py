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
from pathlib import Path

from openelm_jax.command_line import parse, run
from openelm_jax.config import Experiment
from openelm_jax.errors import UserError

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
    _require_data_and_tokenizer(experiment)
    directory = Path(flags.run or f"runs/{experiment.name}")
    began = time.perf_counter()

    import jax
    import jax.numpy as jnp

    from openelm_jax.data.pipeline import Position, open_data, validation_set
    from openelm_jax.model.decoder import Decoder, init_params
    from openelm_jax.model.scaling import flops_per_token, parameter_count
    from openelm_jax.parallel.devices import peak_flops
    from openelm_jax.training.checkpoint import Checkpointer
    from openelm_jax.training.compilation import compile_step, keep_compiled_code
    from openelm_jax.training.feed import feed, to_batch
    from openelm_jax.training.loop import Hook, Logged, train_loop
    from openelm_jax.training.metrics import MetricWriter, is_validated, progress
    from openelm_jax.training.optimizer import learning_rate, make_optimizer
    from openelm_jax.training.run_directory import claim_run, open_tokenizer
    from openelm_jax.training.state import TrainState, new_state
    from openelm_jax.training.step import make_train_step, make_validation_step
    from openelm_jax.training.validation import validate

    keep_compiled_code()
    config, training = experiment.model, experiment.training
    row_length = config.context_length + 1

    # --- Tokens: tokenizer, mixture, held-out text.
    claim_run(directory, experiment)
    tokenizer, origin = open_tokenizer(directory, experiment)
    _say(f"tokenizer: {tokenizer.vocab_size:,} pieces, {origin}")
    data = open_data(
        experiment.data,
        tokenizer,
        row_length=row_length,
        global_batch_size=training.global_batch_size,
    )
    held_out = validation_set(experiment.data, tokenizer, row_length=row_length)
    _say(
        "held out: nothing (name shards in data.sources.holdout to validate)"
        if held_out is None
        else f"held out: {held_out.num_documents} documents, {held_out.num_bytes:,} bytes"
    )

    # --- Model and state: new, from weights, or from the last checkpoint.
    decoder = Decoder(config, dtype=jnp.dtype(training.dtype), remat=training.remat == "block")
    optimizer = make_optimizer(experiment.optimizer)
    checkpointer = Checkpointer(directory, experiment.checkpoint)
    like = jax.eval_shape(lambda: new_state(init_params(config, training.seed), optimizer))
    restored = checkpointer.restore(like.params, _optimizer_item(like))
    if restored is not None:
        start = restored.step
        data.set_state(Position.from_json(restored.data))
        state = TrainState(params=restored.params, **restored.optimizer)
        unused = f"; --from {flags.weights} is for a new run and not used" if flags.weights else ""
        _say(f"resumed at step {start:,} of {directory}{unused}")
    else:
        start = 0
        given = None if flags.weights is None else _starting_weights(flags.weights, experiment)
        state = new_state(given or init_params(config, training.seed), optimizer)
    if start == training.steps and (held_out is None or is_validated(directory, start)):
        _say(f"{directory} is complete: {start:,} of {training.steps:,} steps")
        return
    # Placed alike whether new or restored: another placement would be compiled anew.
    state = jax.device_put(state, jax.devices()[0])

    # --- Compile, and say what will run.
    train_step = jax.jit(
        make_train_step(decoder, optimizer, training, experiment.optimizer.clip_norm),
        donate_argnums=0,
    )
    batch = to_batch(jnp.zeros((training.global_batch_size, row_length), jnp.int32))
    # Accelerators take float32 to mean less unless they are told.
    with jax.default_matmul_precision("highest" if training.dtype == "float32" else "default"):
        compiled = compile_step(train_step, state, batch, jnp.float32(0))
        validation_step = compile_step(
            jax.jit(make_validation_step(decoder, training)), state.params, batch
        ).function
    tokens_per_step = training.global_batch_size * config.context_length
    device = jax.devices()[0].device_kind
    _say(
        f"1 of {jax.device_count()} {device} device(s), "
        f"{parameter_count(config):,} parameters, {tokens_per_step:,} tokens a step, "
        f"{training.dtype}, attention: XLA, "
        f"compiled in {compiled.seconds:.1f} s (cache {compiled.cache})"
    )

    # --- What happens beside the steps.
    writer = MetricWriter(directory, start)
    for note in writer.notes:
        _say(note)

    flops_per_trained_token = 3 * flops_per_token(config)  # forward, and twice that backward
    peak = peak_flops(device)

    def log(logged: Logged) -> None:
        tokens_per_second = logged.tokens / logged.seconds
        writer.write(
            logged.step,
            {
                "train/loss": float(logged.metrics.loss),
                "train/z_loss": float(logged.metrics.z_loss),
                "train/grad_norm": float(logged.metrics.grad_norm),
                "train/learning_rate": logged.learning_rate,
                "train/tokens": logged.step * tokens_per_step,
                "speed/tokens_per_second": tokens_per_second,
                **(
                    {"speed/mfu": flops_per_trained_token * tokens_per_second / peak}
                    if peak
                    else {}
                ),
                "time/elapsed": time.perf_counter() - began,
                **{
                    f"data/{source}/{name}": value
                    for source, counts in data.counters(logged.position).items()
                    for name, value in counts.items()
                },
            },
        )
        bar.update(logged.step, float(logged.metrics.loss), tokens_per_second)

    def save(step: int, state: TrainState, position: Position) -> None:
        checkpointer.save(
            step, params=state.params, optimizer=_optimizer_item(state), data=position.to_json()
        )

    looked_at: set[int] = set()

    def look(step: int, params: dict) -> None:
        """Validate and show a sample."""
        if held_out is not None:
            loss = validate(validation_step, params, held_out, training.global_batch_size)
            writer.write(step, {f"validation/{name}": v for name, v in _validation(loss).items()})
            _say(
                f"step {step:,}: {loss.nats_per_token:.4f} nats a token, "
                f"{loss.bits_per_byte:.4f} bits a byte on the held-out text"
            )
        for prompt, text in _samples(experiment, params, tokenizer):
            _say(f"step {step:,}: {prompt}{text}")
        looked_at.add(step)

    # --- The steps.
    hooks: tuple[Hook, ...] = ((training.validate_every, look),)
    signals = _Signals()
    with (
        closing(writer),
        closing(checkpointer),  # waits for a save in progress, also after a mistake
        closing(data),
        feed(data, experiment.data.prefetch) as batches,
        progress(training.steps, start) as bar,
    ):
        state, done = train_loop(
            state,
            train_step=compiled.function,
            batches=batches,
            learning_rate=lambda step: learning_rate(experiment.optimizer, training.steps, step),
            start=start,
            steps=training.steps,
            log=log,
            log_every=training.log_every,
            save=save,
            save_every=experiment.checkpoint.every,
            hooks=hooks,
            should_stop=signals.arrived,
        )
        if done == training.steps and done not in looked_at:
            look(done, state.params)
    _say(f"{directory}: step {done:,} saved, {time.perf_counter() - began:.0f} s in all")
    if done < training.steps:
        sys.exit(128 + signals.number)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run directory (runs/NAME)")
    parser.add_argument(
        "--from", dest="weights", metavar="WHERE", help="start from these weights, at step 0"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model")


def _require_data_and_tokenizer(experiment: Experiment) -> None:
    missing = []
    patterns = [pattern for source in experiment.data.sources for pattern in source.files]
    if experiment.data.root is None and not all(
        pattern.startswith("package:") or os.path.isabs(pattern) for pattern in patterns
    ):
        missing.append("the folder of its text with --data.root DIR")
    if experiment.tokenizer.path is None and experiment.tokenizer.vocab_size is None:
        missing.append("a SentencePiece model with --tokenizer FILE")
    if missing:
        raise UserError(f"--exp {experiment.name} has no data yet: give {' and '.join(missing)}.")


def _optimizer_item(state):
    """The `optimizer` item of a checkpoint: all of the state but the parameters."""
    return {"step": state.step, "moments": state.moments}


def _starting_weights(where: str, experiment: Experiment):
    """Return the parameters in `where`, widened to the experiment's vocabulary."""
    import jax

    from openelm_jax.config import differing_fields
    from openelm_jax.weights.huggingface import resize_vocabulary
    from openelm_jax.weights.load import load_weights

    weights = load_weights(where)
    wanted = experiment.model
    found = dataclasses.replace(
        weights.config, vocab_size=wanted.vocab_size, context_length=wanted.context_length
    )
    if found != wanted:
        differences = differing_fields(dataclasses.replace(experiment, model=found), experiment)
        raise UserError(
            f"--from {where} is another model (field: there, here): {'; '.join(differences)}."
        )
    _, params = resize_vocabulary(weights.config, weights.params, wanted.vocab_size)
    return jax.device_put(params)


def _validation(loss) -> dict[str, float]:
    return {"loss": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte}


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
