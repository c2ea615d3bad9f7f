// Numbers as they are stored, and fp32, in which they are computed: fp32 itself, bf16 and fp16.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.hpp"

#ifdef __F16C__
#include <immintrin.h>
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

// To the nearest, to even where two are; NaN stays one.
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

// Moved to their places in fp32 exponents are short by 112, of numbers below 2^-14 as well, which are subnormal then;
// infinity and NaN have the largest of fp32.
INLINE float as_float(Float16 x) {
    const uint32_t all = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    const uint32_t wide = all >= 0x7c00 << 13 ? all | 0x7f800000 : bits_of(float_of(all) * 0x1p112f);
    return float_of(wide | sign);
}

// To the nearest, to even where two are; too large is infinity, NaN stays one.
template <>
INLINE Float16 from_float<Float16>(float x) {
    const uint32_t bits = bits_of(x), all = bits & 0x7fffffff;
    const uint16_t sign = bits >> 16 & 0x8000;
    if (all > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (all >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 2^16
    // Below 2^-14 one unit is 2^-24, as it is beside a half: the addition rounds.
    if (all < 0x38800000) return {uint16_t(sign | (bits_of(float_of(all) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | (all - (112u << 23) + 0xfff + (all >> 13 & 1)) >> 13)};
}

INLINE Reals<float> load_floats(const Float16 *at) {
#if defined(__F16C__) && defined(__AVX512F__)
    return (Reals<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Reals<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    typedef uint16_t Halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    const Words x = __builtin_convertvector(*(const Halves *)at, Words), all = (x & 0x7fff) << 13;
    const Words wide = all >= 0x7c00u << 13 ? all | 0x7f800000u : (Words)((Reals<float>)all * 0x1p112f);
    return (Reals<float>)(wide | (x & 0x8000) << 16);
#endif
}
