// How far a block of queries must look, decided while it looks; `attention/certificate/bounds.py` has the idea,
// docs/maths.md the proof.
//
// Keys that are not met weigh, for query i and by Cauchy-Schwarz, at most
//     sum over j of exp(rate_i |k_j| - m |i - j|) / exp(lambda_i),   rate_i = |scale| |q_i|,
// where lambda_i is the log-sum-exp of the keys that it has met: forward goes outward from the queries, and has it at hand.
// The sum over j is taken key by key for the largest rate R of the block and its nearest query; the others follow:
//     exp(rate_i |k_j| - m |i - j|) <= exp(R |k_j| - m d_j) exp(-(R - rate_i) |k|_min - m (|i - j| - d_j)).
// A few tiles with the longest keys may be left out of the sum, and are met one by one where they may matter.

#pragma once

#include "block.hpp"

enum { GROUP = 16, KEPT = 4, OUTLIERS = 4, STATS = OUTLIERS + 4 };  // KEPT and VALUE_RATIO as in `bounds.py`

constexpr double VALUE_RATIO = 4.0;
constexpr double ROUNDED = 0x1p-9;  // nats, of a log-sum-exp from a logarithm without its curve's last bits, and of sums

template <typename Real>
constexpr Real UNIT = sizeof(Real) == 4 ? 0x1p-24 : 0x1p-53;
template <typename Real>
constexpr Real CAP = sizeof(Real) == 4 ? 80 : 600;  // of an exponent that is far beyond the tolerance

// An upper bound of the norm of a row of finite numbers, or inf; see `bounds.norm_bound`.
template <typename Real>
Real longest(Real squares, int64_t D) {
    const Real vanished = sizeof(Real) == 4 ? 0x1p-63 : 0x1p-511;  // a square below the smallest normal number
    return std::sqrt(squares) * (1 + (D + 4) * UNIT<Real>) + std::sqrt(Real(D)) * vanished;
}

// What all blocks of a key head need to know of its keys and values. Hidden keys are no keys.
template <typename Real>
struct Lengths {
    const Real *keys, *values;  // [padded S]: upper bounds of norms; of a hidden key a large negative number, and 0
    const Real *stats;          // the norms of the OUTLIERS + 1 tiles with the longest keys, falling; of the shortest key; of
                                // the longest and shortest value
    const int32_t *tiles;       // [OUTLIERS]: those tiles, -1 = none

    Real longest_without(int tiles) const { return stats[tiles]; }
    Real shortest_key() const { return stats[OUTLIERS + 1]; }
    Real longest_value() const { return stats[OUTLIERS + 2]; }
    Real shortest_value() const { return stats[OUTLIERS + 3]; }
};

template <typename Real>
int64_t padded(const Call<Real> &call) {
    return (call.S + 2 * GROUP - 1) / GROUP * GROUP;
}

template <typename Real>
Lengths<Real> lengths_of(const Call<Real> &call, int64_t head) {
    const Real *keys = call.norms + 2 * head * padded(call);
    return {keys, keys + padded(call), call.stats + head * STATS, call.outliers + head * OUTLIERS};
}

// The norms of keys [from, to) of a key head and of their values.
template <typename Real>
void measure(const Call<Real> &call, int64_t head, int64_t from, int64_t to) {
    const int64_t b = head / call.K, k = head % call.K;
    Real *keys = call.norms + 2 * head * padded(call), *values = keys + padded(call);
    const auto norm = [&](const Real *row) {
        Reals<Real> sum = {};
        for (int64_t d = 0; d < call.D; d += VL<Real>) sum += load(row + d) * load(row + d);
        Real squares = 0;
        for (int i = 0; i < VL<Real>; i++) squares += sum[i];
        return longest(squares, call.D);
    };
    for (int64_t j = from; j < to; j++) {
        const bool hidden = j >= call.S || (call.key_mask && !call.key_mask[b * call.S + j]);
        keys[j] = hidden ? Real(-1e30) : norm(call.key.of(b, k, j));
        values[j] = hidden || !call.has_values ? Real(0) : norm(call.value.of(b, k, j));
    }
}

// The stats and outliers of a key head, from its norms.
template <typename Real>
void summarize(const Call<Real> &call, int64_t head) {
    const Lengths<Real> of = lengths_of(call, head);
    Real *stats = call.stats + head * STATS, top[OUTLIERS + 1] = {};
    Real shortest = INFINITY, longest_value = 0, shortest_value = INFINITY;
    int32_t tiles[OUTLIERS + 1];
    std::fill(tiles, tiles + OUTLIERS + 1, -1);
    for (int64_t tile = 0; tile * BLOCK < call.S; tile++) {
        Real norm = 0;
        for (int64_t j = tile * BLOCK; j < std::min((tile + 1) * BLOCK, call.S); j++) {
            if (of.keys[j] < 0) continue;
            norm = std::max(norm, of.keys[j]), shortest = std::min(shortest, of.keys[j]);
            longest_value = std::max(longest_value, of.values[j]), shortest_value = std::min(shortest_value, of.values[j]);
        }
        int at = OUTLIERS;  // among the longest so far
        if (tiles[at] >= 0 && !(norm > top[at])) continue;
        for (; at > 0 && (tiles[at - 1] < 0 || norm > top[at - 1]); at--) top[at] = top[at - 1], tiles[at] = tiles[at - 1];
        top[at] = norm, tiles[at] = (int32_t)tile;
    }
    std::copy(top, top + OUTLIERS + 1, stats);
    const Real rest[] = {std::isfinite(shortest) ? shortest : 0, longest_value, shortest_value};
    std::copy(rest, rest + 3, stats + OUTLIERS + 1);
    std::copy(tiles, tiles + OUTLIERS, call.outliers + head * OUTLIERS);
}

template <typename Real>
struct Certificate {
    const Block<Real> &block;
    Real *sums;  // [padded S / GROUP + 1]: over the groups of keys beyond one, relative to exp(reference)
    Lengths<Real> lengths = {};
    Real rate[BLOCK] = {}, fixed[BLOCK] = {};  // of each query; nats to be added to -lambda
    Real largest_rate = 0;
    bool possible = false;
    int left_out[2] = {};  // of the sums to the right and to the left: the first so many outlying tiles
    bool summed = false;
    double reference = 0, slope = 0;
    double span = 0;      // the largest distance of a key of the sums
    int64_t nearest = 0;  // position of the block's query that is nearest to the keys of this side
    int side = 1;         // 1: keys to the left; -1: to the right

    void begin() {
        const Call<Real> &call = block.call;
        possible = call.tolerance > 0;
        if (!possible) return;
        lengths = lengths_of(call, block.b * call.K + block.k);
        const Real error = (call.D + 64) * UNIT<Real>, scale = std::abs(Real(call.scale));
        largest_rate = 0;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            Reals<Real> squares = {};
            for (int64_t d = 0; d < call.D; d++) {
                const Reals<Real> x = load(block.queries + d * BLOCK + v);
                squares += x * x;
            }
            for (int i = 0; i < VL<Real>; i++) rate[v + i] = scale * (1 + error) * longest(squares[i], call.D);
        }
        for (int i = 0; i < block.rows; i++) largest_rate = rate[i] > largest_rate || rate[i] != rate[i] ? rate[i] : largest_rate;
        const Real longer = nats_of_longer_values(), rounded = Real(ROUNDED) + Real(call.S / 32) * UNIT<Real>;
        for (int i = 0; i < BLOCK; i++) {
            const Real less = (largest_rate - rate[i]) * lengths.shortest_key();
            fixed[i] = error * (1 + rate[i] * lengths.longest_without(0)) + longer + rounded - less;
        }
    }

    // Turn to the keys to the left (1) or to the right (-1).
    void turn(int towards) {
        side = towards, summed = false;
        slope = side > 0 ? block.slope : block.right_slope;
        nearest = side > 0 ? block.position : block.position + block.rows - 1;
    }

    // How many tiles to leave out of the sums of this side, which has so many keys.
    void leave_out(int64_t available) {
        double best = 0;
        int &chosen = left_out[side > 0];
        chosen = 0;
        for (int tiles = 1; possible && tiles <= OUTLIERS && lengths.tiles[tiles - 1] >= 0; tiles++) {
            // Keys that need not be met, less what the tiles cost; one long key counts only above the many of a flat head.
            const double nats = double(largest_rate) * (lengths.longest_without(0) - lengths.longest_without(tiles));
            const double saved = (nats - std::max(0.0, -std::log(slope))) / slope;
            const double gain = std::min(saved, double(available)) - 2.0 * BLOCK * tiles;
            if (gain > best) best = gain, chosen = tiles;
        }
    }

    bool is_left_out(int tile) const { return tile < left_out[side > 0]; }

    // The first key that must still be met to the left of `key`, or the first one that need not be met to the right of it, after
    // queries have met what `largest` and `mass` hold; `limit` where nothing may be skipped. Keys beyond `limit` are hidden.
    int64_t last_key(int64_t key, int64_t limit, const Real *largest, const Real *mass) {
        if (!possible || !(slope > 0)) return limit;
        const double room = nats_of_room(largest, mass);
        if (!std::isfinite(room)) return limit;
        if (!summed || room - reference > CAP<Real> - 20) add_up(room, key, limit);
        const int64_t groups = padded(block.call) / GROUP;
        const double certain = 1 - 4 * UNIT<Real> * double(groups + 64);  // of sums of so many; what vanished is added
        const double share = left_out[side > 0] ? 0.75 : 1.0;
        const double allowed = std::exp(room - reference - rounding(room, span)) * share * certain - 1e-25;
        // `sums` fall from the queries outward: the first group from there that is small enough.
        int64_t near = side > 0 ? (key + GROUP - 1) / GROUP : key / GROUP;
        int64_t far = side > 0 ? limit / GROUP : (limit + GROUP - 1) / GROUP;
        if (sums[near] <= allowed) return key;
        while (std::abs(near - far) > 1) {
            const int64_t middle = (near + far) / 2;
            (sums[middle] <= allowed ? far : near) = middle;
        }
        if (!(sums[far] <= allowed)) return limit;
        return side > 0 ? std::max(limit, far * GROUP) : std::min(limit, far * GROUP);
    }

    // Whether an outlying tile's keys from one to another, all on this side, must be met.
    bool must_meet(int64_t from, int64_t to, const Real *largest, const Real *mass) {
        if (!possible || !(slope > 0)) return true;
        const double room = nats_of_room(largest, mass);
        if (!std::isfinite(room)) return true;
        const double away = double(std::max(std::abs(nearest - from), std::abs(nearest - to)));
        Real sum = 0;
        for (int64_t j = from / GROUP * GROUP; j < to; j += GROUP) sum += weight(j, room - rounding(room, away));
        return !(sum <= Real(0.99 * 0.25 / OUTLIERS));
    }

   private:
    // ln of what the sum, by the largest rate, may be at most.
    double nats_of_room(const Real *largest, const Real *mass) const {
        const Real error = (block.call.D + 64) * UNIT<Real>, away = Real(slope);
        Reals<Real> worst = every(Real(-INFINITY));
        Ints<Real> wrong = {};
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> lambda = load(largest + v) + log_below(load(mass + v));
            const Ints<Real> lane = block.lanes() + v, behind = side > 0 ? lane : block.rows - 1 - lane;
            Reals<Real> nats = load(fixed + v) + (lambda < 0 ? -lambda : lambda) * error - lambda;
            nats -= __builtin_convertvector(behind, Reals<Real>) * away;
            const Ints<Real> real = lane < block.rows;
            wrong |= real & ~(nats < CAP<Real> * Real(1e20));  // also where it is not a number, or nothing has been met
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

    // Sum over the GROUP keys from j on, relative to exp(reference).
    Real weight(int64_t j, double from) const {
        Real sum = 0;
        for (int v = 0; v < GROUP; v += VL<Real>) {
            const Reals<Real> distance = block.away(0, j + v - nearest) * Real(-side);
            Reals<Real> nats = load(lengths.keys + j + v) * largest_rate - distance * Real(slope) - Real(from);
            nats = nats > CAP<Real> ? every(CAP<Real>) : nats;
            const Reals<Real> weights = exponential(nats);
            for (int i = 0; i < VL<Real>; i++) sum += weights[i];
        }
        return sum;
    }

    // The weight of a group in the sums.
    Real counted(int64_t group) const {
        for (int p = 0; p < left_out[side > 0]; p++)
            if (group * GROUP / BLOCK == lengths.tiles[p]) return 0;
        return weight(group * GROUP, reference);
    }

    // Nats that rounding may take from an exponent.
    double rounding(double room, double distance) const {
        return 8 * double(UNIT<Real>) * (double(largest_rate) * lengths.longest_without(0) + slope * distance + std::abs(room));
    }

    // The sums over all groups from `key` to `limit`, one by one from the farthest that can matter; those beyond it weigh less
    // than e^-10 of the room together.
    void add_up(double room, int64_t key, int64_t limit) {
        const double longest = lengths.longest_without(left_out[side > 0]);
        const double enough = (largest_rate * longest - room - std::log(-std::expm1(-slope)) + 10) / slope;
        const bool is_far = enough < double(std::abs(nearest - limit));  // false also if it is not a number
        const int64_t farthest = is_far ? std::max<int64_t>(0, (int64_t)enough) : 0;
        Real total = is_far ? Real(std::exp(-9.0)) : Real(0);
        reference = room, summed = true, span = is_far ? double(farthest) : double(std::abs(nearest - limit));
        if (side > 0) {
            int64_t group = limit / GROUP;
            const int64_t end = (key + GROUP - 1) / GROUP;
            const int64_t first = is_far ? std::max(group, std::min((nearest - farthest) / GROUP, end)) : group;
            std::fill(sums + group, sums + first, total);
            for (group = first; group * GROUP < key; group++) {
                sums[group] = total;
                total += counted(group);
            }
            sums[group] = total;
        } else {
            int64_t group = (limit + GROUP - 1) / GROUP;
            const int64_t last = is_far ? std::min(group, std::max((nearest + farthest) / GROUP + 1, key / GROUP)) : group;
            std::fill(sums + last, sums + group + 1, total);
            for (group = last; group > key / GROUP; group--) {
                total += counted(group - 1);
                sums[group - 1] = total;
            }
        }
    }

    // ln f, where some value is f times longer than VALUE_RATIO times the longest that a query surely meets.
    Real nats_of_longer_values() const {
        const Call<Real> &call = block.call;
        const Real most = lengths.longest_value();
        if (most == 0 || most <= Real(VALUE_RATIO) * lengths.shortest_value()) return 0;
        Real kept = INFINITY;
        for (int i = 0; i < block.rows; i++) {
            const int64_t own = block.position + i;
            Real nearest = lengths.shortest_value();
            const bool is_sure = own >= 0 && own < call.S && !call.key_segments && (!call.window || call.window >= KEPT);
            for (int64_t j = std::max<int64_t>(0, own - KEPT + 1); is_sure && j <= own; j++)
                nearest = std::max(nearest, lengths.values[j]);
            kept = std::min(kept, nearest);
        }
        return std::max(Real(0), std::log(most / (Real(VALUE_RATIO) * kept)));
    }
};
