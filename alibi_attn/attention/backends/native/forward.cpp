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

template <typename Real>
struct Forward {
    Block<Real> block;
    Real *scores, *acc;  // [BLOCK][BLOCK], [BLOCK][D]
    Certificate<Real> certificate;
    Dropout<Real> dropout;
    Measured<Real> measured = {};
    Real m_i[BLOCK] = {}, l_i[BLOCK] = {};  // the largest score so far, and the sum of exp(score - m_i)

    void visit(int64_t key, int count) {
        return block.call.dropout_seed ? visit<true>(key, count) : visit<false>(key, count);
    }

    template <bool dropping>
    void visit(int64_t key, int count) {
        Real top[BLOCK], factor[BLOCK];
        block.scores_with(key, count, scores);
        certificate.visits(key, count);
        for (int v = 0; v < BLOCK; v += VL<Real>) store(top + v, largest_score(v, count));
        if (measured.may_leave_out(count, block.rows, top, m_i, l_i) && !has_nan(count)) return;
        if (dropping) dropout.draw(key, count);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> before = load(m_i + v), of_tile = load(top + v), most = of_tile > before ? of_tile : before;
            const Reals<Real> reference = most == -INFINITY ? every(Real(0)) : most, sum = weigh<dropping>(v, count, reference);
            const Reals<Real> kept = exponential(before - reference);
            store(factor + v, kept);
            store(m_i + v, most);
            const Reals<Real> all = load(l_i + v) * kept + sum;
            store(l_i + v, all);
            measured.add(sum, all, Block<Real>::lanes() + v < block.rows);
        }
        block.template sum_over_keys<SCALE_AND_ADD>(block.call.value, key, count, scores, acc, factor);
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

    // The band goes outward from here, in both directions.
    int64_t band_start() const {
        return std::max<int64_t>(block.range.low, std::min<int64_t>(block.range.high, block.position + block.rows));
    }

    void go_outward() {
        KeyRange &range = block.range;
        const int64_t low = range.low, high = std::max<int64_t>(low, range.high), middle = band_start();
        int64_t near = middle, far = middle;
        certificate.turn(1);
        certificate.leave_out(middle - low);
        for (int64_t stop = low; near > stop;) {
            // Tiles begin at multiples of BLOCK, wherever the text ends, so that a query sums the same tiles if the text goes on.
            const int64_t next = std::max(stop, (near - 1) / BLOCK * BLOCK);
            visit(next, (int)(near - next));
            measured.left.push_back(measured.share_of_tile());
            near = next;
            if (near == low) break;
            // The nearest keys are always visited.
            const int64_t last = std::min(certificate.last_key(near, low, m_i, l_i), block.position - KEPT + 1);
            stop = std::min(near, std::max(low, last));
        }
        certificate.turn(-1);
        certificate.leave_out(high - middle);
        for (int64_t stop = block.looks_right ? high : middle; far < stop;) {
            const int64_t next = std::min(stop, far + BLOCK);
            visit(far, (int)(next - far));
            measured.right.push_back(measured.share_of_tile());
            far = next;
            if (far < high) stop = certificate.last_key(far, high, m_i, l_i);
        }
        range.first = (int32_t)near, range.end = (int32_t)far;
    }

    // Visits the tiles that were left out of the sums and may matter.
    void visit_outlier_tiles() {
        int needed = 0;
        for (int p = 0; certificate.possible && p < OUTLIER_TILES; p++) {
            for_parts_of_tile(block, p, [&](int64_t from, int64_t to) {
                certificate.turn(to <= block.range.first ? 1 : -1);
                if (!certificate.is_left_out(p) || (certificate.side < 0 && !block.looks_right)) return;
                if (certificate.must_visit(from, to, m_i, l_i)) needed |= 1 << p;
            });
        }
        block.outlier_bits = needed;
        for (int p = 0; p < OUTLIER_TILES; p++) {
            if (!(needed >> p & 1)) continue;
            for_parts_of_tile(block, p, [&](int64_t low, int64_t high) {
                for_keys(low, high, 0, [&](int64_t key, int count) {
                    visit(key, count);
                    measured.outliers[p] += measured.share_of_tile();
                });
            });
        }
    }

    void remember_visited() {
        const Visited<Real> visited = {block.call};
        const int64_t b = block.b, h = block.h, n = block.n;
        visited.ranges(b, h)[n] = block.range, visited.outlier_bits(b, h)[n] = block.outlier_bits;
        measured.remove(certificate.measured_share(), band_start(), block.range, block.outlier_bits,
                        visited.kept_bands(b, h) + n, visited.kept_outlier_bits(b, h) + n);
    }

    void run(int64_t b, int64_t h, int64_t n) {
        const Call<Real> &call = block.call;
        block.begin(b, h, n);
        std::fill(acc, acc + BLOCK * call.D, Real(0));
        std::fill(l_i, l_i + BLOCK, Real(0));
        std::fill(m_i, m_i + BLOCK, Real(-INFINITY));
        certificate.begin();
        measured.begin(MEASURED_SHARE * certificate.measured_share());
        if (call.dropout_seed) dropout.begin(b, h, block.position);
        go_outward();
        visit_outlier_tiles();
        remember_visited();
        for (int i = 0; i < block.rows; i++) {
            const bool blind = l_i[i] == 0;
            // NaN if a query sees keys, but all their scores are below the range of `Real`.
            const double nothing = blind && block.sees_any(i) ? NAN : -INFINITY;
            const double lse = double(m_i[i]) + std::log(double(l_i[i])) + block.left_out_of_scores(i);
            call.lse[block.row() + i] = blind ? nothing : lse;
            // A query that sees nothing has scores of -inf only, and any finite maximum gives them no weight.
            call.row_max(b, h)[n * BLOCK + i] = blind ? 0 : m_i[i];
            call.row_log_sum(b, h)[n * BLOCK + i] = blind ? 0 : std::log(l_i[i]);
            block.write_output(i, acc + i * call.D, std::isnan(nothing) ? Real(NAN) : blind ? 0 : 1 / l_i[i]);
        }
    }
};

template <typename Real>
void run(const Call<Real> &call) {
    allow(call);
    const std::vector<ForwardTask> tasks = forward_tasks(call);
    const BestKeys<Real> best_keys(call);
    const int64_t D = call.D, heads = call.B * call.K, width = 512, parts = (padded(call) + width - 1) / width;
    for (int64_t b = 0; b < call.B; b++) std::fill_n(Visited<Real>{call}.outlier_tiles(b, 0), call.K * OUTLIER_TILES, -1);
    Real *norms = allocate<Real>(call.tolerance > 0 ? heads * norms_size(call) : 0);
    std::vector<double> tails(call.tolerance > 0 && call.key_bias ? call.B * call.H * tails_size(call) : 0);
    in_parallel(call.threads, [&](Member &member) {
        const DenormalNumbers are_kept;
        const Tiles tiles(call.bf16);
        if (call.tolerance > 0) {
            member.for_each(heads * parts, [&](int64_t part) {
                const int64_t from = part % parts * width;
                measure(call, norms, part / parts, from, std::min(from + width, padded(call)));
            });
            member.for_each(heads, [&](int64_t head) {
                summarize(call, norms, head);
                if (call.key_bias) summarize_biased(call, norms, tails.data(), head);
            });
        }
        Real *memory = allocate<Real>((2 * BLOCK + 3 * D) * BLOCK + padded(call));
        Real *acc = memory + BLOCK * BLOCK, *queries = acc + BLOCK * D, *factors = queries + 2 * BLOCK * D;
        Pair *woven = reinterpret_cast<Pair *>(queries + BLOCK * D);
        Forward<Real> forward = {{call, queries, woven, best_keys}, memory, acc,
                                 {forward.block, norms, tails.data(), factors + BLOCK * BLOCK}, {call, factors}};
        member.for_each((int64_t)tasks.size(), [&](int64_t t) {
            for (int64_t n = tasks[t].block; n < tasks[t].last_block; n++) forward.run(tasks[t].b, tasks[t].h, n);
        });
        release(memory);
    });
    release(norms);
}

}  // namespace

EXPORT void alibi_forward_float32(const Call<float> *call) { run(*call); }
EXPORT void alibi_forward_float64(const Call<double> *call) { run(*call); }
EXPORT const char *alibi_built_with() { return ALIBI_BUILT_WITH; }
EXPORT int64_t alibi_call_bytes() { return sizeof(Call<float>); }
// Whether a Call<float> may have bf16 rows: 0 no, 1 yes, 2 yes and tiles multiply them.
EXPORT int64_t alibi_multiplies_bf16() { return InPairs<float>::EXIST + Tiles::usable(); }

// The words of a level in `levels.py`, or those of a compiler's own choice of instructions.
EXPORT const char *alibi_instructions() {
#if defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__SSE2__)
    return "SSE2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON-BF16";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "no vector instructions";
#endif
}
