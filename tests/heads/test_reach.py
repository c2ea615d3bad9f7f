"""The attention of captured heads by distance, compared with a loop over queries and keys."""

import math

import pytest
import torch

from alibi_attn.slopes import alibi_slopes
from alibi_lab.heads.reach import attention_by_distance, compare


def test_attention_by_distance_equals_a_loop() -> None:
    n, num_heads = 11, 2
    query, key = torch.randn(2, 1, num_heads, n, 4, generator=torch.Generator().manual_seed(0)).unbind()
    columns = attention_by_distance(query, key, torch.tensor(alibi_slopes(num_heads)), 0.5)
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


def test_the_true_reach_is_where_the_dropped_mass_passes_the_tolerance() -> None:
    n, slopes = 200, torch.tensor([1.0, 0.25])
    query, key = torch.randn(2, 1, 2, n, 8, generator=torch.Generator().manual_seed(0)).unbind()
    columns = compare(query, key, slopes, 8**-0.5)
    for head, slope in enumerate(slopes.tolist()):
        distance = (torch.arange(n)[:, None] - torch.arange(n)).double()
        scores = (query[0, head].double() @ key[0, head].double().T) * 8**-0.5 - slope * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        dropped = [float((weights * (distance >= r)).sum(-1).max()) for r in range(n + 1)]
        true = next(r for r in range(n + 1) if dropped[r] <= torch.finfo(torch.float32).eps / 32)
        assert columns["true"][head] == true
        assert columns["certified"][head] >= true
