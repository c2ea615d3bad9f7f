"""Forward: a block of queries attends to the tiles of its certified band, with online softmax where it needs it.

The band is known before the loop starts, so the loop over tiles that every query sees in full is a `tl.range` that Triton
pipelines. The loop over the tiles of the diagonal is one too, if all their numbers are known to be finite. A third loop visits
the partial tiles and the outlier tiles (those with the largest norms, see `certificate/bounds.py`).

The diagonal comes first, and full tiles from the nearest to the farthest, so that sums are early close to the final ones. A
tile's part of a query's sum so far bounds its share of the softmax. The farthest tile with a share that matters ends the band
that backward visits (`widened`), by the key rule of `certificate/constants.py`.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Band, Head, Queries
from alibi_attn.attention.backends.fused.kernels.bands import (
    band_of,
    full_count,
    full_tile,
    outlier_count,
    outlier_tile,
    outward_full,
    outward_partial,
    partial_tile,
)
from alibi_attn.attention.backends.fused.kernels.certificate import KEY_RULE_TOKENS
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_weights, numbers_of
from alibi_attn.attention.backends.fused.kernels.positions import (
    biased_lse_before_move,
    distance_moved,
    load_first_key,
    load_offset,
    load_window,
    lse_before_move,
    table_of,
)
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    OUTLIERS,
    TILE,
    all_finite,
    base_of,
    bias_for,
    kept_lse,
    linear_bias,
    load_rows,
    load_segments,
    load_slope,
    load_tile,
    lse_rows,
    no_maximum,
    normalized,
    of_head,
    padded,
    pair_rows,
    partial_scores,
    power,
    raised,
    store_rows,
)
from alibi_attn.attention.certificate import constants

NO_TILE = tl.constexpr(constants.NO_TILE)


@triton.jit
def attend_full(tile, queries, head, m_i, l_i, acc, K, V, S, C, DIAGONAL: tl.constexpr, FIXED: tl.constexpr):
    """(m_i, l_i, acc, part) after a tile that every query sees in full, where the bias is one number per key and one per query;
    `part` is its part of l_i.

    A score costs one instruction more than in attention without a bias, and about two more with key biases. On the DIAGONAL
    of causal attention, which has the nearest keys, the distance is computed first, exactly. If it is FIXED, m_i stays, because
    no score exceeds it by more than fp32 holds.
    """
    slope, near = linear_bias(tile, queries.start, head, C.BN, C.CAUSAL)
    j = tile * C.BN + tl.arange(0, C.BN)
    # Load the keys.
    if DIAGONAL:
        k = load_rows(K, tile * C.BN, j < S, C.BN, C.D)  # [BN, DP]
    else:
        k = load_tile(K, tile, C.BN, C.D)
    # Scores, [BM, BN], and their bias.
    products = tl.dot(queries.q, k.T, input_precision=C.PRECISION) * head.scale
    column, row = (j - near).to(tl.float32), (queries.position - near).to(tl.float32)  # [BN], [BM]
    base = None
    if head.table is not None:
        scores = products + tl.load(head.table + (queries.position[:, None] - j[None, :]))
        row = tl.zeros_like(row)
    elif DIAGONAL:
        distance = row[:, None] - tl.where(j < S, column, float("inf"))[None, :]
        seen = distance >= 0.0
        if head.window is not None:
            seen = seen & (distance < head.window)
        scores = tl.where(seen, products - slope * distance, float("-inf"))
        row = tl.zeros_like(row)
    else:
        column = slope * column
        if head.bias is not None:
            column += tl.load(head.bias.rest + j)
        scores = products + column[None, :]
        row = slope * row
        if head.bias is not None:
            base = base_of(head.bias, tile, C.BN), 0.0
    # Online softmax: a new maximum shrinks the sums.
    if FIXED:
        known = m_i[0]
    else:
        m_i, known, shrink = raised(m_i, tl.max(scores, 1) - row, base, head.table)
        l_i, acc = l_i * shrink, acc * shrink[:, None]
    p = power(scores - (known + row)[:, None], head.table)  # [BM, BN]
    part = tl.sum(p, 1)
    l_i += part
    if head.dropout is not None:
        p = p * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    # Values.
    if DIAGONAL:
        v = load_rows(V, tile * C.BN, j < S, C.BN, C.D)
    else:
        v = load_tile(V, tile, C.BN, C.D)
    return m_i, l_i, tl.dot(p.to(v.dtype), v, acc, input_precision=C.PRECISION), part


@triton.jit
def attend_partial(tile, queries, head, m_i, l_i, acc, K, V, masks, S, C):
    """The same after a tile in which some keys are hidden from some queries.

    A value with NaN or inf is zeroed (0·NaN is NaN), and the queries that see it get NaN.
    """
    # Keys, masks, scores and their bias.
    scores, seen, _k, here, origin = partial_scores(tile, queries, head, K, masks, S, None, C)
    base = None
    if head.bias is not None:
        base = origin
    scores = tl.where(seen, scores, float("-inf"))  # [BM, BN]
    # Online softmax.
    m_i, known, shrink = raised(m_i, tl.max(scores, 1), base, head.table)
    p = power(scores - known[:, None], head.table)
    # Values.
    v = load_rows(V, tile * C.BN, here, C.BN, C.D)  # [BN, DP]
    sound = all_finite(v)
    v = tl.where(sound[:, None], v, 0.0).to(v.dtype)
    hurt = tl.max(tl.where(scores == float("-inf"), 0.0, tl.where(sound, 0.0, 1.0)[None, :]), 1)
    part = tl.sum(p, 1)
    l_i = l_i * shrink + part + tl.where(hurt > 0.0, float("nan"), 0.0)
    if head.dropout is not None:
        p = p * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    return m_i, l_i, tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=C.PRECISION), part


@triton.jit
def widened(ends, tile, part, whole, rule, start, C):
    """(first, last): for every query the outermost tiles that matter, after `tile`, which adds `part` to the sum of weights and
    makes it `whole`.

    `rule` is a pair (allowance, tokens), and a tile d tokens from the block matters unless its share is below allowance /
    (d + tokens); NaN matters. None = nothing is measured.
    """
    first, last = ends
    if rule is not None:
        away = start - (tile * C.BN + C.BN - 1)
        if not C.CAUSAL:
            away = tl.maximum(away, tile * C.BN - (start + C.BM - 1))
        tokens = tl.maximum(away, 0).to(tl.float32) + rule[1]
        matters = ~(part * tokens < rule[0] * whole)
        first = tl.where(matters, tl.minimum(first, tile), first)
        if not C.CAUSAL:
            last = tl.where(matters, tl.maximum(last, tile), last)
    return first, last  # [BM]


@triton.jit
def write_measured(MEASURED, ends, sees, start, last, count, low, high, C):
    """Writes `measured` of a plan, for every TILE of BM queries, or the first `count` of these: the band that backward visits,
    and [low, high), which the masks allow.

    `sees`: which queries see a key; `last`: the end of the band of all of them, in tiles of BN keys.
    """
    of = tl.arange(0, C.BM) // TILE
    for part in tl.static_range(C.BM // TILE + 1):  # one more, of a block that may follow the last one
        mine = sees & (of == part)
        first = tl.min(tl.where(mine, ends[0], NO_TILE), 0)
        if C.CAUSAL:
            end = tl.minimum(last, tl.cdiv(tl.maximum(start + (part + 1) * TILE, 0), C.BN))
        else:
            end = tl.minimum(last, tl.max(tl.where(mine, ends[1] + 1, 0), 0))
        some, at = first < end, MEASURED + 4 * part
        tl.store(at, tl.where(some, first // (TILE // C.BN), NO_TILE), mask=part < count)
        tl.store(at + 1, tl.where(some, tl.cdiv(end, TILE // C.BN), 0), mask=part < count)
        tl.store(at + 2, low, mask=part < count)
        tl.store(at + 3, high, mask=part < count)


@triton.jit
def until_finite(norms, of_head, heads, high, last, S, C):
    """`last` if the norms show that every key and value is finite in the few tiles from `high` on; else `high`."""
    tile = high * C.BN // TILE + tl.arange(0, 4)
    tiles = tl.cdiv(S, TILE)
    at = norms + of_head * tiles + tile
    there = tile < tl.cdiv(last * C.BN, TILE)
    largest = tl.load(at, mask=there, other=0.0) + tl.load(at + heads * tiles, mask=there, other=0.0)
    return tl.where(tl.max(largest, 0) < float("inf"), tl.maximum(last, high), high)


@triton.jit
def online_count(ONLINE, n, band, start, T, C):
    """How many full tiles of a causal band, from the nearest on, need online softmax in block n, given a head's ONLINE."""
    at = n * C.BM // TILE
    distance = tl.load(ONLINE + at)
    for part in tl.static_range(1, C.BM // TILE):
        there = at + part < tl.cdiv(T, TILE)
        distance = tl.maximum(distance, tl.load(ONLINE + at + part, mask=there, other=0))
    nearer = tl.cdiv(tl.maximum(distance - 1 - (start - band.high * C.BN), 0), C.BN)
    return tl.minimum(nearer, full_count(band))


@triton.jit
def forward_kernel(Q, K, V, OUT, LSE, GIVEN_LSE, call, visited, NORMS, ORDER, MEASURED, ALLOWANCE, ONLINE, C):
    """Program: one block of BM queries of one head; the heaviest heads, and in them the last blocks, come first.

    Args:
        Q, K, V, OUT: Rows. LSE: [B, H, T] fp32, see `lse_rows`. A block of the plan has ROWS queries.
        ORDER: [B·H] int32, the heaviest head first; None = as they are.
        GIVEN_LSE: [B, H, T] fp32, or with a key bias fp64, see `lse_before_move`; None = not wanted.
        NORMS: [2, B, K, tiles] fp32, the largest norms of keys and of values; None if they are unknown, or with a key bias.
        MEASURED: `measured` of Plan, with `row` numbers per sequence, if TILE divides BM; None = not wanted.
        ALLOWANCE, ONLINE: `allowance` and `online` of Certificate; ONLINE=None: online softmax everywhere.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    programs = tl.cdiv(T, C.BM)
    bh = (tl.program_id(0) // programs).to(tl.int64)
    if ORDER is not None:
        bh = tl.load(ORDER + bh).to(tl.int64)
    n = programs - 1 - tl.program_id(0) % programs
    b, h = bh // H, (bh % H).to(tl.int32)
    kv = (h // G).to(tl.int64)
    Q, K, V, OUT = of_head(Q, b, h), of_head(K, b, kv), of_head(V, b, kv), of_head(OUT, b, h)
    right = load_slope(call.right_slopes, b, h)
    dropout = head_dropout(call, b, h)
    numbers = numbers_of(call, b)
    window = load_window(call, b)
    bias = bias_for(call.key_bias, bh, bh * tl.cdiv(T, C.ROWS) + n * C.BM // C.ROWS, tl.cdiv(S, TILE), S)
    head = Head(bh, load_slope(call.slopes, b, h), right, call.scale * LOG2E, window, dropout, bias, numbers)

    rows = tl.arange(0, C.BM)
    i = n * C.BM + rows
    segments = load_segments(call.masks.query_segments, b, i, i < T, T)
    start = n * C.BM + load_offset(call.query_offset, b, T, S)
    q = load_rows(Q, n * C.BM, i < T, C.BM, C.D)
    first_key = load_first_key(call, bh, i, i < T)
    queries = Queries(q, i, start + rows, start, segments, b, first_key)
    m_i = no_maximum(C.BM)
    l_i = tl.zeros([C.BM], tl.float32)
    acc = tl.zeros([C.BM, padded(C.D)], tl.float32)

    blocks = tl.cdiv(T, C.ROWS)
    band = band_of(visited, b, h, n, start, head, T, S, C)
    # The nearest tile always stays in the band.
    nearest, rule = band.last - 1, None
    if not C.CAUSAL:
        nearest = tl.minimum(nearest, tl.maximum(start, 0) // C.BN)
    nearest = tl.maximum(nearest, band.first)
    ends = tl.zeros([C.BM], tl.int32) + nearest, tl.zeros([C.BM], tl.int32) + nearest
    if MEASURED is not None:
        allowed = ALLOWANCE + bh * tl.cdiv(T, TILE) + n * C.BM // TILE
        least = tl.load(allowed)
        for other in tl.static_range(1, C.BM // TILE):
            more = n * C.BM // TILE + other < tl.cdiv(T, TILE)
            least = tl.minimum(least, tl.load(allowed + other, mask=more, other=float("inf")))
        # Backward visits the tiles of TILE queries, and the last of these are BM − TILE tokens farther away than the first. The
        # parts of a tile of TILE keys share its allowance.
        moved = tl.abs(distance_moved(call.query_offset, b, T, S)).to(tl.float32)
        rule = least * (0.5 * C.BN / TILE), moved + (KEY_RULE_TOKENS + C.BM - TILE)
    rest = band
    if NORMS is not None:
        heads = call.B * (H // G)
        diagonal = until_finite(NORMS, b * (H // G) + kv, heads, band.high, band.last, S, C)
        for tile in tl.range(band.high, diagonal):
            m_i, l_i, acc, part = attend_full(
                tile, queries, head, m_i, l_i, acc, K, V, S, C, DIAGONAL=True, FIXED=False
            )
            ends = widened(ends, tile, part, l_i, rule, start, C)
        rest = Band(band.first, band.last, band.low, diagonal, diagonal, diagonal)
    outliers = visited.beside + b * visited.row + (h * blocks + n * C.BM // C.ROWS) * OUTLIERS
    partial = tl.maximum(rest.last - rest.first, 0) - full_count(rest)
    for x in tl.range(0, partial + outlier_count(outliers) * (TILE // C.BN), num_stages=1):
        tile = tl.where(
            x < partial,
            outward_partial(x, partial, rest, C.CAUSAL),
            outlier_tile(tl.maximum(x - partial, 0), outliers, C.BN),
        )
        m_i, l_i, acc, part = attend_partial(tile, queries, head, m_i, l_i, acc, K, V, call.masks, S, C)
        # Outlier tiles are always visited.
        ends = widened(ends, tl.where(x < partial, tile, nearest), part, l_i, rule, start, C)
    online = full_count(band)
    if ONLINE is not None:
        online = online_count(ONLINE + bh * tl.cdiv(T, TILE), n, band, start, T, C)
    for FIXED in tl.static_range(1 if ONLINE is None else 2):
        for x in tl.range(online if FIXED else 0, full_count(band) if FIXED else online):
            tile = outward_full(x, band, C.CAUSAL)
            m_i, l_i, acc, part = attend_full(
                tile, queries, head, m_i, l_i, acc, K, V, S, C, DIAGONAL=False, FIXED=FIXED
            )
            ends = widened(ends, tile, part, l_i, rule, start, C)
    if MEASURED is not None:
        parts, at = blocks * (C.ROWS // TILE), n * C.BM // TILE
        count = tl.where(n == programs - 1, parts - at, C.BM // TILE)
        block = b * visited.row + (h * blocks + n * C.BM // C.ROWS) * 4
        low, high = tl.load(visited.bands + block + 2), tl.load(visited.bands + block + 3)
        at = MEASURED + b * visited.row + (h * parts + at) * 4
        write_measured(at, ends, (i < T) & (l_i != 0.0), start, band.last, count, low, high, C)

    store_rows(OUT, n * C.BM, normalized(acc, l_i), i < T, C.BM, C.D)
    LSE = lse_rows(LSE, bh, b, H, T, call.key_bias)
    lse = kept_lse(m_i[0], l_i, call.key_bias)
    tl.store(LSE + i, lse, mask=i < T)
    if GIVEN_LSE is not None:
        if call.key_bias is None:
            given = lse_before_move(lse, call, b, h)
        else:
            given = biased_lse_before_move(lse, m_i[1], m_i[2], call, GIVEN_LSE, b, bh, i, i < T)
        tl.store(GIVEN_LSE + bh * T + i, given, mask=i < T)
    if call.key_bias is not None:
        high, low = pair_rows(LSE, H, T)
        tl.store(high + i, m_i[1], mask=i < T)
        tl.store(low + i, m_i[2], mask=i < T)


@triton.jit
def table_forward_kernel(Q, K, V, OUT, LSE, GIVEN_LSE, call, visited, C):
    """Forward with a table. It gives no bound for far keys, so all tiles are visited that the masks allow.

    Program: (one block of BM queries of one head, part of its keys); the last blocks of a head come first.

    Args:
        OUT, LSE: Rows and [B, H, T] fp32; of every part, one after another, if the keys are split.
        GIVEN_LSE: a copy of LSE; None = not wanted.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    blocks = tl.cdiv(T, C.BM)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    n = blocks - 1 - tl.program_id(0) % blocks
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // H, (bh % H).to(tl.int32)
    K, V = of_head(K, b, (h // G).to(tl.int64)), of_head(V, b, (h // G).to(tl.int64))
    dropout = head_dropout(call, b, h)
    window = load_window(call, b)
    head = Head(bh, 0.0, None, call.scale, window, dropout, None, None, table_of(call, b, h))

    rows = tl.arange(0, C.BM)
    i = n * C.BM + rows
    segments = load_segments(call.masks.query_segments, b, i, i < T, T)
    start = n * C.BM + load_offset(call.query_offset, b, T, S)
    # The table has no numbers for queries past the last one.
    position = tl.minimum(start + rows, start + (T - 1 - n * C.BM))
    queries = Queries(load_rows(of_head(Q, b, h), n * C.BM, i < T, C.BM, C.D), i, position, start, segments, b, None)
    m_i = no_maximum(C.BM)
    l_i = tl.zeros([C.BM], tl.float32)
    acc = tl.zeros([C.BM, padded(C.D)], tl.float32)

    band = band_of(visited, b, h, n, start, head, T, S, C)
    for x in tl.range(part, full_count(band), parts):
        tile = full_tile(x, band, C.CAUSAL)
        m_i, l_i, acc, _part = attend_full(tile, queries, head, m_i, l_i, acc, K, V, S, C, DIAGONAL=False, FIXED=False)
    for x in tl.range(part, tl.maximum(band.last - band.first, 0) - full_count(band), parts, num_stages=1):
        tile = partial_tile(x, band, C.CAUSAL)
        m_i, l_i, acc, _part = attend_partial(tile, queries, head, m_i, l_i, acc, K, V, call.masks, S, C)

    sequence = part.to(tl.int64) * call.B + b
    store_rows(of_head(OUT, sequence, h), n * C.BM, normalized(acc, l_i), i < T, C.BM, C.D)
    lse = m_i[0] + tl.log2(l_i) / LOG2E
    tl.store(LSE + (sequence * H + h) * T + i, lse, mask=i < T)
    if GIVEN_LSE is not None:
        tl.store(GIVEN_LSE + bh * T + i, lse, mask=i < T)
