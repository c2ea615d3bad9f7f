// Linear maps of a few rows, at memory speed.

#include <vector>

#include "few_rows.hpp"
#include "threads.hpp"

namespace {

enum { SMALL = 1 << 16 };  // with fewer weights, one thread is faster than two

template <typename Stored>
void run(const LinearCall<Stored> &call) {
    const int64_t inputs = call.inputs, outputs = call.outputs;
    std::vector<float> x(call.rows * inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = as_float(call.x[i]);
    const int64_t threads = inputs * outputs < SMALL ? 1 : call.threads, size = (outputs + 4 * threads - 1) / (4 * threads);
    in_parallel(threads, [&](Member &member) {
        member.for_ranges(outputs, size, [&](int64_t from, int64_t to) {
            for (int64_t o = from; o < to; o += WIDE) {
                float totals[MOST_ROWS][WIDE];
                const int64_t count = std::min<int64_t>(WIDE, to - o);
                products_of_block(int(call.rows), call.weight + o * inputs, x.data(), inputs, count, totals);
                for (int64_t r = 0; r < call.rows; r++)
                    for (int64_t i = 0; i < count; i++) {
                        const float bias = call.bias ? as_float(call.bias[o + i]) : 0.0f;
                        call.y[r * outputs + o + i] = from_float<Stored>(totals[r][i] + bias);
                    }
            }
        });
    });
}

}  // namespace

template void products_of_block(int, const float *, const float *, int64_t, int64_t, float (*)[WIDE]);
template void products_of_block(int, const BFloat16 *, const float *, int64_t, int64_t, float (*)[WIDE]);
template void products_of_block(int, const Float16 *, const float *, int64_t, int64_t, float (*)[WIDE]);

EXPORT void alibi_linear_float32(const LinearCall<float> *call) { run(*call); }
EXPORT void alibi_linear_bfloat16(const LinearCall<BFloat16> *call) { run(*call); }
EXPORT void alibi_linear_float16(const LinearCall<Float16> *call) { run(*call); }
