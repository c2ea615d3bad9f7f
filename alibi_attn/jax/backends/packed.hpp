// Arrays in XLA's layout, [B, T, H, D], copied so that the rows of one head are adjacent.
//
// A kernel reads a tile of keys many times, and 64 rows that are H D numbers apart map to a few sets of the first-level cache: if
// H D is a power of two, a forward pass takes 1.2 to 1.4 times as long on such rows. A copy costs a hundredth of it.

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
#include "threads.hpp"

enum {
    WIDTH = 16,  // numbers of the widest vector; D is padded with zeros to a multiple of it
    PAGE = 4096,
    MOST_KEPT = 1 << 28,
    FEW_TO_COPY = 1 << 17,
    SOME_ROWS = 64,  // that a thread copies at a time
};

// The value of a number; bf16 is the upper half of a float.
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

// An array of XLA, [B, T, H, D], and the array that the kernels read or write instead.
template <typename Number>
struct Packed {
    int64_t B, T, H, D;
    int threads;
    Number *of_xla;
    bool stays = false;       // not copied: rows are read or written once, and D is a multiple of WIDTH
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

    // For a call, whose pointers to bf16 have type float; strides are in numbers.
    template <typename Said = Number>
    Rows<Said> rows() const {
        Said *at = reinterpret_cast<Said *>(numbers);
        if (stays) return {at, T * H * D, D, H * D};
        return {at, H * T * width(), T * width(), width()};
    }

    // Rows of such numbers have products that do not overflow, even times 256.
    auto largest_moderate() const {
        using Real = decltype(value_of(Number()));
        return std::sqrt(sizeof(Real) == 4 ? Real(3.4e38) : Real(1.7e308)) / (16 * std::sqrt(Real(D)));
    }

    // Copies the rows and checks that they are moderate; called by every thread of a team.
    void read(Member &member) {
        const auto most = largest_moderate();
        member.for_ranges(B * T, SOME_ROWS, [&](int64_t first, int64_t last) {
            int wrong = 0;
            for (int64_t row = first; row < last; row++) {
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
            if (wrong) __atomic_store_n(&is_moderate, false, __ATOMIC_RELAXED);
        });
    }

    // Copies the rows back; called like `read`.
    void write(Member &member) {
        if (stays) return;
        member.for_ranges(B * T, SOME_ROWS, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++)
                for (int64_t h = 0; h < H; h++) std::copy_n(of(row, h), D, of_xla + (row * H + h) * D);
        });
    }

    // Copies XLA's array before it is changed.
    void detach() {
        if (!stays) return;
        copy.assign(of_xla, of_xla + B * T * H * D);
        numbers = copy.data();
    }

    // Row b T + i of a head.
    Number *of(int64_t row, int64_t h) const { return rows().of(row / T, h, row % T); }

    bool is_finite(int64_t row, int64_t h) const {
        return std::all_of(of(row, h), of(row, h) + D, [](Number x) { return std::isfinite(value_of(x)); });
    }

    bool is_moderate_row(int64_t row, int64_t h) const {
        const auto most = largest_moderate();
        return std::all_of(of(row, h), of(row, h) + D, [&](Number x) { return std::abs(value_of(x)) <= most; });
    }

    void fill(int64_t row, int64_t h, Number with) { std::fill_n(of(row, h), stays ? D : width(), with); }
    void zero(int64_t row, int64_t h) { fill(row, h, Number(0)); }
};

// Reads or writes several arrays with one team of as many threads as the call may use; a few rows are copied by one thread.
template <typename Number>
void for_all(void (Packed<Number>::*copy)(Member &), std::initializer_list<Packed<Number> *> arrays) {
    int64_t numbers = 0;
    for (const Packed<Number> *array : arrays) numbers += array->B * array->T * array->H * array->D;
    in_parallel(numbers > FEW_TO_COPY ? (*arrays.begin())->threads : 1, [&](Member &member) {
        for (Packed<Number> *array : arrays) (array->*copy)(member);
    });
}

struct Piece {
    char *begin = nullptr;
    int64_t bytes = 0;
};

// The memory of one call, in one piece. It is kept for the next call: memory that is returned to the system is zeroed page by
// page when it is allocated again, which took from a tenth to a quarter of a backward pass.
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
        release(piece.begin);
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

    // Returns the end of the last array.
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
        return {allocate<char>(whole, PAGE), whole};
    }
};
