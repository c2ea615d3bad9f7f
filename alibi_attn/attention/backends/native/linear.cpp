// Linear maps of a few rows: the weights are read once, at memory speed, with the sums of all rows in registers.

#include <vector>

#include "decoding.hpp"
#include "threads.hpp"

namespace {

enum { SMALL = 1 << 16 };  // with fewer weights, one thread is faster than two

// One output of all rows. Weights of consecutive outputs form a single stream of memory, which determines the speed.
template <int rows, int parts, typename Stored>
INLINE void output(const LinearCall<Stored> &call, const float *x, int64_t inputs, int64_t o) {
    constexpr int step = parts * VL<float>;
    const Stored *weight = call.weight + o * inputs;
    Reals<float> sum[rows][parts];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int part = 0; part < parts; part++) sum[r][part] = Reals<float>{};
    int64_t i = 0;
    for (; i + step <= inputs; i += step)
        UNROLL for (int part = 0; part < parts; part++) {
            const Reals<float> w = load_floats(weight + i + part * VL<float>);
            UNROLL for (int r = 0; r < rows; r++) sum[r][part] += w * load(x + r * inputs + i + part * VL<float>);
        }
    UNROLL for (int r = 0; r < rows; r++) {
        Reals<float> all = sum[r][0];
        UNROLL for (int part = 1; part < parts; part++) all += sum[r][part];
        float total = sum_of(all);
        for (int64_t last = i; last < inputs; last++) total += as_float(weight[last]) * x[r * inputs + last];
        if (call.bias) total += as_float(call.bias[o]);
        call.y[r * call.outputs + o] = from_float<Stored>(total);
    }
}

template <int rows, typename Stored>
void run_rows(const LinearCall<Stored> &call) {
    const int64_t inputs = call.inputs, outputs = call.outputs;
    std::vector<float> x(rows * inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = as_float(call.x[i]);
    const int64_t threads = inputs * outputs < SMALL ? 1 : call.threads, size = (outputs + 4 * threads - 1) / (4 * threads);
    in_parallel(threads, [&](Member &member) {
        member.for_ranges(outputs, size, [&](int64_t from, int64_t to) {
            for (int64_t o = from; o < to; o++) output<rows, rows == 1 ? 4 : 2>(call, x.data(), inputs, o);
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
