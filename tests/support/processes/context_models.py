"""Models whose attention can run over several ranks, each with an input that is split into three shards."""

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import hf
from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.nn import ALiBiTransformerBlock

LENGTHS = (50, 31, 44)
SLOPES = (2.0, 1.0, 0.5, 0.4)


def drawn(model: nn.Module) -> tuple[nn.Module, torch.Generator]:
    """The model with random weights in fp64, and the generator that drew them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return model, generator


def blocks(**attention: object) -> tuple[nn.Module, Tensor]:
    layers = (ALiBiTransformerBlock(32, 4, 48, slopes=SLOPES, **attention) for _ in range(2))
    model, generator = drawn(nn.Sequential(*layers))
    return model, torch.randn(2, sum(LENGTHS), 32, generator=generator, dtype=torch.float64)


def bloom() -> tuple[nn.Module, Tensor]:
    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=40)
    model, generator = drawn(BloomForCausalLM(config).eval())
    hf.patch(model)
    return model, torch.randint(40, (2, sum(LENGTHS)), generator=generator)


class Encoder(nn.Module):
    """An encoder with a batch whose second text is shorter."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = ALiBiBertConfig(**sizes, vocab_size=40, pooler=False)
        self.bert = ALiBiBertModel(config).eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(ids.abs(), attention_mask=(ids >= 0).long()).last_hidden_state


def encoder() -> tuple[nn.Module, Tensor]:
    model, generator = drawn(Encoder())
    ids = torch.randint(1, 40, (2, sum(LENGTHS)), generator=generator)
    ids[1, -60:] = -1
    return model, ids


MODELS = {
    "causal": lambda: blocks(num_kv_heads=2, learn_slopes=True),
    "symmetric with QK-norm": lambda: blocks(causal=False, qk_norm=True),
    "forget gates": lambda: blocks(forget_gate=True),
    "patched BLOOM": bloom,
    "encoder": encoder,
}


def shard_of_input(whole: Tensor, rank: int) -> Tensor:
    return whole.split(LENGTHS, dim=1)[rank]


def run(model: nn.Module, x: Tensor) -> dict[str, object]:
    """The output, and the gradient of the sum of its squares for every parameter."""
    model.zero_grad()
    output = model(x)
    output = output if isinstance(output, Tensor) else output.logits
    output.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "gradients": gradients}
