"""`attention_rows` against the definition as a loop, against the outputs of `alibi_attention`, and its memory."""

import math

import pytest
import torch
from attention_calls import Watched
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import arguments
from attention_oracle import truth
from torch import Tensor

from alibi_attn import alibi_attention, attention_rows, forgetting_attention

SOME = [-1, 0, 2, 2]


@pytest.mark.parametrize("case", [*CASES, *KEY_BIASES], ids=str)
def test_weights_times_values_are_those_of_the_definition(case: Case) -> None:
    (query, key, value, slopes), options = arguments(case, torch.float64)
    rows, group = [row for row in SOME if row < case.query_len], case.heads // (case.kv_heads or case.heads)
    output = attention_rows(query, key, slopes, rows=rows, **options) @ value.nan_to_num(0, 0, 0).repeat_interleave(
        group, 1
    )
    torch.testing.assert_close(output, truth(case).output[:, :, rows], rtol=0, atol=1e-12)


GATED = {
    "gates": {"log_fgate": -torch.rand(2, 4, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(2))},
    "a sink": {"sink_logits": torch.tensor([0.5, -math.inf, 3.0, -1.0], dtype=torch.float64)},
    "segments": {"segment_ids": (torch.arange(70) // 30).expand(2, -1)},
    "both sides": {"causal": False, "right_slopes": torch.tensor([0.1, 0.2, math.inf, 0.0], dtype=torch.float64)},
}
GATED["gates and a sink"] = GATED["gates"] | GATED["a sink"]
GATED["a cut"] = {"log_fgate": GATED["gates"]["log_fgate"].index_fill(2, torch.tensor([31]), -math.inf)}


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 70, 16, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 2, 70, 16, dtype=torch.float64, generator=generator)
    return [x.to(dtype) for x in (query, key, value)]


@pytest.mark.parametrize("options", GATED.values(), ids=GATED)
def test_weights_times_values_are_the_output_with_its_gradients(options):
    """Against the backend that "auto" picks, which shares no arithmetic with it."""
    rows = torch.tensor([69, 3, 40])
    attend = forgetting_attention if "log_fgate" in options else alibi_attention
    results = []
    for of_rows in (True, False):
        leaves = [x.requires_grad_() for x in drawn()]
        more = {
            n: x.clone().requires_grad_() if x.is_floating_point() else x
            for n, x in options.items()
            if isinstance(x, Tensor)
        }
        given = options | more
        query, key, value = leaves
        if of_rows:
            output = attention_rows(query, key, rows=rows, **given) @ value.repeat_interleave(2, 1)
        else:
            output = attend(query, key, value, **given)[:, :, rows]
        leaves += [x for x in more.values() if x.requires_grad]
        results.append([output, *torch.autograd.grad((output**2).sum(), leaves)])
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_of_every_dtype_are_fp32(dtype):
    query, key, _ = drawn(dtype)
    found = attention_rows(query, key, rows=slice(60, None, 3))
    true = attention_rows(query.double(), key.double(), rows=[60, 63, 66, 69])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), true, rtol=0, atol=1e-6)


def test_hidden_keys_are_never_used_and_seen_ones_always():
    query, key, _ = drawn()
    key[0, :, 5] = math.nan
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, 5] = False
    assert bool(attention_rows(query, key, rows=[4, 60], key_mask=mask).isfinite().all())
    seen = attention_rows(query, key, rows=[4, 60])
    assert bool(seen[0, :, 0].isfinite().all())
    assert bool(seen[0, :, 1].isnan().all())
    assert bool(seen[1].isfinite().all())
    blind = attention_rows(query, key, rows=[4], key_mask=torch.zeros_like(mask))
    assert not bool(blind.any())


def test_memory_is_linear_in_the_keys():
    q = torch.randn(1, 4, 3000, 8, requires_grad=True)
    with Watched() as watched:
        attention_rows(q, q, rows=[-1, 17]).square().sum().backward()
    assert watched.largest == q.numel()
    with Watched() as watched:
        attention_rows(q, q, rows=slice(None))
    assert watched.largest == 4 * 3000 * 3000


def test_it_compiles():
    query, key, _ = drawn(torch.float32)
    rows = torch.tensor([3, -1])
    compiled = torch.compile(attention_rows, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, rows=rows), attention_rows(query, key, rows=rows))


def test_no_rows_and_no_keys():
    query, key, _ = drawn()
    assert attention_rows(query, key, rows=[]).shape == (2, 4, 0, 70)
    assert attention_rows(query, key[:, :, :0], rows=[0], key_bias=torch.zeros(0)).shape == (2, 4, 1, 0)
