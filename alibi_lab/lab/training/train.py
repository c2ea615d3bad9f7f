"""The training loop, on one process or many (`torchrun`, `accelerate launch`); training can be interrupted and resumed.

Learning rate, data and dropout are functions of the step, so a checkpoint needs only weights and optimizer state. On a
CPU, the losses after resuming are bit-identical to those of an uninterrupted training. Read next: `evaluate.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn.distributed import even_lengths
from alibi_attn.nn.allocator import kept_memory, peak_memory_bytes, reset_peak_memory
from alibi_lab.lab.clock import clock
from alibi_lab.lab.config import EvalConfig, RunConfig, TrainConfig
from alibi_lab.lab.data.corpus import Corpus, CorpusError
from alibi_lab.lab.evaluation.evaluate import validation_nats
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Context
from alibi_lab.lab.training.checkpoint import Curve, Progress, load_progress, newest, resume, save_checkpoint
from alibi_lab.lab.training.interruption import deferred_interruption
from alibi_lab.lab.training.optimizer import learning_rate
from alibi_lab.lab.training.parallel import Training, prepare

Flag: TypeAlias = Callable[[], bool]  # whether a signal has arrived


class TrainingError(ValueError):
    """The loss or its gradient is NaN or infinite."""


def train(
    config: RunConfig, corpus: Corpus, folder: Path, *, on_step: Callable[[Progress], None] = lambda progress: None
) -> Progress:
    """Train to the last step, from the newest checkpoint in the folder if there is one, and save a checkpoint there.

    Ctrl-C and SIGTERM take effect between two steps: a checkpoint is written, then KeyboardInterrupt is raised.

    Args:
        folder: used by this run only; its checkpoints must be of this config.
        on_step: called after every step.

    Raises:
        TrainingError: the loss or its gradient is NaN or infinite; no checkpoint of such weights is written.
        CheckpointError: the checkpoint to resume from is damaged or of another config, or none can be written.
        CorpusError: the text is shorter than one example.
        ConfigError: the batch cannot be shared by the processes.
    """
    settings = config.train
    checkpoint = newest(folder)
    progress = load_progress(checkpoint, config) if checkpoint else Progress()
    if progress.step >= settings.steps:
        return progress
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # The caller's random state is restored afterwards, because every step seeds torch, for dropout.
    with torch.random.fork_rng(gpus), deferred_interruption() as interrupted:
        training = prepare(config)
        if checkpoint:
            resume(checkpoint, training)
        reset = reset_peak_memory(training.accelerator.device)
        for step in steps(training, corpus, start=progress.step, interrupted=interrupted):
            finished = step.number == settings.steps
            point = {"step": step.number, "loss_nats": step.loss_nats, "learning_rate": step.learning_rate}
            if finished or step.number == 1 or step.number % settings.log_every == 0:
                progress = dataclasses.replace(progress, curve=_with_point(progress.curve, point))
            seconds = progress.seconds + step.seconds
            progress = dataclasses.replace(progress, step=step.number, seconds=seconds, loss_nats=step.loss_nats)
            if settings.validate_every and step.number % settings.validate_every == 0:
                progress = _validated(progress, training.model, corpus.valid, settings)
            on_step(progress)
            if finished or step.interrupted or step.number % settings.checkpoint_every == 0:
                peak = peak_memory_bytes(training.accelerator.device) if reset else None
                progress = dataclasses.replace(progress, peak_memory_bytes=peak)
                save_checkpoint(folder, training, progress, corpus.tokenizer)
            if step.interrupted or (finished and interrupted()):  # also during the last checkpoint
                raise KeyboardInterrupt
            if finished:
                break
    training.accelerator.free_memory()
    return progress


@dataclasses.dataclass(frozen=True)
class Step:
    """The result of one step.

    Args:
        number: the step's number, from 1.
        loss_nats: the mean over the whole batch, before the weights changed.
        gradient_norm: the norm of all gradients together, before clipping.
        learning_rate: of this step.
        seconds: the time of the step (`clock.py`), without loading the batch.
        interrupted: whether any process was interrupted during the step.
    """

    number: int
    loss_nats: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    interrupted: bool


def steps(training: Training, corpus: Corpus, *, start: int = 0, interrupted: Flag = lambda: False) -> Iterator[Step]:
    """Yields the training's steps from `start` on, each computed when requested; the iterator is endless.

    `train` uses this and adds the rest: validation, checkpoints, and restoring the caller's random state, because every
    step seeds torch. Until the iterator is closed, the process keeps its freed memory (`allocator.kept_memory`).

    Raises:
        TrainingError: the loss or its gradient is NaN or infinite.
        CorpusError: the text is shorter than one example.
        ConfigError: the batch cannot be shared by the processes.
    """
    settings, accelerator = training.config.train, training.accelerator
    now = clock(accelerator.device)
    training.model.progress = start / settings.steps
    with kept_memory():
        for number, batch in enumerate(_batches(corpus, training.config, start), start=start + 1):
            started = now()
            for group in training.optimizer.param_groups:
                group["lr"] = rate = learning_rate(number - 1, settings)
            parts = batch.own_parts(training)
            # The dropout's seed is a function of the step, so that a checkpoint need not store it.
            torch.manual_seed(((settings.seed * 1_000_003 + number - 1) * 65_537 + accelerator.process_index) % 2**63)
            loss, norm, stop = _step(training, parts, number, interrupted)
            seconds = now() - started
            training.model.progress = number / settings.steps
            yield Step(number, loss, norm, rate, seconds, stop)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a batch, or some of them.

    Args:
        columns: [B, T + 1] each: the inputs and their next tokens, and the document index of each, unless attention crosses
            document ends.
        counted: the number of losses in the mean over the whole batch, also if this is only a part of it.
        context: the position of these tokens, if other processes have other tokens of the same rows.
    """

    columns: tuple[Tensor, ...]
    counted: int
    context: Context | None = None

    def own_parts(self, training: Training) -> "list[Batch]":
        """This process's rows and, if processes share them, its tokens and the one that follows; in the parts of a step."""
        device, context = training.accelerator.device, training.context
        columns = [column[training.rows].to(device) for column in self.columns]
        if context is not None:
            rank = dist.get_rank(context.group)
            lengths = even_lengths(columns[0].shape[1] - 1, dist.get_world_size(context.group))
            start, stop = sum(lengths[:rank]), sum(lengths[: rank + 1])
            columns = [column[:, start : stop + 1] for column in columns]
            context = dataclasses.replace(context, start=start)
        parts = zip(*(column.chunk(training.config.train.accumulate) for column in columns), strict=True)
        return [Batch(part, self.counted, context) for part in parts]


def _batches(corpus: Corpus, config: RunConfig, start: int) -> Iterator[Batch]:
    """The batches from step `start` on: those of `first_length`, if any are left, then those of `length`."""
    settings = config.train
    stages: list[tuple[int, int, int | None]] = [(settings.length, max(start, settings.first_steps), None)]
    if settings.first_length is not None and start < settings.first_steps:
        stages.insert(0, (settings.first_length, start, settings.first_steps - start))
    num_pieces(corpus.train, max(length for length, _, _ in stages))  # a text that is too short is refused at once
    starts = corpus.starts["train"] if config.data.segments else None
    for length, first, count in stages:
        rows = settings.batch_tokens // length
        order = batches(corpus.train, starts, length=length, batch_size=rows, seed=settings.seed, start=first)
        for columns in itertools.islice(order, count):
            yield Batch(columns, rows * length if starts is None else int(_same_document(columns[1]).sum()))


def batches(
    tokens: Tensor, starts: Tensor | None = None, *, length: int, batch_size: int, seed: int, start: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """Endless batches from step `start` on: inputs and their next tokens, [batch_size, length + 1].

    The text is cut into nonoverlapping pieces of `length` tokens, and every epoch reads all of them in a new order. The order
    depends on the seed, the length and the batch size only: all methods of one seed see the same batches, and a resumed
    training sees those of an uninterrupted one.

    Args:
        starts: the starts of documents, `Corpus.starts["train"]`. Each batch then also has the documents of its tokens, of the
            same shape. Documents follow one another and are cut at the end of a piece.

    Raises:
        CorpusError: fewer tokens than one piece.
    """

    def columns(begins: Sequence[int]) -> tuple[Tensor, ...]:
        rows = torch.stack([tokens[begin : begin + length + 1] for begin in begins]).long()
        if starts is None:
            return (rows,)
        return rows, torch.stack([document_ids(starts, begin, length + 1) for begin in begins])

    return map(columns, _places(num_pieces(tokens, length), length, batch_size, seed, start))


def document_ids(starts: Tensor, begin: int, count: int) -> Tensor:
    """The document index of each of `count` tokens from `begin` on, [count] int64.

    >>> document_ids(torch.tensor([0, 3, 5]), 1, 5)
    tensor([0, 0, 1, 1, 2])
    """
    return torch.searchsorted(starts, torch.arange(begin, begin + count), right=True) - 1


def num_pieces(tokens: Tensor, length: int) -> int:
    """The number of training examples of `length` tokens in the text.

    Raises:
        CorpusError: none.
    """
    pieces = (len(tokens) - 1) // length
    if pieces < 1:
        found = f"the training text has {len(tokens)} tokens but one training example has {length + 1}"
        raise CorpusError(f"{found}; pass more text or a smaller train.length")
    return pieces


def _places(pieces: int, length: int, batch_size: int, seed: int, start: int) -> Iterator[list[int]]:
    """The first tokens of the pieces of each batch; every epoch has another order."""
    first_epoch, read = divmod(start * batch_size, pieces)
    seeds = (seed * 1_000_003 + epoch for epoch in itertools.count(first_epoch))
    orders = (torch.randperm(pieces, generator=torch.Generator().manual_seed(one)).numpy() for one in seeds)
    places = itertools.islice(itertools.chain.from_iterable(orders), read, None)
    while True:
        yield [int(place) * length for place in itertools.islice(places, batch_size)]


def _same_document(documents: Tensor) -> Tensor:
    """[B, T]: whether each target is in its input's document; the first token of a document has no context."""
    return documents[:, 1:] == documents[:, :-1]


def _step(training: Training, parts: Sequence[Batch], step: int, interrupted: Flag) -> tuple[float, float, bool]:
    """One step, counted from 1: the batch's loss, the gradient's norm, and whether any process was interrupted."""
    accelerator, optimizer = training.accelerator, training.optimizer
    loss = torch.zeros((), device=accelerator.device)
    for number, part in enumerate(parts, start=1):
        tokens, *documents = part.columns
        segments = documents[0][:, :-1] if documents else None
        with training.part(last=number == len(parts)):
            with accelerator.autocast():
                nats = training.replica(
                    tokens[:, :-1], targets=tokens[:, 1:], segment_ids=segments, context=part.context
                )
            if documents:
                nats = nats * _same_document(documents[0])
            # The part's share of the batch's mean, times the number of processes, because the processes are averaged.
            share = nats.sum() * (accelerator.num_processes / part.counted)
            accelerator.backward(share)
        loss += share.detach()
    norm = training.clip(training.config.train.clip_norm)
    told = accelerator.reduce(torch.stack([loss, loss.new_tensor(float(interrupted()))]), reduction="mean")
    mean_loss, share_interrupted, norm_found = torch.cat([told, norm.to(told)[None]]).tolist()
    # With half precision, scaled gradients overflow occasionally; such a step is skipped and is no error.
    if not math.isfinite(mean_loss) or (accelerator.mixed_precision != "fp16" and not math.isfinite(norm_found)):
        raise TrainingError(
            f"at step {step} the loss is {mean_loss} and the gradient's norm {norm_found} "
            f"(learning rate {optimizer.param_groups[0]['lr']:.3g}); "
            "lower train.learning_rate, raise train.warmup_steps, or lower train.clip_norm"
        )
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss, norm_found, share_interrupted > 0


def _validated(progress: Progress, model: LanguageModel, tokens: Tensor, config: TrainConfig) -> Progress:
    """The progress with one more validation point; every process computes it all, because shards need every process."""
    length = config.validate_length or config.length
    sizes = {"tokens_to_score": config.validate_tokens, "batch_tokens": EvalConfig.batch_tokens}
    nats, scored = validation_nats(model, tokens, length=length, **sizes)
    point = {"step": progress.step, "seconds": progress.seconds, "nats": nats, "tokens": scored}
    return dataclasses.replace(progress, validation=_with_point(progress.validation, point))


def _with_point(curve: Curve, point: Mapping[str, float]) -> Curve:
    return {name: [*column, point[name]] for name, column in curve.items()}
