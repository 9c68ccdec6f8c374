// The threads of one call, which run in parallel and synchronise between its steps.
//
// Threads are kept between calls. A thread waits in three stages: it spins, it yields the core, it sleeps. A token of a
// small model takes a hundred barriers, so that a system call at each would cost more than the work; and a process that
// computes nothing must use no core.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
static inline int64_t process_id() { return getpid(); }
#else
static inline int64_t process_id() { return 0; }
#endif

constexpr int PATIENCE = 2000, MOST = 20000;  // turns of waiting before yielding the core, and before sleeping
constexpr std::chrono::milliseconds IDLE{1};   // the time without a call after which a worker sleeps

// One turn of waiting that does not sleep.
static inline void wait_a_turn(int turn) {
    if (turn >= PATIENCE) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Wait until `is_done`, which another thread makes true soon.
template <typename Done>
static void wait_until(Done is_done) {
    for (int turn = 0; !is_done(); turn++) {
        if (turn < MOST) {
            wait_a_turn(turn);
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
}

// The number of this thread in the call that it runs, and how many threads run it.
struct Member {
    int64_t thread = 0, threads = 1;
};
inline thread_local Member member;

static inline int64_t thread_number() { return member.thread; }
static inline int64_t thread_count() { return member.threads; }

// What the threads of one call run.
struct Work {
    void (*run)(void*);
    void* with;
    int64_t threads;
    std::atomic<int64_t> running;  // workers that have not finished
};

// A kept thread. It is never joined: the end of the process ends it.
class Worker {
    alignas(64) std::atomic<Work*> work{nullptr};
    int64_t number = 0;
    std::atomic<bool> sleeps{false};
    std::mutex mutex;
    std::condition_variable given;

    Work* next() {
        auto start = std::chrono::steady_clock::now();
        for (int turn = 0; turn < PATIENCE || std::chrono::steady_clock::now() - start < IDLE; turn++) {
            if (Work* one = work.load(std::memory_order_acquire)) return one;
            wait_a_turn(turn);
        }
        std::unique_lock<std::mutex> lock(mutex);
        sleeps.store(true);
        given.wait(lock, [&] { return work.load() != nullptr; });
        sleeps.store(false);
        return work.load();
    }

   public:
    void loop() noexcept {
        for (;;) {
            Work* one = next();
            member = {number, one->threads};
            one->run(one->with);
            work.store(nullptr, std::memory_order_relaxed);
            one->running.fetch_sub(1, std::memory_order_release);  // after this, the caller may destroy the work
        }
    }

    void give(Work* one, int64_t thread) {
        number = thread;
        work.store(one);
        if (!sleeps.load()) return;
        std::lock_guard<std::mutex> lock(mutex);
        given.notify_one();
    }
};

// The workers that run no call. Every call takes its own, so that calls of several threads never wait for each other.
class Pool {
    std::mutex mutex;
    std::vector<Worker*> idle;
    const int64_t process = process_id();

   public:
    // This process's pool. Threads do not survive a fork: the child makes a pool of its own.
    static Pool& get() {
        static std::atomic<Pool*> pool{nullptr};
        Pool* now = pool.load(std::memory_order_acquire);
        if (now && now->process == process_id()) return *now;
        auto made = std::make_unique<Pool>();
        if (pool.compare_exchange_strong(now, made.get())) return *made.release();  // never freed: workers may use it
        return *now;
    }

    // Take up to n workers: fewer where the system gives no more threads.
    std::vector<Worker*> take(int64_t n) {
        std::vector<Worker*> taken;
        std::lock_guard<std::mutex> lock(mutex);
        for (; int64_t(taken.size()) < n && !idle.empty(); idle.pop_back()) taken.push_back(idle.back());
        try {
            while (int64_t(taken.size()) < n) {
                auto made = std::make_unique<Worker>();
                std::thread(&Worker::loop, made.get()).detach();
                taken.push_back(made.release());
            }
        } catch (const std::system_error&) {
        }
        return taken;
    }

    void put_back(const std::vector<Worker*>& workers) {  // the next call finds them in the same order
        std::lock_guard<std::mutex> lock(mutex);
        idle.insert(idle.end(), workers.rbegin(), workers.rend());
    }
};

class Team {
    alignas(64) std::atomic<int64_t> waiting{0};
    alignas(64) std::atomic<int64_t> step{0};

   public:
    // Wait until all threads have called it.
    void wait() {
        int64_t threads = thread_count();
        if (threads == 1) return;
        int64_t now = step.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            waiting.store(0, std::memory_order_relaxed);
            step.store(now + 1, std::memory_order_release);
            return;
        }
        wait_until([&] { return step.load(std::memory_order_acquire) != now; });
    }

    // Call `one` for this thread's share of n items.
    template <typename Do>
    static void share(int64_t n, Do one) {
        for (int64_t i = thread_number(); i < n; i += thread_count()) one(i);
    }

    // Run `work` with at most so many threads, of which the caller is number 0.
    template <typename Do>
    static void run(int64_t num_threads, Do work) {
        Member before = member;
        if (num_threads <= 1) {
            member = {};
            work();
            member = before;
            return;
        }
        Pool& pool = Pool::get();
        std::vector<Worker*> workers = pool.take(num_threads - 1);
        int64_t count = workers.size();
        Work shared{[](void* with) { (*static_cast<Do*>(with))(); }, &work, count + 1, {count}};
        for (int64_t i = 0; i < count; i++) workers[i]->give(&shared, i + 1);
        member = {0, count + 1};
        shared.run(shared.with);
        member = before;
        wait_until([&] { return shared.running.load(std::memory_order_acquire) == 0; });
        pool.put_back(workers);
    }

    // Call `one` for n items, shared by at most so many threads.
    template <typename Do>
    static void for_each(int64_t n, int64_t num_threads, Do one) {
        run(num_threads, [&] { share(n, one); });
    }

    // The same, for items of different sizes: each thread takes the next item when it has finished one.
    template <typename Do>
    static void deal(int64_t n, int64_t num_threads, Do one) {
        std::atomic<int64_t> next{0};
        run(num_threads, [&] {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) one(i);
        });
    }
};
