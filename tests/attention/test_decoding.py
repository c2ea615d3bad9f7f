"""Decoding with remembered norms: equals full attention, although only keys within reach are read."""

import math
import random

import pytest
import torch
from attention_checks import EPS
from certificate_attack import certified_keys, random_attack

from alibi_attn import alibi_attention, alibi_slopes, forgetting_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate import bounds
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run import decoding, near_keys
from alibi_attn.attention.run.execution import attend

SLOPES = torch.tensor(alibi_slopes(8), dtype=torch.float32)
CASES = ["noise", "sink", "giant far key of one head", "giant far value", "tiny near values", "no value"]
SIZES = [(1, 1500, None), (5, 1503, None), (1, 1472, 300), (16, 90, None), (3, 3, 2)]  # queries, keys, window


@pytest.fixture(params=["kernel", "slices"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations on a CPU: the kernel, and the fallback without a compiler."""
    if request.param == "slices":
        monkeypatch.setattr(decoding, "has_kernel", lambda *tensors: False)
    return request.param


def draw(queries: int, keys: int, *, batch: int = 2, kv_heads: int = 4, dtype: torch.dtype = torch.float32):
    query = torch.randn(batch, 8, queries, 16, dtype=dtype)
    key, value = (torch.randn(batch, kv_heads, keys, 16, dtype=dtype) for _ in range(2))
    return query, key, value


def spoiled(case: str, key: torch.Tensor, value: torch.Tensor) -> None:
    if case == "sink":
        key[:, :, 3] *= 30
    elif case == "giant far key of one head":
        key[1, 2, 700] *= 300
    elif case == "giant far value":
        value[:, 1, 100] *= 1e6
    elif case == "tiny near values":
        value[:, :, -8:] *= 1e-9
    elif case == "no value":
        value.zero_()


def assert_as_exact_as_dense(query, key, value, slopes=SLOPES, *, window=None, visible=None, log_fgate=None):
    """Returns the output. Errors are relative to each query's output: giant values must not hide small ones."""
    options = {"window": window, "key_mask": None if visible is None else masked(visible, key.shape[2])}

    def attend(*rows: torch.Tensor, **how: object) -> torch.Tensor:
        if log_fgate is None:
            return alibi_attention(*rows, slopes, **options, **how)
        return forgetting_attention(*rows, log_fgate, slopes, **options, **how)

    exact = attend(*(x.double() for x in (query, key, value)), tolerance=0.0, backend="reference")
    given = {"window": window, "visible": visible, "log_fgate": log_fgate}
    found = decoding.attend_near(query, key, value, slopes, Norms.of(key, value), **given)
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    dense = attend(query, key, value, backend="dense")
    off, theirs = (float(((x.double() - exact).abs() / scale).max()) for x in (found, dense))
    assert off <= 2 * theirs + 16 * EPS[torch.float32]
    return found


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("queries", "keys", "window"), SIZES)
def test_it_gives_what_full_attention_gives(case: str, queries: int, keys: int, window: int | None) -> None:
    query, key, value = draw(queries, keys)
    if keys > 700:
        spoiled(case, key, value)
    assert_as_exact_as_dense(query, key, value, window=window)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    query, key, value = draw(2, 1000, dtype=dtype)
    key[:, :, 3] *= 30  # an outlier tile, merged
    exact = alibi_attention(*(x.double() for x in (query, key, value)), SLOPES, tolerance=0.0, backend="reference")
    got = decoding.attend_near(query, key, value, SLOPES, Norms.of(key, value))
    assert got.dtype == dtype
    assert float((got.double() - exact).abs().max()) <= 8 * EPS[dtype] * float(value.norm(dim=-1).max())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("slopes", [[0.5, 0.0] * 4, [-0.1, 0.3] * 4])
def test_heads_without_reach_read_everything(slopes: list[float]) -> None:
    assert_as_exact_as_dense(*draw(1, 500), torch.tensor(slopes))


@pytest.mark.usefixtures("way")
def test_slopes_of_each_sequence_and_what_else_is_in_the_batch() -> None:
    query, key, value = draw(1, 900, batch=3)
    m = SLOPES * torch.tensor([[1.0], [4.0], [0.5]])
    together = decoding.attend_near(query, key, value, m, Norms.of(key, value))
    for b in range(3):
        one = [x[b : b + 1] for x in (query, key, value)]
        alone = decoding.attend_near(*one, m[b : b + 1], Norms.of(*one[1:]))
        assert torch.equal(together[b : b + 1], alone)


def test_outliers_of_another_sequence_change_nothing() -> None:
    """The first key is 1.9 times longer than the rest: an outlier tile would pay, but `needed_keys` requires twice the mean."""
    query, value = (torch.randn(1, 8, n, 16) for n in (1, 3000))
    query, key = 12 * torch.nn.functional.normalize(query, dim=-1), torch.ones(1, 8, 3000, 16) / 2
    key[:, :, 0] *= 1.9
    giant = key.clone()
    giant[:, :, 0] *= 50

    def needed(*tensors: torch.Tensor) -> near_keys.Row:
        spec = make_spec(*tensors, [0.02] * 8)
        runs = [(0, 3000)] * len(tensors[0])
        return near_keys.needed_keys(spec, *tensors, Norms.of(*tensors[1:]), runs)[0]

    alone = needed(query, key, value)
    assert alone == needed(*(torch.cat(pair) for pair in ((query, query), (key, giant), (value, value))))
    assert alone != needed(query, giant, value)


@pytest.mark.usefixtures("way")
def test_far_keys_are_not_read() -> None:
    """They may have any value, even NaN, once their norms are remembered."""
    query, key, value = draw(1, 6000, batch=1)
    steep = SLOPES.clamp(min=0.02)
    known_norms = Norms.of(key, value)
    before = decoding.attend_near(query, key, value, steep, known_norms)
    key[:, :, :3000], value[:, :, :3000] = math.nan, math.nan
    assert torch.equal(decoding.attend_near(query, key, value, steep, known_norms), before)
    key[:, :, 5990] = math.nan
    assert bool(decoding.attend_near(query, key, value, steep, known_norms).isnan().all())


def test_keys_read_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = draw(1, 16384, batch=1, kv_heads=8)
    read = []

    def counting(spec, q, k, v, backend):
        read.append(k.shape[1] * k.shape[2])
        return attend(spec, q, k, v, backend)

    monkeypatch.setattr(decoding, "attend", counting)
    monkeypatch.setattr(decoding, "has_kernel", lambda *tensors: False)
    known_norms = Norms.of(key, value)
    decoding.attend_near(query, key, value, SLOPES, known_norms)
    spec = make_spec(query, key, value, SLOPES)
    reach = bounds.bounds(spec, query, key, value, tile_norms=known_norms.tile_norms(key, value)).left.amax(-1)
    most = (2 * reach).clamp(min=near_keys.FEW)  # rounded up to a power of two; short ranges are padded
    assert int(reach.sum()) <= sum(read) <= int(most.sum())
    assert sum(read) < 0.25 * 8 * 16384
    read.clear()
    decoding.attend_near(query, key, value, SLOPES * 0, known_norms)
    assert sum(read) == 8 * 16384


def test_gates_that_are_no_gates_are_refused() -> None:
    query, key, value = draw(1, 90, batch=1, kv_heads=8)
    gates = torch.zeros(1, 8, 90)
    gates[0, 3, 40] = math.nan
    with pytest.raises(ValueError, match="log_fgate must be at most 0"):
        decoding.attend_near(query, key, value, SLOPES, Norms.of(key, value), log_fgate=gates)


def gates_of(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Gates that let far keys fade, slowly or quickly; some are fully open, some almost closed."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.nn.functional.logsigmoid(torch.randn(shape, generator=generator) + 6 * (seed % 7) / 6)
    kind = torch.rand(shape, generator=generator)
    return gates.masked_fill(kind < 0.1, 0.0).masked_fill(kind > 0.999, -60.0)


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (200, 400))])
@pytest.mark.parametrize("kind", ["tiles", "padding", "gates"])
def test_dropped_mass_never_exceeds_the_tolerance(kind: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_keys, "FEW", 32)
    skipping = outliers = 0
    for seed in range(start, start + 200):
        attack, rng = random_attack(seed), random.Random(seed)
        (query, key, value, slopes), kwargs = attack.inputs()
        length, count = key.shape[2], min(1 + seed % 16, query.shape[2], key.shape[2])
        query, run, gates = query[:, :, -count:], (0, length), None
        if kind == "padding":
            run = (low := rng.randrange(length // 2 + 1), length if seed % 3 else rng.randrange(low, length) + 1)
        if kind == "gates":
            slopes = slopes * (0.0, 0.01, -0.01)[seed % 3]
            gates = gates_of(seed, (1, query.shape[1], length))
        spec = make_spec(query, key, value, slopes, window=kwargs.get("window"), tolerance=attack.tolerance)
        norms, distance = Norms.of(key, value), distances(count, length, spec.query_offset, None)
        if kind == "tiles":
            read = certified_keys(
                spec, bounds.bounds(spec, query, key, value, tile_norms=norms.tile_norms(key, value)), distance
            )
        else:
            read = torch.zeros(1, spec.num_heads, 1, length, dtype=torch.bool)
            (row,) = near_keys.needed_keys(spec, query, key, value, norms, [run], gates)
            for h in range(spec.num_heads):
                spans = row.spans(row.needed[h // spec.group], [h // spec.group])
                outliers += len(spans) > 1
                for first, behind in spans:
                    assert run[0] <= first <= behind <= run[1]
                    read[:, h, :, first:behind] = True
        seen = visible(spec, distance).expand(1, spec.num_heads, -1, -1) & masked([run], length)
        scores = spec.scale * query.double() @ key.double().repeat_interleave(spec.group, 1).mT
        scores = scores - spec.slopes.double().reshape(-1, 1, 1) * distance.abs()
        scores = scores if gates is None else scores - gates.double().cumsum(-1)[:, :, None]
        weight = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        assert float((weight * (seen & ~read)).sum(-1).max()) <= attack.tolerance, (attack, run)
        skipping += int((seen & ~read).any())
    assert skipping >= 20, "an attack on nothing: too few draws skip a key"
    assert outliers >= (kind == "gates"), "no draw has an outlier tile"


@pytest.mark.parametrize("queries", [1, 7, 16])
@pytest.mark.parametrize("case", ["noise", "sink", "giant far value"])
def test_gates_give_what_full_attention_gives(case: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_keys, "FEW", 32)
    query, key, value = draw(queries, 1500)
    spoiled(case, key, value)
    for m in (SLOPES, SLOPES * 0, -0.01 * SLOPES):
        gates = torch.cat([gates_of(seed, (2, 2, 1500)) for seed in (1, 2, 4, 6)], dim=1)
        assert_as_exact_as_dense(query, key, value, m, log_fgate=gates)


def test_keys_that_gates_let_fade_are_not_read() -> None:
    query, key, value = draw(1, 6000)
    gates = torch.full((2, 8, 6000), -0.05)
    known_norms = Norms.of(key, value)
    before = decoding.attend_near(query, key, value, SLOPES * 0, known_norms, log_fgate=gates)
    key[:, :, :4000], value[:, :, :4000] = math.nan, math.nan
    assert torch.equal(decoding.attend_near(query, key, value, SLOPES * 0, known_norms, log_fgate=gates), before)
    open_gates = gates * 0
    assert bool(decoding.attend_near(query, key, value, SLOPES * 0, known_norms, log_fgate=open_gates).isnan().all())


def test_heads_that_read_much_are_called_with_their_neighbors_only() -> None:
    assert near_keys.buckets([2000, 5000, 1, 3, 6000, 7000, 5000]) == [
        (3, [2, 3]),
        (2000, [0]),
        (5000, [1]),
        (7000, [4, 5, 6]),
    ]


def test_lengths_grow_shrink_and_move_with_the_cache() -> None:
    _, key, value = draw(1, 400)
    whole = Norms.of(key, value)
    assert whole.covered == 384
    grown = Norms.of(key[:, :, :70], value[:, :, :70])
    for length in (71, 127, 128, 300, 400):
        grown = grown.extended(key[:, :, :length], value[:, :, :length])
        assert grown.covered == length // 64 * 64
    assert torch.equal(grown.keys, whole.keys) and torch.equal(grown.values, whole.values)  # noqa: PT018
    assert whole.cropped(200).covered == 192
    rows = torch.tensor([1, 1, 0])
    assert torch.equal(whole.reordered(rows).keys, Norms.of(key[rows], value[rows]).keys)
    keys, _ = whole.tile_norms(key, value)
    assert keys.shape[2] == 7
    norms = torch.nn.functional.pad(key.double().norm(dim=-1), (0, 48)).unflatten(2, (7, 64)).amax(-1)
    assert bool((keys >= norms).all())
    assert bool((keys <= norms * 1.001).all())


# Of 2,600 positions: padding on the left, on the right (finished, or the newest masked), on both sides, everywhere, few
# visible keys; and a row without any.
RUNS = [(0, 2600), (37, 2600), (1500, 2600), (0, 2599), (5, 2590), (64, 1900), (700, 760), (2597, 2600), (0, 0)]


def masked(runs: list[tuple[int, int]], keys: int) -> torch.Tensor:
    at = torch.arange(keys)
    return torch.stack([(at >= start) & (at < stop) for start, stop in runs])


def test_runs_are_read_from_a_mask_without_holes() -> None:
    assert near_keys.visible_runs(masked(RUNS, 2600)) == RUNS
    for holes in ([False, True, False, True], [True, False, False, True]):
        assert near_keys.visible_runs(torch.tensor([[True] * 4, holes])) is None
    assert near_keys.visible_runs(masked(RUNS, 2600)[:, None, None].expand(-1, 1, 3, -1)[:, 0, 2]) == RUNS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", ["noise", "sinks", "giant far value", "hidden"])
@pytest.mark.parametrize(("queries", "window"), [(1, None), (7, None), (16, 300)])
def test_padded_rows_get_what_full_attention_gives_under_a_mask(case: str, queries: int, window: int | None) -> None:
    query, key, value = draw(queries, 2600, batch=len(RUNS))
    mask = masked(RUNS, 2600)
    if case == "hidden":  # may have any value
        for x in (key, value):
            x.masked_fill_(~mask[:, None, :, None], math.nan)
    elif case == "sinks":
        key[:, :, ::700] *= 30
    else:
        spoiled(case, key, value)
    got = assert_as_exact_as_dense(query, key, value, visible=RUNS, window=window)
    assert bool((got[-1] == 0).all())


def test_queries_that_see_no_key_return_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of padded positions, or with all visible keys outside the window; merged with outlier tiles."""
    monkeypatch.setattr(decoding, "has_kernel", lambda *tensors: False)
    query, key, value = draw(5, 2600, batch=2)
    key[:, :, 1000] *= 30
    runs = [(900, 2600), (2597, 2600)]
    for options in ({}, {"window": 2}):
        got = decoding.attend_near(query, key, value, SLOPES, Norms.of(key, value), visible=runs, **options)
        assert bool(got.isfinite().all())
        assert bool((got[1, :, :2] == 0).all())
        assert bool((got[0] != 0).all())
    options = {"visible": [(0, 2598), (10, 1500)], "window": 4}
    hidden_at_the_end = decoding.attend_near(query, key, value, SLOPES, Norms.of(key, value), **options)
    assert bool(hidden_at_the_end.isfinite().all())
    assert bool((hidden_at_the_end[1] == 0).all())


def test_a_padded_row_reads_as_much_as_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own reach, however rows differ; also a finished one, from its last visible key."""
    query, key, value = draw(1, 16384, batch=1, kv_heads=8)
    norms = Norms.of(key, value)
    spec = make_spec(query, key, value, SLOPES)
    (alone,) = near_keys.needed_keys(spec, query, key, value, norms, [(0, 16384)])
    # The same tokens after, before and between padding, which has far larger keys and values.
    runs, shifts = [(3000, 19384), (0, 16384), (70, 16454)], [3000, 0, 70]
    padded = [torch.full((3, 8, 19384, 16), 1e3) for _ in range(2)]
    for b, shift in enumerate(shifts):
        for x, own in zip(padded, (key, value), strict=True):
            x[b, :, shift : shift + 16384] = own[0]
    many = query.expand(3, -1, -1, -1)
    spec = make_spec(many, *padded, SLOPES)
    rows = near_keys.needed_keys(spec, many, *padded, Norms.of(*padded), runs)
    assert sum(alone.needed) < 0.25 * 8 * 16384
    for row in rows:  # up to tiles, which group other keys
        assert sum(row.needed) <= 1.02 * sum(alone.needed)
        assert {tile for tiles in row.outlier_tiles for tile in tiles} == {-1}
