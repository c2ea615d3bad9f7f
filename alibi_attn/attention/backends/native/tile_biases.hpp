// The key of every tile whose bias counts most: from it scores may count.

#pragma once

#include <cmath>
#include <vector>

#include "call.hpp"

// The key of every tile whose bias counts most for queries on one side of it: its bias, what it comes to with the distance to
// position 0, and which key it is. Hidden keys are no keys.
struct TileBias {
    double bias = -INFINITY, nats = -INFINITY;
    int64_t key = -1;
};

// [B, H, 2, tiles], of queries to the right and to the left of the tiles; empty without biases.
template <typename Real>
std::vector<TileBias> tile_biases(const Call<Real> &call) {
    const int64_t tiles = (call.S + BLOCK - 1) / BLOCK;
    std::vector<TileBias> found(call.key_bias ? 2 * call.B * call.H * tiles : 0);
#pragma omp parallel for num_threads(call.threads)
    for (int64_t at = 0; at < (call.key_bias ? call.B * call.H : 0); at++) {
        const double slope = call.slopes[at], right_slope = call.right_slopes[at];
        const double *bias = call.key_bias + at * call.S;
        const uint8_t *mask = call.key_mask ? call.key_mask + at / call.H * call.S : nullptr;
        for (int64_t j = 0; j < call.S; j++) {
            if (mask && !mask[j]) continue;
            TileBias &left = found[2 * at * tiles + j / BLOCK], &right = found[(2 * at + 1) * tiles + j / BLOCK];
            const double nats = bias[j] + slope * double(j), right_nats = bias[j] - right_slope * double(j);
            if (nats > left.nats) left = {bias[j], nats, j};
            if (right_nats > right.nats) right = {bias[j], right_nats, j};
        }
    }
    return found;
}
