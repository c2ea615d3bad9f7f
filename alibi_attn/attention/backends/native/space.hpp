// Positions in the plane and in space: the bias is -m |p_i - p_j|.
//
// Distances are no longer a band, but tokens come sorted along a curve that fills the space (`run/space.py`), so a tile of keys
// lies in a small box, and so does a block of queries. The distance of the two boxes bounds all distances between them.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "call.hpp"
#include "vectors.hpp"

enum { AXES = 3 };
constexpr double MOST_ROUNDED = 1.0 / (1 << 20);  // nats that a bias may be off because of its block's extent

INLINE Reals<float> square_root(Reals<float> x) {
#if defined(__AVX512F__)
    return (Reals<float>)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Reals<float>)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (Reals<float>)_mm_sqrt_ps((__m128)x);
#elif defined(__ARM_NEON)
    return (Reals<float>)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < VL<float>; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

INLINE Reals<double> square_root(Reals<double> x) {
#if defined(__AVX512F__)
    return (Reals<double>)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
    return (Reals<double>)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
    return (Reals<double>)_mm_sqrt_pd((__m128d)x);
#elif defined(__ARM_NEON)
    return (Reals<double>)vsqrtq_f64((float64x2_t)x);
#else
    for (int i = 0; i < VL<double>; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// The smallest box around some points; empty if there are none.
struct Box {
    double low[AXES] = {INFINITY, INFINITY, INFINITY}, high[AXES] = {-INFINITY, -INFINITY, -INFINITY};

    bool is_empty() const { return !(low[0] <= high[0]); }

    void add(const double *point) {
        for (int a = 0; a < AXES; a++) low[a] = std::min(low[a], point[a]), high[a] = std::max(high[a], point[a]);
    }

    // The distance of the nearest points of two boxes.
    double distance(const Box &other) const {
        double squares = 0;
        for (int a = 0; a < AXES; a++) {
            const double gap = std::max({0.0, low[a] - other.high[a], other.low[a] - high[a]});
            squares += gap * gap;
        }
        return std::sqrt(squares);
    }

    // The largest absolute coordinate of a point of the box, relative to `origin`.
    double extent(const double *origin) const {
        double most = 0;
        for (int a = 0; a < AXES; a++) most = std::max({most, std::abs(low[a] - origin[a]), std::abs(high[a] - origin[a])});
        return most;
    }
};

// The positions of a block of queries, relative to the first: coordinates of 10^7 keep their digits in fp32.
template <typename Real>
struct BlockPoints {
    double origin[AXES] = {};
    Real at[AXES][BLOCK] = {};
    Box box = {};
    bool in_plane = true;           // the third coordinates are equal
    bool is_wide = false;           // relative to the first query, coordinates would lose digits that matter
    const double *exact = nullptr;  // [queries][AXES]
    int queries = 0;

    void begin(const double *points, int rows, Real slope) {
        box = {}, in_plane = true, exact = points, queries = rows;
        std::copy_n(points, +AXES, origin);
        for (int i = 0; i < BLOCK; i++)
            for (int a = 0; a < AXES; a++) at[a][i] = i < rows ? Real(points[i * AXES + a] - origin[a]) : Real(0);
        for (int i = 0; i < rows; i++) box.add(points + i * AXES), in_plane &= at[AXES - 1][i] == 0;
        is_wide = std::abs(double(slope)) * box.extent(origin) * double(UNIT<Real>) > MOST_ROUNDED;
    }

    // From VL queries to a point relative to the first query, by some of its axes.
    template <int axes>
    INLINE Reals<Real> distances(const Real *point, int lane) const {
        Reals<Real> squares = {};
        for (int a = 0; a < axes; a++) {
            const Reals<Real> apart = load(at[a] + lane) - point[a];
            squares += apart * apart;
        }
        return square_root(squares);
    }

    // The same in double, to a point in its own coordinates.
    Reals<Real> exact_distances(const double *point, int lane) const {
        Reals<Real> apart = {};
        for (int i = 0; i < VL<Real> && lane + i < queries; i++) {
            double squares = 0;
            for (int a = 0; a < AXES; a++) {
                const double gap = exact[(lane + i) * AXES + a] - point[a];
                squares += gap * gap;
            }
            apart[i] = Real(std::sqrt(squares));
        }
        return apart;
    }
};

// A tile of keys, as seen by a block of queries.
struct TileInSpace {
    int64_t first, end;  // keys [first, end)
    double apart;        // the distance of the two boxes
    double rounded;      // how far a computed distance may be off, beside its own rounding
    int64_t tokens;      // between the tile and the block, in the order of the sequence

    bool operator<(const TileInSpace &other) const {
        return apart != other.apart ? apart < other.apart : tokens != other.tokens ? tokens < other.tokens : first < other.first;
    }
};

// The boxes of all tiles of visible keys.
template <typename Real>
struct Boxes {
    int64_t tiles;
    std::vector<Box> of_tiles;  // [B, tiles]

    explicit Boxes(const Call<Real> &call) : tiles((call.S + BLOCK - 1) / BLOCK) {
        if (!call.key_points) return;
        of_tiles.resize(call.B * tiles);
        for (int64_t b = 0; b < call.B; b++)
            for (int64_t j = 0; j < call.S; j++)
                if (!call.key_mask || call.key_mask[b * call.S + j])
                    of_tiles[b * tiles + j / BLOCK].add(call.key_points + AXES * (b * call.S + j));
    }

    // meet(tile) for the tiles that masks allow to a block.
    template <typename Block, typename Meet>
    void for_tiles(const Block &block, const Meet &meet) const {
        for (int64_t t = block.range.low / BLOCK; t * BLOCK < block.range.high; t++) {
            const Box &box = of_tiles[block.b * tiles + t];
            if (box.is_empty()) continue;
            const int64_t first = std::max<int64_t>(t * BLOCK, block.range.low);
            const int64_t end = std::min<int64_t>((t + 1) * BLOCK, block.range.high);
            const double extent = box.extent(block.points.origin) + block.points.box.extent(block.points.origin);
            const int64_t tokens = std::max<int64_t>({0, block.position - (end - 1), first - (block.position + block.rows - 1)});
            meet({first, end, box.distance(block.points.box), 8 * double(UNIT<Real>) * extent, tokens});
        }
    }
};
