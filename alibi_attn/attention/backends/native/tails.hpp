// Bounds of the total weight of a head's keys from either end of the sequence on, if every key has its own bias.
//
// With slopes alone, a geometric series bounds where the sums of `certificate.hpp` may start. With a bias b_j per key there is
// none, but with R_h the largest rate of a head's queries, |scale| |q_i|, one running log-sum-exp serves all its blocks:
//     F(p) = ln sum over j < p of exp(R_h |k_j| + b_j + m j)
//     sum over j < p of exp(R_h |k_j| + b_j - m (i - j)) = exp(F(p) - m i)
// and to the right, from the other end, with -m j. Only differences are exponentiated: m j may be 10^6. b need not be monotonic.

#pragma once

#include "norms.hpp"

// For one query head: [groups + 1] for the keys before each group; the same for the keys from each group on; R_h.
struct Tails {
    const double *left, *right;
    double rate;
};

template <typename Real>
int64_t tails_size(const Call<Real> &call) {
    return 2 * (padded(call) / TAIL_GROUP + 1) + 1;
}

template <typename Real>
Tails tails_of(const Call<Real> &call, const double *memory, int64_t b, int64_t h) {
    const double *left = memory + (b * call.H + h) * tails_size(call), *right = left + padded(call) / TAIL_GROUP + 1;
    return {left, right, left[tails_size(call) - 1]};
}

// ln(e^x + e^y)
inline double log_add(double x, double y) {
    const double most = std::max(x, y), least = std::min(x, y);
    return least == -INFINITY || most == INFINITY ? most : most + std::log1p(std::exp(least - most));
}

// The nats R_h |k_j| + b_j + m j of a query head's keys, by groups, and their log-sum-exp.
template <typename Real>
struct HeadNats {
    const Call<Real> &call;
    const Norms<Real> &norms;
    int64_t b, h;
    double rate;

    // Writes those of a group, with `slope` per position, -inf for hidden keys; returns the largest.
    double of_group(int64_t group, double slope, double *nats) const {
        const double *bias = call.key_bias + (b * call.H + h) * call.S;
        for (int64_t i = 0; i < TAIL_GROUP; i++) {
            const int64_t j = group * TAIL_GROUP + i;
            const bool hidden = j >= call.S || norms.keys[j] < 0;
            nats[i] = hidden ? -INFINITY : rate * norms.keys[j] + bias[j] + slope * double(j);
            if (nats[i] != nats[i]) nats[i] = INFINITY;
        }
        return *std::max_element(nats, nats + TAIL_GROUP);
    }

    // ln of their sum.
    double log_sum(int64_t group, double slope) const {
        double nats[TAIL_GROUP], sum = 0;
        const double largest = of_group(group, slope, nats);
        if (!std::isfinite(largest)) return largest;
        for (int v = 0; v < TAIL_GROUP; v += VL<double>) {
            const Reals<double> weights = exponential(load(nats + v) - largest);
            for (int i = 0; i < VL<double>; i++) sum += weights[i];
        }
        return largest + std::log(sum);
    }

    // The largest of each of the given number of tiles.
    std::vector<double> of_tiles(int64_t tiles, double slope) const {
        std::vector<double> values(tiles, -INFINITY);
        double nats[TAIL_GROUP];
        for (int64_t group = 0; group * TAIL_GROUP < call.S; group++) {
            double &value = values[group * TAIL_GROUP / BLOCK];
            value = std::max(value, of_group(group, slope, nats));
        }
        return values;
    }

    bool looks_right() const { return !call.causal && !std::isinf(call.right_slopes[b * call.H + h]); }
};

// |scale| |q_i| of the head's longest query, rounded up.
template <typename Real>
double largest_rate_of(const Call<Real> &call, int64_t b, int64_t h) {
    double most = 0;
    for (int64_t i = 0; i < call.T; i++) {
        const double norm = norm_of_row(call, call.query, b, h, i);
        most = norm > most || norm != norm ? norm : most;
    }
    return std::abs(call.scale) * most * (1 + 4 * (call.D + SCORE_UNITS) * double(UNIT<Real>));
}

// Raises `lengths` to the number of tiles, in the given direction, for which each value remains the largest.
inline void add_lengths_as_largest(const std::vector<double> &values, bool from_the_end, std::vector<int64_t> &lengths) {
    const int64_t N = (int64_t)values.size();
    std::vector<int64_t> larger;  // tiles ahead that no nearer tile exceeds, nearest last
    for (int64_t x = 0; x < N; x++) {
        const int64_t at = from_the_end ? x : N - 1 - x;
        while (!larger.empty() && values[larger.back()] < values[at]) larger.pop_back();
        const int64_t until = !larger.empty() ? larger.back() : from_the_end ? -1 : N;
        if (values[at] > -INFINITY) lengths[at] = std::max(lengths[at], std::abs(until - at));
        larger.push_back(at);
    }
}

// The tails of a query head, without the outlier tiles.
template <typename Real>
void sum_tails(const HeadNats<Real> &nats, double *left) {
    const Call<Real> &call = nats.call;
    const int64_t groups = padded(call) / TAIL_GROUP, at = nats.b * call.H + nats.h;
    double *right = left + groups + 1;
    const auto log_sum = [&](int64_t group, double slope) {
        const int32_t *tiles = nats.norms.tiles, *end = tiles + OUTLIER_TILES;
        return std::find(tiles, end, group * TAIL_GROUP / BLOCK) == end ? nats.log_sum(group, slope) : -INFINITY;
    };
    left[0] = right[groups] = -INFINITY;
    for (int64_t p = 0; p < groups; p++) left[p + 1] = log_add(left[p], log_sum(p, call.slopes[at]));
    for (int64_t p = groups - 1; nats.looks_right() && p >= 0; p--)
        right[p] = log_add(right[p + 1], log_sum(p, -call.right_slopes[at]));
    right[groups + 1] = nats.rate;
}

// Computes the tails of all query heads of a key head, and the outlier tiles that they share: those that remain the largest for
// the most tiles, where a single key would keep all later blocks from stopping. With gates, which only decrease, there are none.
template <typename Real>
void summarize_biased(const Call<Real> &call, Real *norms_memory, double *memory, int64_t head) {
    const Norms<Real> norms = norms_of(call, norms_memory, head);
    const int64_t b = head / call.K, group = call.H / call.K, tiles = (call.S + BLOCK - 1) / BLOCK;
    std::vector<HeadNats<Real>> heads;
    std::vector<std::vector<double>> left, right;  // the largest nats of every tile
    for (int64_t h = head % call.K * group; h < (head % call.K + 1) * group; h++) {
        heads.push_back({call, norms, b, h, largest_rate_of(call, b, h)});
        left.push_back(heads.back().of_tiles(tiles, call.slopes[b * call.H + h]));
        if (heads.back().looks_right()) right.push_back(heads.back().of_tiles(tiles, -call.right_slopes[b * call.H + h]));
    }
    int32_t *outlier_tiles = Visited<Real>{call}.outlier_tiles(b, head % call.K);
    std::fill_n(outlier_tiles, +OUTLIER_TILES, -1);
    for (int chosen = 0; chosen < OUTLIER_TILES; chosen++) {
        std::vector<int64_t> lengths(tiles, 0);
        for (const auto &values : left) add_lengths_as_largest(values, false, lengths);
        for (const auto &values : right) add_lengths_as_largest(values, true, lengths);
        const int64_t best = std::max_element(lengths.begin(), lengths.end()) - lengths.begin();
        if (lengths[best] < WORTH_LEAVING_OUT) break;
        outlier_tiles[chosen] = (int32_t)best;
        for (auto &values : left) values[best] = -INFINITY;
        for (auto &values : right) values[best] = -INFINITY;
    }
    for (const HeadNats<Real> &nats : heads) sum_tails(nats, memory + (b * call.H + nats.h) * tails_size(call));
}
