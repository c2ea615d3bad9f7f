"""The certificate in JAX: the keys the loop reads and skips, and the weight of the skipped ones, in float64."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from certificate_attack import Attack, random_attack
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax import attention, certificate
from alibi_attn.jax.certificate import norm_bound
from alibi_attn.jax.operands import operands
from alibi_attn.jax.plan import Plan
from alibi_attn.reach import reach


def visited_tiles(query, key, value, slopes, *, block: int, tile: int, **kwargs) -> np.ndarray:
    """[B, H, blocks, tiles] bool: what the forward loop read.

    Absent windows and segments are replaced by ones that hide nothing, so all calls share one compilation.
    """
    zeros = (jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32))
    kwargs = {"window": 10_000, "segment_ids": zeros} | kwargs
    spec = attention.make_spec(query, key, value, slopes, **kwargs)
    plan = Plan(causal=spec.causal, dropout_p=0.0, dense=False, query_block=block, key_tile=tile,
                key_bias=spec.key_bias is not None)  # fmt: skip
    visited = attention._forward(plan, *operands(spec, query, key, value, None))[2].visited
    number = np.arange(-(-spec.key_len // tile))
    read = (number >= np.asarray(visited.first)[:, None]) & (number <= np.asarray(visited.last)[:, None])
    for outlier in visited.outliers:
        single = number == np.asarray(outlier)[:, None]
        assert not (read & single).any(), "a tile was read twice"
        read |= single
    return read.reshape(spec.batch, spec.num_heads, -1, len(number))


LENGTH, BLOCK, TILE = 96, 8, 8


def dropped_share(attack: Attack) -> tuple[float, float]:
    """(Largest share of a query's softmax mass on unread visible keys; share of keys unread.)"""
    tensors, kwargs = attack.inputs()
    query, key, value, slopes = (x.numpy() for x in tensors)
    n, t = key.shape[2], query.shape[2]
    offset = n - t if kwargs["query_offset"] is None else kwargs["query_offset"]
    mask = np.ones((1, n), bool) if kwargs["key_mask"] is None else kwargs["key_mask"].numpy()
    segments = np.zeros((1, n), np.int32) if kwargs["segment_ids"] is None else kwargs["segment_ids"].numpy()
    window = kwargs["window"] or 10_000
    right = kwargs["right_slopes"]
    i = offset + np.arange(t)
    own = segments[:, np.clip(i, 0, n - 1)]
    bias = None if kwargs["key_bias"] is None else kwargs["key_bias"].numpy().astype(np.float32)
    read = visited_tiles(
        *(jnp.asarray(x.swapaxes(1, 2)) for x in (query, key, value)), jnp.asarray(slopes), block=BLOCK, tile=TILE,
        key_bias=None if bias is None else jnp.asarray(bias),
        causal=attack.causal, right_slopes=None if right is None else jnp.asarray(right), window=window,
        query_offset=offset, key_mask=jnp.asarray(mask), segment_ids=(jnp.asarray(own), jnp.asarray(segments)),
        tolerance=attack.tolerance,
    )[0]  # fmt: skip
    read = read.repeat(BLOCK, 1)[:, :t].repeat(TILE, 2)[:, :, :n]
    distance = i[:, None] - np.arange(n)
    seen = (np.abs(distance) < window) & mask[0] & (own[0][:, None] == segments[0])
    seen = seen & (distance >= 0) if attack.causal else seen
    m = slopes.astype(np.float64)[:, None, None]
    if right is not None:
        m = np.where(distance < 0, np.float32(right).astype(np.float64)[:, None, None], m)
    dots = query[0].astype(np.float64) @ key[0].astype(np.float64).swapaxes(1, 2)
    scores = query.shape[3] ** -0.5 * dots - m * np.abs(distance)
    if bias is not None:
        seen = seen & (bias[0] > -math.inf)[:, None]
        scores = scores + bias[0].astype(np.float64)[:, None]
    scores = np.where(seen, scores, -math.inf)
    top = scores.max(-1, keepdims=True)
    weight = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weight.sum(-1)
    lost = (weight * ~read).sum(-1) / np.where(total == 0, 1.0, total)
    return float(lost.max()), float((seen & ~read).sum() / max(seen.sum(), 1))


@settings(max_examples=100)
@given(seed=st.integers(0, 10**9))
def test_attacks_drop_no_more_than_the_tolerance(seed: int) -> None:
    attack = dataclasses.replace(random_attack(seed), length=LENGTH, head_dim=4, group=2, dtype="float32")
    assert dropped_share(attack)[0] <= attack.tolerance


def biased_attack(seed: int) -> Attack:
    """Uses one shape, and right slopes or none, so that little is compiled."""
    attack = random_attack(seed, biased=True)
    mask = "none" if "offset" in attack.mask else attack.mask
    return dataclasses.replace(attack, length=LENGTH, head_dim=4, group=2, dtype="float32", mask=mask)


def test_attacks_with_a_bias_for_every_key_drop_no_more_than_the_tolerance() -> None:
    skipping = 0
    for seed in range(250):
        attack = biased_attack(seed)
        lost, unread = dropped_share(attack)
        assert lost <= attack.tolerance, f"{attack} lost {lost:.3g}"
        skipping += unread > 0
    assert skipping > 80


def test_the_attack_finds_a_bound_that_ignores_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of = certificate.biased_tiles

    def without(plan, rule, bias, *rest):
        found = tiles_of(plan, rule, bias, *rest)
        return found._replace(bias=jnp.where(found.bias > -jnp.inf, 0.0, -jnp.inf))

    monkeypatch.setattr(certificate, "biased_tiles", without)
    attacks = [dataclasses.replace(biased_attack(seed), length=LENGTH - 1) for seed in range(60)]
    assert any(dropped_share(attack)[0] > attack.tolerance for attack in attacks)


GIANTS = (0.0, 1.0, 3.0, 20.0)


@pytest.mark.parametrize("where", ["far key", "sink", "near key", "aligned", "opposed", "zero queries"])
@pytest.mark.parametrize("log_giant", GIANTS)
@pytest.mark.parametrize(
    ("log_query", "log_key"), [(0.0, 0.0), (25.0, -24.0), (-24.0, 25.0), (-20.0, -20.0), (1.0, 0.5)]
)
def test_far_giants_tiny_and_huge_norms(where: str, log_giant: float, log_query: float, log_key: float) -> None:
    attack = Attack(
        seed=1, length=LENGTH, head_dim=4, slope=0.5, tolerance=1e-4, where=where, mask="none", causal=True, group=2,
        log_query=log_query, log_key=log_key, log_giant=log_giant,
    )  # fmt: skip
    assert dropped_share(attack)[0] <= attack.tolerance


def test_the_attack_finds_a_bound_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi_attn.jax.certificate.norm_bound", lambda x: 0.3 * jnp.linalg.norm(x, axis=-1))
    attack = Attack(
        seed=1, length=LENGTH - 1, head_dim=4, slope=0.5, tolerance=1e-6, where="far key", mask="none", causal=True,
        group=2, log_query=0.5, log_key=0.5, log_giant=1.0,
    )  # fmt: skip
    attacks = [dataclasses.replace(attack, seed=seed) for seed in range(10)]
    assert any(dropped_share(attack)[0] > attack.tolerance for attack in attacks)


@pytest.mark.parametrize("exponent", [-44, -38, -30, -20, -13, 0, 12, 18, 19, 30, 37, 38])
def test_norms_are_never_too_small(exponent: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 7)) * 10.0 ** (exponent - rng.integers(0, 9, (4000, 7)))
    x = x.clip(-3e38, 3e38).astype(np.float32)
    true = np.sqrt((x.astype(np.float64) ** 2).sum(-1))
    bound = np.asarray(norm_bound(jnp.asarray(x)), np.float64)
    assert (bound >= true).all()
    assert ((bound <= true * (1 + 1e-5) + 1e-37) | (true > 3e38)).all()


def test_nonfinite_numbers_have_no_bound() -> None:
    assert np.isinf(norm_bound(jnp.asarray([[np.nan, 1.0], [np.inf, 0.0]]))).all()


N, D, T = 1024, 32, 64
TRIPS_SLOPES = (1.0, 0.25, 0.0625, 2.0**-6)


def noise() -> list[jnp.ndarray]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((2, N, len(TRIPS_SLOPES), D)), jnp.float32) for _ in range(3)]


def certified_tiles(query, key, tolerance: float) -> np.ndarray:
    """[H, blocks] number of tiles in the widest reach of a block, with λ = the query's own score, in float64."""
    q, k = (np.asarray(x, np.float64)[0].swapaxes(0, 1) for x in (query, key))
    size = np.linalg.norm(q, axis=-1) * np.maximum.accumulate(np.linalg.norm(k, axis=-1), axis=1) * D**-0.5
    own = (q * k).sum(-1) * D**-0.5
    tiles = np.zeros((len(q), N // T), int)
    for h, m in enumerate(TRIPS_SLOPES):
        for block in range(N // T):
            first = min(i - reach(m, size[h, i], own[h, i], tolerance) + 1 for i in range(block * T, block * T + T))
            tiles[h, block] = block - max(first, 0) // T + 1
    return tiles


def assert_trips(read: np.ndarray, certified: np.ndarray) -> None:
    """Asserts that the loop reads its own tile, and at most the tiles of the plain certificate with λ = own score."""
    trips = read[0].sum(-1)
    assert (trips >= 1).all()
    assert (trips <= certified).all(), f"{trips.sum()} tiles were read but {certified.sum()} are certified"


def test_the_loop_reads_no_more_than_the_certificate() -> None:
    query, key, value = noise()
    certified = certified_tiles(query, key, 2.0**-28)
    read = visited_tiles(query, key, value, TRIPS_SLOPES, block=T, tile=T)
    assert_trips(read, certified)
    everything = np.tril(np.ones((N // T, N // T), bool))
    assert read[0].sum() < 0.6 * len(TRIPS_SLOPES) * everything.sum()
    with pytest.raises(AssertionError, match="are certified"):
        assert_trips(visited_tiles(query, key, value, TRIPS_SLOPES, block=T, tile=T, tolerance=0.0), certified)


def test_tolerance_zero_reads_every_visible_tile() -> None:
    query, key, value = noise()
    read = visited_tiles(query, key, value, TRIPS_SLOPES, block=T, tile=T, tolerance=0.0)
    assert (read == np.tril(np.ones((N // T, N // T), bool))).all()


def test_a_few_giant_keys_cost_a_few_tiles() -> None:
    query, key, value = noise()
    calm = visited_tiles(query, key, value, TRIPS_SLOPES, block=T, tile=T).sum(-1)
    giant = visited_tiles(query, key.at[:, 3].mul(40).at[:, 200].mul(40), value, TRIPS_SLOPES, block=T, tile=T).sum(-1)
    assert (giant <= calm + LOOP_OUTLIER_TILES + 2).all()


def test_gates_shorten_what_is_read_and_a_spike_costs_a_tile() -> None:
    query, key, value = noise()
    gates = jnp.full((2, len(TRIPS_SLOPES), N), 0.5).cumsum(-1)
    none = [0.0] * len(TRIPS_SLOPES)
    read = visited_tiles(query, key, value, none, block=T, tile=T, key_bias=gates).sum(-1)
    assert (read <= 3).all()
    spiked = gates.at[:, :, 40].add(900.0).at[:, :, 300].add(700.0)
    assert (visited_tiles(query, key, value, none, block=T, tile=T, key_bias=spiked).sum(-1) <= read + 2).all()
    flat = visited_tiles(query, key, value, none, block=T, tile=T, key_bias=0 * gates)
    assert (flat == np.tril(np.ones((N // T, N // T), bool))).all()


def test_hidden_keys_are_not_read() -> None:
    query, key, value = noise()
    segments = jnp.broadcast_to(np.arange(N) // 256, (2, N))
    packed = visited_tiles(query, key, value, [0.0] * 4, block=T, tile=T, segment_ids=segments)[0, 0]
    block = np.arange(N // T)
    assert (packed == ((block[:, None] // 4 == block // 4) & (block <= block[:, None]))).all()
    window = visited_tiles(query, key, value, [0.0] * 4, block=T, tile=T, window=65)[0, 0]
    assert (window == ((block <= block[:, None]) & (block >= block[:, None] - 1))).all()
    padded = visited_tiles(
        query, key, value, [0.0] * 4, block=T, tile=T, key_mask=jnp.broadcast_to(jnp.arange(N) >= 512, (2, N))
    )[0, 0]
    assert (padded == ((block >= 8) & (block <= block[:, None]))).all()


def test_other_sequences_never_change_what_is_skipped() -> None:
    query, key, value = noise()
    read = visited_tiles(query, key, value, TRIPS_SLOPES, block=T, tile=T)
    louder = [x.at[1].mul(50) for x in (query, key, value)]
    assert (visited_tiles(*louder, TRIPS_SLOPES, block=T, tile=T)[0] == read[0]).all()
