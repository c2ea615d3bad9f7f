"""The training loop: one process or many (`torchrun`, `accelerate launch`), cut and resumed without a trace.

Learning rate, data and dropout are functions of the step, so that a checkpoint has only weights and optimizer to
remember: on a CPU a resumed training has the losses of an uncut one, bit for bit. Read next: `evaluate.py`.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.lab.checkpoint import Progress, load_progress, newest, resume, save_checkpoint
from alibi_attn.lab.config import EvalConfig, RunConfig, TrainConfig
from alibi_attn.lab.data import Corpus, batches
from alibi_attn.lab.evaluate import mean_nats, nonoverlapping, scored_stretches
from alibi_attn.lab.interruption import deferred_interruption
from alibi_attn.lab.memory import peak_memory_bytes, reset_peak_memory
from alibi_attn.lab.model import LanguageModel
from alibi_attn.lab.optimizer import learning_rate
from alibi_attn.lab.parallel import Training, prepare, share_of_batch


class TrainingError(ValueError):
    """The loss or its gradient is no number any more."""


def train(
    config: RunConfig, corpus: Corpus, folder: Path, *, on_step: Callable[[Progress], None] | None = None
) -> Progress:
    """Train to the last step, from the newest checkpoint in the folder if there is one, and leave a checkpoint there.

    Ctrl-C and SIGTERM are answered between two steps: a checkpoint is written, then KeyboardInterrupt raised.

    Args:
        folder: of this run alone; its checkpoints must be of this config.
        on_step: called after every step.

    Raises:
        TrainingError: the loss is no number; no checkpoint of such weights is written.
        CheckpointError: the checkpoint to resume from is damaged or of another config, or none can be written.
        CorpusError: the text is shorter than one example.
        ConfigError: the batch cannot be shared by the processes.
    """
    asked = config.train
    checkpoint = newest(folder)
    progress = load_progress(checkpoint, config) if checkpoint else Progress()
    if progress.step >= asked.steps:
        return progress
    with _own_random_numbers(), deferred_interruption() as interrupted:
        training = prepare(config)
        if checkpoint:
            resume(checkpoint, training)
        progress = _loop(training, config, corpus, folder, progress, interrupted, on_step)
    training.accelerator.free_memory()
    return progress


def _loop(
    training: Training,
    config: RunConfig,
    corpus: Corpus,
    folder: Path,
    progress: Progress,
    interrupted: Callable[[], bool],
    on_step: Callable[[Progress], None] | None,
) -> Progress:
    asked, device = config.train, training.accelerator.device
    share = share_of_batch(asked, training.accelerator)
    reset = reset_peak_memory(device)
    for batch in _stream(corpus, asked, progress.step):
        started = time.perf_counter()
        rate = learning_rate(progress.step, asked)
        loss, stop = _step(training, batch[share].to(device), rate, asked, progress.step, interrupted)
        progress = _advanced(progress, loss, rate, time.perf_counter() - started, asked)
        if asked.validate_every and progress.step % asked.validate_every == 0:
            progress = _validated(progress, training.model, corpus.valid, asked)
        finished = progress.step == asked.steps
        if on_step:
            on_step(progress)
        if finished or stop or progress.step % asked.checkpoint_every == 0:
            peak = peak_memory_bytes(device) if reset else None
            progress = dataclasses.replace(progress, peak_memory_bytes=peak)
            save_checkpoint(folder, training, config, progress, finished=finished)
        if finished:
            break
        if stop:
            raise KeyboardInterrupt
    return progress


def _stream(corpus: Corpus, config: TrainConfig, start: int) -> Iterator[Tensor]:
    """The batches from step `start` on: those of `first_length`, as far as there are any, then those of `length`."""

    def at(length: int, begin: int) -> Iterator[Tensor]:
        rows = config.batch_tokens // length
        return batches(corpus.train, length=length, batch_size=rows, seed=config.seed, start=begin)

    if config.first_length is None or start >= config.first_steps:
        return at(config.length, start)
    first = itertools.islice(at(config.first_length, start), config.first_steps - start)
    return itertools.chain(first, at(config.length, config.first_steps))


def _step(
    training: Training,
    rows: Tensor,
    rate: float,
    config: TrainConfig,
    step: int,
    interrupted: Callable[[], bool],
) -> tuple[float, bool]:
    """One step; the loss of the whole batch, and whether any process was interrupted."""
    accelerator, optimizer = training.accelerator, training.optimizer
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed(_dropout_seed(config.seed, step, accelerator.process_index))
    loss = torch.zeros((), device=rows.device)
    parts = rows.chunk(config.accumulate)
    for number, part in enumerate(parts, start=1):
        with training.part(last=number == len(parts)):
            with accelerator.autocast():
                nats = training.replica(part[:, :-1], targets=part[:, 1:])
            share = nats.mean() / len(parts)
            accelerator.backward(share)
        loss += share.detach()
    norm = training.clip(config.clip_norm)
    told = accelerator.reduce(torch.stack([loss, loss.new_tensor(float(interrupted()))]), reduction="mean")
    mean_loss, share_interrupted, norm_found = torch.cat([told, norm.to(told)[None]]).tolist()
    # Half precision scales its gradients until they overflow now and then: such a step is skipped, not an error.
    if not math.isfinite(mean_loss) or (config.precision != "fp16" and not math.isfinite(norm_found)):
        raise TrainingError(
            f"at step {step + 1} the loss is {mean_loss} and the gradient's norm {norm_found} (learning rate {rate:.3g}); "
            "lower train.learning_rate, raise train.warmup_steps, or lower train.clip_norm"
        )
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss, share_interrupted > 0


def _own_random_numbers() -> contextlib.AbstractContextManager[None]:
    """The training seeds torch's random numbers, for dropout, at every step; the caller's are put back afterwards."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _dropout_seed(seed: int, step: int, process: int) -> int:
    """Where the random numbers of a step begin: as reproducible as its data, and resumed without being stored."""
    return ((seed * 1_000_003 + step) * 65_537 + process) % 2**63


def _advanced(progress: Progress, loss: float, rate: float, seconds: float, config: TrainConfig) -> Progress:
    step, curve = progress.step + 1, progress.curve
    if step % config.log_every == 0 or step in (1, config.steps):
        point = {"step": step, "loss_nats": loss, "learning_rate": rate}
        curve = {name: [*column, point[name]] for name, column in curve.items()}
    return dataclasses.replace(progress, step=step, seconds=progress.seconds + seconds, loss_nats=loss, curve=curve)


def _validated(progress: Progress, model: LanguageModel, tokens: Tensor, config: TrainConfig) -> Progress:
    """With one more point of the validation curve; every process computes all of it, because shards need all of them."""
    length = config.validate_length or config.length
    asked = EvalConfig(lengths=(length,), tokens=config.validate_tokens)
    stretches = scored_stretches(len(tokens), asked)
    losses = nonoverlapping(model, tokens, stretches, length=length, batch_tokens=asked.batch_tokens)
    point = {
        "step": progress.step,
        "seconds": progress.seconds,
        "nats": mean_nats(losses),
        "tokens": len(losses.target),
    }
    curve = {name: [*column, point[name]] for name, column in progress.validation.items()}
    return dataclasses.replace(progress, validation=curve)
