// How far a block of queries must look, decided while it looks; `attention/certificate/bounds.py` has the idea,
// docs/maths.md the proof.
//
// Keys that are not visited weigh, for query i and by Cauchy-Schwarz, at most
//     sum over j of exp(rate_i |k_j| - m |i - j|) / exp(lambda_i),   rate_i = |scale| |q_i|,
// where lambda_i is the log-sum-exp of the keys that it has visited: forward goes outward from the queries, and has it at hand.
// The sum over j is taken key by key for the largest rate R of the block and its nearest query; the others follow:
//     exp(rate_i |k_j| - m |i - j|) <= exp(R |k_j| - m d_j) exp(-(R - rate_i) |k|_min - m (|i - j| - d_j)).
// A few tiles with the longest keys may be left out of the sum, and are visited one by one where they may matter.

#pragma once

#include "block.hpp"

enum { STATS = OUTLIER_TILES + 4 };

// An upper bound of the norm of a row of finite numbers from the sum of its squares, or inf; see `norms.norm_bound`.
template <typename Real>
Real norm_bound(Real squares, int64_t D) {
    return std::sqrt(squares) * (1 + (D + NORM_UNITS) * UNIT<Real>) + std::sqrt(Real(D)) * VANISHING<Real>;
}

// What all blocks of a key head need to know of its keys and values. Hidden keys are no keys.
template <typename Real>
struct Norms {
    const Real *keys, *values;  // [padded S]: upper bounds of norms; of a hidden key a large negative number, and 0
    const Real *stats;          // the norms of the OUTLIER_TILES + 1 tiles with the longest keys, falling; of the shortest
                                // key; of the longest and shortest value
    const int32_t *tiles;       // [OUTLIER_TILES]: those tiles, -1 = none

    Real longest_without(int tiles) const { return stats[tiles]; }
    Real shortest_key() const { return stats[OUTLIER_TILES + 1]; }
    Real longest_value() const { return stats[OUTLIER_TILES + 2]; }
    Real shortest_value() const { return stats[OUTLIER_TILES + 3]; }
};

template <typename Real>
int64_t padded(const Call<Real> &call) {
    return (call.S + 2 * TAIL_GROUP - 1) / TAIL_GROUP * TAIL_GROUP;
}

// Numbers that a key head's norms and stats take.
template <typename Real>
int64_t norms_size(const Call<Real> &call) {
    return 2 * padded(call) + STATS;
}

template <typename Real>
Norms<Real> norms_of(const Call<Real> &call, Real *memory, int64_t head) {
    const Real *keys = memory + head * norms_size(call);
    const int32_t *tiles = Visited<Real>{call}.outlier_tiles(head / call.K, head % call.K);
    return {keys, keys + padded(call), keys + 2 * padded(call), tiles};
}

// The norms of keys [from, to) of a key head and of their values.
template <typename Real>
void measure(const Call<Real> &call, Real *memory, int64_t head, int64_t from, int64_t to) {
    const int64_t b = head / call.K, k = head % call.K;
    Real *keys = memory + head * norms_size(call), *values = keys + padded(call);
    const auto norm = [&](const Real *row) {
        Reals<Real> sum = {};
        for (int64_t d = 0; d < call.D; d += VL<Real>) sum += load(row + d) * load(row + d);
        Real squares = 0;
        for (int i = 0; i < VL<Real>; i++) squares += sum[i];
        return norm_bound(squares, call.D);
    };
    for (int64_t j = from; j < to; j++) {
        const bool hidden = j >= call.S || (call.key_mask && !call.key_mask[b * call.S + j]);
        keys[j] = hidden ? Real(-1e30) : norm(call.key.of(b, k, j));
        values[j] = hidden || !call.has_values ? Real(0) : norm(call.value.of(b, k, j));
    }
}

// The stats and outlier tiles of a key head, from its norms.
template <typename Real>
void summarize(const Call<Real> &call, Real *memory, int64_t head) {
    const Norms<Real> of = norms_of(call, memory, head);
    Real *stats = memory + head * norms_size(call) + 2 * padded(call), top[OUTLIER_TILES + 1] = {};
    Real shortest = INFINITY, longest_value = 0, shortest_value = INFINITY;
    int32_t tiles[OUTLIER_TILES + 1];
    std::fill(tiles, tiles + OUTLIER_TILES + 1, -1);
    for (int64_t tile = 0; tile * BLOCK < call.S; tile++) {
        Real norm = 0;
        for (int64_t j = tile * BLOCK; j < std::min((tile + 1) * BLOCK, call.S); j++) {
            if (of.keys[j] < 0) continue;
            norm = std::max(norm, of.keys[j]), shortest = std::min(shortest, of.keys[j]);
            longest_value = std::max(longest_value, of.values[j]), shortest_value = std::min(shortest_value, of.values[j]);
        }
        int at = OUTLIER_TILES;  // among the longest so far
        if (tiles[at] >= 0 && !(norm > top[at])) continue;
        for (; at > 0 && (tiles[at - 1] < 0 || norm > top[at - 1]); at--) top[at] = top[at - 1], tiles[at] = tiles[at - 1];
        top[at] = norm, tiles[at] = (int32_t)tile;
    }
    std::copy(top, top + OUTLIER_TILES + 1, stats);
    const Real rest[] = {std::isfinite(shortest) ? shortest : 0, longest_value, shortest_value};
    std::copy(rest, rest + 3, stats + OUTLIER_TILES + 1);
    std::copy(tiles, tiles + OUTLIER_TILES, Visited<Real>{call}.outlier_tiles(head / call.K, head % call.K));
}

template <typename Real>
struct Certificate {
    const Block<Real> &block;
    Real *memory;  // the norms of all key heads
    Real *sums;    // [padded S / TAIL_GROUP + 1]: over the groups of keys beyond one, relative to exp(reference)
    Norms<Real> norms = {};
    Real rate[BLOCK] = {}, fixed[BLOCK] = {};  // of each query; nats to be added to -lambda
    Real largest_rate = 0;
    bool possible = false;
    int left_out[2] = {};  // of the sums to the right and to the left: the first so many outlier tiles
    bool summed = false;
    double reference = 0, slope = 0;
    double span = 0;      // the largest distance of a key of the sums
    int64_t nearest = 0;  // position of the block's query that is nearest to the keys of this side, less `bias_origin`
    int side = 1;         // 1: keys to the left; -1: to the right

    void begin() {
        const Call<Real> &call = block.call;
        possible = call.tolerance > 0;
        if (!possible) return;
        norms = norms_of(call, memory, block.b * call.K + block.k);
        const Real error = (call.D + SCORE_UNITS) * UNIT<Real>, scale = std::abs(block.scale_after);
        largest_rate = 0;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            Reals<Real> squares = {};
            for (int64_t d = 0; d < call.D; d++) {
                const Reals<Real> x = load(block.queries + d * BLOCK + v);
                squares += x * x;
            }
            for (int i = 0; i < VL<Real>; i++) rate[v + i] = scale * (1 + error) * norm_bound(squares[i], call.D);
        }
        for (int i = 0; i < block.rows; i++) largest_rate = rate[i] > largest_rate || rate[i] != rate[i] ? rate[i] : largest_rate;
        const Real longer = nats_of_longer_values(), rounded = Real(LSE_NATS) + Real(call.S / 32) * UNIT<Real>;
        for (int i = 0; i < BLOCK; i++) {
            const Real less = (largest_rate - rate[i]) * norms.shortest_key();
            fixed[i] = error * (1 + rate[i] * norms.longest_without(0)) + longer + rounded - less;
        }
    }

    // Turn to the keys to the left (1) or to the right (-1).
    void turn(int towards) {
        side = towards, summed = false;
        slope = side > 0 ? block.slope : block.right_slope;
        nearest = (side > 0 ? block.position : block.position + block.rows - 1) - block.bias_origin;
    }

    // How many tiles to leave out of the sums of this side, which has so many keys.
    void leave_out(int64_t available) {
        double best = 0;
        int &chosen = left_out[side > 0];
        chosen = 0;
        for (int tiles = 1; possible && tiles <= OUTLIER_TILES && norms.tiles[tiles - 1] >= 0; tiles++) {
            // Keys that need not be visited, less what the tiles cost; one long key counts only above the many of a flat head.
            const double nats = double(largest_rate) * (norms.longest_without(0) - norms.longest_without(tiles));
            const double saved = (nats - std::max(0.0, -std::log(slope))) / slope;
            const double gain = std::min(saved, double(available)) - 2.0 * BLOCK * tiles;
            if (gain > best) best = gain, chosen = tiles;
        }
    }

    bool is_left_out(int tile) const { return tile < left_out[side > 0]; }

    // The first key that must still be visited to the left of `key`, or the first that need not be visited to the right of it,
    // after queries have visited what `m_i` and `l_i` hold; `limit` where nothing may be skipped. Keys beyond `limit` are hidden.
    int64_t last_key(int64_t key, int64_t limit, const Real *m_i, const Real *l_i) {
        if (!possible || !(slope > 0)) return limit;
        const double room = nats_of_room(m_i, l_i);
        if (!std::isfinite(room)) return limit;
        if (!summed || room - reference > CAP<Real> - 20) add_up(room, key, limit);
        const int64_t groups = padded(block.call) / TAIL_GROUP;
        const double certain = 1 - 4 * UNIT<Real> * double(groups + 64);  // of sums of so many; what vanished is added
        const double share = left_out[side > 0] ? 0.75 : 1.0;
        const double allowed = std::exp(room - reference - rounding(room, span)) * share * certain - 1e-25;
        // `sums` fall from the queries outward: the first group from there that is small enough.
        int64_t near = side > 0 ? (key + TAIL_GROUP - 1) / TAIL_GROUP : key / TAIL_GROUP;
        int64_t far = side > 0 ? limit / TAIL_GROUP : (limit + TAIL_GROUP - 1) / TAIL_GROUP;
        if (sums[near] <= allowed) return key;
        while (std::abs(near - far) > 1) {
            const int64_t middle = (near + far) / 2;
            (sums[middle] <= allowed ? far : near) = middle;
        }
        if (!(sums[far] <= allowed)) return limit;
        return side > 0 ? std::max(limit, far * TAIL_GROUP) : std::min(limit, far * TAIL_GROUP);
    }

    // Whether an outlier tile's keys from one to another, all on this side, must be visited.
    bool must_visit(int64_t from, int64_t to, const Real *m_i, const Real *l_i) {
        if (!possible || !(slope > 0)) return true;
        const double room = nats_of_room(m_i, l_i);
        if (!std::isfinite(room)) return true;
        const double away = double(std::max(std::abs(nearest - from), std::abs(nearest - to)));
        Real sum = 0;
        for (int64_t j = from / TAIL_GROUP * TAIL_GROUP; j < to; j += TAIL_GROUP) sum += weight(j, room - rounding(room, away));
        return !(sum <= Real(0.99 * 0.25 / OUTLIER_TILES));
    }

   private:
    // ln of what the sum, by the largest rate, may be at most.
    double nats_of_room(const Real *m_i, const Real *l_i) const {
        const Real error = (block.call.D + SCORE_UNITS) * UNIT<Real>, away = Real(slope);
        Reals<Real> worst = every(Real(-INFINITY));
        Ints<Real> wrong = {};
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> lambda = load(m_i + v) + log_below(load(l_i + v));
            const Ints<Real> lane = block.lanes() + v, behind = side > 0 ? lane : block.rows - 1 - lane;
            Reals<Real> nats = load(fixed + v) + (lambda < 0 ? -lambda : lambda) * error - lambda;
            nats -= __builtin_convertvector(behind, Reals<Real>) * away;
            const Ints<Real> real = lane < block.rows;
            wrong |= real & ~(nats < CAP<Real> * Real(1e20));  // also where it is not a number, or nothing has been visited
            wrong |= real & ~(nats > CAP<Real> * Real(-1e20));
            nats = real ? nats : worst;
            worst = nats > worst ? nats : worst;
        }
        double most = -INFINITY;
        for (int i = 0; i < VL<Real>; i++) {
            if (wrong[i]) return -INFINITY;
            most = std::max(most, double(worst[i]));
        }
        const double share = block.call.causal ? block.call.tolerance : block.call.tolerance / 2;
        return std::log(share) - most;
    }

    // A little below ln x for x >= 1: of x = 2^e (1 + f), (e + f) ln 2.
    static Reals<Real> log_below(Reals<Real> x) {
        constexpr int bits = sizeof(Real) == 4 ? 23 : 52;
        const Ints<Real> raw = (Ints<Real>)x, one = (Ints<Real>)every(Real(1));
        const Reals<Real> part = (Reals<Real>)((raw & ((typename Simd<Real>::integer(1) << bits) - 1)) | one) - 1;
        return (__builtin_convertvector((raw >> bits) - (one >> bits), Reals<Real>) + part) * Real(0.693147);
    }

    // Sum over the TAIL_GROUP keys from j on, relative to exp(reference).
    Real weight(int64_t j, double from) const {
        Real sum = 0;
        for (int v = 0; v < TAIL_GROUP; v += VL<Real>) {
            const Reals<Real> distance = block.away(0, j + v - nearest) * Real(-side);
            Reals<Real> nats = load(norms.keys + j + v) * largest_rate - distance * Real(slope) - Real(from);
            nats = nats > CAP<Real> ? every(CAP<Real>) : nats;
            const Reals<Real> weights = exponential(nats);
            for (int i = 0; i < VL<Real>; i++) sum += weights[i];
        }
        return sum;
    }

    // The weight of a group in the sums.
    Real counted(int64_t group) const {
        for (int p = 0; p < left_out[side > 0]; p++)
            if (group * TAIL_GROUP / BLOCK == norms.tiles[p]) return 0;
        return weight(group * TAIL_GROUP, reference);
    }

    // Nats that rounding may take from an exponent.
    double rounding(double room, double distance) const {
        return 8 * double(UNIT<Real>) * (double(largest_rate) * norms.longest_without(0) + slope * distance + std::abs(room));
    }

    // The sums over all groups from `key` to `limit`, one by one from the farthest that can matter; those beyond it weigh less
    // than e^-10 of the room together.
    void add_up(double room, int64_t key, int64_t limit) {
        const double longest = norms.longest_without(left_out[side > 0]);
        const double enough = (largest_rate * longest - room - std::log(-std::expm1(-slope)) + 10) / slope;
        const bool is_far = enough < double(std::abs(nearest - limit));  // false also if it is not a number
        const int64_t farthest = is_far ? std::max<int64_t>(0, (int64_t)enough) : 0;
        Real total = is_far ? Real(std::exp(-9.0)) : Real(0);
        reference = room, summed = true, span = is_far ? double(farthest) : double(std::abs(nearest - limit));
        if (side > 0) {
            int64_t group = limit / TAIL_GROUP;
            const int64_t end = (key + TAIL_GROUP - 1) / TAIL_GROUP;
            const int64_t first = is_far ? std::max(group, std::min((nearest - farthest) / TAIL_GROUP, end)) : group;
            std::fill(sums + group, sums + first, total);
            for (group = first; group * TAIL_GROUP < key; group++) {
                sums[group] = total;
                total += counted(group);
            }
            sums[group] = total;
        } else {
            int64_t group = (limit + TAIL_GROUP - 1) / TAIL_GROUP;
            const int64_t enough_groups = std::max((nearest + farthest) / TAIL_GROUP + 1, key / TAIL_GROUP);
            const int64_t last = is_far ? std::min(group, enough_groups) : group;
            std::fill(sums + last, sums + group + 1, total);
            for (group = last; group > key / TAIL_GROUP; group--) {
                total += counted(group - 1);
                sums[group - 1] = total;
            }
        }
    }

    // ln f, where some value is f times longer than VALUE_RATIO times the longest that a query surely visits.
    Real nats_of_longer_values() const {
        const Call<Real> &call = block.call;
        const Real most = norms.longest_value();
        if (most == 0 || most <= Real(VALUE_RATIO) * norms.shortest_value()) return 0;
        Real kept = INFINITY;
        for (int i = 0; i < block.rows; i++) {
            const int64_t own = block.position + i;
            Real nearest = norms.shortest_value();
            const bool is_sure = own >= 0 && own < call.S && !call.key_segments && (!call.window || call.window >= KEPT);
            for (int64_t j = std::max<int64_t>(0, own - KEPT + 1); is_sure && j <= own; j++)
                nearest = std::max(nearest, norms.values[j]);
            kept = std::min(kept, nearest);
        }
        return std::max(Real(0), std::log(most / (Real(VALUE_RATIO) * kept)));
    }
};
