// Loops over independent items, divided among the threads of a team.
//
// Every thread of a team runs the same function, as in an OpenMP parallel region, and takes items of its loops from a common
// counter. A loop ends when its items are done, not when every thread has arrived: a team works with any number of threads, and a
// thread that starts late skips the loops that have ended. Which thread computes an item never affects a result.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "system.hpp"

// Calls work(context) on the calling thread and on up to `threads` - 1 others; returns when all of them have returned.
EXPORT void alibi_run_team(int64_t threads, void (*work)(void *), void *context);

// Waits for another thread: first in a busy loop, then by giving the processor away.
class Patience {
    int turns = 0;

   public:
    void wait() {
        if (++turns > 2000) return std::this_thread::yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb" ::: "memory");
#endif
    }
};

struct Team {
    enum { MOST_LOOPS = 12 };
    struct alignas(LINE) Loop {
        std::atomic<int64_t> next{0}, done{0};
    };
    Loop loops[MOST_LOOPS];
};

// A team as one of its threads sees it.
class Member {
    Team &team;
    int at = 0;  // the next loop

   public:
    explicit Member(Team &of) : team(of) {}

    // item(i) for each i in [0, count), in no particular order; returns when all are done.
    template <typename Item>
    void for_each(int64_t count, const Item &item) {
        Team::Loop &loop = team.loops[at++];
        int64_t done = 0;
        for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < count; done++) item(i);
        if (done) loop.done.fetch_add(done, std::memory_order_release);
        for (Patience patience; loop.done.load(std::memory_order_acquire) < count;) patience.wait();
    }

    // range(from, to) for consecutive ranges of at most `size` items that together are [0, count).
    template <typename Range>
    void for_ranges(int64_t count, int64_t size, const Range &range) {
        for_each((count + size - 1) / size, [&](int64_t n) { range(n * size, std::min((n + 1) * size, count)); });
    }
};

// work(member) on every thread of a team of at most `threads`.
template <typename Work>
void in_parallel(int64_t threads, const Work &work) {
    struct Context {
        Team team;
        const Work &work;
    } context = {{}, work};
    const auto run = [](void *of) {
        Context &context = *static_cast<Context *>(of);
        Member member(context.team);
        context.work(member);
    };
    threads > 1 ? alibi_run_team(threads, run, &context) : run(&context);
}
