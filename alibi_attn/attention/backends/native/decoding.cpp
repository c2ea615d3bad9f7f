// Decoding: a few queries at the end of a long text (`decoding_rows.hpp`), and the norms of keys and values per tile.

#include "decoding_rows.hpp"

namespace {

template <typename Stored>
void run(const DecodingCall<Stored> &call) {
    DecodingTasks<Stored> tasks(call);
    in_parallel(call.threads, [&](Member &member) { member.for_each(tasks.count(), [&](int64_t i) { tasks.run(i); }); });
    *call.fine = tasks.is_fine();
}

// Computes the norm of the longest row in every whole tile.
template <typename Stored>
void measure(const NormsCall<Stored> &call) {
    const auto measure_tiles = [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t head = i / call.N, tile = i % call.N;
            double most = 0;
            for (int64_t j = tile * BLOCK; j < (tile + 1) * BLOCK; j++) {
                const double norm = norm_of_stored(call.rows.of(head / call.K, head % call.K, j), call.D);
                most = norm > most || norm != norm ? norm : most;
            }
            call.norms[i] = most;
        }
    };
    const int64_t tiles = call.B * call.K * call.N;
    in_parallel(call.threads, [&](Member &member) { member.for_ranges(tiles, 16, measure_tiles); });
}

}  // namespace

template bool run_decoding_rows_of(std::vector<DecodingRow<float>> &, int64_t);
template bool run_decoding_rows_of(std::vector<DecodingRow<BFloat16>> &, int64_t);
template bool run_decoding_rows_of(std::vector<DecodingRow<Float16>> &, int64_t);

EXPORT void alibi_decode_float32(const DecodingCall<float> *call) { run(*call); }
EXPORT void alibi_decode_bfloat16(const DecodingCall<BFloat16> *call) { run(*call); }
EXPORT void alibi_decode_float16(const DecodingCall<Float16> *call) { run(*call); }
EXPORT void alibi_norms_float32(const NormsCall<float> *call) { measure(*call); }
EXPORT void alibi_norms_bfloat16(const NormsCall<BFloat16> *call) { measure(*call); }
EXPORT void alibi_norms_float16(const NormsCall<Float16> *call) { measure(*call); }
EXPORT void alibi_decoding_bytes(int64_t *sizes) {
    sizes[0] = sizeof(DecodingCall<float>), sizes[1] = sizeof(NormsCall<float>), sizes[2] = sizeof(LinearCall<float>);
}
