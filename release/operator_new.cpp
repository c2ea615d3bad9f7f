// Memory for the kernels in the wheels of Linux and macOS: malloc's, and a process that has none left ends.
//
// The wheels contain the compiler's C++ library, whose operators new and delete would be exported and, on macOS, exchanged with
// those of the process. These take their place; `-fvisibility-global-new-delete=force-hidden` hides them (`wheels.py`).

#include <cstdlib>
#include <new>

void *operator new(std::size_t bytes, const std::nothrow_t &) noexcept { return std::malloc(bytes ? bytes : 1); }

void *operator new(std::size_t bytes) {
    void *const memory = operator new(bytes, std::nothrow);
    if (!memory) std::abort();
    return memory;
}

void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
