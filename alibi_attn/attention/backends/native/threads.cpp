// The threads of teams: torch's, if this process has loaded GCC's OpenMP (as torch does on Linux), else a pool of our own.
//
// Two pools in one process compete: OpenMP's threads keep spinning for milliseconds after each of torch's operators. So on Linux
// the kernels look OpenMP up when they first need it, and neither link it nor require a compiler that supports it.

#include "threads.hpp"

#include <condition_variable>
#include <mutex>
#include <new>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#endif

namespace {

enum {
    MOST_WORKERS = 1023,
    STACK_BYTES = 2 << 20,  // musl's default is 128 KiB
    SPINS = 1000,           // of an idle worker before it sleeps: some tens of microseconds
};

// A team that still takes threads, on the stack of the thread that called it.
struct Job {
    void (*work)(void *);
    void *context;
    int64_t places;  // for other threads
    std::atomic<int64_t> running{0};
    Job *next = nullptr;
};

// Workers are never joined, and the pool is never destroyed: at the end of a process the system ends them wherever they are.
struct Pool {
    std::mutex guard;
    std::condition_variable wake;
    Job *jobs = nullptr;
    std::atomic<int64_t> places{0};  // of all jobs
    int64_t workers = 0, sleeping = 0;

    void run(int64_t threads, void (*work)(void *), void *context) {
        Job job = {work, context, std::min<int64_t>(threads - 1, MOST_WORKERS)};
        {
            const std::lock_guard<std::mutex> lock(guard);
            // If the system refuses a thread, the call is computed by those that exist.
            while (workers < job.places && start_worker()) workers++;
            job.next = jobs, jobs = &job;
            places += job.places;
            if (sleeping) wake.notify_all();
        }
        work(context);
        {
            const std::lock_guard<std::mutex> lock(guard);
            places -= job.places;
            Job **link = &jobs;
            while (*link != &job) link = &(*link)->next;
            *link = job.next;
        }
        for (Patience patience; job.running.load(std::memory_order_acquire);) patience.wait();
    }

    // A worker's life.
    void serve() {
        for (;;) {
            for (int spin = 0; spin < SPINS && !places.load(std::memory_order_relaxed); spin++) Patience().wait();
            Job *job = nullptr;
            {
                std::unique_lock<std::mutex> lock(guard);
                while (!(job = job_with_places())) sleeping++, wake.wait(lock), sleeping--;
                job->places--, places--;
                job->running.fetch_add(1, std::memory_order_relaxed);
            }
            job->work(job->context);
            job->running.fetch_sub(1, std::memory_order_release);
        }
    }

   private:
    Job *job_with_places() const {
        Job *job = jobs;
        while (job && !job->places) job = job->next;
        return job;
    }

    // The system's own functions, because std::thread reports a failure by an exception, and these sources have none.
#ifdef _WIN32
    bool start_worker() {
        const auto life = [](void *pool) -> DWORD { return static_cast<Pool *>(pool)->serve(), 0; };
        const HANDLE thread = CreateThread(nullptr, STACK_BYTES, life, this, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
        return thread && CloseHandle(thread);
    }
#else
    bool start_worker() {
        const auto life = [](void *pool) -> void * { return static_cast<Pool *>(pool)->serve(), nullptr; };
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        sigset_t all, before;  // signals are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        const bool started = pthread_create(&thread, &attributes, life, this) == 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_attr_destroy(&attributes);
        return started;
    }
#endif
};

std::atomic<Pool *> the_pool{nullptr};
std::atomic<bool> only_own{false};

#ifdef _WIN32
void restart_after_fork() {}
#else
// A child of fork has none of its parent's threads, neither the pool's nor OpenMP's.
void begin_child() { the_pool = new Pool, only_own = true; }
void restart_after_fork() { pthread_atfork(nullptr, nullptr, begin_child); }
#endif

Pool &pool() {
    static const bool once = [] { return the_pool = new Pool, restart_after_fork(), true; }();
    (void)once;
    return *the_pool.load();
}

#ifdef __linux__
typedef void Gomp(void (*)(void *), void *, unsigned, unsigned);
typedef int GompThreads();

template <typename Function>
Function *of_process(const char *name) {
    return reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
}

Gomp *openmp() {
    static Gomp *const found = of_process<Gomp>("GOMP_parallel");
    return only_own ? nullptr : found;
}
#endif

}  // namespace

void alibi_run_team(int64_t threads, void (*work)(void *), void *context) {
    Pool &own = pool();
#ifdef __linux__
    if (Gomp *const run = openmp()) return run(work, context, unsigned(threads), 0);
#endif
    own.run(threads, work, context);
}

// The largest team that the user allows where torch has not said it: OpenMP's setting, or OMP_NUM_THREADS, or as many as asked.
EXPORT int64_t alibi_most_threads() {
#ifdef __linux__
    if (GompThreads *const most = openmp() ? of_process<GompThreads>("omp_get_max_threads") : nullptr) return most();
#endif
    const char *const given = std::getenv("OMP_NUM_THREADS");
    const int64_t threads = given ? std::atoll(given) : 0;
    return threads > 0 ? threads : INT64_MAX;
}

// Whether teams run on our own threads even if the process has OpenMP (for tests and measurements); returns what was set before.
EXPORT int64_t alibi_only_own_threads(int64_t own) {
    pool();
    return only_own.exchange(own != 0);
}
