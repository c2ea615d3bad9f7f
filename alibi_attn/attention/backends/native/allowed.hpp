// The interval of keys that the masks (window, causality, key mask, segments) allow to a block of queries.

#pragma once

#include <algorithm>
#include <vector>

#include "call.hpp"

// The smallest and largest segment in every tile of a row, and the extremes over all tiles up to it and from it on.
struct SegmentTiles {
    std::vector<int32_t> least, most, least_before, most_before, least_after, most_after;

    SegmentTiles(const int32_t *row, int64_t length) {
        const int64_t tiles = (length + BLOCK - 1) / BLOCK;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int32_t *from = row + tile * BLOCK, *to = row + std::min((tile + 1) * BLOCK, length);
            least.push_back(*std::min_element(from, to)), most.push_back(*std::max_element(from, to));
        }
        least_before = least_after = least, most_before = most_after = most;
        for (int64_t tile = 1; tile < tiles; tile++) {
            least_before[tile] = std::min(least_before[tile], least_before[tile - 1]);
            most_before[tile] = std::max(most_before[tile], most_before[tile - 1]);
        }
        for (int64_t tile = tiles - 2; tile >= 0; tile--) {
            least_after[tile] = std::min(least_after[tile], least_after[tile + 1]);
            most_after[tile] = std::max(most_after[tile], most_after[tile + 1]);
        }
    }

    // Tiles [first, last) that include all tiles with a segment in [low, high].
    void meet(int32_t low, int32_t high, int64_t *first, int64_t *last) const {
        const auto reaches = [&](int32_t x, int32_t bound) { return x < bound; };
        const auto falls = [&](int32_t x, int32_t bound) { return x > bound; };
        *first = std::max(std::lower_bound(most_before.begin(), most_before.end(), low, reaches) - most_before.begin(),
                          std::lower_bound(least_before.begin(), least_before.end(), high, falls) - least_before.begin());
        *last = std::min(std::partition_point(most_after.begin(), most_after.end(), [&](int32_t x) { return x >= low; })
                             - most_after.begin(),
                         std::partition_point(least_after.begin(), least_after.end(), [&](int32_t x) { return x <= high; })
                             - least_after.begin());
    }
};

// Writes `low` and `high` of every range, with an empty band.
template <typename Real>
void allow(const Call<Real> &call) {
    const Visited<Real> visited = {call};
    const int64_t N = call.blocks(), S = call.S;
    for (int64_t b = 0; b < call.B; b++) {
        int64_t first_seen = 0, end_seen = S;
        if (call.key_mask) {
            const uint8_t *mask = call.key_mask + b * S;
            while (first_seen < S && !mask[first_seen]) first_seen++;
            while (end_seen > first_seen && !mask[end_seen - 1]) end_seen--;
        }
        std::vector<SegmentTiles> segments;  // of the queries and of the keys
        if (call.query_segments) {
            segments.emplace_back(call.query_segments + b * call.T, call.T);
            segments.emplace_back(call.key_segments + b * S, S);
        }
        std::fill_n(visited.outlier_bits(b, 0), call.H * N, 0);
        KeyRange *ranges = visited.ranges(b, 0);
        for (int64_t n = 0; n < N; n++) {
            const int64_t start = call.first[b] + n * BLOCK, end = std::min(start + BLOCK, call.first[b] + call.T);
            int64_t low = first_seen, high = end_seen;
            if (call.window) low = std::max(low, start - call.window + 1), high = std::min(high, end - 1 + call.window);
            if (call.causal) high = std::min(high, end);
            if (call.query_segments) {
                int64_t first, last;
                segments[1].meet(segments[0].least[n], segments[0].most[n], &first, &last);
                low = std::max(low, first * BLOCK), high = std::min(high, last * BLOCK);
            }
            low = std::max<int64_t>(0, std::min(low, S)), high = std::max(low, std::min(high, S));
            ranges[n] = {(int32_t)low, (int32_t)low, (int32_t)low, (int32_t)high};
        }
        for (int64_t h = 1; h < call.H; h++) std::copy(ranges, ranges + N, ranges + h * N);
    }
}
