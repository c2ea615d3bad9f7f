// Vectors of numbers, their exponential, and a small matrix product that stays in registers, for float and double.
//
// GCC's vector extensions: one source for AVX-512, AVX2 and NEON. A register tile is MR rows of NV vectors: it fills the
// processor's registers and has enough independent sums to hide the latency of a multiply-add.

#pragma once

#include <cmath>
#include <cstdint>

#if defined(__AVX512F__)
enum { BYTES = 64, MR = 8, NV = 2 };  // of a vector; 32 registers
#elif defined(__AVX2__)
enum { BYTES = 32, MR = 6, NV = 2 };  // 16 registers
#elif defined(__ARM_NEON)
enum { BYTES = 16, MR = 6, NV = 4 };  // 32 registers
#else
enum { BYTES = 16, MR = 6, NV = 2 };  // 16 registers
#endif

#define INLINE inline __attribute__((always_inline))
#define OUTLINE __attribute__((noinline))  // so that it does not change how the code around it is compiled
#define UNROLL _Pragma("GCC unroll 16")

template <typename Real>
struct Simd;

template <>
struct Simd<float> {
    typedef int32_t integer;
    typedef float reals __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef int32_t ints __attribute__((vector_size(BYTES), aligned(4), may_alias));
};

template <>
struct Simd<double> {
    typedef int64_t integer;
    typedef double reals __attribute__((vector_size(BYTES), aligned(8), may_alias));
    typedef int64_t ints __attribute__((vector_size(BYTES), aligned(8), may_alias));
};

template <typename Real>
using Reals = typename Simd<Real>::reals;
template <typename Real>
using Ints = typename Simd<Real>::ints;
template <typename Real>
constexpr int VL = BYTES / sizeof(Real);  // lanes

template <typename Real>
INLINE Reals<Real> load(const Real *at) {
    return *(const Reals<Real> *)at;
}

template <typename Real>
INLINE void store(Real *at, Reals<Real> x) {
    *(Reals<Real> *)at = x;
}

template <typename Real>
INLINE Reals<Real> every(Real x) {
    return x - Reals<Real>{};
}

// exp(x) for x <= 0, to about one unit in the last place; 0 below the logarithm of the smallest normal number, NaN for NaN.
// x = n ln 2 + f with |f| <= ln 2 / 2 and ln 2 in two parts; the approximations are those of Cephes (Moshier 1992, expf and exp).
INLINE Reals<float> exponential(Reals<float> x) {
    const Reals<float> lowest = every(-87.336544f), shifter = every(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    const Reals<float> held = x < lowest ? lowest : x, shifted = held * 1.44269504f + shifter, n = shifted - shifter;
    const Reals<float> f = held - n * 0.693359375f + n * 2.12194440e-4f;
    Reals<float> p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    const Reals<float> y = (Reals<float>)((Ints<float>)p + ((Ints<float>)shifted << 23));  // 2^23 leaves at the top
    return x < lowest ? every(0.0f) : y;
}

INLINE Reals<double> exponential(Reals<double> x) {
    const Reals<double> lowest = every(-708.3964185322641), shifter = every(6755399441055744.0);  // 1.5 * 2^52
    const Reals<double> held = x < lowest ? lowest : x, shifted = held * 1.4426950408889634 + shifter, n = shifted - shifter;
    const Reals<double> f = held - n * 6.93145751953125e-1 - n * 1.42860682030941723212e-6, square = f * f;
    const Reals<double> p =
        f * ((square * 1.26177193074810590878e-4 + 3.02994407707441961300e-2) * square + 9.99999999999999999910e-1);
    const Reals<double> q = ((square * 3.00198505138664455042e-6 + 2.52448340349684104192e-3) * square
                             + 2.27265548208155028766e-1) * square + 2.0;
    const Reals<double> y = 1.0 + 2.0 * p / (q - p);
    const Reals<double> scaled = (Reals<double>)((Ints<double>)y + ((Ints<double>)shifted << 52));
    return x < lowest ? every(0.0) : scaled;
}

// How a product updates C: replaces it, adds to it, or adds to factor[i] times its row i.
enum Start { REPLACE, ADD, SCALE_AND_ADD };

template <typename Real>
struct Product {
    const Real *a;  // read one number at a time, with any strides
    int64_t a_row, a_depth;
    const Real *b;  // rows as wide as C
    int64_t b_depth;
    Real *c;
    int64_t c_row;
    const Real *factor;

    typedef Real Sum;
    static constexpr int STEP = 1;  // along the depth

    INLINE Real number(int i, int k) const { return a[i * a_row + k * a_depth]; }
    INLINE Reals<Real> row(int k, int v) const { return load(b + k * b_depth + v * VL<Real>); }
    static INLINE Reals<Real> add(Reals<Real> sum, Real x, Reals<Real> row) {
#ifdef __aarch64__
        // With x in one lane. Compilers first copy it to all lanes, in a pipe that could multiply.
        if constexpr (sizeof(Real) == 4) asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(row), "w"(x));
        else asm("fmla %0.2d, %1.2d, %2.d[0]" : "+w"(sum) : "w"(row), "w"(x));
        return sum;
#else
        return sum + x * row;
#endif
    }
};

// C[i, :] = sum over k of A[i, k] B[k, :], for `rows` rows and `vectors` vectors, with the sums in registers. P is a Product
// or has the same members.
template <Start start, int rows, int vectors, typename P>
INLINE void register_tile(int steps, const P &p) {
    typedef typename P::Sum Real;
    Reals<Real> sum[rows][vectors];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = Reals<Real>{};
    for (int k = 0; k < steps; k++) {
        decltype(p.row(0, 0)) row[vectors];
        UNROLL for (int v = 0; v < vectors; v++) row[v] = p.row(k, v);
        UNROLL for (int i = 0; i < rows; i++) {
            const auto x = p.number(i, k);
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = P::add(sum[i][v], x, row[v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) {
        Real *c = p.c + i * p.c_row + v * VL<Real>;
        // The previous value is added last: it may be large, and each addition to it would round.
        if (start == ADD) sum[i][v] += load(c);
        if (start == SCALE_AND_ADD) sum[i][v] += load(c) * p.factor[i];
        store(c, sum[i][v]);
    }
}

// The last rows, fewer than MR.
template <Start start, int rows, int vectors, typename P>
INLINE void last_rows(int count, int steps, const P &p) {
    if constexpr (rows > 0) {
        if (count == rows) return register_tile<start, rows, vectors>(steps, p);
        last_rows<start, rows - 1, vectors>(count, steps, p);
    }
}

template <Start start, int vectors, typename P>
INLINE void columns(int rows, int steps, P p) {
    for (; rows >= MR; rows -= MR) {
        register_tile<start, MR, vectors>(steps, p);
        p.a += MR * p.a_row, p.c += MR * p.c_row;
        if (start == SCALE_AND_ADD) p.factor += MR;
    }
    last_rows<start, MR - 1, vectors>(rows, steps, p);
}

// The same for any number of rows, a width that is a multiple of VL, and any depth (in numbers, not in steps).
template <Start start, typename P>
void product(int rows, int width, int depth, P p) {
    constexpr int wide = NV * VL<typename P::Sum>, narrow = VL<typename P::Sum>;
    const int steps = (depth + P::STEP - 1) / P::STEP;
    for (; width >= wide; width -= wide, p.b += wide, p.c += wide) columns<start, NV>(rows, steps, p);
    for (; width >= narrow; width -= narrow, p.b += narrow, p.c += narrow) columns<start, 1>(rows, steps, p);
}
