// The key to which the scores of a query are relative, if keys have biases or slopes are extreme.
//
// Scores are computed in `Real`, and a bias of 1e6 would leave them no digits. So they are relative to the visible key that
// weighs most by its bias and its distance alone: the parts that cancel are subtracted in double, before anything is rounded.
// Each
// query has its own such key. A key that a query cannot see must not cost it digits, even one of the same block.

#pragma once

#include <limits>
#include <vector>

#include "call.hpp"
#include "threads.hpp"

constexpr double NEAR_NATS = 8;  // origins this close to each other are replaced by one, which costs three bits of a score
constexpr double EXTREME_NATS = 64;  // per position: above this, the nearest visible key must be known

// The key with the largest b_j + slope j (or b_j - right_slope j) among some visible keys.
struct BestKey {
    double bias = 0;
    int64_t key = -1;  // none

    // Whether another key weighs more; differences first, because a large bias may absorb all digits of `slope j`.
    bool is_below(const BestKey &other, double per_position) const {
        if (key < 0 || other.key < 0) return key < other.key;
        return (other.bias - bias) + per_position * double(other.key - key) > 0;
    }

    void take(const BestKey &other, double per_position) {
        if (is_below(other, per_position)) *this = other;
    }
};

// Whether one position costs so much that the nearest visible key must be known; missing biases count as 0.
template <typename Real>
bool has_extreme_slopes(const Call<Real> &call) {
    const auto is_extreme = [](Real slope) { return std::isfinite(slope) && std::abs(slope) > EXTREME_NATS; };
    for (int64_t at = 0; at < call.B * call.H; at++)
        if (is_extreme(call.slopes[at]) || (!call.causal && is_extreme(call.right_slopes[at]))) return true;
    return false;
}

// The best key of every tile, and of that tile and all tiles farther out: [B, H, 2, tiles], for queries to the right and to the
// left of the tiles. Empty if scores are relative to each query's own position.
template <typename Real>
struct BestKeys {
    int64_t tiles = 0;
    std::vector<BestKey> of_tile, outward;

    explicit BestKeys(const Call<Real> &call) : tiles((call.S + BLOCK - 1) / BLOCK) {
        if (call.key_points || (!call.key_bias && !has_extreme_slopes(call))) return;
        const auto looks_right = [&](int64_t at) { return !call.causal && std::isfinite(call.right_slopes[at]); };
        of_tile.resize(2 * call.B * call.H * tiles);
        const auto find_in_tiles = [&](int64_t at) {
            const double slope = call.slopes[at], right_slope = call.right_slopes[at];
            const bool has_right = looks_right(at);
            const double *bias = call.key_bias ? call.key_bias + at * call.S : nullptr;
            const uint8_t *mask = call.key_mask ? call.key_mask + at / call.H * call.S : nullptr;
            BestKey *left = of_tile.data() + 2 * at * tiles, *right = left + tiles;
            for (int64_t j = 0; j < call.S; j++) {
                if ((mask && !mask[j]) || (bias && bias[j] == -INFINITY)) continue;
                const BestKey own = {bias ? bias[j] : 0.0, j};
                left[j / BLOCK].take(own, slope);
                if (has_right) right[j / BLOCK].take(own, -right_slope);
            }
        };
        in_parallel(call.threads, [&](Member &member) { member.for_each(call.B * call.H, find_in_tiles); });
        outward = of_tile;
        for (int64_t at = 0; at < call.B * call.H; at++) {
            BestKey *left = outward.data() + 2 * at * tiles, *right = left + tiles;
            for (int64_t t = 1; t < tiles; t++) left[t].take(left[t - 1], call.slopes[at]);
            for (int64_t t = tiles - 2; looks_right(at) && t >= 0; t--)
                right[t].take(right[t + 1], -double(call.right_slopes[at]));
        }
    }

    bool empty() const { return of_tile.empty(); }
};

// Finds the best visible key of every query of a block.
template <typename Real>
struct BlockOrigins {
    const Call<Real> &call;
    const BestKeys<Real> &best_keys;
    int64_t b, h, row, position;  // of the first query
    int rows;
    int64_t low, high;  // the keys that masks allow
    double slope, right_slope;
    bool looks_right;

    void find(BestKey *best) const {
        std::fill_n(best, rows, BestKey{});
        find_to_left(best);
        if (looks_right) find_to_right(best);
        for (int i = 0; i < rows; i++)
            if (best[i].key >= 0 && !sees(call, b, h, row + i, best[i].key)) best[i] = search(i);
    }

    // The slope's penalty of a key for a query, in nats.
    double taken(int i, int64_t key) const {
        const int64_t distance = position + i - key;
        return double(distance) * (distance < 0 ? -right_slope : slope);
    }

   private:
    const BestKey *left(const std::vector<BestKey> &of) const { return of.data() + 2 * (b * call.H + h) * best_keys.tiles; }
    const BestKey *right(const std::vector<BestKey> &of) const { return left(of) + best_keys.tiles; }

    BestKey key(int64_t j) const {
        const double bias = call.key_bias ? call.key_bias[(b * call.H + h) * call.S + j] : 0.0;
        return (call.key_mask && !call.key_mask[b * call.S + j]) || bias == -INFINITY ? BestKey{} : BestKey{bias, j};
    }

    // Whether query i gives more weight to the second key; the two may be on different sides.
    bool is_below(int i, const BestKey &best, const BestKey &other) const {
        if (best.key < 0 || other.key < 0) return best.key < other.key;
        return (other.bias - best.bias) + (taken(i, best.key) - taken(i, other.key)) > 0;
    }

    // Tiles [0, whole) have no key after `high`, and tiles from `first_whole` on none before `low`.
    int64_t whole() const { return high == call.S ? best_keys.tiles : high / BLOCK; }
    int64_t first_whole() const { return (low + BLOCK - 1) / BLOCK; }

    // Uses the maxima of whole tiles before the block, and the other keys one by one.
    void find_to_left(BestKey *best) const {
        BestKey most;
        const int64_t first = first_whole(), end = std::min(whole(), std::max<int64_t>(0, position) / BLOCK);
        int64_t j = low;
        if (first < end) {
            for (; j < first * BLOCK; j++) most.take(key(j), slope);
            for (int64_t t = end - 1; t >= first && most.is_below(left(best_keys.outward)[t], slope); t--)
                most.take(left(best_keys.of_tile)[t], slope);
            j = end * BLOCK;
        }
        for (int i = 0; i < rows; i++) {
            for (; j < std::min(high, position + i + 1); j++) most.take(key(j), slope);
            best[i] = most;
        }
    }

    void find_to_right(BestKey *best) const {
        BestKey most;
        const int64_t after = (std::max<int64_t>(0, position + rows) + BLOCK - 1) / BLOCK, first = std::max(first_whole(), after);
        int64_t j = high - 1;
        if (first < whole()) {
            for (; j >= whole() * BLOCK; j--) most.take(key(j), -right_slope);
            for (int64_t t = first; t < whole() && most.is_below(right(best_keys.outward)[t], -right_slope); t++)
                most.take(right(best_keys.of_tile)[t], -right_slope);
            j = first * BLOCK - 1;
        }
        for (int i = rows - 1; i >= 0; i--) {
            for (; j >= std::max(low, position + i + 1); j--) most.take(key(j), -right_slope);
            if (is_below(i, best[i], most)) best[i] = most;
        }
    }

    // The same for one query that cannot see the best of those keys: from its own tile outward, while a better key may exist.
    BestKey search(int i) const {
        const int64_t own = position + i;
        BestKey best;
        // Some keys of a tile may be beyond the query, where the other slope applies: their bound is too high, which is safe.
        const auto may_have = [&](const BestKey &of, double per_position) {
            if (best.key < 0 || of.key < 0) return best.key < of.key;
            const double nats = per_position * double(of.key - own);
            return (of.bias - best.bias) + (nats + taken(i, best.key)) > 0;
        };
        const auto scan = [&](int64_t t, int64_t from, int64_t to) {
            for (int64_t j = std::max({t * BLOCK, low, from}); j < std::min({(t + 1) * BLOCK, high, to}); j++)
                if (is_below(i, best, key(j)) && sees(call, b, h, row + i, j)) best = key(j);
        };
        for (int64_t t = std::min(own, high - 1) / BLOCK; own >= 0 && t >= low / BLOCK; t--) {
            if (!may_have(left(best_keys.outward)[t], slope)) break;
            if (may_have(left(best_keys.of_tile)[t], slope)) scan(t, 0, own + 1);
        }
        for (int64_t t = std::max(own + 1, low) / BLOCK; looks_right && t * BLOCK < high; t++) {
            if (!may_have(right(best_keys.outward)[t], -right_slope)) break;
            if (may_have(right(best_keys.of_tile)[t], -right_slope)) scan(t, own + 1, high);
        }
        return best;
    }
};
