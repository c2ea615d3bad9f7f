// Decoder layers for a few rows, such as the next token: all layers in one call, without a framework between them.
//
// Hidden states are rounded to their stored type wherever a model's modules round them: after each norm, linear map, activation
// and sum. Between two roundings everything is fp32. Norms and quantization are single items of a loop, so one thread computes
// them; linear maps are divided by outputs, attention by heads.

#include "decoder_layers.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "decoding_rows.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

enum {
    SHIFT = 128,  // added to the codes of activations, which are unsigned
    LARGEST = 127,
};

template <typename Stored>
float rounded(float x) {
    return as_float(from_float<Stored>(x));
}

// Rows in fp32, and for int8 weights their codes: one scale per row.
struct Inputs {
    std::vector<float> numbers;
    std::vector<uint8_t> codes;
    float scales[MOST_ROWS];

    // Whether every number is finite.
    bool quantize(int rows, int64_t size) {
        codes.resize(rows * size);
        for (int r = 0; r < rows; r++) {
            const float *x = numbers.data() + r * size;
            float most = 0, wrong = 0;
            for (int64_t i = 0; i < size; i++) most = std::max(most, std::abs(x[i])), wrong += x[i] - x[i];
            if (wrong != 0) return false;
            const float scale = scales[r] = std::max(most / LARGEST, 1.17549435e-38f);
            for (int64_t i = 0; i < size; i++) codes[r * size + i] = uint8_t(int(std::rint(x[i] / scale)) + SHIFT);
        }
        return true;
    }
};

#if defined(__AVX512F__)
// Sums of products of unsigned and signed codes for WIDE outputs, exact in int32. Runs on processors with VNNI only.
template <int rows>
__attribute__((target("avx512f,avx512vnni"))) void code_products(
    const int8_t *weight, const uint8_t *codes, int64_t inputs, int32_t *totals) {
    __m512i sum[rows][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) sum[r][v] = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += 4, weight += 4 * WIDE)
        for (int r = 0; r < rows; r++) {
            int32_t four;
            std::memcpy(&four, codes + r * inputs + i, sizeof four);
            for (int v = 0; v < 4; v++)
                sum[r][v] = _mm512_dpbusd_epi32(
                    sum[r][v], _mm512_set1_epi32(four), _mm512_loadu_si512((const void *)(weight + v * WIDE)));
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) _mm512_storeu_si512((void *)(totals + r * WIDE + v * 16), sum[r][v]);
}

void code_products(int rows, const int8_t *weight, const uint8_t *codes, int64_t inputs, int32_t *totals) {
    switch (rows) {
        case 1: return code_products<1>(weight, codes, inputs, totals);
        case 2: return code_products<2>(weight, codes, inputs, totals);
        case 3: return code_products<3>(weight, codes, inputs, totals);
        default: return code_products<MOST_ROWS>(weight, codes, inputs, totals);
    }
}
#else
void code_products(int rows, const int8_t *weight, const uint8_t *codes, int64_t inputs, int32_t *totals) {
    std::fill(totals, totals + rows * WIDE, 0);
    for (int64_t i = 0; i < inputs; i++)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < WIDE; o++)
                totals[r * WIDE + o] += codes[r * inputs + i] * weight[i / 4 * 4 * WIDE + o * 4 + i % 4];
}
#endif

// x·sigmoid(2u) = x/2·(1 + tanh(u)), u = √(2/π)·(x + 0.044715·x³)
INLINE Reals<float> tanh_gelu(Reals<float> x) {
    const Reals<float> two_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    const Reals<float> decay = exponential(two_u > 0 ? -two_u : two_u);
    return x * (two_u > 0 ? every(1.0f) : decay) / (1.0f + decay);
}

template <typename Stored>
class Run {
    typedef LayersCall<Stored> Call;
    const Call &call;
    const int rows = int(call.B * call.T);
    const int64_t E = call.E, T = call.T, D = call.D, attended_size = call.H * call.D;
    std::vector<float> x;         // the residual stream
    Inputs normed, mixed, inner;  // the inputs of linear maps
    std::vector<Stored> query, attended;
    std::atomic<bool> fine{true};

   public:
    explicit Run(const Call &of) : call(of), x(rows * E), query(rows * attended_size), attended(rows * attended_size) {
        normed.numbers.resize(rows * E), mixed.numbers.resize(rows * attended_size);
        for (int64_t i = 0; i < rows * E; i++) x[i] = as_float(call.x[i]);
        if (call.first_norm.weight) {
            norm(call.first_norm);
            x = normed.numbers;
        }
    }

    bool all_layers() {
        for (int64_t i = 0; i < call.layers && fine; i++) layer(call.layer[i]);
        if (!fine) return false;
        if (call.last_norm.weight) norm(call.last_norm);
        const std::vector<float> &last = call.last_norm.weight ? normed.numbers : x;
        for (int64_t i = 0; i < rows * E; i++) call.y[i] = from_float<Stored>(last[i]);
        return true;
    }

   private:
    void layer(const DecoderLayer<Stored> &layer) {
        DecodingCall<Stored> attention = {};
        attention.B = call.B, attention.H = attention.K = call.H, attention.T = T, attention.S = call.S, attention.D = D;
        attention.query = {query.data(), T * attended_size, D, attended_size};
        attention.output = {attended.data(), T * attended_size, D, attended_size};
        attention.key = {layer.key.at, layer.key.sequence, layer.key.head, layer.key.row};
        attention.value = {layer.value.at, layer.value.sequence, layer.value.head, layer.value.row};
        attention.slopes = call.slopes, attention.start = call.start, attention.stop = call.stop;
        attention.N = layer.N, attention.norms_of_head = layer.norms_of_head;
        attention.norms_of_sequence = layer.norms_of_sequence;
        attention.key_norms = layer.key_norms, attention.value_norms = layer.value_norms;
        attention.scale = call.scale, attention.tolerance = call.tolerance, attention.threads = call.threads;
        DecodingTasks<Stored> tasks(attention);
        inner.numbers.resize(rows * layer.up.outputs);
        const std::vector<float> &residual = call.residual_after_norm ? normed.numbers : x;
        const auto add = [&](int r, int64_t o, float *y, int64_t count) {
            for (int64_t i = 0; i < count; i++) x[r * E + o + i] = rounded<Stored>(residual[r * E + o + i] + y[i]);
        };
        const auto activate = [&](int r, int64_t o, float *y, int64_t count) {
            gelu(y);
            for (int64_t i = 0; i < count; i++) inner.numbers[r * layer.up.outputs + o + i] = rounded<Stored>(y[i]);
        };
        in_parallel(call.threads, [&](Member &member) {
            member.for_each(1, [&](int64_t) { norm(layer.attention_norm), prepare(normed, layer.qkv); });
            linear(member, layer.qkv, normed, [&](int r, int64_t o, float *y, int64_t count) {
                for (int64_t i = 0; i < count; i++) place(layer, r, o + i, y[i]);
            });
            member.for_each(tasks.count(), [&](int64_t i) { tasks.run(i); });
            member.for_each(1, [&](int64_t) {
                for (size_t i = 0; i < attended.size(); i++) mixed.numbers[i] = as_float(attended[i]);
                prepare(mixed, layer.out);
            });
            linear(member, layer.out, mixed, add);
            member.for_each(1, [&](int64_t) { norm(layer.ffn_norm), prepare(normed, layer.up); });
            linear(member, layer.up, normed, activate);
            member.for_each(1, [&](int64_t) { prepare(inner, layer.down); });
            linear(member, layer.down, inner, add);
        });
        if (!tasks.is_fine()) fine = false;
    }

    // Normalizes the residual stream.
    void norm(const LayerNorm &norm) {
        const Stored *weight = static_cast<const Stored *>(norm.weight), *bias = static_cast<const Stored *>(norm.bias);
        for (int r = 0; r < rows; r++) {
            const float *from = x.data() + r * E;
            const float mean = sum_over([&](int64_t i) { return from[i]; }) / E;
            const float variance = sum_over([&](int64_t i) { return (from[i] - mean) * (from[i] - mean); }) / E;
            const float rate = 1 / std::sqrt(variance + float(norm.eps));
            float *to = normed.numbers.data() + r * E;
            for (int64_t i = 0; i < E; i++)
                to[i] = rounded<Stored>((from[i] - mean) * rate * as_float(weight[i]) + (bias ? as_float(bias[i]) : 0.0f));
        }
    }

    // With several partial sums, which the compiler keeps in a vector.
    template <typename Number>
    float sum_over(const Number &number) const {
        float sums[16] = {};
        int64_t i = 0;
        for (; i + 16 <= E; i += 16)
            for (int k = 0; k < 16; k++) sums[k] += number(i + k);
        float total = 0;
        for (int k = 0; k < 16; k++) total += sums[k];
        for (; i < E; i++) total += number(i);
        return total;
    }

    void prepare(Inputs &inputs, const LayerLinear &linear) {
        if (linear.scales && !inputs.quantize(rows, linear.inputs)) fine = false;
    }

    // finish(row, first output, values [WIDE], their number) for every block of outputs.
    template <typename Finish>
    void linear(Member &member, const LayerLinear &linear, const Inputs &inputs, const Finish &finish) {
        member.for_ranges(linear.outputs, WIDE, [&](int64_t from, int64_t to) {
            float y[MOST_ROWS][WIDE] = {};
            if (linear.scales)
                from_codes(linear, inputs, from, y);
            else
                from_numbers(linear, inputs, from, to, y);
            for (int r = 0; r < rows; r++) finish(r, from, y[r], to - from);
        });
    }

    void from_numbers(const LayerLinear &linear, const Inputs &inputs, int64_t from, int64_t to, float (*y)[WIDE]) {
        const Stored *weight = static_cast<const Stored *>(linear.weight), *bias = static_cast<const Stored *>(linear.bias);
        products_of_block(rows, weight + from * linear.inputs, inputs.numbers.data(), linear.inputs, to - from, y);
        for (int r = 0; r < rows; r++)
            for (int64_t o = from; o < to; o++)
                y[r][o - from] = rounded<Stored>(y[r][o - from] + (bias ? as_float(bias[o]) : 0.0f));
    }

    void from_codes(const LayerLinear &linear, const Inputs &inputs, int64_t from, float (*y)[WIDE]) {
        if (!fine) return;  // there are no codes
        int32_t totals[MOST_ROWS * WIDE];
        const int8_t *weight = static_cast<const int8_t *>(linear.weight) + from * linear.inputs;
        code_products(rows, weight, inputs.codes.data(), linear.inputs, totals);
        const float *bias = static_cast<const float *>(linear.bias);
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < WIDE; i++) {
                const float exact = float(totals[r * WIDE + i] - linear.sums[from + i]);
                y[r][i] = rounded<Stored>(exact * linear.scales[from + i] * inputs.scales[r] + (bias ? bias[from + i] : 0.0f));
            }
    }

    // Writes an output of qkv to the queries or to the cache.
    void place(const DecoderLayer<Stored> &layer, int r, int64_t o, float y) {
        const int64_t at = o / D, d = o % D, h = call.by_head ? at / 3 : at % call.H, part = call.by_head ? at % 3 : at / call.H;
        const int64_t b = r / T, t = r % T;
        if (part == 0)
            query[r * attended_size + h * D + d] = from_float<Stored>(y);
        else
            (part == 1 ? layer.key : layer.value).of(b, h, call.S - T + t)[d] = from_float<Stored>(y);
    }

    void gelu(float *y) const {
        if (call.erf_gelu)
            for (int i = 0; i < WIDE; i++) y[i] = 0.5f * y[i] * (1 + std::erf(y[i] * 0.70710678f));
        else
            for (int i = 0; i < WIDE; i += VL<float>) store(y + i, tanh_gelu(load(y + i)));
    }
};

template <typename Stored>
void run(const LayersCall<Stored> &call) {
    *call.fine = Run<Stored>(call).all_layers();
}

}  // namespace

EXPORT void alibi_layers_float32(const LayersCall<float> *call) { run(*call); }
EXPORT void alibi_layers_bfloat16(const LayersCall<BFloat16> *call) { run(*call); }
EXPORT void alibi_layers_float16(const LayersCall<Float16> *call) { run(*call); }
EXPORT void alibi_layers_bytes(int64_t *sizes) { sizes[0] = sizeof(LayersCall<float>), sizes[1] = sizeof(DecoderLayer<float>); }
