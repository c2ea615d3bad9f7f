// The reach of a block of queries, determined while it reads keys; `attention/certificate/bounds.py` has the idea, docs/maths.md
// the proof.
//
// Keys that are not visited weigh, for query i and by Cauchy-Schwarz, at most
//     sum over j of exp(rate_i |k_j| - m |i - j|) / exp(lambda_i),   rate_i = |scale| |q_i|,
// where lambda_i is the log-sum-exp of the visited keys, which forward has computed on its way outward. The sum over j is
// computed key by key for the largest rate R of the block and its nearest query; the other queries follow:
//     exp(rate_i |k_j| - m |i - j|) <= exp(R |k_j| - m d_j) exp(-(R - rate_i) |k|_min - m (|i - j| - d_j)).
// A few tiles with the longest keys may be left out of the sum; each is visited if it may matter. A bias of the key adds the same
// number to the exponents of all queries; `tails.hpp` then bounds where the sum may start. A table by distance replaces -m d;
// `distances.hpp`.
//
// A limit on what each query leaves out is enough for outputs, not for gradients: T queries might leave out the same key. So
// backward leaves out a key only if its own term of the sum obeys the key rule too.

#pragma once

#include <limits>

#include "distances.hpp"

template <typename Real>
struct Certificate {
    const Block<Real> &block;
    Real *memory;         // the norms of all key heads
    const double *tails;  // of all query heads, if keys have biases
    // [padded S / TAIL_GROUP + 1] each, over the groups of keys beyond one, relative to exp(reference): the sum of their weights,
    // and what the key rule compares, see `Weights`.
    Real *sums, *ruled;
    const DistanceBounds<Real> *distances = nullptr;  // of a table
    Norms<Real> norms = {};
    Real rate[BLOCK] = {}, fixed[BLOCK] = {};  // of each query; nats to be added to -lambda
    Real largest_rate = 0;
    bool possible = false;
    int left_out[2] = {};  // how many outlier tiles the sums to the right and to the left exclude
    bool summed = false;
    double reference = 0, slope = 0;
    double span = 0;      // the largest distance of a key in the sums
    int64_t nearest = 0;  // position of the block's query that is nearest to the keys of this side, less `bias_origin`
    int side = 0;         // 1: keys to the left; -1: to the right
    int64_t farthest = 0;       // distance visited so far
    double largest_lambda = 0;  // absolute value of the log-sum-exps so far
    double longer = 0;  // ln of how much longer than VALUE_RATIO the longest value is, compared with the nearest ones

    void begin() {
        const Call<Real> &call = block.call;
        // Extreme slopes alone need no certificate: their far keys weigh nothing, and few keys are near.
        possible = call.tolerance > 0 && (block.key_bias || !block.origins_differ), farthest = 0, side = 0;
        if (!possible) return;
        norms = norms_of(call, memory, block.b * call.K + block.k);
        const Real error = (call.D + SCORE_UNITS) * UNIT<Real>, scale = std::abs(block.scale_after);
        largest_rate = 0;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> squares = block.squared_norms(v);
            for (int i = 0; i < VL<Real>; i++) rate[v + i] = scale * (1 + error) * norm_bound(squares[i], call.D);
        }
        for (int i = 0; i < block.rows; i++) largest_rate = rate[i] > largest_rate || rate[i] != rate[i] ? rate[i] : largest_rate;
        longer = nats_of_longer_values();
        Real rounded = Real(LSE_NATS) + Real(call.S / 32) * UNIT<Real>;
        // Every sum of a bf16 product may lose a number below the smallest normal one.
        if (call.bf16) rounded += 2 * call.D * scale * std::numeric_limits<Real>::min();
        for (int i = 0; i < BLOCK; i++) {
            const Real less = (largest_rate - rate[i]) * norms.shortest_key();
            fixed[i] = error * (1 + rate[i] * norms.longest_without(0)) + Real(longer) + rounded - less;
        }
    }

    // The share of a query's softmax that backward may leave out of what forward visited, a little less for rounding, or 0.
    double measured_share() const { return possible ? 0.99 * block.call.tolerance * std::exp(-longer) : 0.0; }

    // Switches to the keys to the left (1) or to the right (-1).
    void turn(int towards) {
        if (side == towards) return;
        side = towards, summed = false;
        slope = side > 0 ? block.slope : block.right_slope;
        nearest = (side > 0 ? block.position : block.position + block.rows - 1) - block.bias_origin;
    }

    void visits(int64_t key, int count) {
        farthest = std::max({farthest, block.position + block.rows - key, key + count - block.position});
    }

    // Chooses how many tiles to leave out of the sums of this side, which has `available` keys.
    void leave_out(int64_t available) {
        double best = 0;
        int &chosen = left_out[side > 0];
        chosen = 0;
        if (block.key_bias) {
            while (possible && chosen < OUTLIER_TILES && norms.tiles[chosen] >= 0) chosen++;
            return;
        }
        for (int tiles = 1; possible && tiles <= OUTLIER_TILES && norms.tiles[tiles - 1] >= 0; tiles++) {
            // The keys saved, less the cost of the tiles; in a flat head, one long key matters less than the many others.
            const double nats = double(largest_rate) * (norms.longest_without(0) - norms.longest_without(tiles));
            const double saved = block.call.table
                ? std::min(double(available), reach_in_table(0)) - std::min(double(available), reach_in_table(tiles))
                : (nats - std::max(0.0, -std::log(slope))) / slope;
            const double gain = std::min(saved, double(available)) - 2.0 * BLOCK * tiles;
            if (gain > best) best = gain, chosen = tiles;
        }
    }

    bool is_left_out(int tile) const { return tile < left_out[side > 0]; }

    // The first key that outputs still need to the left of `key`, or the first that they do not need to the right of it, after
    // queries have visited what `m_i` and `l_i` hold; `limit` where nothing may be skipped. Keys beyond `limit` are hidden.
    int64_t last_key(int64_t key, int64_t limit, const Real *m_i, const Real *l_i) {
        return last_key(sums, share_of_sums(), key, limit, m_i, l_i);
    }

    // The same for gradients; with biases at the border of a tile, which is left out as a whole.
    int64_t last_key_by_rule(int64_t key, int64_t limit, const Real *m_i, const Real *l_i) {
        const int64_t last = last_key(ruled, 1 / share_of_side(), key, limit, m_i, l_i);
        if (!block.key_bias) return last;
        return side > 0 ? std::max(limit, last / BLOCK * BLOCK) : std::min(limit, (last + BLOCK - 1) / BLOCK * BLOCK);
    }

    // In space: whether a tile may be left out. By the key rule at the distance in the sequence, so that what a query leaves out
    // adds up to the tolerance times ln(S) / TILE; `space.hpp`.
    bool may_leave_out_tile(const TileInSpace &tile, const Real *m_i, const Real *l_i) {
        if (!possible || !(block.slope > 0)) return false;
        slope = 0;  // within the block, distances are not those along the sequence
        const double room = nats_of_room(m_i, l_i);
        if (!std::isfinite(room)) return false;
        Real longest = -1;
        for (int64_t j = tile.first; j < tile.end; j++) {
            if (norms.keys[j] != norms.keys[j]) return false;
            longest = std::max(longest, norms.keys[j]);
        }
        if (longest < 0) return true;  // all are hidden
        const double nats = double(largest_rate) * longest, away = double(block.slope) * tile.apart;
        const double errors = 8 * double(UNIT<Real>) * (nats + away + std::abs(room)) + double(block.slope) * tile.rounded;
        const double rule = std::log(share_of_side() * key_rule(double(tile.tokens)));
        return std::log(double(tile.end - tile.first)) + nats - away + errors <= room - std::max(0.0, rule);
    }

    // Whether outputs need keys [from, to) of an outlier tile, all on this side.
    bool must_visit(int64_t from, int64_t to, const Real *m_i, const Real *l_i) {
        return !(weigh_tile(from, to, m_i, l_i).sum <= Real(0.99 * 0.25 / OUTLIER_TILES));
    }

    // The same for gradients.
    bool must_measure(int64_t from, int64_t to, const Real *m_i, const Real *l_i) {
        return !(weigh_tile(from, to, m_i, l_i).ruled <= Real(0.99 / share_of_side()));
    }

   private:
    // Of keys of one tile: the sum of their weights, and the largest weight times the `key_rule` of its key. A bias may make all
    // keys of a tile light; then it is the sum of these products, as if the tile were one key.
    struct Weights {
        Real sum, ruled;
    };

    Weights together(const Weights &x, const Weights &y) const {
        return {x.sum + y.sum, block.key_bias ? x.ruled + y.ruled : std::max(x.ruled, y.ruled)};
    }

    // Of keys [from, to), relative to the room.
    Weights weigh_tile(int64_t from, int64_t to, const Real *m_i, const Real *l_i) {
        const double room = may_skip() ? nats_of_room(m_i, l_i) : -INFINITY;
        if (!std::isfinite(room)) return {INFINITY, INFINITY};
        const double away = double(std::max(std::abs(nearest - from), std::abs(nearest - to)));
        Weights all = {};
        for (int64_t j = from / TAIL_GROUP * TAIL_GROUP; j < to; j += TAIL_GROUP)
            all = together(all, weigh(j, room - rounding(room, away)));
        return all;
    }

    // By one of the two arrays, which may be at most `share` of the room.
    int64_t last_key(const Real *of, double share, int64_t key, int64_t limit, const Real *m_i, const Real *l_i) {
        if (!may_skip()) return limit;
        const double room = nats_of_room(m_i, l_i);
        if (!std::isfinite(room)) return limit;
        if (!summed || room - reference > CAP<Real> - 20) add_up(room, key, limit);
        const int64_t groups = padded(block.call) / TAIL_GROUP;
        // The rounding of sums of this many terms; the part that vanished is subtracted below.
        const double certain = 1 - 4 * UNIT<Real> * double(groups + 64);
        const double allowed = std::exp(room - reference - rounding(room, span)) * share * certain - 1e-25;
        // They fall from the queries outward: the first group from there that is small enough.
        int64_t near = side > 0 ? (key + TAIL_GROUP - 1) / TAIL_GROUP : key / TAIL_GROUP;
        int64_t far = side > 0 ? limit / TAIL_GROUP : (limit + TAIL_GROUP - 1) / TAIL_GROUP;
        if (of[near] <= allowed) return key;
        while (std::abs(near - far) > 1) {
            const int64_t middle = (near + far) / 2;
            (of[middle] <= allowed ? far : near) = middle;
        }
        if (!(of[far] <= allowed)) return limit;
        return side > 0 ? std::max(limit, far * TAIL_GROUP) : std::min(limit, far * TAIL_GROUP);
    }

    // Of the tolerance: for the keys of one side that the certificate leaves out; and of that, for those in the sums.
    double share_of_side() const { return (block.call.causal ? 1.0 : 0.5) * (1 - MEASURED_SHARE); }
    double share_of_sums() const { return left_out[side > 0] ? 0.75 : 1.0; }

    // Without biases, no key is far for a slope of 0 or below.
    bool may_skip() const { return possible && (slope > 0 || block.key_bias || block.call.table); }

    // About how far a block reads that leaves out this many tiles, if its queries' own keys score 0.
    double reach_in_table(int tiles) const {
        const double room = std::log(block.call.tolerance) + double(*distances->of(block.h));
        return distances->distance_of_little(block.h, side, double(largest_rate) * norms.longest_without(tiles), room, false);
    }

    // ln of the largest value that the sum, for the largest rate, may have.
    double nats_of_room(const Real *m_i, const Real *l_i) {
        const Real error = (block.call.D + SCORE_UNITS) * UNIT<Real>, away = Real(slope);
        Reals<Real> worst = every(Real(-INFINITY)), largest = {};
        Ints<Real> wrong = {};
        double most = -INFINITY;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> lambda = load(m_i + v) + log_below(load(l_i + v)), size = lambda < 0 ? -lambda : lambda;
            const Ints<Real> lane = block.lanes() + v, behind = side > 0 ? lane : block.rows - 1 - lane;
            Reals<Real> nats = load(fixed + v) + size * error - lambda;
            nats -= __builtin_convertvector(behind, Reals<Real>) * away;
            const Ints<Real> real = lane < block.rows;
            wrong |= real & ~(nats < CAP<Real> * Real(1e20));  // also if it is NaN, or nothing has been visited
            wrong |= real & ~(nats > CAP<Real> * Real(-1e20));
            nats = real ? nats : worst;
            worst = nats > worst ? nats : worst;
            largest = (real & (size > largest)) ? size : largest;
            for (int i = 0; block.origins_differ && i < VL<Real> && v + i < block.rows; i++)
                most = std::max(most, double(nats[i]) + block.origin_below_block(v + i));
        }
        largest_lambda = 0;
        for (int i = 0; i < VL<Real>; i++) {
            if (wrong[i]) return -INFINITY;
            if (!block.origins_differ) most = std::max(most, double(worst[i]));
            largest_lambda = std::max(largest_lambda, double(largest[i]));
        }
        return std::log(share_of_side() * block.call.tolerance) - most;
    }

    // A lower bound close to ln x, for x >= 1: (e + f) ln 2 for x = 2^e (1 + f).
    static Reals<Real> log_below(Reals<Real> x) {
        constexpr int bits = sizeof(Real) == 4 ? 23 : 52;
        const Ints<Real> raw = (Ints<Real>)x, one = (Ints<Real>)every(Real(1));
        const Reals<Real> part = (Reals<Real>)((raw & ((typename Simd<Real>::integer(1) << bits) - 1)) | one) - 1;
        return (__builtin_convertvector((raw >> bits) - (one >> bits), Reals<Real>) + part) * Real(0.693147);
    }

    // Of the TAIL_GROUP keys from j on, relative to exp(from).
    Weights weigh(int64_t j, double from) const {
        Reals<Real> sums = {}, ruled = {};
        Real biased[TAIL_GROUP];
        if (block.key_bias) weigh_biased(j, from, biased);
        const Real nearest_by_rule = Real(KEY_RULE_TOKENS + std::abs(block.bias_origin));
        for (int v = 0; v < TAIL_GROUP; v += VL<Real>) {
            const Reals<Real> distance = block.away(0, j + v - nearest) * Real(-side);
            Reals<Real> nats = load(norms.keys + j + v) * largest_rate - distance * Real(slope) - Real(from);
            if (block.call.table) nats += load(distances->of(block.h) + j + v - nearest);
            nats = nats > CAP<Real> ? every(CAP<Real>) : nats;
            const Reals<Real> weights = exponential(block.key_bias ? load(biased + v) : nats);
            const Reals<Real> by_rule = weights * (distance + nearest_by_rule) * 2;
            sums += weights;
            if (block.key_bias) ruled += by_rule;
            else ruled = by_rule > ruled ? by_rule : ruled;
        }
        Weights all = {};
        for (int i = 0; i < VL<Real>; i++) all = together(all, {sums[i], ruled[i]});
        return all;
    }

    // The exponents of those weights, computed in double: a bias and m times the distance may be large and cancel.
    void weigh_biased(int64_t j, double from, Real *nats) const {
        for (int64_t i = 0; i < TAIL_GROUP; i++, j++) {
            const bool hidden = j >= block.call.S || norms.keys[j] < 0;
            const double distance = double((nearest - j) * side);
            const double own = hidden ? -INFINITY
                : double(norms.keys[j]) * double(largest_rate) + block.relative_bias(j) - slope * distance - from;
            nats[i] = own < double(CAP<Real>) ? Real(own) : own != own ? Real(NAN) : CAP<Real>;
        }
    }

    // The weights of a group in the sums; 0 if it is left out.
    Weights counted(int64_t group) const {
        for (int p = 0; p < left_out[side > 0]; p++)
            if (group * TAIL_GROUP / BLOCK == norms.tiles[p]) return {};
        return weigh(group * TAIL_GROUP, reference);
    }

    // The rounding error of an exponent, in nats.
    double rounding(double room, double distance) const {
        if (block.key_bias) {
            // Exponents are computed in double. Among the computed scores, those within CAP of lambda matter: neither their
            // biases nor slope times distance exceed the following numbers, and they are off by a few roundings of these.
            const double scores = 2 * double(largest_rate) * norms.longest_without(0) + largest_lambda + 2 * CAP<Real>;
            const double right = block.looks_right ? std::abs(double(block.right_slope)) : 0.0;
            const double slopes = (std::abs(double(block.slope)) + right) * double(farthest);
            const double wide = double(largest_rate) * norms.longest_without(0) + slope * distance + std::abs(room);
            return 8 * UNIT<double> * wide + 8 * double(UNIT<Real>) * (scores + slopes);
        }
        // The entries of a table include their rounding here; among computed scores, those within CAP of lambda matter.
        const double norm = double(largest_rate) * norms.longest_without(0);
        const double biases = block.call.table ? norm + largest_lambda + 2 * CAP<Real> : slope * distance;
        return 8 * double(UNIT<Real>) * (norm + biases + std::abs(room));
    }

    // The distance from the block's nearest query at and beyond which all keys together weigh less than e^-10 of the room, and
    // each, if backward follows, less than e^-9 times its `key_rule`; NaN or more than `most_distant` if there is none.
    double distance_of_little(double room, double most_distant) const {
        const double origin = std::abs(double(block.bias_origin));
        if (block.call.table) {
            const double nats = double(largest_rate) * norms.longest_without(left_out[side > 0]);
            return distances->distance_of_little(block.h, side, nats, room - 10, block.call.for_backward);
        }
        if (!block.key_bias) {
            // exp(-m d) (d + c) decreases from d = 1 / m - c on.
            const double longest = norms.longest_without(left_out[side > 0]);
            const double little = (largest_rate * longest - room - std::log(-std::expm1(-slope)) + 10) / slope;
            const double more = block.call.for_backward ? std::log(slope * key_rule(little + origin)) : 0.0;
            return little + std::max(0.0, more) / slope;
        }
        const Tails of = tails_of(block.call, tails, block.b, block.h);
        if (!(largest_rate <= of.rate) || !std::isfinite(of.rate)) return INFINITY;
        // Tails increase towards the queries, from both ends.
        const int64_t groups = padded(block.call) / TAIL_GROUP;
        const double away = slope * double(side * nearest);
        const double size = std::abs(room) + std::abs(block.key_bias_origin) + std::abs(away);
        // Less the rounding of the tails, which are as many sums of two as there are groups.
        const double by_rule = block.call.for_backward ? std::log(key_rule(most_distant + origin)) : 0.0;
        const double most = room - 10 - by_rule + block.key_bias_origin + away - 4 * UNIT<double> * double(groups + 64) * size;
        if (side > 0) {
            const int64_t little = std::upper_bound(of.left, of.left + groups + 1, most) - of.left - 1;
            return little <= 0 ? INFINITY : double(nearest - little * TAIL_GROUP + 1);
        }
        const auto is_more = [&](double x) { return !(x <= most); };
        const int64_t little = std::partition_point(of.right, of.right + groups + 1, is_more) - of.right;
        return little > groups ? INFINITY : double(little * TAIL_GROUP - nearest);
    }

    // Computes `sums` and `ruled` for all groups from `key` to `limit`, starting at the farthest that can matter.
    void add_up(double room, int64_t key, int64_t limit) {
        const double most_distant = double(std::abs(nearest - limit)), enough = distance_of_little(room, most_distant);
        const bool is_far = enough < most_distant;  // false for NaN too
        const int64_t farthest = is_far ? std::max<int64_t>(0, (int64_t)enough) : 0;
        const Real little = is_far ? Real(std::exp(-9.0)) : Real(0);
        Weights total = {little, little}, of_tile = {};
        int64_t tile = -1;
        reference = room, summed = true, span = is_far ? double(farthest) : most_distant;
        const auto keep = [&](int64_t group) { sums[group] = total.sum, ruled[group] = total.ruled; };
        const auto add = [&](int64_t group) {
            const Weights more = counted(group);
            of_tile = together(tile == group * TAIL_GROUP / BLOCK ? of_tile : Weights{}, more);
            tile = group * TAIL_GROUP / BLOCK;
            total = {total.sum + more.sum, std::max(total.ruled, of_tile.ruled)};
        };
        if (side > 0) {
            int64_t group = limit / TAIL_GROUP;
            const int64_t end = (key + TAIL_GROUP - 1) / TAIL_GROUP;
            const int64_t first = is_far ? std::max(group, std::min((nearest - farthest) / TAIL_GROUP, end)) : group;
            for (; group < first; group++) keep(group);
            for (; group * TAIL_GROUP < key; group++) {
                keep(group);
                add(group);
            }
            keep(group);
        } else {
            int64_t group = (limit + TAIL_GROUP - 1) / TAIL_GROUP;
            const int64_t enough_groups = std::max((nearest + farthest) / TAIL_GROUP + 1, key / TAIL_GROUP);
            const int64_t last = is_far ? std::min(group, enough_groups) : group;
            for (; group > last; group--) keep(group);
            for (; group > key / TAIL_GROUP; group--) {
                keep(group);
                add(group - 1);
            }
            keep(group);
        }
    }

    // ln f if some value is f times longer than VALUE_RATIO times the longest value that a query certainly visits.
    Real nats_of_longer_values() const {
        const Call<Real> &call = block.call;
        const Real most = norms.longest_value();
        if (most == 0 || most <= Real(VALUE_RATIO) * norms.shortest_value()) return 0;
        Real kept = INFINITY;
        // In space the first tile that is visited has the query's own key, if there is one.
        const bool has_own = !call.key_points || call.key_points == call.query_points;
        const int64_t nearby = call.key_points ? 1 : KEPT;
        for (int i = 0; i < block.rows; i++) {
            const int64_t own = block.position + i;
            Real nearest = norms.shortest_value();
            const bool is_sure = has_own && own >= 0 && own < call.S && (nearby == 1 || !call.key_segments)
                && (!call.window || call.window >= KEPT);
            for (int64_t j = std::max<int64_t>(0, own - nearby + 1); is_sure && j <= own; j++)
                if (!block.key_bias || block.key_bias[j] > -INFINITY) nearest = std::max(nearest, norms.values[j]);
            kept = std::min(kept, nearest);
        }
        return std::max(Real(0), std::log(most / (Real(VALUE_RATIO) * kept)));
    }
};
