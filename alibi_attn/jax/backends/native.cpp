// The kernels of `attention/backends/native` as targets of XLA's foreign function interface; `native.py` calls them.
//
// Arrays have XLA's row-major layout, [B, T, H, D]; axes that `vmap` puts before them are runs of the batch. A missing array has
// no elements. Arguments that a kernel needs in fp64 or int64, which JAX may not have enabled, are widened here, and fp64 results
// are narrowed.

#include <cstring>
#include <limits>
#include <type_traits>

#include "clean.hpp"
#include "denormals.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// In the order of `native.py`.
enum Operand {
    QUERY, KEY, VALUE, SLOPES, RIGHT_SLOPES, FIRST, KEY_MASK, QUERY_SEGMENTS, KEY_SEGMENTS, KEY_BIAS, KEY_BIAS_LOW, QUERY_BIAS,
    QUERY_BIAS_LOW, DROPOUT_SEED, QUERY_START, QUERY_NUMBERS, KEY_NUMBERS, NUMBERS, FORWARD_OPERANDS,
    OUTPUT = FORWARD_OPERANDS, GRAD, GRAD_LSE, ROWS, VISITED, BACKWARD_OPERANDS,
};
enum ForwardResult { OF_OUTPUT, OF_LSE, OF_ROWS, OF_VISITED, OF_LSE_LOW, FORWARD_RESULTS };
enum BackwardResult { OF_QUERY, OF_KEY, OF_VALUE, OF_SLOPES, OF_RIGHT_SLOPES, OF_KEY_BIAS, OF_QUERY_BIAS, BACKWARD_RESULTS };

enum { FEW_BLOCKS = 2 };  // so few blocks read their keys only once or twice

// The functions of the kernels' libraries that this one calls, in the order of `native.py`.
struct Threads {
    void (*run_team)(int64_t, void (*)(void *), void *);
    int64_t (*most)();
} threads = {};
struct Kernels {
    void (*forward)(const void *), (*backward)(const void *);
} parts[3] = {};  // for float, double and products of bf16; those that a call has needed

// The kernels for numbers of a type, computed in `Real`.
template <typename Real, typename Number>
const Kernels &kernels = parts[sizeof(Real) == 8 ? 1 : sizeof(Number) == 2 ? 2 : 0];

struct Settings {
    int64_t causal, for_backward, dropout_threshold;
    double dropout_factor;
    int64_t dropout_head, dropout_key;  // the numbers of the first of each in the whole computation
    int threads;
};

using Buffers = std::vector<ffi::AnyBuffer>;

// The numbers of an array, or null if the call has none.
template <typename Number>
Number *numbers_of(const ffi::AnyBuffer &array) {
    return array.element_count() ? static_cast<Number *>(array.untyped_data()) : nullptr;
}

bool is_narrow(const ffi::AnyBuffer &array) { return array.element_type() == ffi::DataType::S32; }

double number_of(const ffi::AnyBuffer &array, int64_t at) {
    const bool wide = array.element_type() == ffi::DataType::F64;
    return wide ? static_cast<const double *>(array.untyped_data())[at] : static_cast<const float *>(array.untyped_data())[at];
}

// x = high + low, each an array or none, in fp64.
std::vector<double> sum_of_two(const ffi::AnyBuffer &high, const ffi::AnyBuffer &low) {
    std::vector<double> sum(high.element_count());
    const bool has_low = low.element_count();
    for (size_t at = 0; at < sum.size(); at++) {
        sum[at] = number_of(high, at);
        if (has_low && sum[at] > -INFINITY) sum[at] += number_of(low, at);
    }
    return sum;
}

void narrow(const std::vector<double> &from, const ffi::AnyBuffer &to) {
    if (to.element_type() == ffi::DataType::F64) std::copy(from.begin(), from.end(), static_cast<double *>(to.untyped_data()));
    else std::copy(from.begin(), from.end(), static_cast<float *>(to.untyped_data()));
}

// A call as `call.hpp` defines it, and the arrays it owns.
template <typename Real>
struct Laid {
    Call<Real> call = {};
    std::vector<int64_t> first, seeds, query_numbers, key_numbers;
    std::vector<double> key_bias;
    std::vector<int32_t> segments;  // of queries, then of keys, if they were int64
    Sight<Real> sight;

    Laid(const Buffers &in, const Settings &settings) : sight{call, numbers_of<const int32_t>(in[QUERY_START])} {
        const auto query = in[QUERY].dimensions().last(4), key = in[KEY].dimensions().last(4);
        const int64_t runs = query[0] ? in[FIRST].element_count() / query[0] : 0;  // in the axes of `vmap`
        call.B = runs * query[0], call.T = query[1], call.H = query[2], call.D = query[3], call.S = key[1], call.K = key[2];
        call.slopes = numbers_of<const Real>(in[SLOPES]), call.right_slopes = numbers_of<const Real>(in[RIGHT_SLOPES]);
        const int32_t *positions = numbers_of<const int32_t>(in[FIRST]);
        first.assign(positions, positions + call.B), call.first = first.data();
        call.key_mask = numbers_of<const uint8_t>(in[KEY_MASK]);
        take_segments(in[QUERY_SEGMENTS], in[KEY_SEGMENTS]);
        key_bias = sum_of_two(in[KEY_BIAS], in[KEY_BIAS_LOW]);
        call.key_bias = key_bias.empty() ? nullptr : key_bias.data();
        const uint32_t *words = numbers_of<const uint32_t>(in[DROPOUT_SEED]);
        for (int64_t run = 0; words && run < runs; run++) {
            const uint64_t seed = uint64_t(words[2 * run]) << 32 | words[2 * run + 1];
            seeds.insert(seeds.end(), {int64_t(seed), 0, settings.dropout_head, settings.dropout_key});
        }
        call.dropout_seed = seeds.empty() ? nullptr : seeds.data(), call.dropout_runs = words ? runs : 0;
        call.query_numbers = widened(in[QUERY_NUMBERS], query_numbers);
        call.key_numbers = widened(in[KEY_NUMBERS], key_numbers);
        call.dropout_threshold = settings.dropout_threshold, call.dropout_factor = settings.dropout_factor;
        const uint32_t *numbers = numbers_of<const uint32_t>(in[NUMBERS]);
        std::memcpy(&call.scale, numbers, 8), std::memcpy(&call.tolerance, numbers + 2, 8);
        call.window = numbers[4], call.causal = settings.causal, call.has_values = 1;
        call.for_backward = settings.for_backward, call.threads = settings.threads;
    }

    template <typename Number>
    Packed<Number> like_queries(const ffi::AnyBuffer &array) const {
        return {call.B, call.T, call.H, call.D, int(call.threads), numbers_of<Number>(array)};
    }

    template <typename Number>
    Packed<Number> like_keys(const ffi::AnyBuffer &array) const {
        return {call.B, call.S, call.K, call.D, int(call.threads), numbers_of<Number>(array)};
    }

    // Reads queries, keys, values, and other arrays. Returns [B, H, T], which queries see NaN or inf, or nothing.
    template <typename Number>
    std::vector<uint8_t> read(std::initializer_list<Packed<Number> *> arrays) {
        for_all(&Packed<Number>::read, arrays);
        Packed<Number> &queries = *arrays.begin()[0], &keys = *arrays.begin()[1], &values = *arrays.begin()[2];
        call.bf16 = std::is_same<Number, Bf16>::value;
        const std::vector<uint8_t> poisoned = clean(sight, queries, keys, values, key_bias);
        call.query = queries.template rows<const Real>();
        call.key = keys.template rows<const Real>(), call.value = values.template rows<const Real>();
        call.D = queries.width();
        return poisoned;
    }

    // An int32 array as int64, or null if the call has none.
    const int64_t *widened(const ffi::AnyBuffer &array, std::vector<int64_t> &to) const {
        const int32_t *numbers = numbers_of<const int32_t>(array);
        if (numbers) to.assign(numbers, numbers + array.element_count());
        return numbers ? to.data() : nullptr;
    }

    // Segments are only compared for equality, so int64 ones are replaced by their rank.
    void take_segments(const ffi::AnyBuffer &of_queries, const ffi::AnyBuffer &of_keys) {
        call.query_segments = numbers_of<const int32_t>(of_queries), call.key_segments = numbers_of<const int32_t>(of_keys);
        if (!call.query_segments || (is_narrow(of_queries) && is_narrow(of_keys))) return;
        std::vector<int64_t> all;
        for (const ffi::AnyBuffer &array : {of_queries, of_keys}) {
            for (size_t at = 0; at < array.element_count(); at++)
                all.push_back(is_narrow(array) ? numbers_of<int32_t>(array)[at] : numbers_of<int64_t>(array)[at]);
        }
        std::vector<int64_t> sorted = all;
        std::sort(sorted.begin(), sorted.end());
        for (const int64_t id : all)
            segments.push_back(int32_t(std::lower_bound(sorted.begin(), sorted.end(), id) - sorted.begin()));
        call.query_segments = segments.data(), call.key_segments = segments.data() + of_queries.element_count();
    }
};

// Computes in `Real`, with rows stored as `Number`.
template <typename Real, typename Number = Real>
void forward(const Buffers &in, const Buffers &out, const Settings &settings) {
    Laid<Real> laid(in, settings);
    Call<Real> &call = laid.call;
    Packed<Number> queries = laid.template like_queries<Number>(in[QUERY]).may_stay();
    Packed<Number> output = laid.template like_queries<Number>(out[OF_OUTPUT]).may_stay();
    Packed<Number> keys = laid.template like_keys<Number>(in[KEY]), values = laid.template like_keys<Number>(in[VALUE]);
    if (call.blocks() <= FEW_BLOCKS) keys = keys.may_stay(), values = values.may_stay();
    const Memory memory({&queries, &keys, &values, &output});
    const std::vector<uint8_t> poisoned = laid.read({&queries, &keys, &values});
    std::vector<double> lse(call.B * call.H * call.T);
    call.output = output.template rows<Real>(), call.lse = lse.data();
    call.rows = numbers_of<Real>(out[OF_ROWS]), call.visited = numbers_of<int32_t>(out[OF_VISITED]);
    kernels<Real, Number>.forward(&call);
    const std::vector<double> of_queries = sum_of_two(in[QUERY_BIAS], in[QUERY_BIAS_LOW]);
    const bool is_wide = out[OF_LSE].element_type() == ffi::DataType::F64;
    const double largest = is_wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
    for (int64_t row = 0; row < int64_t(lse.size()); row++) {
        const int64_t head = row / call.T, b = head / call.H, h = head % call.H, i = row % call.T;
        if (laid.sight.is_blinded_by_cut(b, h, i)) {
            lse[row] = -INFINITY;
            output.fill(b * call.T + i, h, Number(0));
        }
        // A query that sees nothing has weights 0 in backward, whatever its scores are.
        if (lse[row] == -INFINITY) call.row_max(b, h)[i] = INFINITY;
        if (!of_queries.empty()) lse[row] += of_queries[row];
        // Clamped to the range of its dtype: -inf is for queries that see nothing.
        if (lse[row] > -INFINITY) lse[row] = std::max(-largest, std::min(lse[row], largest));
        if (poisoned.empty() || !poisoned[row]) continue;
        lse[row] = NAN;
        output.fill(b * call.T + i, h, NOT_A_NUMBER<Number>);
    }
    narrow(lse, out[OF_LSE]);
    if (out[OF_LSE_LOW].element_count()) {
        for (size_t row = 0; row < lse.size(); row++)
            lse[row] = std::isfinite(lse[row]) ? lse[row] - number_of(out[OF_LSE], row) : 0;
        narrow(lse, out[OF_LSE_LOW]);
    }
    if (!output.stays) for_all(&Packed<Number>::write, {&output});
}

template <typename Real, typename Number = Real>
void backward(const Buffers &in, const Buffers &out, const Settings &settings) {
    Laid<Real> laid(in, settings);
    Call<Real> &call = laid.call;
    Packed<Number> queries = laid.template like_queries<Number>(in[QUERY]);
    Packed<Number> keys = laid.template like_keys<Number>(in[KEY]), values = laid.template like_keys<Number>(in[VALUE]);
    Packed<Number> output = laid.template like_queries<Number>(in[OUTPUT]).may_stay();
    Packed<Number> grads = laid.template like_queries<Number>(in[GRAD]);
    Packed<Real> query_grad = laid.template like_queries<Real>(out[OF_QUERY]).may_stay();
    Packed<Real> key_grad = laid.template like_keys<Real>(out[OF_KEY]), value_grad = laid.template like_keys<Real>(out[OF_VALUE]);
    const Memory memory({&queries, &keys, &values, &output, &grads}, {&query_grad, &key_grad, &value_grad});
    laid.read({&queries, &keys, &values, &output, &grads});
    call.grad = grads.template rows<const Real>(), call.grad_lse = numbers_of<const Real>(in[GRAD_LSE]);
    call.output = output.template rows<Real>();
    call.rows = numbers_of<Real>(in[ROWS]), call.visited = numbers_of<int32_t>(in[VISITED]);
    // The incoming gradient of a query that saw nothing is ignored.
    for (int64_t b = 0; b < call.B; b++)
        for (int64_t at = 0; at < call.H * call.T; at++)
            if (call.row_max(b, 0)[at] == INFINITY) grads.zero(b * call.T + at % call.T, at / call.T);
    call.query_grad = query_grad.rows(), call.key_grad = key_grad.rows(), call.value_grad = value_grad.rows();
    const int64_t heads = call.B * call.H;
    std::vector<double> slopes(out[OF_SLOPES].element_count() ? 2 * heads : 0);
    std::vector<double> of_keys(out[OF_KEY_BIAS].element_count()), of_queries(of_keys.empty() ? 0 : heads * call.T);
    if (!slopes.empty()) call.slope_grads = slopes.data();
    if (!of_keys.empty()) call.key_bias_grad = of_keys.data(), call.query_bias_grad = of_queries.data();
    kernels<Real, Number>.backward(&call);
    for_all(&Packed<Real>::write, {&query_grad, &key_grad, &value_grad});
    if (!of_keys.empty()) narrow(of_keys, out[OF_KEY_BIAS]);
    if (out[OF_QUERY_BIAS].element_count()) narrow(of_queries, out[OF_QUERY_BIAS]);
    if (slopes.empty()) return;
    narrow({slopes.begin(), slopes.begin() + heads}, out[OF_SLOPES]);
    narrow({slopes.begin() + heads, slopes.end()}, out[OF_RIGHT_SLOPES]);
}

ffi::Error call_of(
    bool is_forward, ffi::ThreadPool &pool, ffi::RemainingArgs &args, ffi::RemainingRets &rets, Settings settings) {
    const size_t operands = is_forward ? +FORWARD_OPERANDS : +BACKWARD_OPERANDS;
    const size_t results = is_forward ? +FORWARD_RESULTS : +BACKWARD_RESULTS;
    if (args.size() != operands || rets.size() != results)
        return ffi::Error::InvalidArgument("the kernels were called with " + std::to_string(args.size()) + " arrays for "
                                           + std::to_string(rets.size()) + " results, not " + std::to_string(operands) + " for "
                                           + std::to_string(results) + ": native.py and native.cpp are of different versions");
    Buffers in, out;
    for (size_t n = 0; n < operands; n++) in.push_back(*args.get<ffi::AnyBuffer>(n));
    for (size_t n = 0; n < results; n++) out.push_back(**rets.get<ffi::AnyBuffer>(n));
    // As many threads as XLA's own, or fewer if OpenMP's settings say so.
    settings.threads = int(std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), threads.most())));
    const DenormalNumbers are_kept;
    const ffi::DataType dtype = in[QUERY].element_type();
    if (dtype == ffi::DataType::F64) is_forward ? forward<double>(in, out, settings) : backward<double>(in, out, settings);
    else if (dtype == ffi::DataType::F32) is_forward ? forward<float>(in, out, settings) : backward<float>(in, out, settings);
    else is_forward ? forward<float, Bf16>(in, out, settings) : backward<float, Bf16>(in, out, settings);
    return ffi::Error::Success();
}

template <bool is_forward>
ffi::Error handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t causal, int64_t for_backward,
                  int64_t threshold, double factor, int64_t head, int64_t key) {
    return call_of(is_forward, pool, args, rets, {causal, for_backward, threshold, factor, head, key, 1});
}

auto binding() {
    return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("causal")
        .Attr<int64_t>("for_backward").Attr<int64_t>("dropout_threshold").Attr<double>("dropout_factor")
        .Attr<int64_t>("dropout_head")
        .Attr<int64_t>("dropout_key");
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(alibi_xla_forward, handle<true>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(alibi_xla_backward, handle<false>, binding());
#pragma GCC visibility pop

void alibi_run_team(int64_t threads, void (*work)(void *), void *context) { ::threads.run_team(threads, work, context); }

// Sets the addresses of `Threads` and of one of `Kernels`; returns the size of a `Call`.
EXPORT int64_t alibi_xla_bind(int64_t part, void *const *of_threads, void *const *of_part) {
    std::memcpy(&threads, of_threads, sizeof threads);
    std::memcpy(&parts[part], of_part, sizeof parts[part]);
    return sizeof(Call<float>);
}
