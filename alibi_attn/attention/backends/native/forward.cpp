// Forward: each block of queries goes outward from where it stands, by online softmax, until what is left cannot matter.
//
// tasks: [count, 4], a sequence, a head, and blocks of its queries from one to another.

#include "certificate.hpp"

namespace {

template <typename Real>
struct Forward {
    Block<Real> block;
    Real *scores, *output;  // [BLOCK][BLOCK], [BLOCK][D]
    Certificate<Real> certificate = {block, nullptr};
    Real largest[BLOCK] = {}, mass[BLOCK] = {};
    int64_t met = 0;

    void meet(int64_t key, int count) {
        Real factor[BLOCK];
        met += (int64_t)count * block.rows;
        block.inner_products(block.call.key, key, count, block.queries, scores);
        block.add_bias(key, count, scores);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Reals<Real> before = load(largest + v);
            Reals<Real> top = before, sum = {};
            for (int j = 0; j < count; j++) {
                const Reals<Real> score = load(scores + j * BLOCK + v);
                top = score > top ? score : top;
            }
            const Reals<Real> reference = top == -INFINITY ? every(Real(0)) : top;
            for (int j = 0; j < count; j++) {
                const Reals<Real> weight = exponential(load(scores + j * BLOCK + v) - reference);
                sum += weight;
                store(scores + j * BLOCK + v, weight);
            }
            const Reals<Real> kept = exponential(before - reference);
            store(factor + v, kept);
            store(largest + v, top);
            store(mass + v, load(mass + v) * kept + sum);
        }
        block.template sum_over_keys<SCALE_AND_ADD>(block.call.value, key, count, scores, output, factor);
    }

    void go_outward() {
        const int64_t low = block.range[2], high = std::max<int64_t>(low, block.range[3]);
        const int64_t middle = std::max(low, std::min(high, block.position + block.rows));
        int64_t near = middle, far = middle;
        certificate.turn(1);
        certificate.leave_out(middle - low);
        for (int64_t stop = low; near > stop;) {
            const int64_t next = std::max(stop, near - BLOCK);
            meet(next, (int)(near - next));
            near = next;
            if (near == low) break;
            // The nearest keys are met in any case: `bounds.KEPT`.
            const int64_t last = std::min(certificate.last_key(near, low, largest, mass), block.position - KEPT + 1);
            stop = std::min(near, std::max(low, last));
        }
        certificate.turn(-1);
        certificate.leave_out(high - middle);
        for (int64_t stop = block.looks_right ? high : middle; far < stop;) {
            const int64_t next = std::min(stop, far + BLOCK);
            meet(far, (int)(next - far));
            far = next;
            if (far < high) stop = certificate.last_key(far, high, largest, mass);
        }
        block.range[0] = (int32_t)near, block.range[1] = (int32_t)far;
    }

    // Those of the tiles that were left out of the sums which may matter.
    void meet_outliers() {
        int needed = 0;
        for (int p = 0; certificate.possible && p < OUTLIERS; p++) {
            for_parts_of_tile(block, p, [&](int64_t from, int64_t to) {
                certificate.turn(to <= block.range[0] ? 1 : -1);
                if (!certificate.is_left_out(p) || (certificate.side < 0 && !block.looks_right)) return;
                if (certificate.must_meet(from, to, largest, mass)) needed |= 1 << p;
            });
        }
        *block.pins = needed;
        for (int p = 0; p < OUTLIERS; p++) {
            if (!(needed >> p & 1)) continue;
            for_parts_of_tile(block, p, [&](int64_t low, int64_t high) {
                for_keys(low, high, 0, 0, [&](int64_t key, int count) { meet(key, count); });
            });
        }
    }

    void run(int64_t b, int64_t h, int64_t n) {
        const int64_t D = block.call.D;
        block.begin(b, h, n);
        std::fill(output, output + BLOCK * D, Real(0));
        std::fill(mass, mass + BLOCK, Real(0));
        std::fill(largest, largest + BLOCK, Real(-INFINITY));
        met = 0;
        certificate.begin();
        go_outward();
        meet_outliers();
        count(block, met);
        for (int i = 0; i < block.rows; i++) {
            const bool blind = mass[i] == 0;
            const Real share = blind ? 0 : 1 / mass[i];
            block.call.lse[block.row() + i] = blind ? -INFINITY : largest[i] + std::log(mass[i]);
            Real *to = block.call.result + (block.row() + i) * D;
            for (int64_t d = 0; d < D; d++) to[d] = output[i * D + d] * share;
        }
    }
};

template <typename Real>
void run(Call<Real> call) {
    const int64_t D = call.D, heads = call.B * call.K, width = 512, parts = (padded(call) + width - 1) / width;
    call.norms = static_cast<Real *>(std::malloc(heads * (2 * padded(call) + STATS) * sizeof(Real)));
    call.stats = call.norms + 2 * heads * padded(call);
#pragma omp parallel num_threads(call.threads)
    {
        if (call.tolerance > 0) {
#pragma omp for schedule(static)
            for (int64_t part = 0; part < heads * parts; part++) {
                const int64_t from = part % parts * width;
                measure(call, part / parts, from, std::min(from + width, padded(call)));
            }
#pragma omp for schedule(static)
            for (int64_t head = 0; head < heads; head++) summarize(call, head);
        }
        const int64_t size = (BLOCK + 2 * D) * BLOCK + padded(call);  // a multiple of 16 numbers
        Real *memory = static_cast<Real *>(std::aligned_alloc(64, size * sizeof(Real)));
        Forward<Real> forward = {{call, memory + BLOCK * BLOCK}, memory, memory + (BLOCK + D) * BLOCK};
        forward.certificate.sums = memory + (BLOCK + 2 * D) * BLOCK;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < call.count; t++) {
            const int64_t *task = call.tasks + 4 * t;
            for (int64_t n = task[2]; n < task[3]; n++) forward.run(task[0], task[1], n);
        }
        std::free(memory);
    }
    std::free(call.norms);
}

}  // namespace

extern "C" void alibi_forward_float32(const Call<float> *call) { run(*call); }
extern "C" void alibi_forward_float64(const Call<double> *call) { run(*call); }
