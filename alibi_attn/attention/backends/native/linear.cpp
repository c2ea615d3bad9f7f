// Linear maps of a few rows, at memory speed.

#include <vector>

#include "few_rows.hpp"
#include "threads.hpp"

namespace {

enum { SMALL = 1 << 16 };  // with fewer weights, one thread is faster than two

template <int rows, typename Stored>
void run_rows(const LinearCall<Stored> &call) {
    const int64_t inputs = call.inputs, outputs = call.outputs;
    std::vector<float> x(rows * inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = as_float(call.x[i]);
    const int64_t threads = inputs * outputs < SMALL ? 1 : call.threads, size = (outputs + 4 * threads - 1) / (4 * threads);
    in_parallel(threads, [&](Member &member) {
        member.for_ranges(outputs, size, [&](int64_t from, int64_t to) {
            for (int64_t o = from; o < to; o++) {
                float totals[rows];
                products_of<rows>(call.weight + o * inputs, x.data(), inputs, totals);
                for (int r = 0; r < rows; r++)
                    call.y[r * outputs + o] = from_float<Stored>(totals[r] + (call.bias ? as_float(call.bias[o]) : 0.0f));
            }
        });
    });
}

template <typename Stored>
void run(const LinearCall<Stored> &call) {
    switch (call.rows) {
        case 1: return run_rows<1>(call);
        case 2: return run_rows<2>(call);
        case 3: return run_rows<3>(call);
        default: return run_rows<4>(call);
    }
}

}  // namespace

EXPORT void alibi_linear_float32(const LinearCall<float> *call) { run(*call); }
EXPORT void alibi_linear_bfloat16(const LinearCall<BFloat16> *call) { run(*call); }
EXPORT void alibi_linear_float16(const LinearCall<Float16> *call) { run(*call); }
