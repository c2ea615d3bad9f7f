// The gradient of a table by distance: sums of ds along the diagonals of every tile, [keys][BLOCK].
//
// Summed in double from tile to tile, like the gradients of biases: a distance near 0 has as many pairs as there are queries.

#pragma once

#include <vector>

#include "block.hpp"
#include "tasks.hpp"

// Adds the sums of one block of queries and a few keys to `sums`, those of the head.
template <typename Real>
OUTLINE void add_diagonals(const Block<Real> &block, int64_t key, int count, const Real *moments, double *sums) {
    sums += block.position - key - block.call.table_first;
    for (int from = 1 - count; from < block.rows; from += VL<Real>) {  // distances of the lanes, relative to query 0 and key 0
        Reals<Real> sum[2] = {};
        const int start = std::max(0, 1 - from - VL<Real>), stop = std::min(count, block.rows - from);
        for (int j = start; j < stop; j++) {
            const Ints<Real> lane = Block<Real>::lanes() + (from + j), here = (lane >= 0) & (lane < +BLOCK);
            const Reals<Real> ds = load(moments + j * BLOCK + from + j);
            sum[j % 2] += here ? ds : Reals<Real>{};
        }
        for (int i = 0; i < VL<Real>; i++) sums[from + i] += double(sum[0][i] + sum[1][i]);
    }
}

// Sum over the tasks, in the order of their queries.
template <typename Real>
void add_table_grads(const Call<Real> &call, const BackwardPlan &plan, const std::vector<double> &of_tasks) {
    const int64_t heads = call.H / call.K, numbers = heads * call.distances;
    std::fill_n(call.table_grads, call.H * call.distances, 0.0);
    for (size_t t = 0; t < plan.tasks.size(); t++) {
        double *to = call.table_grads + plan.tasks[t].k * numbers;
        for (int64_t at = 0; at < numbers; at++) to[at] += of_tasks[t * numbers + at];
    }
}
