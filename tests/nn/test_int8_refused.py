"""Where a processor has no exact int8 products, layers are refused and a model stays as it is; tested on every processor."""

import pytest
import torch
from torch import nn

from alibi_attn.nn import int8


def test_a_processor_without_vnni_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = [*model]
    with pytest.raises(ValueError, match="int8 needs an x86 processor with VNNI instructions and a torch build"):
        int8.convert(model)
    assert [*model] == before
