// The instructions for products of bf16 numbers with sums in fp32: those of AVX512-BF16, or of Arm's BF16. Vector extensions
// cannot express them; apart from the conversion of fp16 (`stored.hpp`) these are the only intrinsics of the kernels.
//
// In each lane both multiply two pairs of bf16 numbers, x0 y0 + x1 y1, and add the products to a sum. vdpbf16ps adds one after
// the other and rounds to the nearest fp32 number, as two multiply-adds do. bfdot adds the products to each other first, and
// rounds both sums to odd: if a sum is not an fp32 number, to the one of its neighbors whose last bit is 1. Both treat numbers
// below the smallest normal one, 2^-126, as 0. docs/maths.md, step 7, bounds the effect.

#pragma once

#include "call.hpp"
#include "vectors.hpp"

typedef uint32_t Pair __attribute__((aligned(2), may_alias));  // of Bf16, the first in the low half
typedef uint32_t Pairs __attribute__((vector_size(BYTES), aligned(2), may_alias));      // VL<float> of them
typedef uint16_t Bf16s __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));  // VL<float> numbers

#if defined(__AVX512BF16__)
#include <immintrin.h>

struct Bf16Instructions {
    static constexpr bool EXIST = true;
    typedef __m512bh Factor;

    // The pair at `at`, for every lane.
    static INLINE Factor repeated(const Bf16 *at) { return (Factor)_mm512_set1_epi32((int)*(const Pair *)at); }

    static INLINE Reals<float> multiply_add(Reals<float> sum, Factor repeated, Pairs row) {
        return (Reals<float>)_mm512_dpbf16_ps((__m512)sum, (Factor)(__m512i)row, repeated);
    }

    // The first `count` pairs, and zeros.
    static INLINE Pairs first(const Pair *at, int count) {
        return (Pairs)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), at);
    }

    // Rounded to the nearest: VL numbers, two vectors one after the other, and pairs of one number from x and one from y.
    static INLINE Bf16s rounded(Reals<float> x) { return (Bf16s)_mm512_cvtneps_pbh((__m512)x); }
    static INLINE Pairs rounded(Reals<float> x, Reals<float> next) {
        return (Pairs)_mm512_cvtne2ps_pbh((__m512)next, (__m512)x);
    }
    static INLINE Pairs rounded_pairs(Reals<float> x, Reals<float> y) {
        const __m512i both = (__m512i)rounded(x, y);
        return (Pairs)_mm512_permutex2var_epi16(both, order(16), both);
    }

    // Pairs of one number from x and one from y.
    static INLINE Pairs woven(Bf16s x, Bf16s y) {
        return (Pairs)_mm512_permutex2var_epi16(
            _mm512_castsi256_si512((__m256i)x), order(32), _mm512_castsi256_si512((__m256i)y));
    }

    // t - floor(t), and x 2^floor(t).
    static INLINE Reals<float> fraction(Reals<float> t) {
        return (Reals<float>)_mm512_maskz_reduce_ps(ALL, (__m512)t, _MM_FROUND_TO_NEG_INF);
    }
    static INLINE Reals<float> scaled(Reals<float> x, Reals<float> t) {
        return (Reals<float>)_mm512_maskz_scalef_ps(ALL, (__m512)x, (__m512)t);
    }

   private:
    static constexpr __mmask16 ALL = 0xffff;  // without a mask GCC warns about its own headers

    // Indices 0, second, 1, second + 1, ... into two registers, numbered consecutively.
    static INLINE __m512i order(int second) {
        Pairs indices = {};
        for (int i = 0; i < VL<float>; i++) indices[i] = uint32_t(i | (second + i) << 16);
        return (__m512i)indices;
    }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>

#include <cstring>

struct Bf16Instructions {
    static constexpr bool EXIST = true;
    typedef float Factor;  // a pair in the first lane of a register

    static INLINE Factor repeated(const Bf16 *at) {
        Factor pair;
        std::memcpy(&pair, at, sizeof pair);
        return pair;
    }

    // The product takes the pair from its lane. In assembler, because g++ has these intrinsics from Armv8.2 on only.
    static INLINE Reals<float> multiply_add(Reals<float> sum, Factor repeated, Pairs row) {
        asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(row), "w"(repeated));
        return sum;
    }

    static INLINE Pairs first(const Pair *at, int count) {
        Pairs pairs = {};
        for (int i = 0; i < count; i++) pairs[i] = at[i];
        return pairs;
    }

    static INLINE Bf16s rounded(Reals<float> x) {
        Bf16s rounded;
        asm("bfcvtn %0.4h, %1.4s" : "=w"(rounded) : "w"(x));
        return rounded;
    }
    static INLINE Pairs rounded(Reals<float> x, Reals<float> next) {
        const Bf16s first = rounded(x), second = rounded(next);
        return (Pairs)vcombine_u16((uint16x4_t)first, (uint16x4_t)second);
    }
    static INLINE Pairs rounded_pairs(Reals<float> x, Reals<float> y) { return woven(rounded(x), rounded(y)); }

    static INLINE Pairs woven(Bf16s x, Bf16s y) {
        const uint16x4_t low = (uint16x4_t)x, high = (uint16x4_t)y;
        return (Pairs)vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
    }

    static INLINE Reals<float> fraction(Reals<float> t) { return t - (Reals<float>)vrndmq_f32((float32x4_t)t); }

    // For x in [1, 2] and t <= 0; 0 if the result is below 2^-126.
    static INLINE Reals<float> scaled(Reals<float> x, Reals<float> t) {
        const Ints<float> n = (Ints<float>)vcvtmq_s32_f32((float32x4_t)t);
        return t < -126.0f ? Reals<float>{} : (Reals<float>)((Ints<float>)x + (n << 23));
    }
};
#else
struct Bf16Instructions {
    static constexpr bool EXIST = false;
};
#endif
