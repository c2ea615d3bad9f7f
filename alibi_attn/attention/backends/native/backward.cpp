// Backward: the same keys as forward, from the log-sum-exp that it left; no atomics, so the same bits every time.
//
// A task is a run of queries, with all heads that share a key head. The keys where these queries stand are its own: their
// gradients are added up in place. Those of other keys it meets, a halo before and after its own and the pinned tiles, are kept
// apart (in `partial`) and added at the end, in the order of the tasks.
//
// tasks: [count, 9]: a sequence, a key head, blocks of queries from one to another; the first of its own keys and the first after
// them; the first key of the halo before and the first after the halo behind; its first row in `partial`, which has twice the
// rows. The heaviest come first; order[starts[b K + k] ...] are the tasks of a key head, by their queries.

#include "block.hpp"

namespace {

// What one block adds to the gradients of its head's slopes: -sum over j of ds |i - j|, on the left and on the right.
//
// Rows of ds add up to dlse, on paper; in floats they are off by what inner rounds, which grows with the distance. So each row is
// centered by what it computed: ds + p (dlse - sum of ds) / (sum of p). Distances are summed from each tile's first key on, and
// the tile's own distance counts in double: 10^6 tokens away no digit is lost.
template <typename Real>
struct SlopeGradient {
    // Of every query, on either side: sums over the keys of ds, p, ds |i - j| and p |i - j|.
    enum { DS, P, DS_AWAY, P_AWAY, SUMS };
    double sums[2][SUMS][BLOCK];

    void begin() { std::fill_n(&sums[0][0][0], 2 * SUMS * BLOCK, 0.0); }

    void meet(const Block<Real> &block, int64_t key, int count, const Real *weights, const Real *moments) {
        const int64_t ahead = block.position - key;  // how far query 0 is behind the tile's first key
        const bool some_left = ahead + block.rows > 0, some_right = ahead < count - 1 && block.looks_right;
        if (some_left) meet_side<0>(ahead, count, weights, moments, some_right);
        if (some_right) meet_side<1>(ahead, count, weights, moments, some_left);
    }

    // -(ds |i - j|) of all queries, added to the task's; dlse is what the rows of ds must add up to.
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
    // |i - j| = start + sign (i - j'), with j' from the tile's first key on.
    template <int side>
    void meet_side(int64_t ahead, int count, const Real *weights, const Real *moments, bool mixed) {
        const Real sign = side == 0 ? 1 : -1;
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            Reals<Real> sum[SUMS] = {};
            const Ints<Real> lanes = Block<Real>::lanes() + v;
            for (int j = 0; j < count; j++) {
                Reals<Real> p = load(weights + j * BLOCK + v), ds = load(moments + j * BLOCK + v);
                if (mixed) {
                    const Ints<Real> away = lanes + (int)(ahead - j), here = side == 0 ? away >= 0 : away < 0;
                    p = here ? p : Reals<Real>{}, ds = here ? ds : Reals<Real>{};
                }
                const Reals<Real> from_start = __builtin_convertvector(lanes - j, Reals<Real>) * sign;
                sum[DS] += ds, sum[P] += p, sum[DS_AWAY] += ds * from_start, sum[P_AWAY] += p * from_start;
            }
            const double start = double(sign) * double(ahead);
            for (int i = 0; i < VL<Real>; i++) {
                sums[side][DS][v + i] += sum[DS][i], sums[side][P][v + i] += sum[P][i];
                sums[side][DS_AWAY][v + i] += double(sum[DS_AWAY][i]) + start * double(sum[DS][i]);
                sums[side][P_AWAY][v + i] += double(sum[P_AWAY][i]) + start * double(sum[P][i]);
            }
        }
    }
};

struct Task {
    int64_t b, k, block, last_block, own, own_end, halo, halo_end, at;

    // Its rows of `partial`: the halo before, the halo behind, the pinned tiles; first for keys, then for values.
    int64_t row_of(int64_t key) const { return key < own ? key - halo : own - halo + key - own_end; }
    int64_t row_of_pin(int64_t pin) const { return own - halo + halo_end - own_end + pin * BLOCK; }
    template <typename Real>
    int64_t rows(const Call<Real> &call) const { return row_of_pin(call.P); }
    template <typename Real>
    Real *partial(const Call<Real> &call) const { return call.partial + 2 * at * call.D; }
};

template <typename Real>
struct Backward {
    Block<Real> block;
    Real *weights, *moments, *grads, *query_grad;  // [BLOCK][BLOCK] twice, [D][BLOCK], [BLOCK][D]
    Real inner[BLOCK], lse[BLOCK];                 // what the softmax's derivative subtracts, and the log-sum-exp
    SlopeGradient<Real> slope_grad;

    // Where the gradients of the keys from `key` on, and of their values, are added up.
    struct Place {
        Real *keys, *values;
    };

    Place place(const Task &task, int64_t key, int64_t pin) const {
        const Call<Real> &call = block.call;
        const int64_t D = call.D;
        if (task.own <= key && key < task.own_end) {
            const int64_t at = ((task.b * call.K + task.k) * call.S + key) * D;
            return {call.key_grad + at, call.value_grad + at};
        }
        const int64_t row = pin >= 0 ? task.row_of_pin(pin) + key % BLOCK : task.row_of(key);
        Real *keys = task.partial(call) + row * D;
        return {keys, keys + task.rows(call) * D};
    }

    void meet(const Task &task, int64_t key, int count, int64_t pin) {
        const Call<Real> &call = block.call;
        block.inner_products(call.key, key, count, block.queries, weights);
        block.add_bias(key, count, weights);
        block.inner_products(call.value, key, count, grads, moments);
        for (int j = 0; j < count; j++) {
            for (int v = 0; v < BLOCK; v += VL<Real>) {
                const int at = j * BLOCK + v;
                // No score is above the log-sum-exp but by rounding, which at scores of 1e20 is more than exp can hold.
                const Reals<Real> nats = load(weights + at) - load(lse + v);
                const Reals<Real> weight = exponential(nats > 0 ? Reals<Real>{} : nats);
                store(weights + at, weight);
                store(moments + at, weight * (load(moments + at) - load(inner + v)));
            }
        }
        if (call.slope_grads) slope_grad.meet(block, key, count, weights, moments);
        const Real scale = (Real)call.scale;
        for (int at = 0; at < count * BLOCK; at += VL<Real>) store(moments + at, load(moments + at) * scale);
        const Place to = place(task, key, pin);
        block.sum_over_queries(call.grad, key, count, weights, to.values);
        block.sum_over_queries(call.query, key, count, moments, to.keys);
        block.template sum_over_keys<ADD>(call.key, key, count, moments, query_grad, nullptr);
    }

    void run(const Task &task, int64_t h, int64_t n, double *slope_grads) {
        const Call<Real> &call = block.call;
        const int64_t D = call.D;
        block.begin(task.b, h, n);
        block.transpose(call.grad, grads);
        for (int i = 0; i < BLOCK; i++) {
            inner[i] = 0, lse[i] = INFINITY;  // a lane without a query: whatever its scores are, its weights are 0
            if (i >= block.rows) continue;
            const Real *out = call.output.of(task.b, h, n * BLOCK + i);
            for (int64_t d = 0; d < D; d++) inner[i] += grads[d * BLOCK + i] * out[d];
            if (call.grad_lse) inner[i] -= call.grad_lse[block.row() + i];
            lse[i] = call.lse[block.row() + i];
            if (lse[i] == -INFINITY) lse[i] = 0;  // it sees nothing, and all its scores are -inf
        }
        std::fill(query_grad, query_grad + BLOCK * D, Real(0));
        if (call.slope_grads) slope_grad.begin();
        int64_t met = 0;
        const auto meet_all = [&](int64_t low, int64_t high, int pin) {
            for_keys(low, high, task.own, task.own_end, [&](int64_t key, int count) {
                meet(task, key, count, pin);
                met += (int64_t)count * block.rows;
            });
        };
        meet_all(block.range[0], block.range[1], -1);
        for (int p = 0; p < call.P; p++)
            if (*block.pins >> p & 1) for_parts_of_tile(block, p, [&](int64_t low, int64_t high) { meet_all(low, high, p); });
        count(block, met);
        if (call.slope_grads) slope_grad.end(block, slope_grads);
        std::copy(query_grad, query_grad + block.rows * D, call.result + block.row() * D);
    }

    void run(const Task &task, double *slope_grads) {
        const Call<Real> &call = block.call;
        const int64_t D = call.D, group = call.H / call.K, at = ((task.b * call.K + task.k) * call.S + task.own) * D;
        std::fill_n(call.key_grad + at, (task.own_end - task.own) * D, Real(0));
        std::fill_n(call.value_grad + at, (task.own_end - task.own) * D, Real(0));
        std::fill_n(task.partial(call), 2 * task.rows(call) * D, Real(0));
        for (int64_t g = 0; g < group; g++) {
            double *of_head = slope_grads ? slope_grads + 2 * g : nullptr;
            for (int64_t n = task.block; n < task.last_block; n++) run(task, task.k * group + g, n, of_head);
        }
    }
};

// Add what a task kept of keys [low, high), from row `row` of its part on, to the gradients of those of [from, to).
template <typename Real>
void add_kept(const Call<Real> &call, const Task &task, int64_t low, int64_t high, int64_t row, int64_t from, int64_t to) {
    const int64_t start = std::max(low, from), count = (std::min(high, to) - start) * call.D;
    if (count <= 0) return;
    const Real *keys = task.partial(call) + (row + start - low) * call.D, *values = keys + task.rows(call) * call.D;
    const int64_t at = ((task.b * call.K + task.k) * call.S + start) * call.D;
    for (int64_t d = 0; d < count; d++) call.key_grad[at + d] += keys[d];
    for (int64_t d = 0; d < count; d++) call.value_grad[at + d] += values[d];
}

// The same for all that the tasks of one key head kept of keys [from, to), in their order.
template <typename Real>
void add_all_kept(const Call<Real> &call, int64_t head, int64_t from, int64_t to) {
    const Task *tasks = reinterpret_cast<const Task *>(call.tasks);
    for (int64_t t = call.starts[head]; t < call.starts[head + 1]; t++) {
        const Task &task = tasks[call.order[t]];
        add_kept(call, task, task.halo, task.own, 0, from, to);
        add_kept(call, task, task.own_end, task.halo_end, task.own - task.halo, from, to);
        for (int64_t p = 0; p < call.P; p++) {
            const int64_t tile = call.outliers[head * call.P + p];
            const int64_t low = tile * BLOCK, high = std::min<int64_t>(low + BLOCK, call.S);
            if (tile >= 0) add_kept(call, task, low, high, task.row_of_pin(p), from, to);
        }
    }
}

template <typename Real>
void run(const Call<Real> &call) {
    const Task *tasks = reinterpret_cast<const Task *>(call.tasks);
    const int64_t D = call.D, group = call.H / call.K, width = 512, parts = (call.S + width - 1) / width;
#pragma omp parallel num_threads(call.threads)
    {
        Real *memory = static_cast<Real *>(std::aligned_alloc(64, (2 * BLOCK + 3 * D) * BLOCK * sizeof(Real)));
        Real *panels = memory + 2 * BLOCK * BLOCK;
        Backward<Real> backward = {
            {call, panels}, memory, memory + BLOCK * BLOCK, panels + D * BLOCK, panels + 2 * D * BLOCK, {}, {}, {}};
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < call.count; t++)
            backward.run(tasks[t], call.slope_grads ? call.slope_grads + t * group * 2 : nullptr);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < call.B * call.K * parts; part++) {
            const int64_t from = part % parts * width;
            add_all_kept(call, part / parts, from, std::min(from + width, call.S));
        }
        std::free(memory);
    }
}

}  // namespace

extern "C" void alibi_backward_float32(const Call<float> *call) { run(*call); }
extern "C" void alibi_backward_float64(const Call<double> *call) { run(*call); }
