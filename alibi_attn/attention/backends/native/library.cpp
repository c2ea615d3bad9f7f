// What a library of kernels was compiled with, and the threads of one that has only a part of the kernels.

#include "threads.hpp"
#include "tiles_bf16.hpp"

EXPORT const char *alibi_built_with() { return ALIBI_BUILT_WITH; }
EXPORT int64_t alibi_call_bytes() { return sizeof(Call<float>); }
// Whether a Call<float> may have bf16 rows: 0 no, 1 yes, 2 yes and tiles multiply them.
EXPORT int64_t alibi_multiplies_bf16() { return Bf16Instructions::EXIST + Tiles::usable(); }

// The words of a level in `levels.py`, or those of a compiler's own choice of instructions.
EXPORT const char *alibi_instructions() {
#if defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__SSE2__)
    return "SSE2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON-BF16";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "no vector instructions";
#endif
}

#if ALIBI_PART > 1
// Teams of this library are those of the library that has the threads.
static decltype(alibi_run_team) *run_team = nullptr;
EXPORT void alibi_use_team(decltype(alibi_run_team) *of) { run_team = of; }
void alibi_run_team(int64_t threads, void (*work)(void *), void *context) { run_team(threads, work, context); }
#endif
