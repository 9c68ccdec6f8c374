// The threads of one call, which work side by side and wait for each other between its steps.
//
// OpenMP's own barriers ask the system to wake whoever sleeps each time, even where there is a single thread: a hundred
// times per token of a small model.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#else  // a compiler without it: one thread
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
static inline int omp_in_parallel() { return 0; }
#endif

class Team {
    static constexpr int PATIENCE = 2000, MOST = 20000;  // turns of waiting until others may have the core; and for long
    alignas(64) std::atomic<int64_t> waiting{0};
    alignas(64) std::atomic<int64_t> step{0};

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

   public:
    // Until all threads have come here.
    void wait() {
        int64_t threads = omp_get_num_threads();
        if (threads == 1) return;
        int64_t now = step.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            waiting.store(0, std::memory_order_relaxed);
            step.store(now + 1, std::memory_order_release);
            return;
        }
        for (int turn = 0; step.load(std::memory_order_acquire) == now; turn++) {
            if (turn < PATIENCE) {
                pause();
            } else if (turn < MOST) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
    }

    // Of n things, all that are this thread's, one after another.
    template <typename Do>
    static void share(int64_t n, Do one) {
        for (int64_t i = omp_get_thread_num(); i < n; i += omp_get_num_threads()) one(i);
    }

    // By so many threads at most.
    template <typename Work>
    static void run(int64_t num_threads, Work work) {
        if (num_threads == 1 && !omp_in_parallel()) return work();
#pragma omp parallel num_threads(num_threads)
        work();
    }
};
