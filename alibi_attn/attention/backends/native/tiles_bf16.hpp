// Products of bf16 numbers by AMX, the matrix unit of Intel's server processors since 2023, on Linux.
//
// A tile register holds 16 rows of 64 bytes. An instruction multiplies a tile of 16 × 32 numbers by one of 16 × 16 pairs and
// adds the result to a tile of 16 × 16 sums. It adds the 32 products of a sum to each other first, one after the other, as
// multiply-adds rounded to the nearest fp32 number, and treats numbers below 2^-126 as 0: no more roundings than `vdpbf16ps`.

#pragma once

#include "products_bf16.hpp"

#if defined(__AVX512BF16__) && defined(__linux__) && !defined(ALIBI_WITHOUT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ON_TILES __attribute__((target("amx-tile,amx-bf16")))

// The shapes of a thread's tile registers, from here to the end of the scope. Those of before are restored, because other
// libraries set theirs once per thread and expect to find them (llama.cpp does).
class Tiles {
    enum { REQUEST_PERMISSION = 0x1023, OF_TILES = 18 };  // of arch_prctl; a process must ask, once

    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};  // palette 0: no tiles are in use
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

    static bool ask() {
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1)) return false;  // AMX-BF16
        return syscall(SYS_arch_prctl, REQUEST_PERMISSION, OF_TILES) == 0;
    }

    const bool used;
    Shapes before;

   public:
    static bool usable() {
        static const bool answer = ask();
        return answer;
    }

    ON_TILES explicit Tiles(bool wanted) : used(wanted && usable()) {
        if (!used) return;
        const Shapes shapes;
        asm volatile("sttilecfg %0" : "=m"(before));
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ON_TILES ~Tiles() {
        if (used) asm volatile("ldtilecfg %0" : : "m"(before));
    }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

// Swaps the upper right and the lower left quarter of each square of 2 `half` × 2 `half` pairs among 16 rows of 16.
template <int half>
INLINE void swap_quarters(Pairs *x) {
    Pairs of_upper = {}, of_lower = {};  // lanes of two rows, those of the second from 16 on
    for (int i = 0; i < 16; i++) of_upper[i] = i & half ? 16 + i - half : i, of_lower[i] = i & half ? 16 + i : i + half;
    UNROLL for (int i = 0; i < 16; i++) {
        if (i & half) continue;
        const __m512i upper = (__m512i)x[i], lower = (__m512i)x[i + half];
        x[i] = (Pairs)_mm512_permutex2var_epi32(upper, (__m512i)of_upper, lower);
        x[i + half] = (Pairs)_mm512_permutex2var_epi32(upper, (__m512i)of_lower, lower);
    }
}

// to[j][i] = from[i][j] for 16 × 16 pairs; rows are `from_row` and `to_row` pairs apart.
inline void transpose_tile(const Pair *from, int64_t from_row, Pair *to, int64_t to_row) {
    Pairs x[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = *(const Pairs *)(from + i * from_row);
    swap_quarters<8>(x), swap_quarters<4>(x), swap_quarters<2>(x), swap_quarters<1>(x);
    UNROLL for (int i = 0; i < 16; i++) *(Pairs *)(to + i * to_row) = x[i];
}

// In assembler, because g++'s intrinsics do not say that they read memory.
template <int tile>
ON_TILES INLINE void load_tile(const void *at, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(row_bytes), "i"(tile) : "memory");
}

template <int tile>
ON_TILES INLINE void store_tile(void *at, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(row_bytes), "i"(tile) : "memory");
}

template <int sum, int a, int b>
ON_TILES INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
}

// Sums of 16 `down` rows and 16 `across` columns, in tile registers 0 to 3; factors are loaded into 4 to 7.
template <int down, int across>
ON_TILES OUTLINE void multiply_on_tiles(PairProduct<Bf16Instructions> p, int depth, bool adds) {
    const int64_t a_row = p.a_row * sizeof(Bf16), b_row = p.b_depth * sizeof(Pair), c_row = p.c_row * sizeof(float);
    const Bf16 *a = p.a, *a_below = a + 16 * p.a_row;
    const Pair *b = p.b;
    float *c = p.c, *c_below = c + 16 * p.c_row;
    if (adds) {
        load_tile<0>(c, c_row);
        if (across == 2) load_tile<1>(c + 16, c_row);
        if (down == 2) load_tile<2>(c_below, c_row);
        if (down == 2 && across == 2) load_tile<3>(c_below + 16, c_row);
    } else {
        asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    }
    for (int k = 0; k < depth; k += 32, a += 32, a_below += 32, b += 16 * p.b_depth) {
        load_tile<4>(a, a_row), load_tile<6>(b, b_row);
        if (down == 2) load_tile<5>(a_below, a_row);
        if (across == 2) load_tile<7>(b + 16, b_row);
        multiply_tiles<0, 4, 6>();
        if (across == 2) multiply_tiles<1, 4, 7>();
        if (down == 2) multiply_tiles<2, 5, 6>();
        if (down == 2 && across == 2) multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(c, c_row);
    if (across == 2) store_tile<1>(c + 16, c_row);
    if (down == 2) store_tile<2>(c_below, c_row);
    if (down == 2 && across == 2) store_tile<3>(c_below + 16, c_row);
}

// For numbers of rows and columns that are multiples of 16, and a depth that is one of 32.
inline void product_on_tiles(int rows, int width, int depth, PairProduct<Bf16Instructions> p, bool adds) {
    alignas(64) Pair turned[BLOCK * BLOCK / 2];
    if (p.a_row == 2) {  // pairs of neighbors are in different rows
        const Pair *pairs = reinterpret_cast<const Pair *>(p.a);
        for (int i = 0; i < rows; i += 16)
            for (int k = 0; k < depth / 2; k += 16)
                transpose_tile(pairs + k * p.a_depth / 2 + i, p.a_depth / 2, turned + i * (BLOCK / 2) + k, BLOCK / 2);
        p.a = reinterpret_cast<const Bf16 *>(turned), p.a_row = BLOCK;
    }
    for (int i = 0; i < rows; i += 32, p.a += 32 * p.a_row, p.c += 32 * p.c_row) {
        const bool below = rows - i > 16;
        PairProduct<Bf16Instructions> at = p;
        for (int v = 0; v < width; v += 32, at.b += 32, at.c += 32) {
            const auto multiply = width - v > 16 ? below ? multiply_on_tiles<2, 2> : multiply_on_tiles<1, 2>
                                                 : below ? multiply_on_tiles<2, 1> : multiply_on_tiles<1, 1>;
            multiply(at, depth, adds);
        }
    }
}

// `product` of `vectors.hpp`: most of it on tiles, and what is left of the rows and the depth with vectors.
template <Start start>
void product(int rows, int width, int depth, const PairProduct<Bf16Instructions> &p) {
    typedef PairProduct<Bf16Instructions> P;
    const int down = rows / 16 * 16, deep = depth / 32 * 32;
    if (!down || !deep || !Tiles::usable()) return product<start, P>(rows, width, depth, p);
    for (int i = 0; start == SCALE_AND_ADD && i < down; i++) {
        float *row = p.c + i * p.c_row;
        for (int v = 0; p.factor[i] != 1 && v < width; v += VL<float>) store(row + v, load(row + v) * p.factor[i]);
    }
    product_on_tiles(down, width, deep, p, start != REPLACE);
    P rest = p;
    if (depth > deep) {
        rest.a += deep / 2 * p.a_depth, rest.b += deep / 2 * p.b_depth;
        product<ADD, P>(down, width, depth - deep, rest);
    }
    if (rows > down) {
        rest = p, rest.a += down * p.a_row, rest.c += down * p.c_row;
        if (start == SCALE_AND_ADD) rest.factor += down;
        product<start, P>(rows - down, width, depth, rest);
    }
}
#else
// Without AMX there is nothing to prepare.
struct Tiles {
    explicit Tiles(bool) {}
    ~Tiles() {}
    static bool usable() { return false; }
};
#endif
