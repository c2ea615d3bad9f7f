"""Tiny models with random weights: one builder per family; every parameter is random, so all have an effect."""

from collections.abc import Callable

import pytest
import torch
from decoder_checkpoints import SIZES
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM, MptConfig, MptForCausalLM

from alibi_attn.hf import ALiBiCausalLMConfig, ALiBiForCausalLM, patch
from alibi_attn.hf.attention.patched_attention import Numerics

PLAIN_FALCON = {"new_decoder_architecture": False, "parallel_attn": False, "bias": True, "multi_query": False}
VOCABULARY = 60


def bloom(**changes: object) -> nn.Module:
    return BloomForCausalLM(BloomConfig(**{"hidden_size": 48, "n_layer": 2, "n_head": 6, **_SHARED, **changes}))


def mpt(attention: dict[str, object] | None = None, **changes: object) -> nn.Module:
    sizes = {"d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 128, **_SHARED}
    return MptForCausalLM(MptConfig(attn_config=attention, **{**sizes, **changes}))


def falcon(**changes: object) -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True, **_SHARED}
    return FalconForCausalLM(FalconConfig(**{**sizes, **PLAIN_FALCON, **changes}))


def ours(**changes: object) -> nn.Module:
    return ALiBiForCausalLM(ALiBiCausalLMConfig(**{**SIZES, **changes}))


_SHARED = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BUILDERS = {
    "bloom": bloom,
    "mpt": mpt,
    "falcon": falcon,
    "falcon multi-query": lambda **changes: falcon(multi_query=True, bias=False, **changes),
    "falcon new": lambda **changes: falcon(
        new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True, **changes
    ),
    "ours": ours,
}


@pytest.fixture
def build() -> Callable[..., nn.Module]:
    """build("bloom", seed=0, **config) -> a model in evaluation mode."""

    def builder(family: str, *, seed: int = 0, **changes: object) -> nn.Module:
        torch.manual_seed(seed)
        model = BUILDERS[family](**changes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.15)
        return model.eval()

    return builder


@pytest.fixture
def model(request, build_patched) -> nn.Module:
    """A patched model of a family of transformers, or "ours", an `ALiBiForCausalLM`."""
    return build_patched(request.param, **({"max_seq_len": 512} if request.param == "mpt" else {}))


@pytest.fixture
def build_patched(build) -> Callable[..., nn.Module]:
    """The same, patched where it is a model of transformers."""

    def builder(family: str, *, numerics: Numerics = "exact", **options: object) -> nn.Module:
        if family == "ours":
            return build(family, numerics=numerics, **options)
        model = build(family, **options)
        patch(model, numerics=numerics)
        return model

    return builder


@pytest.fixture
def largest() -> Callable[..., int]:
    """largest(run) -> the fp32 numbers of the largest allocation by torch; a dispatch mode would change the backend."""

    def measured(run: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
        return max(event.self_cpu_memory_usage for event in profile.events()) // 4

    return measured


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """tokens(batch, length) -> random tokens that are neither padding nor an end."""

    def draw(batch: int, length: int, *, seed: int = 1) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw
