// What forward learns about the tiles of keys that it visits, and what may be left out because of it.
//
// The certificate decides before it reads a key, from norms. Afterwards forward has every score: for a tile of keys and query i,
//     (sum over the tile of exp s_ij) / (sum over all keys visited so far of exp s_ij)
// bounds the tile's share of the query's softmax from above, since the denominator only grows. Backward leaves out the tiles at
// the ends of the band, and the outlier tiles, whose bounds obey the key rule for every query of the block. And a tile whose
// largest scores prove a bound of its share needs no weights and no sum of values in forward: those that forward leaves out have
// MEASURED_SHARE of the tolerance together, and the certificate the rest.

#pragma once

#include <cmath>
#include <vector>

#include "block.hpp"

// A key this close to a query's best one so far has too large a share; a quick test.
template <typename Real>
constexpr Real FEW_NATS = 8;
enum { FEW_KEYS = 4 };  // bounds without weights take each of this many keys of a tile for the heaviest of them

template <typename Real>
struct Measured {
    struct Tile {
        int64_t first, end;  // keys
        Real share;
    };
    std::vector<Tile> left, right;  // of the band, from the queries outward
    Real outliers[OUTLIER_TILES];
    Reals<Real> shares = {};  // of the tile that is being visited, the largest in every lane
    double allowed = 0;       // the share of a query's softmax that forward may still leave out

    void begin(double allowed_in_forward) {
        left.clear(), right.clear(), allowed = allowed_in_forward;
        std::fill_n(outliers, +OUTLIER_TILES, Real(0));
    }

    // Takes the shares of VL queries: the sum of a tile and that of all keys so far, both relative to the same maximum.
    void add(Reals<Real> sum, Reals<Real> all, Ints<Real> has_query) {
        // Nothing was visible so far if `all` is 0, and NaN weighs more than any tolerance.
        Reals<Real> share = all > 0 ? sum / all : sum;
        share = share <= 1 ? share : every(Real(INFINITY));
        share = has_query ? share : Reals<Real>{};
        shares = share > shares ? share : shares;
    }

    // Takes bounds of the shares of all queries from the scores of a tile, none of them NaN, and the maxima and sums so far.
    void add_bounds(const Real *scores, int count, int rows, const Real *m_i, const Real *l_i) {
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            Reals<Real> sum = {};
            for (int from = 0; from < count; from += FEW_KEYS) {
                const int to = std::min<int>(from + FEW_KEYS, count);
                Reals<Real> most = load(scores + from * BLOCK + v);
                for (int j = from + 1; j < to; j++) {
                    const Reals<Real> score = load(scores + j * BLOCK + v);
                    most = score > most ? score : most;
                }
                Reals<Real> nats = most - load(m_i + v);
                nats = nats > CAP<Real> ? every(CAP<Real>) : nats;
                sum += most == -INFINITY ? Reals<Real>{} : exponential(nats) * Real(1.01 * (to - from));
            }
            add(sum, load(l_i + v), Block<Real>::lanes() + v < rows);
        }
    }

    // The largest share since the last call.
    Real share_of_tile() {
        Real largest = 0;
        for (int i = 0; i < VL<Real>; i++) largest = std::max(largest, shares[i]);
        shares = Reals<Real>{};
        return largest;
    }

    // Whether forward may leave out a tile of `count` keys, given its scores and the largest of each query, and the maxima and
    // sums so far. Then `shares` has its bound.
    bool may_leave_out(const Real *scores, int count, int rows, const Real *top, const Real *m_i, const Real *l_i) {
        if (!(allowed > 0)) return false;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Ints<Real> has_query = Block<Real>::lanes() + v < rows, sees = load(top + v) != -INFINITY;
            const Reals<Real> nats = load(top + v) - load(m_i + v);
            const Ints<Real> heavy = has_query & sees & ~(nats < -FEW_NATS<Real>);
            for (int i = 0; i < VL<Real>; i++)
                if (heavy[i]) return false;
        }
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Ints<Real> has_query = Block<Real>::lanes() + v < rows, sees = load(top + v) != -INFINITY;
            const Reals<Real> heaviest = exponential(load(top + v) - load(m_i + v));
            add(sees ? heaviest : Reals<Real>{}, load(l_i + v), has_query);
        }
        if (!(share_of_tile() <= allowed)) return false;
        add_bounds(scores, count, rows, m_i, l_i);
        const Real share = share_of_tile();
        if (!(share <= allowed)) return false;
        allowed -= share, shares = every(share);
        return true;
    }

    // Removes the tiles from both ends of the band, and the outlier tiles, that obey the key rule for this tolerance. The tile
    // nearest to the queries stays.
    void remove(double tolerance, const Block<Real> &block, KeptBand *band, int32_t *kept_bits) const {
        const int64_t last_query = block.position + block.rows - 1;
        const auto is_light = [&](const Tile &tile) {
            const int64_t distance = std::max<int64_t>({0, block.position - (tile.end - 1), tile.first - last_query});
            return tolerance > 0 && tile.share * key_rule(double(distance)) <= tolerance;
        };
        size_t lefts = left.size(), rights = right.size();
        while (lefts > 1 && is_light(left[lefts - 1])) lefts--;
        while (rights > (left.empty() ? 1 : 0) && is_light(right[rights - 1])) rights--;
        if (lefts < left.size()) band->first = (int32_t)left[lefts - 1].first;
        if (rights < right.size()) band->end = (int32_t)right[rights].first;
        for (int p = 0; p < OUTLIER_TILES; p++) {
            const int64_t first = int64_t(block.outlier_tiles[p]) * BLOCK;
            if (*kept_bits >> p & 1 && is_light({first, first + BLOCK, outliers[p]})) *kept_bits &= ~(1 << p);
        }
    }
};
