// Forward: each block of queries meets the keys of its certified band by online softmax.
//
// tasks: [count, 4], a sequence, a head, and blocks of its queries from one to another, the heaviest first.

#include "block.hpp"

namespace {

template <typename Real>
struct Forward {
    Block<Real> block;
    Real *scores, *output;  // [BLOCK][BLOCK], [BLOCK][D]
    Real largest[BLOCK], mass[BLOCK];

    void meet(int64_t key, int count) {
        Real factor[BLOCK];
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

    void run(int64_t b, int64_t h, int64_t n) {
        const int64_t D = block.call.D;
        block.begin(b, h, n);
        std::fill(output, output + BLOCK * D, Real(0));
        std::fill(mass, mass + BLOCK, Real(0));
        std::fill(largest, largest + BLOCK, Real(-INFINITY));
        for_keys(block, 0, 0, [&](int64_t key, int count, int64_t) { meet(key, count); });
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
void run(const Call<Real> &call) {
#pragma omp parallel num_threads(call.threads)
    {
        const int64_t D = call.D;
        Real *memory = static_cast<Real *>(std::aligned_alloc(64, (BLOCK + 2 * D) * BLOCK * sizeof(Real)));
        Forward<Real> forward = {{call, memory + BLOCK * BLOCK}, memory, memory + (BLOCK + D) * BLOCK, {}, {}};
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < call.count; t++) {
            const int64_t *task = call.tasks + 4 * t;
            for (int64_t n = task[2]; n < task[3]; n++) forward.run(task[0], task[1], n);
        }
        std::free(memory);
    }
}

}  // namespace

extern "C" void alibi_forward_float32(const Call<float> *call) { run(*call); }
extern "C" void alibi_forward_float64(const Call<double> *call) { run(*call); }
