"""The training loop: one process or many (`accelerate launch`), cut and resumed without a trace.

The learning rate and the data are functions of the step, so that a checkpoint has only weights, optimizer and random
numbers to remember: on a CPU a resumed training has the losses of an uncut one, bit for bit. Read next: `evaluate.py`.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from alibi_attn.lab.checkpoint import Progress, load_progress, newest, resume, save_checkpoint
from alibi_attn.lab.config import ConfigError, RunConfig, TrainConfig
from alibi_attn.lab.data import Corpus, batches
from alibi_attn.lab.memory import peak_memory_bytes, reset_peak_memory
from alibi_attn.lab.model import LanguageModel

BETAS = (0.9, 0.95)
FINAL_SHARE = 0.1  # of the learning rate, where the cosine ends


class TrainingError(ValueError):
    """The loss or its gradient is no number any more."""


def train(
    config: RunConfig, corpus: Corpus, folder: Path, *, on_step: Callable[[Progress], None] | None = None
) -> Progress:
    """Train to the last step, from the newest checkpoint in the folder if there is one, and leave a checkpoint there.

    Ctrl-C is answered between two steps: a checkpoint is written, then KeyboardInterrupt raised.

    Args:
        folder: of this run alone; its checkpoints must be of this config.
        on_step: called after every step.

    Raises:
        TrainingError: the loss is no number; no checkpoint of such weights is written.
        CheckpointError: the checkpoint to resume from is damaged.
        CorpusError: the training text is shorter than one example.
        ConfigError: the batch cannot be shared by the processes.
    """
    asked = config.train
    checkpoint = newest(folder)
    progress = load_progress(checkpoint) if checkpoint else Progress()
    if progress.step >= asked.steps:
        return progress
    accelerator = Accelerator(mixed_precision=asked.precision, cpu=not torch.accelerator.is_available())
    share = _share_of_batch(asked, accelerator)
    model = LanguageModel(config.model, trained_length=asked.length, seed=asked.seed)
    model, optimizer = accelerator.prepare(model, _optimizer(model, asked))
    if checkpoint:
        resume(checkpoint, accelerator)
    stream = batches(
        corpus.train,
        length=asked.length,
        batch_size=asked.batch_tokens // asked.length,
        seed=asked.seed,
        start=progress.step,
    )
    reset = reset_peak_memory(accelerator.device)
    with _deferred_interrupt() as interrupted:
        for batch in stream:
            started = time.perf_counter()
            rate = learning_rate(progress.step, asked)
            rows = batch[share].to(accelerator.device)
            loss, stop = _step(model, optimizer, rows, rate, asked, accelerator, interrupted(), progress.step)
            progress = _advanced(progress, loss, rate, time.perf_counter() - started, asked)
            finished = progress.step == asked.steps
            if on_step:
                on_step(progress)
            if finished or stop or progress.step % asked.checkpoint_every == 0:
                peak = peak_memory_bytes(accelerator.device) if reset else None
                progress = dataclasses.replace(progress, peak_memory_bytes=peak)
                save_checkpoint(folder, model, config, progress, accelerator, finished=finished)
            if finished:
                break
            if stop:
                raise KeyboardInterrupt
    accelerator.free_memory()
    return progress


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, counted from 0: rising to `learning_rate`, then half a cosine down to a tenth of it."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    rate: float,
    config: TrainConfig,
    accelerator: Accelerator,
    interrupted: bool,
    step: int,
) -> tuple[float, bool]:
    """One step; the loss of the whole batch, and whether any process was interrupted."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    told = torch.stack([loss.detach(), loss.new_tensor(float(interrupted))])
    mean_loss, share_interrupted = accelerator.reduce(told, reduction="mean").tolist()
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
    # Half precision scales its gradients until they overflow now and then: such a step is skipped, not an error.
    if not math.isfinite(mean_loss) or (config.precision != "fp16" and not math.isfinite(norm)):
        raise TrainingError(
            f"at step {step + 1} the loss is {mean_loss} and the gradient's norm {float(norm)} (learning rate {rate:.3g}); "
            "lower train.learning_rate, raise train.warmup_steps, or lower train.clip_norm"
        )
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss, share_interrupted > 0


def _optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that decays the matrices inside the blocks, and neither norms, embeddings nor positions."""
    decayed = [parameter for name, parameter in model.named_parameters() if "blocks." in name and parameter.ndim > 1]
    others = [parameter for name, parameter in model.named_parameters() if "blocks." not in name or parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)


def _share_of_batch(config: TrainConfig, accelerator: Accelerator) -> slice:
    """Which rows of every batch this process trains on."""
    rows, processes = config.batch_tokens // config.length, accelerator.num_processes
    if rows % processes:
        raise ConfigError(
            f"a batch has {rows} examples (train.batch_tokens / train.length) but {processes} processes share it equally; "
            f"pass a train.batch_tokens that {processes * config.length} divides"
        )
    return slice(accelerator.process_index, None, processes)


def _advanced(progress: Progress, loss: float, rate: float, seconds: float, config: TrainConfig) -> Progress:
    step, curve = progress.step + 1, progress.curve
    if step % config.log_every == 0 or step in (1, config.steps):
        point = {"step": step, "loss_nats": loss, "learning_rate": rate}
        curve = {name: [*column, point[name]] for name, column in curve.items()}
    return dataclasses.replace(progress, step=step, seconds=progress.seconds + seconds, loss_nats=loss, curve=curve)


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only answers True to the function that this yields; the second is the usual one."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python delivers signals to the main thread only
        return
    seen = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: types.FrameType | None) -> None:
        seen.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)
