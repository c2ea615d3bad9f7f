// Decoding rows: a row is one query of one head, over keys whose norms a cache stores per tile.
//
// A row moves outward from its own tile, with an online softmax. The norms of unread tiles bound their weights, which are
// compared with the sum so far: tiles are skipped while everything skipped weighs less than the tolerance. So a far tile of
// long keys is read without reading the tiles around it. Error terms are those of `certificate.hpp`; the effect of a skipped
// long value is added per tile.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "decoding.hpp"
#include "threads.hpp"

constexpr int64_t TOGETHER = 16;  // tiles whose sums are added in fp32

template <typename Stored>
struct DecodingRow {
    const DecodingCall<Stored> &call;
    int64_t b, h, k, position, low, high;  // keys [low, high) are visible
    float slope, scale;
    std::vector<float> query, acc;
    float m_i = -INFINITY, l_i = 0;
    std::vector<double> settled_acc;  // of earlier tiles, relative to settled_m: next to 1, fp32 drops what is below 6e-8
    double settled_l = 0;
    float settled_m = -INFINITY;
    float wrong = 0;  // NaN where a score or an output is not finite
    double rate = 0, longest_kept = 0;
    int64_t visited = 0, next_decision = 1;
    int64_t next;            // the nearest tile to visit next, or -1
    std::vector<double> weight;  // of a skipped tile, relative to exp(reference); 0 = visit it
    double skipped = 0, reference = 0;

    DecodingRow(const DecodingCall<Stored> &of, int64_t sequence, int64_t head, int64_t t)
        : call(of), b(sequence), h(head), k(head / (of.H / of.K)), position(of.S - of.T + t), query(of.D), acc(of.D),
          settled_acc(of.D) {
        low = call.start[b], high = std::min(call.stop[b], position + 1);
        if (call.window) low = std::max(low, position - call.window + 1);
        slope = call.slopes[b * call.H + h], scale = float(call.scale);
        double squares = 0;
        for (int64_t d = 0; d < call.D; d++) {
            query[d] = as_float(call.query.of(b, h, t)[d]);
            squares += double(query[d]) * double(query[d]);
        }
        const double error = (call.D + SCORE_UNITS) * double(UNIT<float>);
        rate = std::abs(call.scale) * (1 + error) * std::sqrt(squares);
        next = high > low ? (high - 1) / BLOCK : -1;
    }

    int64_t first_tile() const { return low / BLOCK; }

    // Adds the visible keys of a tile to the online softmax.
    template <int vectors>
    void visit(int64_t tile) {
        const int64_t from = std::max(tile * BLOCK, low), count = std::min((tile + 1) * BLOCK, high) - from;
        float scores[BLOCK];
        std::fill(scores, scores + BLOCK, -INFINITY);
        scores_of<vectors>(from, count, scores);
        Reals<float> top = load(scores);
        for (int v = VL<float>; v < BLOCK; v += VL<float>) top = load(scores + v) > top ? load(scores + v) : top;
        float most = m_i;
        for (int i = 0; i < VL<float>; i++) most = top[i] > most ? top[i] : most;
        const float kept = m_i == most ? 1.0f : exponential(every(m_i - most))[0];
        Reals<float> sum = {};
        for (int v = 0; v < BLOCK; v += VL<float>) {
            const Reals<float> weights = exponential(load(scores + v) - most);
            store(scores + v, weights);
            sum += weights;
        }
        float total = 0;
        for (int i = 0; i < VL<float>; i++) total += sum[i];
        m_i = most, l_i = l_i * kept + total;
        add_values<vectors>(from, count, scores, kept);
        if (++visited % TOGETHER == 0) settle();
    }

    double settled_share() const { return settled_m == m_i ? 1 : std::exp(double(settled_m) - double(m_i)); }

    // Moves the sums of the last tiles to those in fp64.
    void settle() {
        const double share = settled_share();
        settled_l = settled_l * share + l_i, l_i = 0, settled_m = m_i;
        for (int64_t d = 0; d < call.D; d++) settled_acc[d] = settled_acc[d] * share + acc[d], acc[d] = 0;
    }

    template <int vectors>
    void scores_of(int64_t from, int64_t count, float *scores) {
        const int64_t size = vectors ? vectors * VL<float> : call.D;
        Reals<float> own[vectors ? vectors : 1];
        for (int v = 0; v < vectors; v++) own[v] = load(query.data() + v * VL<float>);
        for (int64_t j = 0; j < count; j++) {
            const Stored *key = call.key.of(b, k, from + j), *value = call.value.of(b, k, from + j);
            for (int64_t d = 0; d < size; d += 64 / sizeof(Stored)) __builtin_prefetch(value + d);  // read next
            Reals<float> sum = {};
            if (vectors)
                UNROLL for (int v = 0; v < vectors; v++) sum += own[v] * load_floats(key + v * VL<float>);
            else
                for (int64_t d = 0; d < size; d += VL<float>) sum += load(query.data() + d) * load_floats(key + d);
            scores[j] = sum_of(sum) * scale - slope * float(position - from - j);
            wrong += scores[j] - scores[j];
        }
    }

    template <int vectors>
    void add_values(int64_t from, int64_t count, const float *weights, float kept) {
        if constexpr (vectors > 0) {
            Reals<float> sum[vectors];
            UNROLL for (int v = 0; v < vectors; v++) sum[v] = Reals<float>{};
            for (int64_t j = 0; j < count; j++) {
                const Stored *value = call.value.of(b, k, from + j);
                UNROLL for (int v = 0; v < vectors; v++) sum[v] += weights[j] * load_floats(value + v * VL<float>);
            }
            for (int v = 0; v < vectors; v++) {
                float *to = acc.data() + v * VL<float>;
                store(to, load(to) * kept + sum[v]);
            }
        } else {
            for (int64_t d = 0; d < call.D; d += VL<float>) {
                Reals<float> sum = {};
                for (int64_t j = 0; j < count; j++) sum += weights[j] * load_floats(call.value.of(b, k, from + j) + d);
                store(acc.data() + d, load(acc.data() + d) * kept + sum);
            }
        }
    }

    // Decides which tiles before `tile` to skip, given the sum so far, and which tile is next.
    void decide(int64_t tile, double longest_key) {
        next_decision = 2 * visited;
        const int64_t known = std::min(call.N, tile), first = first_tile();
        const double lambda = double(m_i) + std::log(settled_l * settled_share() + l_i);
        const double error = (call.D + SCORE_UNITS) * double(UNIT<float>);
        const double fixed = error * (1 + rate * longest_key + std::abs(lambda)) + LSE_NATS + double(call.S / 32) * UNIT<float>;
        const double base = std::log(-std::expm1(-BLOCK * double(slope)) / -std::expm1(-double(slope))) + fixed - lambda;
        if (!(call.tolerance > 0 && slope > 0 && std::isfinite(base) && std::isfinite(rate))) {
            weight.clear();
            return go_on(tile);
        }
        skipped *= visited == 1 ? 0 : std::exp(reference - lambda), reference = lambda;
        double allowed = call.tolerance * (1 - 1e-6) - skipped;
        weight.assign(std::max<int64_t>(0, tile - first), 0.0);
        const int64_t stop = std::min(known, (high - KEPT) / BLOCK);  // the nearest keys are always read
        if (first < stop) weigh(first, stop, base);
        for (int64_t at = 0; at < (int64_t)weight.size(); at++) {
            double &most = weight[at];
            if (first + at < stop && most <= allowed)
                allowed -= most, most = std::max(most, 1e-300);
            else
                most = 0;
        }
        go_on(tile);
    }

    // Upper bounds of the weights of these tiles, relative to exp(-base), times the factor of longer values.
    void weigh(int64_t first, int64_t stop, double base) {
        const double *keys = call.norms(call.key_norms, b, k), *values = call.norms(call.value_norms, b, k);
        for (int64_t at = first; at < stop; at += VL<double>) {
            const int64_t count = std::min<int64_t>(VL<double>, stop - at);
            double nats[VL<double>] = {};
            for (int64_t i = 0; i < count; i++) {
                const double away = double(position - (at + i + 1) * BLOCK + 1), own = rate * keys[at + i] + base;
                nats[i] = std::min(own - double(slope) * away, 600.0);
                if (!(own < INFINITY)) nats[i] = 600;  // also NaN
            }
            store(nats, exponential(load(nats)));
            for (int64_t i = 0; i < count; i++) {
                const double longer = values[at + i] / (VALUE_RATIO * longest_kept);
                weight[at - first + i] = values[at + i] == 0 || longer <= 1 ? nats[i] : nats[i] * longer;
            }
        }
    }

    // Moves past the skipped tiles, whose weights are added to `skipped`.
    void go_on(int64_t tile) {
        const int64_t first = first_tile();
        int64_t at = tile - 1;
        for (; at >= first && at - first < (int64_t)weight.size() && weight[at - first] > 0; at--) skipped += weight[at - first];
        next = at >= first ? at : -1;
    }

    bool write(int64_t t) {
        Stored *to = call.output.of(b, h, t);
        const bool blind = high <= low;
        settle();
        for (int64_t d = 0; d < call.D; d++) {
            const float x = blind ? 0 : float(settled_acc[d] / settled_l);
            wrong += x - x;
            to[d] = from_float<Stored>(x);
        }
        return wrong == 0;
    }
};

// The norm of the longest visible key: from the norms of whole visible tiles, and from the keys of other tiles.
template <typename Stored>
double longest_key_of(const DecodingCall<Stored> &call, int64_t b, int64_t k) {
    const int64_t start = call.start[b], stop = call.stop[b];
    const double *norms = call.norms(call.key_norms, b, k);
    double most = 0;
    const auto take = [&](double norm) { most = norm <= most ? most : norm; };  // also NaN
    for (int64_t tile = start / BLOCK; tile * BLOCK < stop; tile++) {
        const int64_t from = tile * BLOCK, end = from + BLOCK;
        if (tile < call.N && from >= start && end <= stop) {
            take(norms[tile]);
            continue;
        }
        for (int64_t j = std::max(from, start); j < std::min(end, stop); j++) take(norm_of_stored(call.key.of(b, k, j), call.D));
    }
    return most;
}

// Runs some rows of a key head together, so that a tile stays in the processor's cache.
template <int vectors, typename Stored>
bool run_decoding_rows(std::vector<DecodingRow<Stored>> &rows) {
    const DecodingCall<Stored> &call = rows[0].call;
    const double longest_key = longest_key_of(call, rows[0].b, rows[0].k);
    int64_t tile = -1;
    for (DecodingRow<Stored> &row : rows) {
        for (int64_t j = std::max(row.low, row.high - KEPT); j < row.high; j++)
            row.longest_kept = std::max(row.longest_kept, norm_of_stored(call.value.of(row.b, row.k, j), call.D));
        tile = std::max(tile, row.next);
    }
    while (tile >= 0) {
        int64_t farther = -1;
        for (DecodingRow<Stored> &row : rows) {
            if (row.next == tile) {
                row.template visit<vectors>(tile);
                if (row.visited == row.next_decision)
                    row.decide(tile, longest_key);
                else
                    row.go_on(tile);
            }
            farther = std::max(farther, row.next);
        }
        tile = farther;
    }
    bool fine = true;
    for (DecodingRow<Stored> &row : rows) fine = row.write(row.position - (call.S - call.T)) && fine;
    return fine;
}

template <typename Stored>
bool run_decoding_rows_of(std::vector<DecodingRow<Stored>> &rows, int64_t D) {
    switch (D / VL<float> * (D % VL<float> == 0)) {
        case 4: return run_decoding_rows<4>(rows);
        case 5: return run_decoding_rows<5>(rows);
        case 8: return run_decoding_rows<8>(rows);
        case 16: return run_decoding_rows<16>(rows);
        default: return run_decoding_rows<0>(rows);
    }
}

// Compiled once, in `decoding.cpp`.
extern template bool run_decoding_rows_of(std::vector<DecodingRow<float>> &, int64_t);
extern template bool run_decoding_rows_of(std::vector<DecodingRow<BFloat16>> &, int64_t);
extern template bool run_decoding_rows_of(std::vector<DecodingRow<Float16>> &, int64_t);

// The rows of a call, divided into independent tasks.
template <typename Stored>
class DecodingTasks {
    const DecodingCall<Stored> &call;
    const int64_t group, of_head, parts;
    std::vector<int64_t> order;
    std::atomic<bool> fine{true};

   public:
    explicit DecodingTasks(const DecodingCall<Stored> &of)
        : call(of), group(of.H / of.K), of_head(group * of.T),
          parts(std::min(of_head, std::max<int64_t>(1, 4 * of.threads / (of.B * of.K)))), order(of.B * of.K * parts) {
        for (size_t i = 0; i < order.size(); i++) order[i] = i;
        const auto slope_of = [&](int64_t task) {
            const int64_t head = task / parts;
            return call.slopes[head / call.K * call.H + head % call.K * group];
        };
        // The flattest heads read the most, so they start first.
        std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return slope_of(x) < slope_of(y); });
    }

    int64_t count() const { return (int64_t)order.size(); }

    void run(int64_t i) {
        const int64_t head = order[i] / parts, part = order[i] % parts, b = head / call.K, k = head % call.K;
        std::vector<DecodingRow<Stored>> rows;
        for (int64_t row = of_head * part / parts; row < of_head * (part + 1) / parts; row++)
            rows.emplace_back(call, b, k * group + row / call.T, row % call.T);
        if (!run_decoding_rows_of(rows, call.D)) fine = false;
    }

    // After all tasks: whether the whole output is finite.
    bool is_fine() const { return fine; }
};
