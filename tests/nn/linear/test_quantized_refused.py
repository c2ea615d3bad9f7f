"""Layers that cannot be exact in int8 are refused and a model stays as it is; tested on every processor."""

import pytest
import torch
from torch import nn

from alibi_attn.nn.linear import quantized


def test_a_processor_without_vnni_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = [*model]
    with pytest.raises(ValueError, match="int8 needs an x86 processor with VNNI instructions and a torch build"):
        quantized.convert(model)
    assert [*model] == before


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_layer_with_hooks_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "check_supported", lambda *_: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = [*model]
    getattr(model[1], f"register_{kind}")(lambda *_: None)
    with pytest.raises(ValueError, match=r"a linear layer has .*hooks, which its int8 version would lose; remove them"):
        quantized.convert(model)
    assert [*model] == before


def test_a_bias_beyond_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "check_supported", lambda *_: None)
    model = nn.Sequential(nn.Linear(64, 8, dtype=torch.float64))
    nn.init.constant_(model[0].bias, 1e300)
    with pytest.raises(ValueError, match="the bias of a linear layer is not finite in fp32"):
        quantized.convert(model)
    assert type(model[0]) is nn.Linear


def test_a_parametrized_layer_keeps_its_parametrization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "check_supported", lambda *_: None)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)))
    layer = model[0]
    assert quantized.convert(model) == []
    assert model[0] is layer
