// The threads of one call, which run in parallel and synchronise between its steps.
//
// OpenMP's barriers wake sleeping threads by a system call each time. A token of a small model takes a hundred
// barriers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#else  // without OpenMP: one thread
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
static inline int omp_in_parallel() { return 0; }
#endif

class Team {
    static constexpr int PATIENCE = 2000, MOST = 20000;  // spins before yielding the core, and before sleeping
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
    // Wait until all threads have called it.
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

    // Call `one` for this thread's share of n items.
    template <typename Do>
    static void share(int64_t n, Do one) {
        for (int64_t i = omp_get_thread_num(); i < n; i += omp_get_num_threads()) one(i);
    }

    // Run with at most so many threads.
    template <typename Work>
    static void run(int64_t num_threads, Work work) {
        if (num_threads == 1 && !omp_in_parallel()) return work();
#pragma omp parallel num_threads(num_threads)
        work();
    }
};
