"""The FLOPs of a training step equal torch's count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alibi_lab.lab.config import Architecture, ModelConfig, RunConfig, TrainConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.training.flops import attention_flops, linear_flops, multiplying_parameters

LENGTH, ROWS = 16, 3


def config_of(architecture: Architecture) -> RunConfig:
    model = ModelConfig(
        method="sinusoidal",
        architecture=architecture,
        num_layers=2,
        num_heads=2,
        embed_dim=32,
        ffn_dim=48,
        vocab_size=64,
    )
    return RunConfig(model=model, train=TrainConfig(length=LENGTH, batch_tokens=ROWS * LENGTH))


@pytest.mark.parametrize("architecture", ["modern", "mpt", "baevski-auli"])
def test_flops_are_those_that_torch_counts(architecture: Architecture) -> None:
    """SDPA's math kernel computes attention as bmm, including hidden pairs; every linear layer is an mm or addmm."""
    config = config_of(architecture)
    model = LanguageModel(config.model, trained_length=LENGTH)
    tokens = torch.arange(ROWS * (LENGTH + 1)).view(ROWS, -1) % 64
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens[:, :-1], targets=tokens[:, 1:]).sum().backward()
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    assert counted.pop("aten.mm") + counted.pop("aten.addmm", 0) == linear_flops(config)
    assert counted.pop("aten.bmm") * (LENGTH + 1) == attention_flops(config) * 2 * LENGTH
    assert not counted
    assert multiplying_parameters(config.model) == sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not name.startswith("position.")
    )
