"""A patched model gives a row of a batch the bits that it gives the row alone, if the linear layers do."""

import pytest
import torch
from torch.nn.functional import linear

from alibi_attn.hf import patch

LENGTH, ROWS = 40, 3


def is_invariant(model, dtype: torch.dtype) -> bool:
    """Whether the products of this processor do not depend on the number of rows, for every linear layer of the model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            x = torch.randn(ROWS, LENGTH, module.in_features, dtype=dtype)
            together, alone = (torch.cat([linear(part, module.weight) for part in x.split(n)]) for n in (ROWS, 1))
            if not torch.equal(together, alone):
                return False
    return True


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_a_row_has_the_same_logits_alone_and_in_a_batch(family, build, tokens):
    model, ids = build(family), tokens(ROWS, LENGTH)
    if not is_invariant(model, torch.float32):
        pytest.skip("torch's linear layers round by the number of rows on this processor")
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [7], [20]])
    patch(model, backend="native")
    whole = model(ids, attention_mask=mask.long(), use_cache=False).logits
    for row in range(ROWS):
        alone = model(ids[row : row + 1], attention_mask=mask[row : row + 1].long(), use_cache=False).logits
        assert torch.equal(whole[row : row + 1], alone)
