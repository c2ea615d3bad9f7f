// Conversions between fp32, in which numbers are computed, and the types in which they are stored: fp32, bf16 and fp16.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

struct BFloat16 {
    uint16_t bits;
};

INLINE float as_float(float x) { return x; }

INLINE float as_float(BFloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &wide, sizeof y);
    return y;
}

template <typename Stored>
Stored from_float(float x);

template <>
INLINE float from_float<float>(float x) {
    return x;
}

// To the nearest, ties to even; NaN stays NaN.
template <>
INLINE BFloat16 from_float<BFloat16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

INLINE Reals<float> load_floats(const float *at) { return load(at); }

INLINE Reals<float> load_floats(const BFloat16 *at) {
    typedef uint16_t Halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    return (Reals<float>)(__builtin_convertvector(*(const Halves *)at, Words) << 16);
}

// IEEE 754's binary16: 5 bits of exponent, 10 of mantissa.
struct Float16 {
    uint16_t bits;
};

INLINE float float_of(uint32_t bits) {
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Shifted into fp32's fields, the exponents are too small by 112, also those of subnormal numbers (below 2^-14); infinity and NaN
// get the largest exponent of fp32.
INLINE float as_float(Float16 x) {
#ifdef __ARM_NEON
    __fp16 half;
    std::memcpy(&half, &x, sizeof half);
    return half;
#else
    const uint32_t all = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    const uint32_t wide = all >= 0x7c00 << 13 ? all | 0x7f800000 : bits_of(float_of(all) * 0x1p112f);
    return float_of(wide | sign);
#endif
}

// To the nearest, ties to even; numbers that are too large become infinity, NaN stays NaN.
template <>
INLINE Float16 from_float<Float16>(float x) {
#ifdef __ARM_NEON
    const __fp16 half = (__fp16)x;
    Float16 y;
    std::memcpy(&y, &half, sizeof y);
    return y;
#else
    const uint32_t bits = bits_of(x), all = bits & 0x7fffffff;
    const uint16_t sign = bits >> 16 & 0x8000;
    if (all > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (all >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 2^16
    // Below 2^-14 one unit is 2^-24, as it is next to 0.5: the addition rounds.
    if (all < 0x38800000) return {uint16_t(sign | (bits_of(float_of(all) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | (all - (112u << 23) + 0xfff + (all >> 13 & 1)) >> 13)};
#endif
}

INLINE Reals<float> load_floats(const Float16 *at) {
#if defined(__F16C__) && defined(__AVX512F__)
    constexpr __mmask16 all = 0xffff;  // without a mask GCC warns about its own headers
    return (Reals<float>)_mm512_maskz_cvtph_ps(all, _mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Reals<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif defined(__ARM_NEON)
    return (Reals<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&at->bits)));
#else
    typedef uint16_t Halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    const Words x = __builtin_convertvector(*(const Halves *)at, Words), all = (x & 0x7fff) << 13;
    const Words wide = all >= 0x7c00u << 13 ? all | 0x7f800000u : (Words)((Reals<float>)all * 0x1p112f);
    return (Reals<float>)(wide | (x & 0x8000) << 16);
#endif
}
