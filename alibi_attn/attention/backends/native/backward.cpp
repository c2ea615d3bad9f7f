// Backward: reads the keys that forward read, with the maxima and sums that forward saved.
//
// Gradients need no atomics. Tasks do not depend on the batch, or on the number of threads up to FEW_THREADS, and so neither do
// the bits of gradients. The separate sums of tasks (see `BackwardTask`) are added at the end, in the order of the tasks.

#include "certificate.hpp"
#include "denormals.hpp"
#include "diagonals.hpp"
#include "dropout.hpp"
#include "tasks.hpp"
#include "threads.hpp"

namespace {

// One block's part of the gradients of its head's slopes: -sum over j of ds |i - j|, on the left and on the right.
//
// Mathematically, a row of ds sums to dlse; in floating point the rounding of the inner products adds an error that the distance
// multiplies. So each row is centered: ds + p (dlse - sum of ds) / (sum of p). In far tiles distances are relative to the first
// key, and the tile's own distance is added in double, so that no digit is lost 10^6 tokens away.
template <typename Real>
struct SlopeGradient {
    // For every query and side: sums over the keys of ds, p, ds |i - j| and p |i - j|.
    enum { DS, P, DS_AWAY, P_AWAY, SUMS };
    double sums[2][SUMS][BLOCK];

    void begin() { std::fill_n(&sums[0][0][0], 2 * SUMS * BLOCK, 0.0); }

    void visit(const Block<Real> &block, int64_t key, int count, const Real *weights, const Real *moments) {
        if (block.call.key_points) return visit_in_space(block, key, count, weights, moments);
        const int64_t ahead = block.position - key;  // from the tile's first key to query 0
        const bool some_left = ahead + block.rows > 0, some_right = ahead < count - 1 && block.looks_right;
        if (some_left) visit_side<0>(ahead, count, weights, moments, some_right);
        if (some_right) visit_side<1>(ahead, count, weights, moments, some_left);
    }

    // Adds -(ds |i - j|) of all queries to the task's sums; each row of ds must sum to dlse.
    void end(const Block<Real> &block, double *slope_grads) const {
        for (int i = 0; i < block.rows; i++) {
            const double weight = sums[0][P][i] + sums[1][P][i];
            const double dlse = block.call.grad_lse ? double(block.call.grad_lse[block.row() + i]) : 0.0;
            const double excess = weight > 0 ? (sums[0][DS][i] + sums[1][DS][i] - dlse) / weight : 0.0;
            for (int side = 0; side < 2; side++)
                slope_grads[side] -= sums[side][DS_AWAY][i] - sums[side][P_AWAY][i] * excess;
        }
    }

   private:
    OUTLINE void visit_in_space(const Block<Real> &block, int64_t key, int count, const Real *weights, const Real *moments) {
        block.in_space(key, count, [&](const auto &distance) {
            for (int v = 0; v < BLOCK; v += VL<Real>) {
                Reals<Real> sum[SUMS] = {};
                for (int j = 0; j < count; j++) {
                    const Reals<Real> p = load(weights + j * BLOCK + v), ds = load(moments + j * BLOCK + v);
                    const Reals<Real> away = distance(j, v);
                    sum[DS] += ds, sum[P] += p, sum[DS_AWAY] += ds * away, sum[P_AWAY] += p * away;
                }
                for (int i = 0; i < VL<Real>; i++)
                    for (int s = 0; s < SUMS; s++) sums[0][s][v + i] += double(sum[s][i]);
            }
        });
    }

    // |i - j| = sign (ahead - beside) + sign (beside + i - j'), with j' from the tile's first key on.
    template <int side>
    void visit_side(int64_t ahead, int count, const Real *weights, const Real *moments, bool mixed) {
        const Real sign = side == 0 ? 1 : -1;
        const int beside = std::abs(ahead) < 2 * BLOCK ? (int)ahead : 0;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            Reals<Real> sum[SUMS] = {};
            const Ints<Real> lanes = Block<Real>::lanes() + v;
            for (int j = 0; j < count; j++) {
                Reals<Real> p = load(weights + j * BLOCK + v), ds = load(moments + j * BLOCK + v);
                if (mixed) {
                    const Ints<Real> away = lanes + (int)(ahead - j), here = side == 0 ? away >= 0 : away < 0;
                    p = here ? p : Reals<Real>{}, ds = here ? ds : Reals<Real>{};
                }
                const Reals<Real> from_start = __builtin_convertvector(lanes + (beside - j), Reals<Real>) * sign;
                sum[DS] += ds, sum[P] += p, sum[DS_AWAY] += ds * from_start, sum[P_AWAY] += p * from_start;
            }
            const double start = double(sign) * double(ahead - beside);
            for (int i = 0; i < VL<Real>; i++) {
                sums[side][DS][v + i] += sum[DS][i], sums[side][P][v + i] += sum[P][i];
                sums[side][DS_AWAY][v + i] += double(sum[DS_AWAY][i]) + start * double(sum[DS][i]);
                sums[side][P_AWAY][v + i] += double(sum[P_AWAY][i]) + start * double(sum[P][i]);
            }
        }
    }
};

// The gradients of biases: sums of ds over the queries for each key, and over the keys for each query. Both are in double and use
// the same numbers, because a gate's gradient is a sum over many of their differences.
template <typename Real>
struct BiasGradient {
    double of_queries[BLOCK];

    void begin() { std::fill_n(of_queries, +BLOCK, 0.0); }

    // of_keys[j * stride] += the sum over the queries of moments[j][i].
    void visit(int count, const Real *moments, double *of_keys, int64_t stride) {
        constexpr int L = VL<double>;
        for (int j = 0; j < count; j++, moments += BLOCK) {
            double parts[L] = {}, sum = 0;  // one vector of partial sums
            for (int v = 0; v < BLOCK; v += L)
                for (int i = 0; i < L; i++) {
                    const double moment = moments[v + i];
                    of_queries[v + i] += moment, parts[i] += moment;
                }
            for (int i = 0; i < L; i++) sum += parts[i];
            of_keys[j * stride] += sum;
        }
    }
};

template <typename Real>
struct Backward {
    Block<Real> block;
    Real *weights, *moments, *grads, *query_grad;  // [BLOCK][BLOCK] twice, [D][BLOCK], [BLOCK][D]
    Pair *woven_queries, *woven_grads;             // of a call in bf16: [BLOCK / 2][D] pairs of queries
    const BackwardPlan &plan;
    Real *kept;  // the separate sums of all tasks
    Real delta[BLOCK], row_max[BLOCK], row_log_sum[BLOCK];  // do.o - dlse, m_i and ln l_i of every query
    SlopeGradient<Real> slope_grad;
    double *kept_biases;  // the same for biases, with the query heads of a group adjacent
    BiasGradient<Real> bias_grad;
    Dropout<Real> dropout;
    const Boxes<Real> &boxes;
    Certificate<Real> certificate;  // of a call in space
    Real row_sum[BLOCK] = {};       // l_i
    double *table_grads = nullptr;  // of the current task and head

    // Where the gradients of the keys from `key` on, and of their values and biases, are summed.
    struct Place {
        Real *keys, *values;
        int64_t key_row, value_row;
        double *biases;
        int64_t bias_row;
    };

    Place place(const BackwardTask &task, int64_t key, int64_t outlier) const {
        const Call<Real> &call = block.call;
        const bool biased = call.key_bias_grad;
        if (task.own <= key && key < task.own_end)
            return {call.key_grad.of(task.b, task.k, key), call.value_grad.of(task.b, task.k, key), call.key_grad.row,
                    call.value_grad.row, biased ? call.key_bias_grad + (task.b * call.H + block.h) * call.S + key : nullptr, 1};
        const int64_t row = outlier >= 0 ? task.row_of_outlier(outlier) + key % BLOCK : task.row_of(key);
        Real *keys = kept + (2 * task.at + row) * call.D;
        const int64_t group = call.H / call.K;
        return {keys, keys + task.row_of_outlier(plan.outlier_tiles) * call.D, call.D, call.D,
                biased ? kept_biases + (task.at + row) * group + block.h % group : nullptr, group};
    }

    void visit(const BackwardTask &task, int64_t key, int count, int64_t outlier) {
        const bool dropping = block.call.dropout_seed;
        if constexpr (InPairs<Real>::EXIST)
            if (block.call.bf16)
                return dropping ? visit<true, true>(task, key, count, outlier) : visit<false, true>(task, key, count, outlier);
        return dropping ? visit<true, false>(task, key, count, outlier) : visit<false, false>(task, key, count, outlier);
    }

    template <bool dropping, bool bf16>
    void visit(const BackwardTask &task, int64_t key, int count, int64_t outlier) {
        const Call<Real> &call = block.call;
        block.scores_with(key, count, weights);
        block.inner_products(call.value, key, count, grads, moments);
        if (dropping) drop(key, count);
        for (int j = 0; j < count; j++) {
            for (int v = 0; v < BLOCK; v += VL<Real>) {
                const int at = j * BLOCK + v;
                // Forward may have rounded this score differently; at 1e20 the difference is beyond the range of exp.
                Reals<Real> nats = load(weights + at) - load(row_max + v);
                nats = (nats > 0 ? Reals<Real>{} : nats) - load(row_log_sum + v);
                const Reals<Real> weight = weight_of<bf16>(nats);
                store(weights + at, weight);
                // 0 inf is NaN: the product of a gradient and a hidden value can be inf.
                const Reals<Real> moment = weight * (load(moments + at) - load(delta + v));
                store(moments + at, weight == 0 ? Reals<Real>{} : moment);
            }
        }
        if (call.slope_grads) slope_grad.visit(block, key, count, weights, moments);
        if (table_grads) add_diagonals(block, key, count, moments, table_grads);
        const Place to = place(task, key, outlier);
        if (to.biases) bias_grad.visit(count, moments, to.biases, to.bias_row);
        const Real scale = (Real)call.scale;
        for (int at = 0; at < count * BLOCK; at += VL<Real>) {
            store(moments + at, load(moments + at) * scale);
            if (dropping) store(weights + at, load(weights + at) * load(dropout.factors + at));
        }
        const Real *of_queries = moments;
        if constexpr (bf16) of_queries = round_to_bf16(count);
        block.sum_over_queries(call.grad, woven_grads, key, count, weights, to.values, to.value_row);
        block.sum_over_queries(call.query, woven_queries, key, count, of_queries, to.keys, to.key_row);
        block.template sum_over_keys<ADD>(call.key, key, count, moments, query_grad, nullptr);
    }

    template <bool bf16>
    static INLINE Reals<Real> weight_of(Reals<Real> nats) {
        if constexpr (bf16) return InPairs<Real>::exponential(nats);
        return exponential(nats);
    }

    // Rounds weights and moments for products of bf16, in place: weights to [count][BLOCK] bf16, moments to pairs of keys.
    // Returns moments in the format of the weights, stored after these.
    const Real *round_to_bf16(int count) {
        typedef InPairs<Real> In;
        Bf16 *narrow = reinterpret_cast<Bf16 *>(weights), *behind = narrow + BLOCK * BLOCK;
        constexpr int L = VL<Real>;
        // Row j of the narrow numbers ends before row j of the wide ones starts.
        for (int at = 0; at < count * BLOCK; at += 2 * L) In::round(narrow + at, load(weights + at), load(weights + at + L));
        for (int at = 0; at < count * BLOCK; at += 2 * L) In::round(behind + at, load(moments + at), load(moments + at + L));
        Pair *pairs = reinterpret_cast<Pair *>(moments);
        for (int j = 0; j < count; j += 2)
            for (int v = 0; v < BLOCK; v += L) {
                const Real *at = moments + j * BLOCK + v;
                In::round_to_pairs(pairs + j / 2 * BLOCK + v, load(at), j + 1 < count ? load(at + BLOCK) : Reals<Real>{});
            }
        return reinterpret_cast<const Real *>(behind);
    }

    // do.v of a dropped weight is 0; that of the others is scaled like the weights.
    void drop(int64_t key, int count) {
        dropout.draw(key, count);
        for (int at = 0; at < count * BLOCK; at += VL<Real>) {
            const Reals<Real> factor = load(dropout.factors + at);
            store(moments + at, factor == 0 ? factor : load(moments + at) * factor);
        }
    }

    // Prepares the queries' gradients of the output, and delta, m_i and ln l_i.
    void begin_rows(int64_t h, int64_t n) {
        const Call<Real> &call = block.call;
        block.transpose(call.grad, 1, grads);
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const auto weave = [&](const Rows<const Real> &rows, Pair *to) {
                    InPairs<Real>::weave(in_bf16(rows).of(block.b, h, n * BLOCK), rows.row, block.rows, call.D, to);
                };
                weave(call.query, woven_queries), weave(call.grad, woven_grads);
            }
        for (int i = 0; i < BLOCK; i++) {
            // A lane without a query has weights 0, whatever its scores are.
            delta[i] = row_log_sum[i] = 0, row_max[i] = INFINITY, row_sum[i] = 1;
            if (i >= block.rows) continue;
            delta[i] = grad_times_output(i);
            if (call.grad_lse) delta[i] -= call.grad_lse[block.row() + i];
            row_max[i] = call.row_max(block.b, h)[n * BLOCK + i];
            row_log_sum[i] = call.row_log_sum(block.b, h)[n * BLOCK + i];
            row_sum[i] = std::exp(row_log_sum[i]);
        }
    }

    // do_i . o_i
    Real grad_times_output(int i) const {
        const Call<Real> &call = block.call;
        const int64_t row = block.n * BLOCK + i;
        const Rows<const Real> output = {call.output.at, call.output.sequence, call.output.head, call.output.row};
        Real sum = 0;
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const Bf16 *x = in_bf16(call.grad).of(block.b, block.h, row), *y = in_bf16(output).of(block.b, block.h, row);
                typedef InPairs<Real> In;
                Reals<Real> sums = {};
                for (int64_t d = 0; d < call.D; d += VL<Real>) sums += In::widened(x + d) * In::widened(y + d);
                for (int v = 0; v < VL<Real>; v++) sum += sums[v];
                return sum;
            }
        const Real *out = output.of(block.b, block.h, row);
        for (int64_t d = 0; d < call.D; d++) sum += grads[d * BLOCK + i] * out[d];
        return sum;
    }

    void run(const BackwardTask &task, int64_t h, int64_t n, double *slope_grads) {
        const Call<Real> &call = block.call;
        block.begin(task.b, h, n, true);
        begin_rows(h, n);
        if (call.dropout_seed) dropout.begin(task.b, h, block.position);
        std::fill(query_grad, query_grad + BLOCK * call.D, Real(0));
        if (slope_grads) slope_grad.begin();
        bias_grad.begin();
        if (call.key_points) {
            certificate.begin();
            boxes.for_tiles(block, [&](const TileInSpace &tile) {
                // By the final log-sum-exp, so all that forward left out is left out, and perhaps more.
                if (!certificate.may_leave_out_tile(tile, row_max, row_sum))
                    visit(task, tile.first, (int)(tile.end - tile.first), -1);
            });
            block.range.end = block.range.first;
        }
        const auto visit_all = [&](int64_t low, int64_t high, int outlier) {
            // A task's own keys begin and end at borders, so that they are the same for any number of tasks.
            for_keys(low, high, call.first[task.b], [&](int64_t key, int count) { visit(task, key, count, outlier); });
        };
        visit_all(block.range.first, block.range.end, -1);
        for (int p = 0; p < plan.outlier_tiles; p++) {
            if (!(block.outlier_bits >> p & 1)) continue;
            for_parts_of_tile(block, p, [&](int64_t low, int64_t high) { visit_all(low, high, p); });
        }
        if (slope_grads) slope_grad.end(block, slope_grads);
        if (call.query_bias_grad) std::copy_n(bias_grad.of_queries, block.rows, call.query_bias_grad + block.row());
        for (int i = 0; i < block.rows; i++)
            std::copy_n(query_grad + i * call.D, call.D, call.query_grad.of(task.b, h, n * BLOCK + i));
    }

    void run(const BackwardTask &task, double *slope_grads, double *of_distances) {
        const Call<Real> &call = block.call;
        const int64_t D = call.D, group = call.H / call.K;
        for (int64_t key = task.own; key < task.own_end; key++) {
            std::fill_n(call.key_grad.of(task.b, task.k, key), D, Real(0));
            std::fill_n(call.value_grad.of(task.b, task.k, key), D, Real(0));
        }
        const int64_t rows = task.row_of_outlier(plan.outlier_tiles);
        std::fill_n(kept + 2 * task.at * D, 2 * rows * D, Real(0));
        for (int64_t h = task.k * group; call.key_bias_grad && h < (task.k + 1) * group; h++)
            std::fill(call.key_bias_grad + (task.b * call.H + h) * call.S + task.own,
                      call.key_bias_grad + (task.b * call.H + h) * call.S + task.own_end, 0.0);
        if (call.key_bias_grad) std::fill_n(kept_biases + task.at * group, rows * group, 0.0);
        for (int64_t g = 0; g < group; g++) {
            double *of_head = slope_grads ? slope_grads + 2 * g : nullptr;
            table_grads = of_distances ? of_distances + g * call.distances : nullptr;
            for (int64_t n = task.block; n < task.last_block; n++) run(task, task.k * group + g, n, of_head);
        }
    }
};

// Adds a task's separate sums of keys [low, high), from row `row` of its part on, to the gradients of those in [from, to).
template <typename Real>
void add_kept(const Call<Real> &call, const BackwardTask &task, const Real *keys, const Real *values, const double *biases,
              int64_t low, int64_t high, int64_t row, int64_t from, int64_t to) {
    const int64_t group = call.H / call.K;
    for (int64_t key = std::max(low, from); key < std::min(high, to); key++) {
        for (int64_t g = 0; call.key_bias_grad && g < group; g++)
            call.key_bias_grad[(task.b * call.H + task.k * group + g) * call.S + key] += biases[(row + key - low) * group + g];
        const int64_t at = (row + key - low) * call.D;
        Real *to_key = call.key_grad.of(task.b, task.k, key), *to_value = call.value_grad.of(task.b, task.k, key);
        for (int64_t d = 0; d < call.D; d++) to_key[d] += keys[at + d], to_value[d] += values[at + d];
    }
}

// Adds the separate sums of all tasks of one key head for keys [from, to), in their order.
template <typename Real>
void add_all_kept(const Call<Real> &call, const BackwardPlan &plan, const Real *kept, const double *kept_biases, int64_t head,
                  int64_t from, int64_t to) {
    const int32_t *tiles = Visited<Real>{call}.outlier_tiles(head / call.K, head % call.K);
    for (int64_t t = plan.starts[head]; t < plan.starts[head + 1]; t++) {
        const BackwardTask &task = plan.tasks[t];
        const Real *keys = kept + 2 * task.at * call.D, *values = keys + task.row_of_outlier(plan.outlier_tiles) * call.D;
        const double *biases = kept_biases ? kept_biases + task.at * (call.H / call.K) : nullptr;
        add_kept(call, task, keys, values, biases, task.halo, task.own, 0, from, to);
        add_kept(call, task, keys, values, biases, task.own_end, task.halo_end, task.own - task.halo, from, to);
        for (int64_t p = 0; p < plan.outlier_tiles; p++) {
            const int64_t low = tiles[p] * int64_t(BLOCK), high = std::min<int64_t>(low + BLOCK, call.S);
            if (tiles[p] >= 0) add_kept(call, task, keys, values, biases, low, high, task.row_of_outlier(p), from, to);
        }
    }
}

// Sums over the tasks of a key head, in the order of their queries.
template <typename Real>
void add_slope_grads(const Call<Real> &call, const BackwardPlan &plan, const std::vector<double> &of_tasks) {
    const int64_t group = call.H / call.K;
    std::fill_n(call.slope_grads, 2 * call.B * call.H, 0.0);
    for (size_t t = 0; t < plan.tasks.size(); t++) {
        const int64_t head = plan.tasks[t].b * call.H + plan.tasks[t].k * group;
        for (int64_t g = 0; g < group; g++)
            for (int64_t side = 0; side < 2; side++)
                call.slope_grads[side * call.B * call.H + head + g] += of_tasks[(t * group + g) * 2 + side];
    }
}

template <typename Real>
void run(const Call<Real> &call) {
    const BackwardPlan plan = backward_plan(call);
    const BestKeys<Real> best_keys(call);
    const Boxes<Real> boxes(call);
    const bool measures = call.key_points && call.tolerance > 0;
    Real *norms = allocate<Real>(measures ? call.B * call.K * norms_size(call) : 0);
    const int64_t D = call.D, group = call.H / call.K, width = 512, parts = (call.S + width - 1) / width;
    std::vector<double> slope_grads(call.slope_grads ? plan.tasks.size() * group * 2 : 0, 0.0);
    std::vector<double> table_grads(call.table_grads ? plan.tasks.size() * group * call.distances : 0, 0.0);
    Real *kept = static_cast<Real *>(std::malloc(2 * plan.kept * D * sizeof(Real)));
    double *kept_biases = nullptr;
    if (call.key_bias_grad) kept_biases = static_cast<double *>(std::malloc(plan.kept * group * sizeof(double)));
    in_parallel(call.threads, [&](Member &member) {
        const DenormalNumbers are_kept;
        const Tiles tiles(call.bf16);
        if (measures) measure_all(call, norms, member);
        Real *memory = allocate<Real>((3 * BLOCK + 6 * D) * BLOCK);
        Real *panels = memory + 2 * BLOCK * BLOCK;
        const auto panel = [&](int64_t i) { return panels + i * D * BLOCK; };
        const auto woven = [&](int64_t i) { return reinterpret_cast<Pair *>(panel(i)); };
        const Block<Real> block = {call, panels, woven(3), best_keys};
        Backward<Real> backward = {block, memory, memory + BLOCK * BLOCK, panel(1), panel(2), woven(4), woven(5),
                                   plan, kept, {}, {}, {}, {}, kept_biases, {}, {call, panel(6)}, boxes,
                                   {backward.block, norms, nullptr, nullptr, nullptr}};
        member.for_each((int64_t)plan.heaviest.size(), [&](int64_t i) {
            const int64_t t = plan.heaviest[i];
            backward.run(plan.tasks[t], call.slope_grads ? slope_grads.data() + t * group * 2 : nullptr,
                         call.table_grads ? table_grads.data() + t * group * call.distances : nullptr);
        });
        member.for_each(call.B * call.K * parts, [&](int64_t part) {
            const int64_t from = part % parts * width;
            add_all_kept(call, plan, kept, kept_biases, part / parts, from, std::min(from + width, call.S));
        });
        release(memory);
    });
    release(norms);
    std::free(kept);
    std::free(kept_biases);
    if (call.slope_grads) add_slope_grads(call, plan, slope_grads);
    if (call.table_grads) add_table_grads(call, plan, table_grads);
}

}  // namespace

#if ALIBI_FLOAT64
EXPORT void alibi_backward_float64(const Call<double> *call) { run(*call); }
#endif
#if ALIBI_FLOAT32
EXPORT void alibi_backward_float32(const Call<float> *call) { run(*call); }

// For a forward call's visited keys: writes at most `most` tasks, [count, 6] (sequence, key head, first and last block, first and
// last own key); returns the number of tasks, and in `kept` the number of rows of their separate sums.
EXPORT int64_t alibi_backward_tasks(const Call<float> *call, int64_t *tasks, int64_t most, int64_t *kept) {
    const BackwardPlan plan = backward_plan(*call);
    for (int64_t t = 0; t < std::min<int64_t>(most, plan.tasks.size()); t++) {
        const BackwardTask &task = plan.tasks[t];
        const int64_t row[] = {task.b, task.k, task.block, task.last_block, task.own, task.own_end};
        std::copy_n(row, 6, tasks + 6 * t);
    }
    *kept = plan.kept;
    return (int64_t)plan.tasks.size();
}
#endif
