"""Distributes one training over processes: replicated or sharded weights, and sequences divided between processes.

"ddp": every process has all the weights, and gradients are averaged (accelerate). "fsdp": every process has a part of
each weight, gradient and optimizer state (FSDP2: Zhao et al. 2023, arXiv:2304.11277), on CPUs and on GPUs. Both get the
number of processes from the launcher, torchrun or `accelerate launch`. With `train.context_parallel`, neighboring
processes also share their sequences: each has consecutive tokens of them. Read next: `train.py`.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch import distributed as dist

from alibi_lab.lab.config import ConfigError, RunConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Context
from alibi_lab.lab.training.optimizer import make_optimizer

COMPILER = "inductor"  # of torch.compile
_REPLICAS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and its optimizer, prepared for training on these processes.

    Args:
        config: of the training.
        model: the bare model; if `sharded`, its parameters are DTensors.
        replica: the model in the wrapper that averages gradients over the processes; training calls it.
        rows: the rows of every batch that this process trains on.
        context: the processes that share the sequences; None if each process has whole sequences.
    """

    config: RunConfig
    model: LanguageModel
    replica: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    sharded: bool
    rows: slice
    context: Context | None = None

    def part(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """A context for forward and backward of one part of a batch; only the last part synchronizes gradients."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # a method that fully_shard adds
        return contextlib.nullcontext() if last or self.sharded else self.accelerator.no_sync(self.replica)

    def clip(self, norm: float) -> Tensor:
        """Scale the gradients down to this norm if theirs is larger; returns their norm before scaling."""
        found = self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        return found.full_tensor() if self.sharded else found

    def weights(self) -> Mapping[str, Tensor]:
        """All complete weights, on the first process; the others must call this too, but may get none."""
        if not self.sharded:
            return self.model.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: value for name, value in whole.items() if isinstance(value, Tensor)}


def prepare(config: RunConfig) -> Training:
    """The initialized model and its optimizer, on this process's device, distributed according to `train.parallel`.

    Raises:
        ConfigError: the number of processes, the launcher or the precision does not allow it.
    """
    settings = config.train
    if settings.parallel == "fsdp" and settings.precision == "fp16":
        raise ConfigError('train.parallel is "fsdp" and train.precision "fp16"; pass train.precision bf16 or no')
    limits = [InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=settings.exchange_timeout_s))]
    handlers, cpu = limits if settings.context_parallel > 1 else None, not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=settings.precision, cpu=cpu, kwargs_handlers=handlers)
    if accelerator.distributed_type not in _REPLICAS:
        raise ConfigError(
            f"the launcher asks for {accelerator.distributed_type.value}, but here the config says how weights are shared; "
            "launch without it and pass train.parallel=fsdp"
        )
    lengths, sharers = (settings.first_length or settings.length, settings.length), settings.context_parallel
    context = _context_group(accelerator, sharers, min(lengths), settings.exchange_timeout_s)
    rows = share_of_batch(accelerator, sharers, lengths, settings.batch_tokens, settings.accumulate)
    sharded = settings.parallel == "fsdp" and accelerator.num_processes > 1
    model = LanguageModel(config.model, trained_length=settings.length, seed=settings.seed).to(accelerator.device)
    model.activation_checkpointing = settings.activation_checkpointing
    if settings.compile:
        for block in model.blocks:
            block.compile(backend=COMPILER, dynamic=False)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        # Each block is gathered when it runs; weights outside the blocks stay gathered during a step.
        for module in (*model.blocks, model):
            fully_shard(module)
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate, settings.weight_decay)
    pair = (model, optimizer) if sharded else accelerator.prepare(model, optimizer)
    return Training(config, model, pair[0], pair[1], accelerator, sharded, rows, context)


def _context_group(accelerator: Accelerator, sharers: int, shortest: int, timeout_s: float) -> Context | None:
    """The group of neighboring processes that share this process's sequences; None for groups of one."""
    processes = accelerator.num_processes
    if processes % sharers:
        raise ConfigError(
            f"train.context_parallel is {sharers} but there are {processes} processes; start a multiple of it, with torchrun "
            "--nproc-per-node, or pass train.context_parallel=1"
        )
    if shortest < sharers:
        raise ConfigError(
            f"sequences of {shortest} tokens cannot be shared by train.context_parallel={sharers} processes"
        )
    if sharers == 1:
        return None
    groups = [dist.new_group(list(range(first, first + sharers))) for first in range(0, processes, sharers)]
    return Context(groups[accelerator.process_index // sharers], 0, timeout_s)


def share_of_batch(
    accelerator: Accelerator, sharers: int, lengths: tuple[int, ...], batch_tokens: int, accumulate: int = 1
) -> slice:
    """The rows of every batch that this process trains on.

    Raises:
        ConfigError: the rows cannot be divided equally.
    """
    processes = accelerator.num_processes // sharers
    for length in lengths:
        rows, parts = batch_tokens // length, processes * accumulate
        if rows % parts:
            each = f"{processes} processes" + (f" in {accumulate} parts each" if accumulate > 1 else "")
            raise ConfigError(
                f"a batch has {rows} examples (train.batch_tokens / train.length) but {each} share it equally; "
                f"pass a train.batch_tokens that {parts * length} divides"
            )
    return slice(accelerator.process_index // sharers, None, processes)
