"""The certificate in JAX: the keys the loop reads and skips, and the weight of the skipped ones, in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from certificate_attack import Attack, dropped, random_attack
from halo_checks import scores
from jax_keys import visited
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
from alibi_attn.reach import reach

LENGTH, TILE = 96, 8


class Narrow(Attack):
    """An attack in one shape, so that little is compiled, whose biases fp32 holds."""

    def inputs(self) -> tuple[list[torch.Tensor], dict]:
        tensors, kwargs = super().inputs()
        if kwargs["key_bias"] is not None:
            kwargs["key_bias"] = kwargs["key_bias"].float().double()
        return tensors, kwargs


def attack_of(seed: int, *, biased: bool = False, **changes: object) -> Narrow:
    attack = vars(random_attack(seed, biased=biased)) | {"length": LENGTH, "head_dim": 4, "group": 2}
    if biased and "offset" in attack["mask"]:
        attack["mask"] = "none"
    return Narrow(**attack | {"dtype": "float32"} | changes)


def keys_read(spec: AttentionSpec[torch.Tensor], *tensors: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    """[1, H, T, S] each: the keys that the forward loop reads for each query, and those that backward reads."""
    return visited("loop", spec, *tensors, side=TILE, x64=False, **options)


def dropped_share(attack: Attack) -> tuple[float, float]:
    """(Largest share of a query's softmax mass on unread visible keys; share of visible keys unread.)"""
    return dropped(attack, lambda *call: keys_read(*call, for_gradients=False)[0])


@pytest.mark.parametrize(("biased", "least"), [(False, 60), (True, 80)])
def test_attacks_drop_no_more_than_the_tolerance(biased: bool, least: int) -> None:
    skipping = 0
    for seed in range(250):
        attack = attack_of(seed, biased=biased)
        lost, unread = dropped_share(attack)
        assert lost <= attack.tolerance, f"{attack} lost {lost:.3g}"
        skipping += unread > 0
    assert skipping > least


@pytest.mark.parametrize("draws", [60, pytest.param(2500, marks=pytest.mark.long)])
@pytest.mark.parametrize("biased", [False, True])
def test_every_key_that_is_left_out_obeys_the_key_rule(biased: bool, draws: int) -> None:
    """By the certificate or by its measured share; without gradients the certificate leaves out more."""
    certified = measured = careless = 0
    for seed in range(draws):
        attack = attack_of(seed, biased=biased)
        (query, key, value, slopes), kwargs = attack.inputs()
        spec = make_spec(query, key, value, slopes, **kwargs)
        if rounding(spec, query, key) >= 0.1 or "offset" in attack.mask:
            continue  # shares are those of the computed scores
        forward, backward = keys_read(spec, query, key, value)
        score = scores(query, key, slopes, spec=spec)
        distance = distances(spec.query_len, spec.key_len, 0, None)
        tolerance = attack.tolerance * math.exp(2 * rounding(spec, query, key))
        assert_keys_keep_their_weight(backward, score, distance, tolerance)
        certified += bool((~forward & (score > -math.inf)).any())
        measured += bool((forward & ~backward & (score > -math.inf)).any())
        plain, _ = keys_read(spec, query, key, value, for_gradients=False)
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
    tensors, kwargs = attack_of(3, tolerance=0.0, mask="none", where="nothing", slope=20.0).inputs()
    forward, backward = keys_read(make_spec(*tensors, **kwargs), *tensors[:3])
    assert torch.equal(forward, backward)


def test_the_attack_finds_a_bound_that_ignores_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of = certificate.biased_tiles

    def without(plan, rule, bias, *rest):
        found = tiles_of(plan, rule, bias, *rest)
        return found._replace(bias=jnp.where(found.bias > -jnp.inf, 0.0, -jnp.inf))

    monkeypatch.setattr(certificate, "biased_tiles", without)
    attacks = [attack_of(seed, biased=True, length=LENGTH - 1) for seed in range(60)]
    assert any(dropped_share(attack)[0] > attack.tolerance for attack in attacks)


def test_the_attack_finds_a_bound_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi_attn.jax.backends.certificate.norm_bound", lambda x: 0.3 * jnp.linalg.norm(x, axis=-1))
    far = {"mask": "none", "where": "far key", "causal": True, "bias": None, "slope": 0.5, "tolerance": 1e-6}
    sizes = {"length": LENGTH - 1, "log_query": 0.5, "log_key": 0.5, "log_giant": 1.0}
    attacks = [attack_of(seed, **far, **sizes) for seed in range(10)]
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


N, D, T, H = 1024, 32, 64, 4
TRIPS_SLOPES = [1.0, 0.25, 0.0625, 2.0**-6]
EVERYTHING = torch.ones(N // T, N // T, dtype=torch.bool).tril()


def noise() -> list[torch.Tensor]:
    return list(torch.randn(3, 2, H, N, D, generator=torch.Generator().manual_seed(0)))


def tiles_read(*tensors: torch.Tensor, slopes: list[float] = TRIPS_SLOPES, **options: object) -> torch.Tensor:
    """[B, H, blocks, tiles] bool: what the forward loop reads, with blocks and tiles of T."""
    spec = make_spec(*tensors, slopes, **options)
    return visited("loop", spec, *tensors, side=T, x64=False, for_gradients=False)[0][:, :, ::T, ::T]


def certified_tiles(query: torch.Tensor, key: torch.Tensor, tolerance: float) -> np.ndarray:
    """[H, blocks] number of tiles in the widest reach of a block, with λ = the query's own score, in float64."""
    q, k = (x[0].double().numpy() for x in (query, key))
    size = np.linalg.norm(q, axis=-1) * np.maximum.accumulate(np.linalg.norm(k, axis=-1), axis=1) * D**-0.5
    own = (q * k).sum(-1) * D**-0.5
    tiles = np.zeros((H, N // T), int)
    for h, m in enumerate(TRIPS_SLOPES):
        for block in range(N // T):
            first = min(i - reach(m, size[h, i], own[h, i], tolerance) + 1 for i in range(block * T, block * T + T))
            tiles[h, block] = block - max(first, 0) // T + 1
    return tiles


def test_the_loop_reads_no_more_than_the_certificate() -> None:
    """At least its own tile, and at most the tiles of the plain certificate with λ = own score."""
    query, key, value = noise()
    read = tiles_read(query, key, value)[0]
    assert (read.sum(-1) >= 1).all()
    assert (read.sum(-1).numpy() <= certified_tiles(query, key, 2.0**-28)).all()
    assert read.sum() < 0.6 * H * EVERYTHING.sum()


def test_tolerance_zero_reads_every_visible_tile() -> None:
    assert (tiles_read(*noise(), tolerance=0.0) == EVERYTHING).all()


def test_a_few_giant_keys_cost_a_few_tiles() -> None:
    query, key, value = noise()
    calm = tiles_read(query, key, value).sum(-1)
    key[:, :, [3, 200]] *= 40
    assert (tiles_read(query, key, value).sum(-1) <= calm + LOOP_OUTLIER_TILES + 2).all()


def test_gates_shorten_what_is_read_and_a_spike_costs_a_tile() -> None:
    tensors, none = noise(), [0.0] * H
    gates = torch.full((2, H, N), 0.5).cumsum(-1)
    read = tiles_read(*tensors, slopes=none, key_bias=gates).sum(-1)
    assert (read <= 3).all()
    spiked = gates.clone()
    spiked[:, :, 40] += 900.0
    spiked[:, :, 300] += 700.0
    assert (tiles_read(*tensors, slopes=none, key_bias=spiked).sum(-1) <= read + 2).all()
    assert (tiles_read(*tensors, slopes=none, key_bias=0 * gates) == EVERYTHING).all()


def test_hidden_keys_are_not_read() -> None:
    block, at = torch.arange(N // T), torch.arange(N)
    for seen, options in (
        (block[:, None] // 4 == block // 4, {"segment_ids": (at // 256).expand(2, -1)}),
        (block >= block[:, None] - 1, {"window": 65}),
        (block >= 8, {"key_mask": (at >= 512).expand(2, -1)}),
    ):
        read = tiles_read(*noise(), slopes=[0.0] * H, **options)
        assert (read[0, 0] == (seen & EVERYTHING)).all()


def test_other_sequences_never_change_what_is_skipped() -> None:
    tensors = noise()
    read = tiles_read(*tensors)
    for x in tensors:
        x[1] *= 50
    assert torch.equal(tiles_read(*tensors)[0], read[0])
