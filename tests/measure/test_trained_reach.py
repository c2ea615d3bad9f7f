"""The attention of captured heads by distance, compared with a loop over queries and keys."""

import math

import pytest
import torch

from alibi_attn.slopes import alibi_slopes
from alibi_lab.measure.trained_reach import attention_by_distance


def test_attention_by_distance_equals_a_loop() -> None:
    n, num_heads = 11, 2
    query, key = torch.randn(2, 1, num_heads, n, 4, generator=torch.Generator().manual_seed(0)).unbind()
    columns = attention_by_distance(query, key)
    assert columns["distance"] == [1, 2, 4, 8, 16] * 2
    expected = []
    for head, slope in enumerate(alibi_slopes(num_heads)):
        for limit in (1, 2, 4, 8, 16):
            near = 0.0
            for i in range(n):
                score = [float(query[0, head, i] @ key[0, head, j]) / 2 - slope * (i - j) for j in range(i + 1)]
                whole = sum(math.exp(s) for s in score)
                near += sum(math.exp(s) for j, s in enumerate(score) if i - j < limit) / whole
            expected.append(near / n)
    assert columns["share"] == pytest.approx(expected, rel=1e-5)
    assert columns["head"] == [0] * 5 + [1] * 5
