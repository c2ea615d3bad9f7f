"""One training on one process or many: what is replicated, what is sharded, when gradients travel.

"ddp": every process has all the weights and the gradients are averaged (accelerate). "fsdp": every process has a part of
each weight, gradient and optimizer state (FSDP2: Zhao et al. 2023, arXiv:2304.11277), on CPUs as on GPUs. Both read their
world from the launcher, torchrun or `accelerate launch`. Read next: `train.py`.
"""

import contextlib
import dataclasses
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from alibi_attn.lab.config import ConfigError, RunConfig, TrainConfig
from alibi_attn.lab.model import LanguageModel
from alibi_attn.lab.optimizer import make_optimizer

_REPLICAS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and by which processes.

    Args:
        model: the bare model; where `sharded`, its parameters are DTensors.
        replica: the model in what averages its gradients over the processes; it is called for training.
    """

    model: LanguageModel
    replica: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    sharded: bool

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """Without what accelerate puts around it."""
        inside: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return inside

    def part(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around forward and backward of one part of a batch; gradients travel with the last one only."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # given to it by fully_shard
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.replica)

    def clip(self, norm: float) -> Tensor:
        """Scale the gradients down to this norm if theirs, which is returned, is larger."""
        found = self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        return found.full_tensor() if self.sharded else found

    def weights(self) -> Mapping[str, Tensor]:
        """All the weights, whole, on the first process; the others, which must call this as well, may get none."""
        if not self.sharded:
            return self.model.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: value for name, value in whole.items() if isinstance(value, Tensor)}


def prepare(config: RunConfig) -> Training:
    """The model with its first weights and its optimizer, on this process's device, shared as `train.parallel` says.

    Raises:
        ConfigError: the processes cannot share it so.
    """
    asked = config.train
    if asked.parallel == "fsdp" and asked.precision == "fp16":
        raise ConfigError('train.parallel is "fsdp" and train.precision "fp16"; pass train.precision bf16 or no')
    accelerator = Accelerator(mixed_precision=asked.precision, cpu=not torch.accelerator.is_available())
    if accelerator.distributed_type not in _REPLICAS:
        raise ConfigError(
            f"the launcher asks for {accelerator.distributed_type.value}, but here the config says how weights are shared; "
            "launch without it and pass train.parallel=fsdp"
        )
    sharded = asked.parallel == "fsdp" and accelerator.num_processes > 1
    model = LanguageModel(
        config.model,
        trained_length=asked.length,
        seed=asked.seed,
        activation_checkpointing=asked.activation_checkpointing,
    ).to(accelerator.device)
    if sharded:
        _shard(model)
    optimizer = make_optimizer(model, asked)
    if sharded:
        return Training(model, model, accelerator.prepare_optimizer(optimizer), accelerator, sharded)
    replica, optimizer = accelerator.prepare(model, optimizer)
    return Training(model, replica, optimizer, accelerator, sharded)


def share_of_batch(config: TrainConfig, accelerator: Accelerator) -> slice:
    """Which rows of every batch this process trains on.

    Raises:
        ConfigError: they cannot have equally many.
    """
    processes, parts = accelerator.num_processes, accelerator.num_processes * config.accumulate
    for length in (config.first_length or config.length, config.length):
        rows = config.batch_tokens // length
        if rows % parts:
            each = f"{processes} processes" + (f" in {config.accumulate} parts each" if config.accumulate > 1 else "")
            raise ConfigError(
                f"a batch has {rows} examples (train.batch_tokens / train.length) but {each} share it equally; "
                f"pass a train.batch_tokens that {parts * length} divides"
            )
    return slice(accelerator.process_index, None, processes)


def _shard(model: LanguageModel) -> None:
    """Each block is gathered when it is its turn; what is outside the blocks stays gathered through a step."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
