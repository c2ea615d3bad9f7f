// Rows of heads side by side, as XLA has them, [B, T, H, D], copied to where the rows of one head follow one another.
//
// A kernel reads a tile of keys many times, and 64 rows that are H D numbers apart fall into a few sets of the first cache: where
// H D is a power of two a forward pass takes 1.2 to 1.4 times as long on such rows. A copy costs a hundredth of it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <utility>
#include <vector>

#include "call.hpp"

enum {
    WIDTH = 16,  // numbers of the widest vector: what D becomes a multiple of, by zeros
    LINE = 64,   // bytes
    PAGE = 4096,
    MOST_KEPT = 1 << 28,
    FEW_TO_COPY = 1 << 17,
};

// What a number is: bf16 has the upper half of a float.
template <typename Real>
Real value_of(Real x) {
    return x;
}
inline float value_of(Bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename Number>
constexpr Number NOT_A_NUMBER = Number(NAN);
template <>
inline constexpr Bf16 NOT_A_NUMBER<Bf16> = 0x7fc0;

// [B, T, H, D] of XLA, and what the kernels get for it.
template <typename Number>
struct Packed {
    int64_t B, T, H, D;
    int threads;
    Number *of_xla;
    bool stays = false;       // what is read or written once a row may stay where it is, if D is a multiple of WIDTH
    bool is_moderate = true;  // all are finite, and so small that no inner product of two rows overflows
    Number *numbers = nullptr;  // [B, H, T, width()]; [B, T, H, D] if it stays
    std::vector<Number> copy = {};

    int64_t width() const { return (D + WIDTH - 1) / WIDTH * WIDTH; }
    int64_t bytes() const { return stays ? 0 : (B * H * T * width() * int64_t(sizeof(Number)) + LINE - 1) / LINE * LINE; }

    Packed may_stay() const {
        Packed same = *this;
        if (D == width()) same.stays = true, same.numbers = of_xla;
        return same;
    }

    // As a call has them, whose pointers to bf16 say float; strides are in numbers.
    template <typename Said = Number>
    Rows<Said> rows() const {
        Said *at = reinterpret_cast<Said *>(numbers);
        if (stays) return {at, T * H * D, D, H * D};
        return {at, H * T * width(), T * width(), width()};
    }

    // Copy them, and look whether they are moderate; the rows are divided among the threads that call.
    void read() {
        using Real = decltype(value_of(Number()));
        const Real most = std::sqrt(sizeof(Real) == 4 ? Real(3.4e38) : Real(1.7e308)) / (16 * std::sqrt(Real(D)));
        int wrong = 0;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < B * T; row++) {
            for (int64_t h = 0; h < H; h++) {
                const Number *from = of_xla + (row * H + h) * D;
                int here = 0;
                for (int64_t d = 0; d < D; d++) here |= !(std::abs(value_of(from[d])) <= most);
                wrong |= here;
                if (stays) continue;
                std::copy_n(from, D, of(row, h));
                std::fill_n(of(row, h) + D, width() - D, Number(0));
            }
        }
        if (wrong) {
#pragma omp atomic write
            is_moderate = false;
        }
    }

    // Copy them back; as above.
    void write() {
        if (stays) return;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < B * T; row++)
            for (int64_t h = 0; h < H; h++) std::copy_n(of(row, h), D, of_xla + (row * H + h) * D);
    }

    // Make sure that what is changed is not XLA's.
    void detach() {
        if (!stays) return;
        copy.assign(of_xla, of_xla + B * T * H * D);
        numbers = copy.data();
    }

    // Of row b T + i of a head.
    Number *of(int64_t row, int64_t h) const { return rows().of(row / T, h, row % T); }

    bool is_finite(int64_t row, int64_t h) const {
        return std::all_of(of(row, h), of(row, h) + D, [](Number x) { return std::isfinite(value_of(x)); });
    }

    void fill(int64_t row, int64_t h, Number with) { std::fill_n(of(row, h), stays ? D : width(), with); }
    void zero(int64_t row, int64_t h) { fill(row, h, Number(0)); }
};

// Read or write several arrays, on as many threads as a call may use: a team has to meet but once. Few rows are quicker alone.
template <typename Number>
void for_all(void (Packed<Number>::*copy)(), std::initializer_list<Packed<Number> *> arrays) {
    int64_t numbers = 0;
    for (const Packed<Number> *array : arrays) numbers += array->B * array->T * array->H * array->D;
#pragma omp parallel num_threads((*arrays.begin())->threads) if (numbers > FEW_TO_COPY)
    for (Packed<Number> *array : arrays) (array->*copy)();
}

struct Piece {
    char *begin = nullptr;
    int64_t bytes = 0;
};

// The memory of one call, in one piece. The last one is kept for the next call: what goes back to the system comes again page by
// page, zeroed, which took from a tenth to a quarter of a backward pass.
class Memory {
   public:
    template <typename Number, typename Other = Number>
    explicit Memory(std::initializer_list<Packed<Number> *> arrays, std::initializer_list<Packed<Other> *> others = {}) {
        piece = take(bytes_of(arrays) + bytes_of(others));
        hand_out(others, hand_out(arrays, piece.begin));
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        if (piece.bytes <= MOST_KEPT) {
            const std::lock_guard<std::mutex> alone(guard);
            if (piece.bytes > kept.bytes) std::swap(piece, kept);
        }
        std::free(piece.begin);
    }

   private:
    Piece piece;
    inline static Piece kept;
    inline static std::mutex guard;

    template <typename Number>
    static int64_t bytes_of(std::initializer_list<Packed<Number> *> arrays) {
        int64_t bytes = 0;
        for (const Packed<Number> *array : arrays) bytes += array->bytes();
        return bytes;
    }

    // Returns where they end.
    template <typename Number>
    static char *hand_out(std::initializer_list<Packed<Number> *> arrays, char *next) {
        for (Packed<Number> *array : arrays) {
            if (array->stays) continue;
            array->numbers = reinterpret_cast<Number *>(next);
            next += array->bytes();
        }
        return next;
    }

    static Piece take(int64_t bytes) {
        {
            const std::lock_guard<std::mutex> alone(guard);
            if (kept.bytes >= bytes) return std::exchange(kept, {});
        }
        const int64_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
        return {static_cast<char *>(std::aligned_alloc(PAGE, whole)), whole};
    }
};
