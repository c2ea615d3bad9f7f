// Forward: each block of queries moves outward from its own position, with an online softmax, until the remaining keys cannot
// matter.

#include "certificate.hpp"
#include "denormals.hpp"
#include "dropout.hpp"
#include "measured.hpp"
#include "tasks.hpp"
#include "threads.hpp"

#ifdef ALIBI_COUNT
int64_t alibi_counted = 0;
EXPORT int64_t *alibi_counter() { return &alibi_counted; }
#endif

namespace {

constexpr int64_t KEYS_IN_FLOAT = 4096;  // keys whose weighted values are summed in float at a time

template <typename Real>
struct Forward {
    Block<Real> block;
    Real *scores, *acc;  // [BLOCK][BLOCK], [BLOCK][D]
    Certificate<Real> certificate;
    Dropout<Real> dropout;
    const Boxes<Real> &boxes;
    std::vector<TileInSpace> order = {};
    Measured<Real> measured = {};
    double *total;  // [BLOCK][D]: acc of earlier keys, at their m_i `total_m`; only if `has_total`
    Real m_i[BLOCK] = {}, l_i[BLOCK] = {};  // the largest score so far, and the sum of exp(score - m_i)
    Real l_low[BLOCK] = {}, total_m[BLOCK] = {};  // the rounding error of l_i
    bool has_total = false, acc_is_full = false;

    void visit(int64_t key, int count) {
        return block.call.dropout_seed ? visit<true>(key, count) : visit<false>(key, count);
    }

    template <bool dropping>
    void visit(int64_t key, int count) {
        if (acc_is_full) add_to_total();
        Real top[BLOCK], factor[BLOCK];
        block.scores_with(key, count, scores);
        certificate.visits(key, count);
        for (int v = 0; v < BLOCK; v += VL<Real>) store(top + v, largest_score(v, count));
        if (measured.may_leave_out(scores, count, block.rows, top, m_i, l_i) && !has_nan(count)) return;
        if (dropping) dropout.draw(key, count);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> before = load(m_i + v), of_tile = load(top + v), most = of_tile > before ? of_tile : before;
            const Reals<Real> reference = most == -INFINITY ? every(Real(0)) : most, sum = weigh<dropping>(v, count, reference);
            const Reals<Real> kept = exponential(before - reference);
            store(factor + v, kept);
            store(m_i + v, most);
            const Reals<Real> old = load(l_i + v) * kept, all = old + sum, added = all - old;
            store(l_i + v, all);
            store(l_low + v, load(l_low + v) * kept + ((old - (all - added)) + (sum - added)));
            measured.add(sum, all, Block<Real>::lanes() + v < block.rows);
        }
        block.template sum_over_keys<SCALE_AND_ADD>(block.call.value, key, count, scores, acc, factor);
        acc_is_full = sizeof(Real) == 4 && key % KEYS_IN_FLOAT == 0;
    }

    // Moves acc into the total, so that a sum in float has few addends: of a million, it would drop those below half its unit.
    OUTLINE void add_to_total() {
        const int64_t D = block.call.D;
        if (!has_total) std::fill(total, total + BLOCK * D, 0.0), std::copy(m_i, m_i + BLOCK, total_m), has_total = true;
        for (int i = 0; i < BLOCK; i++) {
            const double kept = total_m[i] == m_i[i] ? 1 : std::exp(double(total_m[i]) - double(m_i[i]));
            for (int64_t d = 0; d < D; d++) total[i * D + d] = total[i * D + d] * kept + double(acc[i * D + d]);
            total_m[i] = m_i[i];
        }
        std::fill(acc, acc + BLOCK * D, Real(0));
        acc_is_full = false;
    }

    Reals<Real> largest_score(int v, int count) const {
        Reals<Real> top = load(scores + v);
        for (int j = 1; j < count; j++) {
            const Reals<Real> score = load(scores + j * BLOCK + v);
            top = score > top ? score : top;
        }
        return top;
    }

    bool has_nan(int count) const {
        Ints<Real> found = {};
        for (int at = 0; at < count * BLOCK; at += VL<Real>) found |= load(scores + at) != load(scores + at);
        for (int i = 0; i < VL<Real>; i++)
            if (found[i]) return true;
        return false;
    }

    // Turns the scores of VL queries into weights, in place; returns their sums.
    template <bool dropping>
    Reals<Real> weigh(int v, int count, Reals<Real> reference) {
        if constexpr (InPairs<Real>::EXIST)
            if (block.call.bf16) return weigh_in_pairs<dropping>(v, count, reference);
        Reals<Real> sum = {};
        for (int j = 0; j < count; j++) {
            const Reals<Real> weight = exponential(load(scores + j * BLOCK + v) - reference);
            sum += weight;
            store(scores + j * BLOCK + v, dropping ? weight * load(dropout.factors + j * BLOCK + v) : weight);
        }
        return sum;
    }

    // The same, rounded to bf16 in pairs of keys, [(count + 1) / 2][BLOCK]; the sums are of the unrounded weights.
    template <bool dropping>
    OUTLINE Reals<Real> weigh_in_pairs(int v, int count, Reals<Real> reference) {
        typedef InPairs<Real> In;
        Reals<Real> sums[2] = {};
        for (int j = 0; j < count; j += 2) {
            Reals<Real> weights[2] = {};
            for (int at = 0; at < 2 && j + at < count; at++) {
                weights[at] = In::exponential(load(scores + (j + at) * BLOCK + v) - reference);
                sums[at] += weights[at];
                if (dropping) weights[at] *= load(dropout.factors + (j + at) * BLOCK + v);
            }
            In::round_to_pairs(reinterpret_cast<Pair *>(scores) + j / 2 * BLOCK + v, weights[0], weights[1]);
        }
        return sums[0] + sums[1];
    }

    // Moves outward to the left from key `near` down to `stop`, which next(near) may move after each visit(key, count).
    template <typename Visit, typename Next>
    static int64_t go_left(int64_t near, int64_t stop, const Visit &visit, const Next &next) {
        while (near > stop) {
            // Tiles begin at multiples of BLOCK, wherever the text ends, so that a query sums the same tiles if the text goes on.
            const int64_t first = std::max(stop, (near - 1) / BLOCK * BLOCK);
            visit(first, (int)(near - first));
            near = first, stop = next(near);
        }
        return near;
    }

    template <typename Visit, typename Next>
    static int64_t go_right(int64_t far, int64_t stop, const Visit &visit, const Next &next) {
        while (far < stop) {
            const int64_t end = std::min(stop, far + BLOCK);
            visit(far, (int)(end - far));
            far = end, stop = next(far);
        }
        return far;
    }

    void go_outward() {
        KeyRange &range = block.range;
        const int64_t low = range.low, high = std::max<int64_t>(low, range.high);
        const int64_t middle = std::max(low, std::min(high, block.position + block.rows));
        const auto visit_into = [&](auto &tiles) {
            return [&](int64_t key, int count) {
                visit(key, count);
                tiles.push_back({key, key + count, measured.share_of_tile()});
            };
        };
        certificate.turn(1);
        certificate.leave_out(middle - low);
        range.first = (int32_t)go_left(middle, low, visit_into(measured.left), [&](int64_t near) {
            if (near == low) return low;
            // The nearest keys are always visited.
            const int64_t last = std::min(certificate.last_key(near, low, m_i, l_i), block.position - KEPT + 1);
            return std::min(near, std::max(low, last));
        });
        range.end = (int32_t)middle;
        if (!block.looks_right) return;
        certificate.turn(-1);
        certificate.leave_out(high - middle);
        range.end = (int32_t)go_right(middle, high, visit_into(measured.right), [&](int64_t far) {
            return far < high ? certificate.last_key(far, high, m_i, l_i) : high;
        });
    }

    // Visits the tiles that were left out of the sums and may matter.
    void visit_outlier_tiles() {
        block.outlier_bits = needed_tiles([&](int64_t from, int64_t to) { return certificate.must_visit(from, to, m_i, l_i); });
        for (int p = 0; p < OUTLIER_TILES; p++) {
            if (!(block.outlier_bits >> p & 1)) continue;
            for_parts_of_tile(block, p, [&](int64_t low, int64_t high) {
                for_keys(low, high, 0, [&](int64_t key, int count) {
                    visit(key, count);
                    measured.outliers[p] += measured.share_of_tile();
                });
            });
        }
    }

    // Which of them are needed, as bits, given whether keys [from, to) are.
    template <typename Needed>
    int needed_tiles(const Needed &is_needed) {
        int bits = 0;
        for (int p = 0; certificate.possible && p < OUTLIER_TILES; p++) {
            for_parts_of_tile(block, p, [&](int64_t from, int64_t to) {
                certificate.turn(to <= block.range.first ? 1 : -1);
                if (!certificate.is_left_out(p) || (certificate.side < 0 && !block.looks_right)) return;
                if (is_needed(from, to)) bits |= 1 << p;
            });
        }
        return bits;
    }

    // Reads on as far as gradients may need it, for the shares of further tiles only: outputs remain the same.
    void look_farther() {
        KeyRange &range = block.range;
        const int64_t low = range.low, high = range.high;
        const auto measure_into = [&](auto &tiles) {
            return [&](int64_t key, int count) { tiles.push_back({key, key + count, bound_of_share(key, count)}); };
        };
        certificate.turn(1);
        const int64_t first = range.first > low ? certificate.last_key_by_rule(range.first, low, m_i, l_i) : low;
        const int64_t near = go_left(range.first, first, measure_into(measured.left), [&](int64_t) { return first; });
        int64_t far = range.end;
        if (block.looks_right && far < high) {
            certificate.turn(-1);
            const int64_t end = certificate.last_key_by_rule(far, high, m_i, l_i);
            far = go_right(far, end, measure_into(measured.right), [&](int64_t) { return end; });
        }
        range.first = (int32_t)near, range.end = (int32_t)far;
        const int visited = block.outlier_bits;
        const int more = ~visited
            & needed_tiles([&](int64_t from, int64_t to) { return certificate.must_measure(from, to, m_i, l_i); });
        for (int p = 0; p < OUTLIER_TILES; p++) {
            if (!(more >> p & 1)) continue;
            for_parts_of_tile(block, p, [&](int64_t from, int64_t to) {
                for_keys(from, to, 0, [&](int64_t key, int count) { measured.outliers[p] += bound_of_share(key, count); });
            });
        }
        block.outlier_bits = visited | more;
    }

    // Of the largest share of keys [key, key + count).
    Real bound_of_share(int64_t key, int count) {
        for (int p = 0; p < OUTLIER_TILES; p++) {
            const int64_t first = int64_t(block.outlier_tiles[p]) * BLOCK;
            const bool is_known = block.outlier_bits >> p & 1 && first <= key && key + count <= first + BLOCK;
            if (is_known) return measured.outliers[p];
        }
        block.scores_with(key, count, scores);
        if (has_nan(count)) return INFINITY;
        measured.add_bounds(scores, count, block.rows, m_i, l_i);
        return measured.share_of_tile();
    }

    // In space: from the nearest box outward; of boxes that touch the block's, from the nearest in the sequence.
    void visit_nearest_first() {
        order.clear();
        boxes.for_tiles(block, [&](const TileInSpace &tile) { order.push_back(tile); });
        std::sort(order.begin(), order.end());
        int64_t visited = 0;
        for (const TileInSpace &tile : order) {
            if (visited && certificate.may_leave_out_tile(tile, m_i, l_i)) continue;
            visit(tile.first, (int)(tile.end - tile.first));
            measured.share_of_tile();
            visited += tile.end - tile.first;
        }
        block.range.first = block.range.low, block.range.end = block.range.high;
        block.outlier_bits = (int)visited;  // `visited.py` counts the scores by it; backward tests each tile again
    }

    void remember_visited() {
        const Visited<Real> visited = {block.call};
        const int64_t b = block.b, h = block.h, n = block.n;
        KeptBand *band = visited.kept_bands(b, h) + n;
        int32_t *kept_bits = visited.kept_outlier_bits(b, h) + n;
        visited.ranges(b, h)[n] = block.range, *band = {block.range.first, block.range.end};
        visited.outlier_bits(b, h)[n] = *kept_bits = block.outlier_bits;
        if (block.call.key_points) *kept_bits = 0;
        else if (block.call.for_backward) measured.remove(certificate.measured_share(), block, band, kept_bits);
    }

    void run(int64_t b, int64_t h, int64_t n) {
        const Call<Real> &call = block.call;
        block.begin(b, h, n);
        std::fill(acc, acc + BLOCK * call.D, Real(0));
        std::fill(l_i, l_i + BLOCK, Real(0));
        std::fill(l_low, l_low + BLOCK, Real(0));
        has_total = acc_is_full = false;
        std::fill(m_i, m_i + BLOCK, Real(-INFINITY));
        certificate.begin();
        measured.begin(MEASURED_SHARE * certificate.measured_share());
        if (call.dropout_seed) dropout.begin(b, h, block.position);
        if (call.key_points) visit_nearest_first();
        else go_outward(), visit_outlier_tiles();
        if (call.for_backward) look_farther();
        remember_visited();
        if (has_total) {
            add_to_total();
            for (int64_t at = 0; at < BLOCK * call.D; at++) acc[at] = Real(total[at]);
        }
        for (int i = 0; i < block.rows; i++) {
            const bool blind = l_i[i] == 0;
            // NaN if a query sees keys, but all their scores are below the range of `Real`.
            const double nothing = blind && block.sees_any(i) ? NAN : -INFINITY;
            const double l = double(l_i[i]) + double(l_low[i]);
            const double lse = double(m_i[i]) + std::log(l) + block.left_out_of_scores(i);
            call.lse[block.row() + i] = blind ? nothing : lse;
            // A query that sees nothing has scores of -inf only, and any finite maximum gives them no weight.
            call.row_max(b, h)[n * BLOCK + i] = blind ? 0 : m_i[i];
            call.row_log_sum(b, h)[n * BLOCK + i] = blind ? 0 : Real(std::log(l));
            block.write_output(i, acc + i * call.D, std::isnan(nothing) ? Real(NAN) : blind ? 0 : Real(1 / l));
        }
    }
};

template <typename Real>
void run(const Call<Real> &call) {
    allow(call);
    const std::vector<ForwardTask> tasks = forward_tasks(call);
    const BestKeys<Real> best_keys(call);
    const Boxes<Real> boxes(call);
    const int64_t D = call.D, heads = call.B * call.K;
    for (int64_t b = 0; b < call.B; b++) std::fill_n(Visited<Real>{call}.outlier_tiles(b, 0), call.K * OUTLIER_TILES, -1);
    Real *norms = allocate<Real>(call.tolerance > 0 ? heads * norms_size(call) : 0);
    DistanceBounds<Real> distances(call);
    std::vector<double> tails(call.tolerance > 0 && call.key_bias ? call.B * call.H * tails_size(call) : 0);
    in_parallel(call.threads, [&](Member &member) {
        const DenormalNumbers are_kept;
        const Tiles tiles(call.bf16);
        if (call.tolerance > 0) {
            measure_all(call, norms, member);
            if (call.key_bias) member.for_each(heads, [&](int64_t head) { summarize_biased(call, norms, tails.data(), head); });
            if (call.table) member.for_each(call.H, [&](int64_t head) { distances.find(call, head); });
        }
        Real *memory = allocate<Real>((2 * BLOCK + 3 * D) * BLOCK + padded(call));
        double *total = allocate<double>(D * BLOCK);
        Real *acc = memory + BLOCK * BLOCK, *queries = acc + BLOCK * D, *factors = queries + 2 * BLOCK * D;
        Real *sums = factors + BLOCK * BLOCK;
        Pair *woven = reinterpret_cast<Pair *>(queries + BLOCK * D);
        Forward<Real> forward = {{call, queries, woven, best_keys}, memory, acc,
                                 {forward.block, norms, tails.data(), sums, sums + padded(call) / TAIL_GROUP + 1, &distances},
                                 {call, factors}, boxes, {}, {}, total};
        member.for_each((int64_t)tasks.size(), [&](int64_t t) {
            for (int64_t n = tasks[t].block; n < tasks[t].last_block; n++) forward.run(tasks[t].b, tasks[t].h, n);
        });
        release(total);
        release(memory);
    });
    release(norms);
}

}  // namespace

#if ALIBI_FLOAT32
EXPORT void alibi_forward_float32(const Call<float> *call) { run(*call); }
#endif
#if ALIBI_FLOAT64
EXPORT void alibi_forward_float64(const Call<double> *call) { run(*call); }
#endif
