// What bounds the far keys of a table by distance, where those of a slope have a geometric series.
//
// Queries of a block are up to BLOCK - 1 farther away from a key than the nearest one, d tokens away: e_d, the largest of t_d to
// t_{d + BLOCK - 1}, bounds the biases of all. There is one key per distance on each side, so
//     F(r) = ln sum over d >= r of exp(e_d)
// bounds the biases of all keys from r on, and so does max over d >= r of e_d + ln key_rule(d) by the key rule. Both decrease
// in r, whatever the table, so the distance where either is small enough is found by a binary search.

#pragma once

#include "tails.hpp"

template <typename Real>
struct DistanceBounds {
    enum { PAD = BLOCK + TAIL_GROUP };  // groups of keys begin before the first key and end after the last
    int64_t farthest[2] = {0, 0};       // distance to the right and to the left
    int64_t width = 0, groups = 0;
    std::vector<Real> biases;   // [H, width]: e_d for the key at -d or d, relative to the block's nearest query, at width / 2
    std::vector<double> tails;  // [H, 2, 2, groups + 1]: of both sides F and the maximum, from every TAIL_GROUP-th distance on

    explicit DistanceBounds(const Call<Real> &call) {
        if (!call.table || !(call.tolerance > 0)) return;
        for (int64_t b = 0; b < call.B; b++) {
            farthest[1] = std::max(farthest[1], call.first[b] + call.T - 1);
            if (!call.causal) farthest[0] = std::max(farthest[0], call.S - 1 - call.first[b]);
        }
        for (int64_t &distance : farthest)
            if (call.window) distance = std::min(distance, call.window - 1);
        const int64_t most = std::max(farthest[0], farthest[1]);
        width = 2 * (most + PAD) + 1, groups = most / TAIL_GROUP + 1;
        biases.assign(call.H * width, Real(-1e30)), tails.assign(call.H * 4 * (groups + 1), -INFINITY);
    }

    // The entry of the nearest query's own position; further to the right follow.
    const Real *of(int64_t h) const { return biases.data() + h * width + width / 2; }

    void find(const Call<Real> &call, int64_t h) {
        for (int side = 0; side < 2; side++) {
            const int64_t count = farthest[side] + 1, step = side ? 1 : -1;
            if (!side && call.causal) continue;
            const Real *table = call.table + h * call.distances - call.table_first;
            std::vector<Real> most(count);
            for (int64_t d = 0; d < count; d++) most[d] = std::max(Real(-1e30), table[step * d]);
            for (int64_t apart = 1; apart < BLOCK; apart *= 2)
                for (int64_t d = 0; d + apart < count; d++) most[d] = std::max(most[d], most[d + apart]);
            Real *to = biases.data() + h * width + width / 2;
            // Less its own rounding in the sums of `certificate.hpp`.
            for (Real &bias : most) bias += 8 * UNIT<Real> * std::abs(bias);
            for (int64_t d = side ? 0 : 1; d < count; d++) to[-step * d] = most[d];
            sum_tails(most, tails.data() + (2 * h + side) * 2 * (groups + 1));
        }
    }

    // The distance from which on keys with norms up to `nats` / rate are below `room`, all together and, if `by_rule`, each by
    // the key rule; infinite if there is none.
    double distance_of_little(int64_t h, int side, double nats, double room, bool by_rule) const {
        const double *sums = tails.data() + (2 * h + (side > 0)) * 2 * (groups + 1), *ruled = sums + groups + 1;
        const auto is_more = [&](double x) { return !(nats + x <= room); };
        int64_t group = std::partition_point(sums, sums + groups, is_more) - sums;
        if (by_rule) group = std::max<int64_t>(group, std::partition_point(ruled, ruled + groups, is_more) - ruled);
        return group < groups ? double(group * TAIL_GROUP) : INFINITY;
    }

   private:
    void sum_tails(const std::vector<Real> &biases, double *sums) const {
        double *ruled = sums + groups + 1;
        for (int64_t group = groups - 1, count = (int64_t)biases.size(); group >= 0; group--) {
            const int64_t from = group * TAIL_GROUP, to = std::min<int64_t>(count, from + TAIL_GROUP);
            double largest = -INFINITY, sum = 0;
            for (int64_t d = from; d < to; d++) largest = std::max(largest, double(biases[d]));
            for (int64_t d = from; d < to; d++) sum += std::exp(double(biases[d]) - largest);
            sums[group] = log_add(sums[group + 1], from < to ? largest + std::log(sum) : -INFINITY);
            ruled[group] = std::max(ruled[group + 1], largest + std::log(key_rule(double(from + TAIL_GROUP))));
        }
    }
};
