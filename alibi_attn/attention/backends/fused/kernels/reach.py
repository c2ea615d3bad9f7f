"""The certificate's quotient, and the plan: how far each block of queries must look, and from there the tiles that it visits.

`reach_kernel` bounds the log-sum-exp of a block's queries from below by the keys around it, and divides. With biased keys it adds
up, from the far end, the most that each tile can weigh for a block, given its longest key; there are no outlier tiles then.
The last program of a head continues with the head's plan (`plan.py`), and the last of all with the order of the heads: every
program counts itself after its results are in memory, so that whichever counts last sees those of all others. No launch lies
between the steps.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head
from alibi_attn.attention.backends.fused.kernels.certificate import (
    CERTAIN,
    CHOICES,
    FIXED_DIGITS,
    FIXED_HALF_DIGITS,
    KEPT,
    KEY_RULE_TOKENS,
    NATS,
    PRODUCTS,
    ROUNDING,
    UNIT,
    UNLIMITED_REACH,
    VALUE_RATIO,
    norm_bound,
    outliers_in,
    survey,
)
from alibi_attn.attention.backends.fused.kernels.plan import octave, order_heads, plan_group, plan_head
from alibi_attn.attention.backends.fused.kernels.positions import (
    LN2,
    distance_moved,
    load_first_key,
    load_offset,
    load_window,
)
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    OUTLIERS,
    TILE,
    bias_for,
    biased_scores,
    load_rows,
    load_segments,
    load_slope,
    natural_lse,
    of_head,
    padded,
    raised_maximum,
    shown_keys,
)


@triton.jit
def is_last(counter, total):
    """Counts this program, and returns whether it is the last of `total`. What all of them stored before can then be loaded."""
    tl.debug_barrier()  # all threads of this program have stored
    return tl.atomic_add(counter, 1, sem="acq_rel") == total - 1


@triton.jit
def load_nearest(X, first, count, D: tl.constexpr):
    """TILE rows from row `first` on; for those outside [0, count), the nearest row inside. Zeros beyond D."""
    row = tl.minimum(tl.maximum(first + tl.arange(0, TILE), 0), count - 1) - first
    column = tl.arange(0, padded(D))
    at = X.pointer + tl.cast(first, tl.int64) * X.row + (row[:, None] * X.row + column[None, :])
    if padded(D) == D:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(column < D)[None, :], other=0.0)
    return rows  # [TILE, DP]


@triton.jit
def tiles_of_little(norms, sums, bias, bk, tiles, walk, weights, rule, WIDTH: tl.constexpr):
    """How many tiles of a walk together weigh at most 2^(−worst).

    Everything is in log2 units.

    Args:
        bias: the BlockBias.
        walk: (from_tile, count, step, origin): `count` tiles, in the order `from_tile`, `from_tile` + `step` …; a tile's sum is
            relative to the position `origin`, from which it loses slope·step·(origin − the first key).
        weights: (slope, rate, worst); `rate` times a norm bounds a score.
        rule: a pair (factor, tokens), and each tile d tokens from `origin` weighs at most 2^(−worst) / (factor·(d + tokens)) too;
            None = no such rule.
    """
    from_tile, count, step, origin = walk
    slope, rate, worst = weights
    skippable, total = count, 0.0
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        there = place < count
        tile = from_tile + place * step
        norm = tl.load(norms + bk * tiles + tile, mask=there, other=0.0)
        inner = tl.load(sums + tile, mask=there, other=float("-inf"))
        some, base = inner > float("-inf"), tl.load(bias.bases + tile, mask=there, other=0.0) - bias.reference
        away = slope * ((origin - tile * TILE) * step).to(tl.float32)
        inner = tl.where(some, inner, 0.0)
        bound = rate * norm
        # Each of these numbers is rounded, and their sum.
        rounded = tl.abs(inner) + tl.abs(base) + tl.abs(away) + bound + tl.abs(worst) + tl.abs(slope) * TILE
        weight = ((inner + base) - away) + bound + worst + rounded * (ROUNDING - 1.0)
        weight = tl.where(weight < 64.0, weight, 64.0)  # also if it is NaN
        weight = tl.where(some, tl.exp2(weight), 0.0)
        matters = total + tl.cumsum(weight, 0) > CERTAIN
        if rule is not None:
            tokens = ((origin - tile * TILE) * step).to(tl.float32) + rule[1]
            matters = matters | (weight * (rule[0] * tokens) > CERTAIN)
        skippable = tl.minimum(skippable, tl.min(tl.where(there & matters, place, count), 0))
        total += tl.sum(weight, 0)
    return skippable


@triton.jit
def reach_of_key_rule(nats, slope, tokens, near):
    """A distance r from which on exp(nats − slope·r)·(r + tokens) ≤ 1; `near` is a guess of r, and `slope` positive.

    ln(r + tokens) lies below its tangent at every point, so r·slope ≥ nats + (the tangent) is enough. Where the tangent rises
    less than slope·r, that also holds for every larger distance.
    """
    at = tl.maximum(near + tokens, 2.0 / slope)
    return (nats + tl.log2(at) / LOG2E - 1.0 + tokens / at) / (slope - 1.0 / at) * ROUNDING + 1.0


@triton.jit
def online_reach(excess, slope, of_values, S, HALF: tl.constexpr):
    """`online` of Certificate for one block; see step 13 of docs/certificate.md.

    At a distance, a score exceeds those of a query's nearest keys by `excess` − slope·distance nats at most; `of_values` is the
    largest norm of a value.
    """
    digits = FIXED_DIGITS - tl.log2(tl.cast(S, tl.float32)) - tl.maximum(tl.log2(of_values), 0.0)
    if HALF:
        digits = tl.minimum(digits, FIXED_HALF_DIGITS)
    more = excess - digits / LOG2E
    reach = tl.where(more <= 0.0, 0.0, more / tl.abs(slope) * ROUNDING + 1.0)
    reach = tl.where(slope >= 0.0, reach, UNLIMITED_REACH)
    return tl.where(reach < UNLIMITED_REACH, reach, UNLIMITED_REACH).to(tl.int32)


@triton.jit
def reach_kernel(
    Q,
    K,
    call,
    norms,
    surveyed,
    FIRST_SEEN,
    ALLOWED,
    certificate,
    plan,
    nats_of_tolerance,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLAN_WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_RULE: tl.constexpr,
):
    """Program: one block of TILE queries of one head; writes the certificate, then `plan`.

    With a key bias a reach is a distance from the block's nearest query, and is the same for all choices.

    Args:
        surveyed: the Survey; None = each program makes its own.
        FIRST_SEEN: [B] int32: the first key that the masks leave visible; None if no key is hidden. With a key bias [B, H].
        ALLOWED: see `plan_head`.
        ROWS: queries of a block of the plan. BIAS_ROWS: queries that share a reference, see KeyBias.
        HIDDEN: a key mask or bias may hide keys.
        SHARED: the heads of a group share their plan; there are at most TILE queries.
        KEY_RULE: a query leaves out no key, and no tile with a key bias, of which it holds more than the key rule of
            `certificate/constants.py` allows; for calls with gradients.
    """
    B, H, G, T, S, masks = call.B, call.H, call.G, call.T, call.S, call.masks
    blocks, tiles, kv_heads = tl.cdiv(T, TILE), tl.cdiv(S, TILE), H // G
    n, which = tl.program_id(0) % blocks, tl.program_id(0) // blocks  # in 32 bits: divisions of 64 take long
    bh, b, h = which.to(tl.int64), (which // H).to(tl.int64), which % H
    bk = b * kv_heads + h // G
    x = tl.arange(0, TILE)
    i = n * TILE + x
    start = n * TILE + load_offset(call.query_offset, b, T, S)
    position = start + x
    right = load_slope(call.right_slopes, b, h)
    window = load_window(call, b)
    head = Head(bh, load_slope(call.slopes, b, h), right, call.scale * LOG2E, window, None)
    m = tl.load(call.slopes.pointer + b * call.slopes.batch + h)
    K = of_head(K, b, (h // G).to(tl.int64))
    q = load_nearest(of_head(Q, b, h), n * TILE, T, D)  # [TILE, DP]; rows from T on count for nothing
    segments = load_segments(masks.query_segments, b, i, i < T, T)
    first_key = load_first_key(call, bh, i, i < T)

    m_i = tl.full([TILE], float("-inf"), tl.float32)
    l_i = tl.zeros([TILE], tl.float32)
    nearest = m_i  # the largest score of keys from `start` on, if no tile that the block sees in full has one of them
    # The keys at the block's positions, the same number before it, and after it if visible. Queries may lie outside the
    # keys.
    bias = bias_for(call.key_bias, bh, bh * tl.cdiv(T, BIAS_ROWS) + n * TILE // BIAS_ROWS, tiles, S)
    last = tl.maximum(tl.minimum(start, S - TILE), 0)
    every, heads, choice = (bh * 0 + B) * kv_heads * tiles, (bh * 0 + B) * H * blocks, tl.arange(0, CHOICES)
    to_left = tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE
    to_right = tl.minimum(tl.maximum(start, 0), S - 1) // TILE
    if surveyed is None:
        outliers, to_left, to_right, most, least, seen_tile = survey(
            norms, bk, every, tiles, to_left, to_right, to_left, WIDTH, not CAUSAL
        )
    else:
        at = bk * tiles + to_left
        seen_tile = tl.load(surveyed.latest + at)
        if not CAUSAL:
            to_right = tl.load(surveyed.longest + (CHOICES + choice) * every + bk * tiles + to_right)
        to_left = tl.load(surveyed.longest + choice * every + at)
        outliers = tl.load(surveyed.outliers + bk * OUTLIERS + tl.arange(0, OUTLIERS))
        most, least = tl.load(surveyed.of_values + bk), tl.load(surveyed.of_values + B * kv_heads + bk)
    if HIDDEN:
        # After padding, the keys before it.
        last = tl.where(seen_tile < 0, last, tl.minimum(last, seen_tile * TILE))
    # The largest norm of the nearest values, which are always visited; if there are none, of some value.
    kept = tl.zeros([TILE], tl.float32) + least
    for back in tl.static_range(KEPT):
        j = position - back
        here = (j >= 0) & (j < S)
        if window is not None:
            here = here & (position - j < window)
        if segments is not None:
            here = here & (segments == tl.load(masks.key_segments + b * S + j, mask=here, other=0))
        if first_key is not None:
            here = here & (j >= first_key)
        if bias is not None:
            here = here & (tl.load(bias.rest + j, mask=here, other=float("-inf")) > float("-inf"))
        kept = tl.maximum(kept, tl.load(norms.each_value + bk * S + j, mask=here, other=0.0))
    rate = tl.abs(call.scale) * norm_bound(q, D) * ROUNDING
    # Without masks one comparison shows whether a query sees a key, whose number is unsigned.
    plain: tl.constexpr = CAUSAL and not HIDDEN and window is None and segments is None and first_key is None
    visible = tl.maximum(tl.minimum(position, S - 1) + 1, 0).to(tl.uint32)
    # A loop, because unrolled it would need registers for all its keys at once; wide rows leave no room to load ahead.
    stages: tl.constexpr = 2 if D * K.pointer.dtype.element_ty.primitive_bitwidth <= 2048 else 1
    for step in tl.range(2 if CAUSAL else 3, num_stages=stages):
        from_key = last - TILE * step + (0 if CAUSAL else TILE)
        j = from_key + x
        if plain:
            k = load_nearest(K, from_key, S, D)  # [TILE, DP]
            products = tl.dot(q, k.T, input_precision="tf32")  # [TILE, TILE]
            seen = j.to(tl.uint32)[None, :] < visible[:, None]
        else:
            here = shown_keys(masks, b, j, (j >= 0) & (j < S), S)
            if bias is not None:
                rest = tl.load(bias.rest + j, mask=here, other=float("-inf"))
                here = here & (rest > float("-inf"))
            k = load_rows(K, from_key, here, TILE, D)
            shown = here[None, :]
            if segments is not None:
                theirs = tl.load(masks.key_segments + b * S + j, mask=here, other=0)
                shown = shown & (segments[:, None] == theirs[None, :])
            if first_key is not None:
                shown = shown & (j[None, :] >= first_key[:, None])
            products = tl.dot(q, k.T, input_precision="tf32")
            scores, seen = biased_scores(products, position[:, None] - j[None, :], shown, head, CAUSAL)
        if CAUSAL:  # minus the query's place in the block
            scores = products * head.scale + (head.slope * (j - start).to(tl.float32))[None, :]
        if bias is not None:
            base = tl.load(bias.bases + j // TILE, mask=here, other=0.0) - bias.reference
            # Minus the rounding error: a lower bound may leave out a key.
            own = (base + rest) - (tl.abs(base) + tl.abs(rest)) * (ROUNDING - 1.0)
            scores += tl.where(here, own, 0.0)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        m_i, known, shrink = raised_maximum(m_i, tl.max(scores, 1))
        l_i = l_i * shrink + tl.sum(tl.exp2(scores - known[:, None]), 1)
        if CAUSAL:
            nearest = tl.where(from_key >= (start + 1) // 16 * 16, m_i, nearest)  # a tile has at least 16 keys
    lse_bound = natural_lse(m_i, l_i)  # [TILE]
    if CAUSAL:
        lse_bound -= m * x.to(tl.float32)

    longer = tl.where(most == 0.0, 0.0, tl.maximum(tl.log2(most / (VALUE_RATIO * kept)) / LOG2E, 0.0))
    real = (i < T) & (position >= 0)
    if not CAUSAL:
        real = i < T
    elif FIRST_SEEN is not None:
        of_sequence = b
        if bias is not None:
            of_sequence = bh
        real = real & (position >= tl.load(FIRST_SEEN + of_sequence))  # the others see no key
    less = nats_of_tolerance + tl.max(tl.where(real, longer, 0.0), 0)
    allowance = tl.exp2(-less * LOG2E) * (CERTAIN if CAUSAL else 2.0 * CERTAIN)
    tl.store(certificate.allowance + bh * blocks + n, tl.where(most < float("inf"), allowance, 0.0))
    cost = outliers_in(choice).to(tl.int64) * (2 * TILE)
    # `nats_of_tolerance` is that of one side, and the key rule halves the whole tolerance.
    factor, rule, tokens = (2.0 if CAUSAL else 1.0), None, 0.0
    if KEY_RULE:
        tokens = tl.abs(distance_moved(call.query_offset, b, T, S)).to(tl.float32) + KEY_RULE_TOKENS
        rule = factor, tokens
    for side in tl.static_range(1 if CAUSAL else 2):
        slope, longest, reachable = m, to_left, start + TILE
        if side == 1:
            longest, reachable = to_right, S - start
            if call.right_slopes is not None:
                slope = tl.load(call.right_slopes.pointer + b * call.right_slopes.batch + h)
        upper = rate * tl.max(tl.where(choice == 0, longest, 0.0), 0)
        off = (4 * D + 64) * UNIT * (1.0 + upper + tl.abs(lse_bound)) + NATS + 512 * UNIT * tl.abs(m)
        if Q.pointer.dtype.element_ty == tl.float32:
            off += upper * PRODUCTS
        if bias is not None:
            tail = tl.minimum(n * TILE + TILE, T) + (start - n * TILE) - 1  # the position of the last query
            need = off - lse_bound + tl.abs(lse_bound) * (ROUNDING - 1.0) + longer + nats_of_tolerance
            behind = x if side == 0 else tail - position
            need -= tl.where(slope < float("inf"), slope, 0.0) * behind.to(tl.float32)
            need += tl.abs(need) * (ROUNDING - 1.0) + 512 * UNIT * tl.abs(slope)
            need = tl.where(need < float("inf"), need, float("inf"))
            worst = tl.max(tl.where(real, need, float("-inf")), 0) * LOG2E
            most_rate = (
                tl.max(tl.where(real, tl.where(rate < float("inf"), rate, float("inf")), 0.0), 0) * ROUNDING * LOG2E
            )
            low = tl.load(ALLOWED + (bh * blocks + n) * 2)
            high = tl.load(ALLOWED + (bh * blocks + n) * 2 + 1)
            if window is not None:
                low, high = tl.maximum(low, start - window + 1), tl.minimum(high, tail + window)
            sums = norms.sums + (side * (bh * 0 + B) * H + bh) * tiles
            if side == 0:
                from_tile, origin, step = low // TILE, start, 1
                count = tl.maximum(tl.minimum(tl.maximum(start - KEPT + 1, 0), S) // TILE - from_tile, 0)
            else:
                from_tile, origin, step = tl.cdiv(high, TILE) - 1, tail, -1
                count = tl.maximum(from_tile + 1 - tl.cdiv(tl.maximum(tail + KEPT, 0), TILE), 0)
            walk, weights = (from_tile, count, step, origin), (slope * LOG2E, most_rate, worst)
            skippable = tiles_of_little(norms.tiles, sums, bias, bk, tiles, walk, weights, rule, WIDTH)
            farthest = (from_tile + skippable * step) * TILE
            reach = start - farthest + 1
            if side == 1:
                reach = farthest + TILE - tail
            reach = tl.minimum(tl.maximum(reach, KEPT), UNLIMITED_REACH)
            reach = choice * 0 + tl.where(slope == float("inf"), 1, reach)
        else:
            nats = (rate * ROUNDING)[:, None] * longest[None, :]  # [TILE, CHOICES]
            nats += (off - lse_bound + tl.abs(lse_bound) * (ROUNDING - 1.0) + longer)[:, None]
            nats = tl.where(nats < float("inf"), nats, float("inf"))
            worst = tl.max(tl.where(real[:, None], nats, float("-inf")), 0)
            # −ln(1 − e^(−m)) ≤ m/2 − ln m.
            tail = slope * 0.5 - tl.log2(slope) / LOG2E + nats_of_tolerance
            reach = tl.maximum((worst + tail) / slope * ROUNDING + 1.0, KEPT)
            if KEY_RULE:
                nats_of_rule = worst + nats_of_tolerance + LN2 * (factor - 1.0)
                reach = tl.maximum(reach, reach_of_key_rule(nats_of_rule, slope, tokens, reach))
            reach = tl.where(slope > 0.0, tl.where(reach < UNLIMITED_REACH, reach, UNLIMITED_REACH), UNLIMITED_REACH)
            reach = tl.where(slope == float("inf"), 1.0, reach)
            if CAUSAL:
                # For every choice, because Triton 3.6 cannot reduce these numbers to one for Blackwell.
                excess = (rate * ROUNDING)[:, None] * longest[None, :] + (off - nearest / LOG2E)[:, None]
                excess = tl.where(excess < float("inf"), excess, float("inf"))
                excess = tl.max(tl.where(real[:, None], excess, float("-inf")), 0)
                online = online_reach(excess, m, most, S, Q.pointer.dtype.element_ty == tl.float16)
                tl.store(certificate.online + bh * blocks + n + choice * 0, online, mask=choice == 0)
        reach = reach.to(tl.int32)
        tl.store(certificate.reach + (side * CHOICES + choice) * heads + bh * blocks + n, reach)
        cost += tl.minimum(reach, tl.minimum(tl.maximum(reachable, 0), S))
    tl.atomic_add(certificate.costs + bh * CHOICES + choice, cost, sem="relaxed")
    if n == 0:
        tl.store(certificate.outliers + bh * OUTLIERS + tl.arange(0, OUTLIERS), outliers)
    if SHARED:
        if is_last(plan.arrived + bk, G):
            plan_group(certificate, ALLOWED, plan, call, bk, CAUSAL)
    else:
        if is_last(plan.arrived + bh, blocks):
            weight = plan_head(certificate, ALLOWED, plan, call, bh, ROWS, PLAN_WIDTH, CAUSAL)
            if plan.order is not None:
                tl.store(plan.arrived + bh, octave(weight))
                order_when_all_arrived(plan, B, H)


@triton.jit
def order_when_all_arrived(plan, B, H):
    if is_last(plan.arrived + B * H, B * H):
        order_heads(plan, B, H)
