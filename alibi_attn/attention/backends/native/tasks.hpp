// Divides the work into tasks of similar cost, heaviest first. The division never depends on timing.

#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "call.hpp"

enum {
    TASKS = 8,        // of forward, per thread, so that none is idle at the end
    MOST_BLOCKS = 8,  // of queries in a forward task, at most
    USUAL_NATS = 30,  // a head of slope m usually reads about 30 / m keys
    // For up to FEW_THREADS threads, a backward task costs this many keys times blocks of queries, and a head has at most
    // MOST_TASKS. Neither depends on the batch, so the bits of gradients do not. Smaller tasks cost more than 2 % of the time.
    TASK_COST = 3 << 13,
    MOST_TASKS = 3,
    FEW_THREADS = 8,
    HALOS = 2,  // limits the keys whose gradients backward accumulates separately: to this many times all keys,
    FEW_NUMBERS = 1 << 24,  // or to this many numbers per sequence, for many threads and a short text
};

// Blocks [block, last_block) of the queries of one head.
struct ForwardTask {
    int64_t b, h, block, last_block;
    double cost;  // an estimate: the reach is not known yet
};

template <typename Real>
std::vector<ForwardTask> forward_tasks(const Call<Real> &call) {
    const Visited<Real> visited = {call};
    const int64_t N = call.blocks();
    const int64_t size = std::max<int64_t>(1, std::min<int64_t>(MOST_BLOCKS, call.B * call.H * N / (TASKS * call.threads)));
    std::vector<ForwardTask> tasks;
    for (int64_t b = 0; b < call.B; b++) {
        for (int64_t h = 0; h < call.H; h++) {
            const double slope = call.slopes[b * call.H + h];
            const double usual = slope > 0 && !call.key_points ? USUAL_NATS / slope : INFINITY;
            const KeyRange *ranges = visited.ranges(b, h);
            for (int64_t block = 0; block < N; block += size) {
                ForwardTask task = {b, h, block, std::min(block + size, N), 0.0};
                for (int64_t n = block; n < task.last_block; n++)
                    task.cost += std::min(double(ranges[n].high - ranges[n].low), usual);
                tasks.push_back(task);
            }
        }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const auto &x, const auto &y) { return x.cost > y.cost; });
    return tasks;
}

// Consecutive queries, for all heads that share a key head. The keys at the positions of these queries are its own: their
// gradients are summed in place. Gradients of the other keys it visits, a halo on both sides and the outlier tiles, are summed
// separately.
struct BackwardTask {
    int64_t b, k, block, last_block;  // blocks [block, last_block) of queries
    int64_t own, own_end;             // keys
    int64_t halo, halo_end;           // keys, around its own
    int64_t at;                       // its first row in the separate sums, which hold keys and values
    int64_t cost;

    // Its rows: the halo before, the halo after, the outlier tiles; first for keys, then for values.
    int64_t row_of(int64_t key) const { return key < own ? key - halo : own - halo + key - own_end; }
    int64_t row_of_outlier(int64_t p) const { return own - halo + halo_end - own_end + p * BLOCK; }
};

struct BackwardPlan {
    std::vector<BackwardTask> tasks;  // by key head, then by position
    std::vector<int64_t> starts;      // [B K + 1] the first task of every key head
    std::vector<int64_t> heaviest;    // the order in which they start
    int64_t outlier_tiles = 0;        // all of them if some block visited one, else 0
    int64_t kept = 0;                 // rows of the separate sums
};

// The costs of the blocks of one key head, and the keys they visit.
struct HeadOfBlocks {
    std::vector<int64_t> cost, low, high;
    int64_t total = 0, widest = 1;
};

template <typename Real>
HeadOfBlocks blocks_of_head(const Call<Real> &call, int64_t b, int64_t k) {
    const Visited<Real> visited = {call};
    const int64_t N = call.blocks(), group = call.H / call.K;
    HeadOfBlocks head{std::vector<int64_t>(N, 0), std::vector<int64_t>(N, call.S), std::vector<int64_t>(N, 0)};
    for (int64_t g = 0; g < group; g++) {
        const KeptBand *bands = visited.kept_bands(b, k * group + g);
        const int32_t *outlier_bits = visited.kept_outlier_bits(b, k * group + g);
        for (int64_t n = 0; n < N; n++) {
            const KeptBand &range = bands[n];
            head.cost[n] += range.end - range.first;
            for (int bits = outlier_bits[n]; bits; bits &= bits - 1) head.cost[n] += BLOCK;
            if (range.first >= range.end) continue;
            head.low[n] = std::min<int64_t>(head.low[n], range.first);
            head.high[n] = std::max<int64_t>(head.high[n], range.end);
        }
    }
    for (int64_t n = 0; n < N; n++) {
        head.total += head.cost[n], head.widest = std::max(head.widest, head.high[n] - head.low[n]);
    }
    return head;
}

template <typename Real>
BackwardPlan backward_plan(const Call<Real> &call) {
    const Visited<Real> visited = {call};
    const int64_t N = call.blocks(), heads = call.B * call.K;
    BackwardPlan plan;
    for (int64_t b = 0; b < call.B; b++)
        for (int64_t i = 0; i < call.H * N; i++)
            if (visited.kept_outlier_bits(b, 0)[i]) plan.outlier_tiles = OUTLIER_TILES;
    const int64_t most = std::max(HALOS * call.S, FEW_NUMBERS / (call.K * call.D));
    const double more = std::max(1.0, double(call.threads) / FEW_THREADS), most_tasks = more * MOST_TASKS * (call.H / call.K);
    plan.starts.push_back(0);
    for (int64_t h = 0; h < heads; h++) {
        const HeadOfBlocks head = blocks_of_head(call, h / call.K, h % call.K);
        const double wanted = std::min(std::ceil(more * head.total / TASK_COST), most_tasks);
        const int64_t parts = (int64_t)std::min(std::max(wanted, 1.0), double(1 + most / head.widest));
        int64_t before = 0, n = 0;  // the cost of blocks 0 ... n - 1
        for (int64_t part = 0, from = 0; part < parts && from < N; part++) {
            // Cuts at equal cost; a block that costs more than a part replaces several parts.
            const double until = double(head.total) * double(part + 1) / double(parts);
            while (n < N && (before < until || part + 1 == parts)) before += head.cost[n++];
            if (n == from) continue;
            const int64_t first = call.first[h / call.K];
            BackwardTask task = {h / call.K, h % call.K, from, n, 0, call.S, 0, 0, plan.kept, 0};
            if (from > 0) task.own = std::max<int64_t>(0, std::min(first + from * BLOCK, call.S));
            if (n < N) task.own_end = std::max<int64_t>(0, std::min(first + n * BLOCK, call.S));
            task.halo = *std::min_element(head.low.begin() + from, head.low.begin() + n);
            task.halo = std::min(task.halo, task.own);
            task.halo_end = *std::max_element(head.high.begin() + from, head.high.begin() + n);
            task.halo_end = std::max(task.halo_end, task.own_end);
            task.cost = std::accumulate(head.cost.begin() + from, head.cost.begin() + n, int64_t(0));
            plan.kept += task.row_of_outlier(plan.outlier_tiles);
            plan.tasks.push_back(task);
            from = n;
        }
        plan.starts.push_back((int64_t)plan.tasks.size());
    }
    plan.heaviest.resize(plan.tasks.size());
    std::iota(plan.heaviest.begin(), plan.heaviest.end(), 0);
    std::stable_sort(plan.heaviest.begin(), plan.heaviest.end(),
                     [&](int64_t x, int64_t y) { return plan.tasks[x].cost > plan.tasks[y].cost; });
    return plan;
}
