"""The certificate in JAX: the keys the loop reads and skips, and the weight of the skipped ones, in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from certificate_attack import Attack, dropped, random_attack
from halo_checks import scores
from hypothesis import given, settings
from hypothesis import strategies as st
from key_losses import LENGTH as LENGTH_OF_KEYS
from key_losses import SLOPE, TOLERANCE, assert_keys_keep_their_weight, gates, growing_queries, largest_loss
from measured_attack import rounding

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances
from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax import alibi_attention, attention, explain
from alibi_attn.jax.backends import certificate
from alibi_attn.jax.backends.certificate import norm_bound
from alibi_attn.jax.call.operands import operands
from alibi_attn.jax.call.plan import Plan
from alibi_attn.reach import reach


def visited_tiles(
    query, key, value, slopes, *, block: int, tile: int, needed: bool = False, for_gradients: bool = False, **kwargs
) -> np.ndarray:
    """[B, H, blocks, tiles] bool: what the forward loop read, or the backward loop reads if `needed`.

    Absent windows, segments and masks are replaced by ones that hide nothing, so all calls share one compilation.
    """
    zeros = (jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32))
    kwargs = {"window": 10_000, "segment_ids": zeros, "key_mask": jnp.ones(key.shape[:2], bool)} | kwargs
    spec = attention.make_spec(query, key, value, slopes, **kwargs)
    plan = Plan(
        causal=spec.causal,
        dropout_p=0.0,
        dense=False,
        query_block=block,
        key_tile=tile,
        for_gradients=for_gradients,
    )
    saved = attention._forward(plan, *operands(spec, query, key, value, None))[3]
    visited = saved.needed if needed else saved.visited
    number = np.arange(-(-spec.key_len // tile))
    read = (number >= np.asarray(visited.first)[:, None]) & (number <= np.asarray(visited.last)[:, None])
    for outlier in visited.outliers:
        single = number == np.asarray(outlier)[:, None]
        assert not (read & single).any(), "a tile was read twice"
        read |= single
    return read.reshape(spec.batch, spec.num_heads, -1, len(number))


LENGTH, BLOCK, TILE = 96, 8, 8


class Narrow(Attack):
    """An attack in one shape, so that little is compiled, whose biases fp32 holds."""

    def inputs(self) -> tuple[list[torch.Tensor], dict]:
        tensors, kwargs = super().inputs()
        if kwargs["key_bias"] is not None:
            kwargs["key_bias"] = kwargs["key_bias"].float().double()
        return tensors, kwargs


def narrow(attack: Attack, **changes: object) -> Narrow:
    return Narrow(**vars(attack) | {"length": LENGTH, "head_dim": 4, "group": 2, "dtype": "float32"} | changes)


def keys_read(
    spec: AttentionSpec[torch.Tensor], *tensors: torch.Tensor, needed: bool = False, for_gradients: bool = False
) -> torch.Tensor:
    """[1, H, T, S]: the keys that the forward loop read for each query, or backward if `needed`."""
    names = ("causal", "query_offset", "tolerance", "right_slopes", "window", "key_mask", "key_bias")
    options = {name: getattr(spec, name) for name in names if getattr(spec, name) is not None}
    if spec.key_segments is not None:
        options["segment_ids"] = (spec.query_segments, spec.key_segments)
    given = [*(x.transpose(1, 2) for x in tensors), spec.slopes], options
    arrays, options = jax.tree.map(lambda x: jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x, given)
    read = visited_tiles(*arrays, block=BLOCK, tile=TILE, needed=needed, for_gradients=for_gradients, **options)
    return torch.from_numpy(read.repeat(BLOCK, 2)[:, :, : spec.query_len].repeat(TILE, 3)[..., : spec.key_len])


def dropped_share(attack: Attack) -> tuple[float, float]:
    """(Largest share of a query's softmax mass on unread visible keys; share of visible keys unread.)"""
    return dropped(attack, keys_read)


@settings(max_examples=100)
@given(seed=st.integers(0, 10**9))
def test_attacks_drop_no_more_than_the_tolerance(seed: int) -> None:
    attack = narrow(random_attack(seed))
    assert dropped_share(attack)[0] <= attack.tolerance


def keys_of_both(spec: AttentionSpec[torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [keys_read(spec, *tensors, needed=needed, for_gradients=True) for needed in (False, True)]


@pytest.mark.parametrize("draws", [60, pytest.param(2500, marks=pytest.mark.long)])
@pytest.mark.parametrize("biased", [False, True])
def test_every_key_that_is_left_out_obeys_the_key_rule(biased: bool, draws: int) -> None:
    """By the certificate or by its measured share; without gradients the certificate leaves out more."""
    certified = measured = careless = 0
    for seed in range(draws):
        attack = biased_attack(seed) if biased else narrow(random_attack(seed))
        (query, key, value, slopes), kwargs = attack.inputs()
        spec = make_spec(query, key, value, slopes, **kwargs)
        if rounding(spec, query, key) >= 0.1 or "offset" in attack.mask:
            continue  # shares are those of the computed scores
        forward, backward = keys_of_both(spec, query, key, value)
        score = scores(query, key, slopes, spec=spec)
        distance = distances(spec.query_len, spec.key_len, 0, None)
        tolerance = attack.tolerance * math.exp(2 * rounding(spec, query, key))
        assert_keys_keep_their_weight(backward, score, distance, tolerance)
        certified += bool((~forward & (score > -math.inf)).any())
        measured += bool((forward & ~backward & (score > -math.inf)).any())
        plain = keys_read(spec, query, key, value)
        careless += bool((plain < forward).any())
    print(f"{draws} draws, {certified} leave out a key by the certificate, {measured} by its share")
    assert certified >= draws / 10
    assert measured >= draws / 20
    assert careless > 0, "the rule changes nothing"


@pytest.mark.parametrize("gated", [False, True])
def test_a_key_that_all_queries_may_leave_out_keeps_its_gradient(gated: bool) -> None:
    """A limit per query lets key 0 lose 30 times what the key rule allows."""
    with jax.enable_x64(True):
        tensors = growing_queries(0.1 * TOLERANCE, block=1)
        query, key, value = (jnp.asarray(x.transpose(1, 2).numpy()) for x in tensors)
        options = {"key_bias": jnp.asarray(gates(attention.KEY_TILE).numpy())} if gated else {}

        def weights(value: jax.Array, **how: object) -> jax.Array:
            slopes = [0.0 if gated else SLOPE]
            return alibi_attention(query, key, value, slopes, scale=1.0, **options, **how)[..., 0].sum()

        full, ours = (
            np.asarray(jax.grad(functools.partial(weights, **how))(value)[0, :, 0])
            for how in ({"backend": "dense", "tolerance": 0.0}, {"backend": "loop", "tolerance": TOLERANCE})
        )
    assert full[0, 0] > 30 * largest_loss(TOLERANCE, LENGTH_OF_KEYS)
    assert np.abs(full - ours).max() <= largest_loss(TOLERANCE, LENGTH_OF_KEYS)


def test_explain_shows_what_backward_of_the_loop_computes() -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 1500, 2, 16))
    found = explain(6 * query, key, value, [0.2, 0.05], backend="loop")
    assert found.measured_scores is not None
    assert found.measured_reaches is not None
    assert found.measured_scores.sum() < 0.95 * found.scores.sum()
    assert (found.measured_reaches <= found.reaches).all()
    share = found.measured_scores.sum() / found.scores.sum()
    assert f"it computes {share:.1%} of them, with the same bound" in str(found)


def test_backward_leaves_out_nothing_at_a_tolerance_of_zero() -> None:
    attack = narrow(random_attack(3), tolerance=0.0, mask="none", where="nothing", slope=20.0)
    tensors, kwargs = attack.inputs()
    forward, backward = keys_of_both(make_spec(*tensors, **kwargs), *tensors[:3])
    assert torch.equal(forward, backward)


def biased_attack(seed: int) -> Attack:
    attack = random_attack(seed, biased=True)
    return narrow(attack, mask="none" if "offset" in attack.mask else attack.mask)


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


def test_the_attack_finds_a_bound_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi_attn.jax.backends.certificate.norm_bound", lambda x: 0.3 * jnp.linalg.norm(x, axis=-1))
    far = {"mask": "none", "where": "far key", "causal": True, "bias": None, "slope": 0.5, "tolerance": 1e-6}
    sizes = {"length": LENGTH - 1, "log_query": 0.5, "log_key": 0.5, "log_giant": 1.0}
    attacks = [narrow(random_attack(seed), **far, **sizes) for seed in range(10)]
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
