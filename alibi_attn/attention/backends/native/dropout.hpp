// Which weights of a block dropout keeps; `attention/call/dropout.py` has the definition.
//
// Philox 2x32-7 in 64-bit lanes: the product of one round is the state of the next, shifted. One call serves two keys.

#pragma once

#include <algorithm>

#include "call.hpp"
#include "vectors.hpp"

constexpr uint32_t PHILOX_MULTIPLIER = 0xD256D193, PHILOX_WEYL = 0x9E3779B9;
constexpr int PHILOX_ROUNDS = 7;

typedef uint64_t Wide __attribute__((vector_size(BYTES), aligned(8), may_alias));
constexpr int WIDE = BYTES / 8;

// WIDE numbers as wide as a Real: factors, and the words that decide about them.
template <typename Real>
struct Narrow;

template <>
struct Narrow<float> {
    typedef uint32_t words __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
    typedef float reals __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
};

template <>
struct Narrow<double> {
    typedef Wide words;
    typedef double reals __attribute__((vector_size(BYTES), aligned(8), may_alias));
};

// The products of the low halves. GCC emits three instructions instead of one, hence the builtins; clang does not.
INLINE Wide product_of_low_halves(Wide x, uint32_t factor) {
    const Wide factors = Wide{} + uint64_t(factor);
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
    typedef int32_t Ints16 __attribute__((vector_size(64)));
    typedef long long Longs8 __attribute__((vector_size(64)));
    return (Wide)__builtin_ia32_pmuludq512_mask((Ints16)x, (Ints16)factors, Longs8{}, (unsigned char)-1);
#elif defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__)
    typedef int32_t Ints8 __attribute__((vector_size(32)));
    return (Wide)__builtin_ia32_pmuludq256((Ints8)x, (Ints8)factors);
#else
    return (x & uint64_t(UINT32_MAX)) * factors;
#endif
}

template <typename Real>
struct Dropout {
    const Call<Real> &call;
    Real *factors;  // [BLOCK][BLOCK], keys by queries: 1 / (1 - p) where a weight is kept, else 0
    uint64_t round_keys[PHILOX_ROUNDS] = {};
    Wide first_round[BLOCK / WIDE] = {};  // the product of every query's first round
    int64_t key_origin = 0;
    const int64_t *key_numbers = nullptr;  // [S], or null: keys count from 0

    // Prepares for the block of queries that starts at `position`.
    void begin(int64_t b, int64_t h, int64_t position) {
        const int64_t alike = call.B / call.dropout_runs, *seed = call.dropout_seed + b / alike * 4;
        uint32_t x = uint32_t(b % alike + seed[1]), y = uint32_t(h + seed[2]);
        philox(uint32_t(seed[0]), x, y);
        philox(uint32_t(seed[0] >> 32), x, y);
        for (int r = 0; r < PHILOX_ROUNDS; r++, x += PHILOX_WEYL) round_keys[r] = x;
        key_origin = seed[3];
        key_numbers = call.key_numbers ? call.key_numbers + b * call.S : nullptr;
        const int64_t row = position - call.first[b];
        for (int v = 0; v < BLOCK / WIDE; v++)
            for (int i = 0; i < WIDE; i++) {
                int64_t number = position + v * WIDE + i;
                if (key_numbers) number = call.query_numbers[b * call.T + std::min(row + v * WIDE + i, call.T - 1)];
                first_round[v][i] = uint64_t(uint32_t(number + key_origin + y)) * PHILOX_MULTIPLIER;
            }
    }

    // The factors of `count` keys from `key` on.
    void draw(int64_t key, int count) {
        if (key_numbers) return draw_numbered(key_numbers + key, count);
        const int64_t first = key + key_origin, last = first + count - 1;
        for (int64_t pair = first >> 1; pair <= last >> 1; pair++) {
            const int64_t even = 2 * pair - first;  // its row; that of the odd key is the next
            Real *row = factors + even * BLOCK;
            Real *const rows[2] = {even >= 0 ? row : nullptr, even + 1 < count ? row + BLOCK : nullptr};
            draw_pair(uint32_t(pair) & UINT32_MAX >> 1, rows);
        }
    }

   private:
    void draw_numbered(const int64_t *numbers, int count) {
        for (int at = 0; at < count;) {
            const int64_t number = numbers[at] + key_origin;
            const bool both = at + 1 < count && (number ^ (numbers[at + 1] + key_origin)) == 1;  // the keys of a pair
            Real *rows[2] = {};
            rows[number & 1] = factors + at * BLOCK;
            if (both) rows[~number & 1] = factors + (at + 1) * BLOCK;
            draw_pair(uint32_t(number >> 1) & UINT32_MAX >> 1, rows);
            at += 1 + both;
        }
    }

    static void philox(uint32_t key, uint32_t &x, uint32_t &y) {
        for (int r = 0; r < PHILOX_ROUNDS; r++, key += PHILOX_WEYL) {
            const uint64_t product = uint64_t(x) * PHILOX_MULTIPLIER;
            x = uint32_t(product >> 32) ^ key ^ y, y = uint32_t(product);
        }
    }

    INLINE void draw_pair(uint32_t pair, Real *const *rows) const {
        enum { SIDE_BY_SIDE = 4 };  // independent rounds, because each waits for its product
        static_assert(BLOCK % (SIDE_BY_SIDE * WIDE) == 0, "whole groups");
        for (int v = 0; v < BLOCK / WIDE; v += SIDE_BY_SIDE) {
            Wide x[SIDE_BY_SIDE], y[SIDE_BY_SIDE];
            UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++) {
                y[s] = first_round[v + s];
                x[s] = (y[s] >> 32) ^ (round_keys[0] ^ pair);
            }
            UNROLL for (int r = 1; r < PHILOX_ROUNDS; r++) UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++) {
                // The high halves hold leftovers of products and are ignored.
                const Wide product = product_of_low_halves(x[s], PHILOX_MULTIPLIER);
                x[s] = (product >> 32) ^ y[s] ^ round_keys[r], y[s] = product;
            }
            UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++) {
                if (rows[0]) keep(x[s], rows[0] + (v + s) * WIDE);
                if (rows[1]) keep(y[s], rows[1] + (v + s) * WIDE);
            }
        }
    }

    INLINE void keep(Wide words, Real *to) const {
        typedef typename Narrow<Real>::words Words;
        typedef typename Narrow<Real>::reals Factors;
        const Words low = __builtin_convertvector(words & uint64_t(UINT32_MAX), Words);
        const Factors kept = Factors{} + Real(call.dropout_factor);
        *(Factors *)to = low < Words{} + uint32_t(call.dropout_threshold) ? Factors{} : kept;
    }
};
