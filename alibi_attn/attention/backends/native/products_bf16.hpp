// Products of bf16 numbers with sums in fp32, for processors with instructions for them (`instructions_bf16.hpp`).
//
// These multiply a pair of numbers in each lane. So both factors are stored in pairs along the depth: two neighbors in a row
// already are, and two rows must be woven into one.

#pragma once

#include "instructions_bf16.hpp"

// A product of `vectors.hpp` whose depth is in pairs.
template <typename Instructions>
struct PairProduct {
    const Bf16 *a;  // a pair of neighbors at a time
    int64_t a_row, a_depth;  // in numbers; `a_depth` from pair to pair
    const Pair *b;
    int64_t b_depth;
    float *c;
    int64_t c_row;
    const float *factor;

    typedef float Sum;
    static constexpr int STEP = 2;

    INLINE auto number(int i, int k) const { return Instructions::repeated(a + i * a_row + k * a_depth); }
    INLINE Pairs row(int k, int v) const { return *(const Pairs *)(b + k * b_depth + v * VL<float>); }
    template <typename Factor>
    static INLINE Reals<float> add(Reals<float> sum, Factor x, Pairs row) {
        return Instructions::multiply_add(sum, x, row);
    }
};

// For types and processors without such products; the instructions are a parameter because there they have no functions.
template <typename Real, typename Instructions = Bf16Instructions, bool = Instructions::EXIST && ALIBI_BF16_PRODUCTS>
struct InPairs {
    static constexpr bool EXIST = false;
};

template <typename Instructions>
struct InPairs<float, Instructions, true> {
    static constexpr bool EXIST = true;
    typedef PairProduct<Instructions> Product;

    // VL numbers.
    static INLINE Reals<float> widened(const Bf16 *at) {
        return (Reals<float>)(__builtin_convertvector(*(const Bf16s *)at, Ints<float>) << 16);
    }

    // The first and the second numbers of VL pairs.
    static INLINE Reals<float> first_of(Pairs pairs) { return (Reals<float>)(pairs << 16); }
    static INLINE Reals<float> second_of(Pairs pairs) { return (Reals<float>)(pairs & 0xffff0000); }

    // VL pairs, of which only `count` exist, times a power of two: only numbers below 2^-126 are rounded.
    static INLINE Pairs scaled(const Pair *at, int count, float factor) {
        const Pairs pairs = Instructions::first(at, count);
        return ((Pairs)(first_of(pairs) * factor) >> 16) | ((Pairs)(second_of(pairs) * factor) & 0xffff0000);
    }

    // VL numbers, rounded to the nearest.
    static INLINE void round(Bf16 *to, Reals<float> x) { *(Bf16s *)to = Instructions::rounded(x); }

    // 2 VL numbers, one vector after the other.
    static INLINE void round(Bf16 *to, Reals<float> x, Reals<float> next) {
        *(Pairs *)to = Instructions::rounded(x, next);
    }

    // VL pairs, each of one number from x and one from y.
    static INLINE void round_to_pairs(Pair *to, Reals<float> x, Reals<float> y) {
        *(Pairs *)to = Instructions::rounded_pairs(x, y);
    }

    // Weaves rows of `width` numbers, `row` numbers apart, into [(count + 1) / 2][width] pairs; an odd last row is paired with 0.
    static void weave(const Bf16 *from, int64_t row, int count, int64_t width, Pair *to) {
        for (int j = 0; j < count; j += 2, from += 2 * row, to += width)
            for (int64_t d = 0; d < width; d += VL<float>) {
                const Bf16s x = *(const Bf16s *)(from + d);
                const Bf16s y = j + 1 < count ? *(const Bf16s *)(from + row + d) : Bf16s{};
                *(Pairs *)(to + d) = Instructions::woven(x, y);
            }
    }

    // exp(x) for x <= 0, to 2^-22 and to 2^-24 of |x|: enough for a weight that is rounded to bf16. 0 far below, NaN for NaN.
    // Among the polynomials that are 1 at 0, this one has the least relative error for 2^f, f in [0, 1).
    static INLINE Reals<float> exponential(Reals<float> x) {
        const Reals<float> t = x * 1.44269504f, f = Instructions::fraction(t);
        Reals<float> p = f * 1.86714029e-3f + 9.01700743e-3f;
        p = p * f + 5.57999313e-2f;
        p = p * f + 2.40164444e-1f;
        p = p * f + 6.93151295e-1f;
        p = p * f + 1.0f;
        return Instructions::scaled(p, t);
    }
};
