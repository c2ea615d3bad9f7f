"""Dropout: a seed gives the same mask in every backend, chunk and part; shares, gradients and linear memory."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_calls import assert_close, assert_equal, draw
from attention_checks import WITH_KEY_BIAS
from dropout_oracle import PUBLISHED, factors, keeps, words
from programs import printed
from torch import Tensor
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from alibi_attn import alibi_attention, explain, head_reach
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.call.dropout import kept, philox
from alibi_attn.attention.call.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend
from alibi_attn.nn import ALiBiTransformerBlock

SEED = 2**61 + 2**33 + 12345
P = 0.3
every_backend = pytest.mark.parametrize("backend", WITH_KEY_BIAS)
quiet = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


def described(
    *tensors: Tensor, p: float = P, seeds: tuple[int, ...] = (SEED,), origin=(0, 0, 0), **options
) -> AttentionSpec:
    """The AttentionSpec of a call whose first sequence, head and key have the indices in `origin`."""
    seed = torch.tensor([[seed, *origin] for seed in seeds])
    return dataclasses.replace(make_spec(*tensors, **options, dropout_p=p), dropout_seed=seed)


def read_mask(backend: str, spec: AttentionSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, H, T, S]: the weights that a backend keeps, read with one-hot values; for D = S and slopes of 0."""
    key = torch.zeros(spec.batch, spec.num_kv_heads, spec.key_len, spec.head_dim, dtype=dtype)
    query = key.new_zeros(spec.batch, spec.num_heads, spec.query_len, spec.head_dim)
    return attend(spec, query, key, torch.eye(spec.key_len, dtype=dtype).expand_as(key), backend) != 0


def test_the_words_are_the_published_ones() -> None:
    for key, counter, published in PUBLISHED:
        assert words(key, *counter) == published
        assert tuple(int(word) for word in philox(*map(torch.tensor, (key, *counter)))) == published


@pytest.mark.parametrize(
    ("offset", "origin"),
    [
        (60, (0, 0, 0)),
        (-20, (0, 0, 0)),
        (7, (3, 8, 1)),
        (0, (2**40, 2, -35)),
        (2**31 - 100, (1, 1, 0)),
        (3, (0, 0, 2**31 - 65)),
    ],
)
def test_every_backend_has_the_mask_of_the_definition(offset: int, origin: tuple[int, int, int]) -> None:
    b, h, t, s = 2, 4, 70, 131
    shapes = torch.empty(b, h, t, s), torch.empty(b, 2, s, s), torch.empty(b, 2, s, s)
    spec = described(*shapes, torch.zeros(h).tolist(), origin=origin, query_offset=offset, causal=False)
    at = np.full((b, 1), offset) + np.arange(t)
    defined = factors(SEED, P, batch=b, heads=h, positions=at, key_len=s, origin=origin) != 0
    assert torch.equal(kept(spec, torch.device("cpu")), defined)
    for x in ((0, 0, 0, 0), (1, 3, t - 1, s - 1), (1, 2, 40, 64)):
        i, j = offset + x[2] + origin[2], x[3] + origin[2]
        assert bool(defined[x]) == keeps(SEED, (x[0] + origin[0]) % 2**32, x[1] + origin[1], i, j, P)
    for backend in WITH_KEY_BIAS:
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(read_mask(backend, spec, dtype), defined), (backend, dtype)


def test_a_batch_of_several_seeds_is_as_many_batches() -> None:
    shapes = torch.empty(6, 2, 9, 20), torch.empty(6, 1, 20, 20), torch.empty(6, 1, 20, 20)
    spec = described(*shapes, [0.0, 0.0], seeds=(5, 2**62 - 1, 5), origin=(4, 0, 0), causal=False)
    at = np.tile(np.arange(11, 20), (2, 1))
    each = [
        factors(seed, P, batch=2, heads=2, positions=at, key_len=20, origin=(4, 0, 0)) for seed in (5, 2**62 - 1, 5)
    ]
    for backend in WITH_KEY_BIAS:
        assert torch.equal(read_mask(backend, spec), torch.cat(each) != 0)


# Share and independence.


def excess(kept: Tensor, p: float) -> dict[str, float]:
    """The excess of kept weights, and of pairs that are both kept, in the mask [B, H, T, S], in standard deviations."""
    q, kept = 1 - p, kept.double()
    found = {"share": (kept.mean() - q) / math.sqrt(p * q / kept.numel())}
    both = math.sqrt(q * q * (1 - q * q))
    for axis, name in enumerate("bhij"):
        for step in (1, 2, 3):
            product = kept.narrow(axis, step, kept.shape[axis] - step) * kept.narrow(axis, 0, kept.shape[axis] - step)
            # Neighboring products share a draw, which adds 2·q³p to their variance; take every other run of `step`.
            own = torch.arange(product.shape[axis]) // step % 2 == 0
            product = product.index_select(axis, own.nonzero()[:, 0])
            found[f"{name} + {step}"] = (product.mean() - q * q) * math.sqrt(product.numel()) / both
    for axes, name in (((0, 1, 2), "columns"), ((0, 1, 3), "rows"), ((2, 3), "heads")):
        counts, each = kept.sum(axes), kept.numel() / kept.sum(axes).numel()
        chi = ((counts - each * q) ** 2 / (each * p * q)).sum()
        found[name] = (chi - counts.numel()) / math.sqrt(2 * counts.numel())
    return {name: float(x) for name, x in found.items()}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_right_and_nothing_is_correlated(p: float) -> None:
    shapes = torch.empty(6, 6, 200, 1), torch.empty(6, 6, 256, 1), torch.empty(6, 6, 256, 1)
    masks = [kept(described(*shapes, p=p, seeds=(seed,), origin=(0, 0, -100)), torch.device("cpu")) for seed in (1, 2)]
    for mask in masks:
        assert max(map(abs, excess(mask, p).values())) < 4.5, excess(mask, p)
    agree = (masks[0] == masks[1]).double().mean() - (p * p + (1 - p) ** 2)
    assert abs(float(agree)) < 4.5 * 0.5 / math.sqrt(masks[0].numel()), "another seed is another mask"


def test_a_mask_that_is_not_random_is_detected() -> None:
    mask = torch.rand(4, 4, 128, 128) >= 0.3
    assert max(map(abs, excess(mask, 0.3).values())) < 4.5
    for wrong in (
        mask[:, :, :, torch.arange(128) // 2],
        mask[:, :1].expand(-1, 4, -1, -1),
        mask | (torch.rand(128) < 0.05),
    ):
        assert max(map(abs, excess(wrong, 0.3).values())) > 10


@pytest.mark.parametrize(
    ("p", "numbers"),
    [(0.5, (2**31, 2.0)), (2.0**-40, (0, 1.0)), (1 - 2.0**-40, (2**32 - 1, 2.0**32)), (0.1, (429496730, None))],
)
def test_kept_weights_make_up_for_dropped_ones_exactly(p: float, numbers: tuple[int, float | None]) -> None:
    threshold, factor = dropout_numbers(p)
    assert threshold == numbers[0]
    assert factor * (1 - threshold / 2**32) == pytest.approx(1, rel=1e-15)
    assert numbers[1] is None or factor == numbers[1]


# Parts of a whole.


def test_the_same_keys_are_visited_and_the_output_keeps_its_bound() -> None:
    """‖o − õ‖ ≤ 2R·max‖v‖ / (1 − p), where R, unaffected by dropout, is within the tolerance."""
    q, k, v, _ = draw(h=2, k=2, t=1500, requires_grad=False)
    tolerance, slopes = 1e-4, [0.5, 0.1]
    reaches = [head_reach(q, k, slopes, tolerance=tolerance, dropout_p=p, backend="native") for p in (0.0, 0.9)]
    assert torch.equal(*reaches)
    assert int(reaches[0].max()) < 400
    near, full = (
        attend(described(q, k, v, slopes, p=0.9, tolerance=x, return_lse=True), q, k, v, "native")
        for x in (tolerance, 0.0)
    )
    dropped = -torch.expm1(near[1] - full[1])
    assert 0 < float(dropped.max()) <= tolerance
    off = (near[0] - full[0]).norm(dim=-1)
    assert bool((off <= 10 * (2 * tolerance + 2.0**-20) * v.norm(dim=-1).max()).all())
    assert f"at most {2 * tolerance / (1 - 0.9):.2g}·max‖v‖" in str(
        explain(q, k, v, slopes, tolerance=tolerance, dropout_p=0.9)
    )


# Seeds and torch.


@every_backend
def test_the_seed_is_one_draw_from_torchs_generator(backend: str) -> None:
    q, k, v, m = draw(t=100, requires_grad=False)

    def run() -> Tensor:
        return alibi_attention(q, k, v, m, dropout_p=P, backend=backend)

    torch.manual_seed(3)
    first, second = run(), run()
    after = torch.rand(4)
    torch.manual_seed(3)
    assert_equal([run(), run()], [first, second])
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    seeds = [int(torch.randint(2**62, (1, 1))) for _ in range(2)]
    assert torch.equal(torch.rand(4), after)
    assert torch.equal(attend(described(q, k, v, m, seeds=tuple(seeds[1:])), q, k, v, backend), second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same_again(reentrant: bool) -> None:
    block = ALiBiTransformerBlock(32, 8, num_kv_heads=2, dropout_p=0.2, learn_slopes=True).train()
    x = torch.randn(1, 260, 32, requires_grad=True)
    leaves = [x, *block.parameters()]
    torch.manual_seed(1)
    exact = torch.autograd.grad(block(x).square().sum(), leaves)
    torch.manual_seed(1)
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    assert_equal([leaf.grad for leaf in leaves], exact)


@quiet
def test_compiled_code_drops_alike_forward_and_backward() -> None:
    """The output is linear in the values: do·o = dv·v, if both passes use the same mask."""
    q, k, v, m = draw(b=1, t=200)
    compiled = torch.compile(
        lambda *x: alibi_attention(*x, dropout_p=P, backend="native"), fullgraph=True, backend="aot_eager"
    )
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(compiled(q, k, v, m))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    grad = torch.randn_like(outputs[0])
    (of_value,), (of_other,) = (torch.autograd.grad(outputs[at], v, grad) for at in (0, 2))
    with torch.no_grad():
        assert float((grad * outputs[0]).sum() - (of_value * v).sum()) == pytest.approx(0, abs=2e-3)
        assert abs(float((grad * outputs[0]).sum() - (of_other * v).sum())) > 1


@every_backend
def test_entries_of_vmap_share_a_mask_only_if_requested(backend: str) -> None:
    q, k, v, m = (x[:1].expand(3, *x.shape[1:]) for x in draw(3, t=40, requires_grad=False))

    def one(*x: Tensor) -> Tensor:
        return alibi_attention(*x, dropout_p=P, backend=backend)

    torch.manual_seed(2)
    same = vmap(one, randomness="same")(q, k, v, m)
    torch.manual_seed(2)
    assert_close(same, one(q[0], k[0], v[0], m[0]).expand(3, -1, -1, -1, -1))
    different = vmap(one, randomness="different")(q, k, v, m)
    assert not torch.equal(different[0], different[1])
    torch.manual_seed(2)
    of_dense = vmap(lambda *x: alibi_attention(*x, dropout_p=P, backend="dense"), randomness="different")
    torch.manual_seed(2)
    expected = of_dense(q, k, v, m)
    torch.manual_seed(2)
    assert_close([vmap(one, randomness="different")(q, k, v, m)], [expected])


# Backend selection and memory.


def test_the_kernels_are_picked_at_every_length() -> None:
    for t in (1, 12, 600):
        q, k, v, m = draw(t=t, requires_grad=False)
        assert "native     runs (picked by auto)" in str(explain(q, k, v, m, dropout_p=0.1))
    assert "banded     cannot: it does not compute dropout_p" in str(explain(q, k, v, m, dropout_p=0.1))
    assert native.too_small(make_spec(q, k, v, m, dropout_p=0.1)) is None


MEMORY = """
import resource, torch
from alibi_attn import alibi_attention
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def run(t):
    q, k, v = (torch.randn(1, 2, t, 16, requires_grad=True) for _ in range(3))
    alibi_attention(q, k, v, [1.0, 0.5], dropout_p=0.1).sum().backward()
run(256)
before = peak()
run(16_384)
print((peak() - before) / 2**10)
"""


def test_native_memory_is_linear_in_the_length() -> None:
    """16,384 tokens of two heads: one bit per weight would be 64 MiB, one float 2 GiB."""
    assert float(printed("-c", MEMORY)) < 60  # MiB
