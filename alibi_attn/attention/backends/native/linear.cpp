// Linear maps of a few rows: the weights are read once, at the speed of memory, with the sums of all rows in registers.

#include <algorithm>
#include <vector>

#include "decoding.hpp"

namespace {

enum { OUTPUTS = 2, SMALL = 1 << 16 };  // outputs that are summed together; weights of which one thread is done before two are

template <int rows, int outputs, typename Stored>
INLINE void sums(const LinearCall<Stored> &call, const float *x, int64_t o) {
    const int64_t inputs = call.inputs, whole = inputs / (2 * VL<float>) * (2 * VL<float>);
    Reals<float> sum[outputs][rows][2] = {};
    for (int64_t i = 0; i < whole; i += 2 * VL<float>) {
        UNROLL for (int n = 0; n < outputs; n++) UNROLL for (int part = 0; part < 2; part++) {
            const Reals<float> w = load_floats(call.weight + (o + n) * inputs + i + part * VL<float>);
            UNROLL for (int r = 0; r < rows; r++) sum[n][r][part] += w * load(x + r * inputs + i + part * VL<float>);
        }
    }
    for (int n = 0; n < outputs; n++) for (int r = 0; r < rows; r++) {
        float total = sum_of(sum[n][r][0] + sum[n][r][1]);
        for (int64_t i = whole; i < inputs; i++) total += as_float(call.weight[(o + n) * inputs + i]) * x[r * inputs + i];
        if (call.bias) total += as_float(call.bias[o + n]);
        call.y[r * call.outputs + o + n] = from_float<Stored>(total);
    }
}

template <int rows, typename Stored>
void run_rows(const LinearCall<Stored> &call) {
    std::vector<float> x(rows * call.inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = as_float(call.x[i]);
    const int64_t groups = (call.outputs + OUTPUTS - 1) / OUTPUTS;
    const int threads = call.inputs * call.outputs < SMALL ? 1 : (int)call.threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t group = 0; group < groups; group++) {
        const int64_t o = group * OUTPUTS;
        if (o + OUTPUTS <= call.outputs)
            sums<rows, OUTPUTS>(call, x.data(), o);
        else
            for (int64_t last = o; last < call.outputs; last++) sums<rows, 1>(call, x.data(), last);
    }
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

extern "C" void alibi_linear_float32(const LinearCall<float> *call) { run(*call); }
extern "C" void alibi_linear_bfloat16(const LinearCall<BFloat16> *call) { run(*call); }
