#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace megatrain {
namespace {

struct Job {
    const std::function<void(int64_t, int64_t)>& body;
    int64_t size, grain;
    int helpers_wanted;
    int helpers_busy = 0;           // guarded by the pool's mutex
    std::atomic<int64_t> next{0};

    void work() {
        for (;;) {
            const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= size) return;
            body(begin, std::min(begin + grain, size));
        }
    }
};

class Pool {
public:
    void run(Job& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            grow(job.helpers_wanted);
            jobs_.push_back(&job);
        }
        work_ready_.notify_all();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        jobs_.remove(&job);
        job_done_.wait(lock, [&] { return job.helpers_busy == 0; });
    }

private:
    void grow(int num_helpers) {
        while (int(helpers_.size()) < num_helpers) {
            try {
                helpers_.emplace_back([this] { serve(); });
            } catch (const std::system_error&) {
                return;  // No more threads to be had: the calling thread does the work itself.
            }
        }
    }

    Job* claim() {
        for (Job* job : jobs_) {
            if (job->helpers_wanted > 0 && job->next.load(std::memory_order_relaxed) < job->size) {
                --job->helpers_wanted;
                ++job->helpers_busy;
                return job;
            }
        }
        return nullptr;
    }

    void serve() {
#if defined(__linux__)
        pthread_setname_np(pthread_self(), "megatrain-pool");
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            work_ready_.wait(lock, [&] { return (job = claim()) != nullptr; });
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->helpers_busy == 0) job_done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_ready_, job_done_;
    std::list<Job*> jobs_;
    std::vector<std::thread> helpers_;
};

std::mutex pool_mutex;
Pool* pool = nullptr;  // Never freed: its threads outlive static destructors.

// The threads do not follow into a forked child: it starts a pool of its own. The lock is held
// over the fork so that the child finds it in a known state.
Pool& current_pool() {
    static const int registered = pthread_atfork(
        [] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
        [] {
            pool = nullptr;
            pool_mutex.unlock();
        });
    (void)registered;
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (pool == nullptr) pool = new Pool;
    return *pool;
}

}  // namespace

void parallel_for(int64_t size, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body) {
    const int64_t ranges = (size + grain - 1) / grain;
    const int helpers = int(std::min<int64_t>(threads, ranges)) - 1;
    if (helpers < 1) {
        for (int64_t begin = 0; begin < size; begin += grain)
            body(begin, std::min(begin + grain, size));
        return;
    }
    Job job{body, size, grain, helpers};
    current_pool().run(job);
}

}  // namespace megatrain
