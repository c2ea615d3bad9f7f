// Replaces NaN, inf and numbers whose products overflow: `without_bad_numbers` of `attention/call/visibility.py` in C++.

#pragma once

#include <vector>

#include "packed.hpp"

// Which query sees which key, including cuts by gates, which are biases lower by 2^20 in the kernels.
template <typename Real>
struct Sight {
    const Call<Real> &call;
    const int32_t *query_start;  // [B, H, T] the first key that each query may see, or null

    int64_t start(int64_t b, int64_t h, int64_t i) const { return query_start ? query_start[(b * call.H + h) * call.T + i] : 0; }

    bool has(int64_t b, int64_t h, int64_t i, int64_t j) const { return j >= start(b, h, i) && sees(call, b, h, i, j); }

    // Starts at the query's own key, which it usually sees.
    bool is_blinded_by_cut(int64_t b, int64_t h, int64_t i) const {
        const int64_t from = start(b, h, i);
        if (from == 0) return false;
        for (int64_t j = std::min(call.first[b] + i, call.S - 1); j >= from; j--)
            if (sees(call, b, h, i, j)) return false;
        return true;
    }
};

// Zeros the keys that no query sees, judged by positions, biases, mask and segments, unless they are moderate: the norms of those
// may bound a reach, which must not depend on what else is in the batch.
template <typename Real, typename Number>
void zero_unseen(const Call<Real> &call, Packed<Number> &keys, Packed<Number> &values) {
    const int64_t window = call.window ? call.window : INT64_MAX / 4, group = call.H / call.K;
    for (int64_t b = 0; b < call.B; b++) {
        const int64_t first = call.first[b], end = first + call.T;
        std::vector<int32_t> segments;  // of the queries
        if (call.query_segments) segments.assign(call.query_segments + b * call.T, call.query_segments + (b + 1) * call.T);
        std::sort(segments.begin(), segments.end());
        for (int64_t j = 0; j < call.S; j++) {
            bool seen = (!call.causal || j < end) && j > first - window && j < end - 1 + window;
            seen = seen && (!call.key_mask || call.key_mask[b * call.S + j]);
            if (seen && call.query_segments)
                seen = std::binary_search(segments.begin(), segments.end(), call.key_segments[b * call.S + j]);
            for (int64_t k = 0; k < call.K; k++) {
                bool by_head = !call.key_bias;
                for (int64_t h = k * group; call.key_bias && h < (k + 1) * group; h++)
                    by_head |= call.key_bias[(b * call.H + h) * call.S + j] != -INFINITY;
                if (seen && by_head) continue;
                const int64_t row = b * call.S + j;
                if (!keys.is_moderate_row(row, k) || !values.is_moderate_row(row, k)) keys.zero(row, k), values.zero(row, k);
            }
        }
    }
}

// [B, H, T]: the queries that see NaN or inf; empty if there are none. The bad numbers become 0, and bad biases -inf.
template <typename Real, typename Number>
std::vector<uint8_t> clean(const Sight<Real> &sight, Packed<Number> &queries, Packed<Number> &keys, Packed<Number> &values,
                           std::vector<double> &key_bias) {
    const Call<Real> &call = sight.call;
    const bool has_bad_bias = !std::all_of(key_bias.begin(), key_bias.end(), [](double b) { return b < INFINITY; });
    if (queries.is_moderate && keys.is_moderate && values.is_moderate && !has_bad_bias) return {};
    queries.detach(), keys.detach(), values.detach();
    zero_unseen(call, keys, values);
    const int64_t group = call.H / call.K;
    std::vector<uint8_t> poisoned(call.B * call.H * call.T, 0);
    const auto clean_head = [&](int64_t head) {
        const int64_t b = head / call.K, k = head % call.K;
        std::vector<int64_t> bad_keys;
        for (int64_t j = 0; j < call.S; j++) {
            if (keys.is_finite(b * call.S + j, k) && values.is_finite(b * call.S + j, k)) continue;
            keys.zero(b * call.S + j, k), values.zero(b * call.S + j, k);
            bad_keys.push_back(j);
        }
        for (int64_t h = k * group; h < (k + 1) * group; h++) {
            std::vector<int64_t> bad = bad_keys;
            double *biases = key_bias.data() + (has_bad_bias ? (b * call.H + h) * call.S : 0);
            for (int64_t j = 0; has_bad_bias && j < call.S; j++)
                if (!(biases[j] < INFINITY)) bad.push_back(j);
            for (int64_t i = 0; i < call.T; i++) {
                const bool spoiled = !queries.is_finite(b * call.T + i, h);
                bool found = false;
                for (size_t n = 0; !found && n < bad.size(); n++) found = sight.has(b, h, i, bad[n]);
                for (int64_t j = 0; spoiled && !found && j < call.S; j++) found = sight.has(b, h, i, j);
                if (spoiled) queries.zero(b * call.T + i, h);
                poisoned[(b * call.H + h) * call.T + i] = found;
            }
            for (size_t n = bad_keys.size(); n < bad.size(); n++) biases[bad[n]] = -INFINITY;
        }
    };
    in_parallel(call.threads, [&](Member &member) { member.for_each(call.B * call.K, clean_head); });
    return poisoned;
}
