// Products of bf16 numbers with sums in fp32, for processors with AVX512-BF16. Vector extensions cannot express them; apart from
// the conversion of fp16 (`stored.hpp`) these are the only intrinsics of the kernels.
//
// vdpbf16ps adds x0 y0 + x1 y1 to each lane, for two pairs of bf16 numbers. So both factors are stored in pairs along the depth:
// two neighbors in a row already are, and two rows must be woven into one. The instruction rounds each of its two sums to the
// nearest fp32 number, as two multiply-adds do, and treats numbers below the smallest normal one, 2^-126, as 0; docs/maths.md,
// step 7, bounds the effect.

#pragma once

#include "call.hpp"
#include "vectors.hpp"

typedef uint32_t Pair __attribute__((aligned(2), may_alias));  // of Bf16, the first in the low half

// For types and processors without such products.
template <typename Real>
struct InPairs {
    static constexpr bool EXIST = false;
};

#ifdef __AVX512BF16__
#include <immintrin.h>

// A product of `vectors.hpp` whose depth is in pairs.
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

    INLINE __m512bh number(int i, int k) const {
        return (__m512bh)_mm512_set1_epi32((int)*(const Pair *)(a + i * a_row + k * a_depth));
    }
    INLINE __m512bh row(int k, int v) const { return (__m512bh)_mm512_loadu_si512(b + k * b_depth + v * VL<float>); }
    static INLINE Reals<float> add(Reals<float> sum, __m512bh x, __m512bh row) {
        return (Reals<float>)_mm512_dpbf16_ps((__m512)sum, row, x);
    }
};

template <>
struct InPairs<float> {
    static constexpr bool EXIST = true;
    typedef PairProduct Product;
    typedef uint32_t Pairs __attribute__((vector_size(64), aligned(2), may_alias));
    typedef uint16_t Narrow __attribute__((vector_size(32), aligned(2), may_alias));

    // VL numbers.
    static INLINE Reals<float> widened(const Bf16 *at) {
        return (Reals<float>)(__builtin_convertvector(*(const Narrow *)at, Ints<float>) << 16);
    }

    // The first and the second numbers of VL pairs.
    static INLINE Reals<float> first_of(Pairs pairs) { return (Reals<float>)(pairs << 16); }
    static INLINE Reals<float> second_of(Pairs pairs) { return (Reals<float>)(pairs & 0xffff0000); }

    // VL pairs, of which only `count` exist, times a power of two: only numbers below 2^-126 are rounded.
    static INLINE Pairs scaled(const Pair *at, int count, float factor) {
        const Pairs pairs = (Pairs)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), at);
        return ((Pairs)(first_of(pairs) * factor) >> 16) | ((Pairs)(second_of(pairs) * factor) & 0xffff0000);
    }

    // VL numbers, rounded to the nearest.
    static INLINE void round(Bf16 *to, Reals<float> x) { *(Narrow *)to = (Narrow)_mm512_cvtneps_pbh((__m512)x); }

    // 2 VL numbers, one vector after the other.
    static INLINE void round(Bf16 *to, Reals<float> x, Reals<float> next) {
        *(Pairs *)to = (Pairs)_mm512_cvtne2ps_pbh((__m512)next, (__m512)x);
    }

    // VL pairs, each of one number from x and one from y.
    static INLINE void round_to_pairs(Pair *to, Reals<float> x, Reals<float> y) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
        *(Pairs *)to = (Pairs)_mm512_permutex2var_epi16(both, woven(16), both);
    }

    // Weaves rows of `width` numbers, `row` numbers apart, into [(count + 1) / 2][width] pairs; an odd last row is paired with 0.
    static void weave(const Bf16 *from, int64_t row, int count, int64_t width, Pair *to) {
        for (int j = 0; j < count; j += 2, from += 2 * row, to += width)
            for (int64_t d = 0; d < width; d += VL<float>) {
                const __m256i x = (__m256i) * (const Narrow *)(from + d);
                const __m256i y = j + 1 < count ? (__m256i) * (const Narrow *)(from + row + d) : __m256i{};
                const __m512i low = _mm512_castsi256_si512(x), high = _mm512_castsi256_si512(y);
                *(Pairs *)(to + d) = (Pairs)_mm512_permutex2var_epi16(low, woven(32), high);
            }
    }

    // exp(x) for x <= 0, to 2^-22 and to 2^-24 of |x|: enough for a weight that is rounded to bf16. 0 far below, NaN for NaN.
    // Among the polynomials that are 1 at 0, this one has the least relative error for 2^f, f in [0, 1).
    static INLINE Reals<float> exponential(Reals<float> x) {
        constexpr __mmask16 all = 0xffff;  // without a mask GCC warns about its own headers
        const Reals<float> t = x * 1.44269504f, f = (Reals<float>)_mm512_maskz_reduce_ps(all, (__m512)t, _MM_FROUND_TO_NEG_INF);
        Reals<float> p = f * 1.86714029e-3f + 9.01700743e-3f;
        p = p * f + 5.57999313e-2f;
        p = p * f + 2.40164444e-1f;
        p = p * f + 6.93151295e-1f;
        p = p * f + 1.0f;
        return (Reals<float>)_mm512_maskz_scalef_ps(all, (__m512)p, (__m512)t);  // p 2^floor(t)
    }

   private:
    // Indices 0, second, 1, second + 1, ... into two registers, numbered consecutively.
    static INLINE __m512i woven(int second) {
        Pairs order = {};
        for (int i = 0; i < VL<float>; i++) order[i] = uint32_t(i | (second + i) << 16);
        return (__m512i)order;
    }
};
#endif
