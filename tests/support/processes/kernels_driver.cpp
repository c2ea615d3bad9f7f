// The kernels as a program, to run them on processors and systems that are emulated here; `emulated_kernels.py` starts it.
//
// It reads calls from the standard input and writes their results to the standard output. A call is: the index of a function, the
// sizes of its arguments' structure and of the list of its arrays, the structure, the list and the arrays. The list says for each
// array where its pointer is stored (-1 for the structure, else the index of an earlier array; and an offset), its bytes, and
// whether it is a result.

#include <cstdio>
#include <cstring>
#include <vector>

#include "system.hpp"

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#endif

#define KERNELS(USE)                                                                                                     \
    USE(alibi_forward_float32) USE(alibi_forward_float64) USE(alibi_backward_float32) USE(alibi_backward_float64)         \
    USE(alibi_decode_float32) USE(alibi_decode_bfloat16) USE(alibi_decode_float16) USE(alibi_norms_float32)               \
    USE(alibi_norms_bfloat16) USE(alibi_norms_float16) USE(alibi_linear_float32) USE(alibi_linear_bfloat16)               \
    USE(alibi_linear_float16) USE(alibi_layers_float32) USE(alibi_layers_bfloat16) USE(alibi_layers_float16)
#define DECLARE(name) extern "C" void name(void *);
#define LIST(name) name,
KERNELS(DECLARE)
extern "C" const char *alibi_instructions();
extern "C" int64_t alibi_multiplies_bf16();
extern "C" int64_t alibi_call_bytes();
extern "C" void alibi_decoding_bytes(int64_t *);
extern "C" void alibi_layers_bytes(int64_t *);

namespace {

void (*const FUNCTIONS[])(void *) = {KERNELS(LIST)};

struct Array {
    int64_t parent, offset, bytes, is_result;
};

bool read(void *to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }
void write(const void *from, size_t bytes) { std::fwrite(from, 1, bytes, stdout); }

}  // namespace

int main() {
#ifdef _WIN32
    _setmode(0, _O_BINARY), _setmode(1, _O_BINARY);
#endif
    char words[64] = {};
    std::strncpy(words, alibi_instructions(), sizeof words - 1);
    int64_t facts[7] = {alibi_multiplies_bf16(), alibi_call_bytes()};
    alibi_decoding_bytes(facts + 2), alibi_layers_bytes(facts + 5);
    write(words, sizeof words), write(facts, sizeof facts), std::fflush(stdout);
    for (int64_t head[3]; read(head, sizeof head);) {
        std::vector<char> call(head[1]);
        std::vector<Array> arrays(head[2]);
        std::vector<char *> memory;
        if (!read(call.data(), call.size()) || !read(arrays.data(), arrays.size() * sizeof(Array))) return 1;
        for (const Array &array : arrays) {
            char *const owner = array.parent < 0 ? call.data() : memory[array.parent];
            memory.push_back(allocate<char>(array.bytes + LINE));
            if (!read(memory.back(), array.bytes)) return 1;
            std::memcpy(owner + array.offset, &memory.back(), sizeof(char *));
        }
        FUNCTIONS[head[0]](call.data());
        for (size_t n = 0; n < arrays.size(); n++)
            if (arrays[n].is_result) write(memory[n], arrays[n].bytes);
        std::fflush(stdout);
        for (char *array : memory) release(array);
    }
    return 0;
}
