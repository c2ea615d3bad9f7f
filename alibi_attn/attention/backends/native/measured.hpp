// What forward learns about the tiles of keys that it visits, and what may be left out because of it.
//
// The certificate decides before it reads a key, from norms. Afterwards forward has every score: for a tile of keys and query i,
//     (sum over the tile of exp s_ij) / (sum over all keys visited so far of exp s_ij)
// bounds the tile's share of the query's softmax from above, since the denominator only grows. So the tiles at the ends of the
// band, and the outlier tiles, whose bounds add up to no more than the tolerance, weigh less than it together: backward leaves
// them out. And a tile whose largest score proves such a bound needs no weights and no sum of values in forward: those that
// forward leaves out have MEASURED_SHARE of the tolerance together, and the certificate the rest.

#pragma once

#include <cmath>
#include <vector>

#include "block.hpp"

// A key this close to a query's best one so far has too large a share; a quick test.
template <typename Real>
constexpr Real FEW_NATS = 8;

template <typename Real>
struct Measured {
    std::vector<Real> left, right;  // of the tiles of the band, from the queries outward
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

    // The largest share since the last call.
    Real share_of_tile() {
        Real largest = 0;
        for (int i = 0; i < VL<Real>; i++) largest = std::max(largest, shares[i]);
        shares = Reals<Real>{};
        return largest;
    }

    // Whether forward may leave out a tile of `count` keys, given the largest scores of the queries in it, the largest so far,
    // and the sums so far.
    bool may_leave_out(int count, int rows, const Real *top, const Real *m_i, const Real *l_i) {
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
            const Reals<Real> most = exponential(load(top + v) - load(m_i + v)) * Real(1.01 * count);
            add(sees ? most : Reals<Real>{}, load(l_i + v), has_query);
        }
        const double share = share_of_tile();
        if (!(share <= allowed)) return false;
        allowed -= share;
        return true;
    }

    // Removes from the band [range.first, range.end), whose tiles start at `middle`, and from the outlier tiles what together has
    // a share of at most `tolerance`, the lightest first. The tile nearest to the queries stays. Tiles to the left begin at
    // multiples of BLOCK.
    void remove(double tolerance, int64_t middle, const KeyRange &range, int outlier_bits, KeptBand *band, int32_t *kept_bits) {
        size_t lefts = left.size(), rights = right.size();
        while (true) {
            double least = INFINITY;
            int which = -1;  // an outlier tile, or one of the following
            const auto consider = [&](double share, int candidate) {
                if (share < least) least = share, which = candidate;
            };
            if (lefts > 1) consider(left[lefts - 1], OUTLIER_TILES);
            if (rights > (left.empty() ? 1 : 0)) consider(right[rights - 1], OUTLIER_TILES + 1);
            for (int p = 0; p < OUTLIER_TILES; p++)
                if (outlier_bits >> p & 1) consider(outliers[p], p);
            if (!(tolerance > 0 && least <= tolerance)) break;
            tolerance -= least;
            if (which == OUTLIER_TILES) lefts--;
            else if (which > OUTLIER_TILES) rights--;
            else outlier_bits &= ~(1 << which);
        }
        const int64_t nearest = (middle - 1) / BLOCK * BLOCK, farthest = nearest - (int64_t(lefts) - 1) * BLOCK;
        band->first = (int32_t)(lefts > 0 ? std::max<int64_t>(range.first, farthest) : middle);
        band->end = (int32_t)std::min<int64_t>(range.end, middle + int64_t(rights) * BLOCK);
        *kept_bits = outlier_bits;
    }
};
