#include "core/thread_pool.h"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace flash_attn {
namespace {

// One job at a time: callers from several threads take turns, and a call from inside a job runs on the calling thread.
class ThreadPool {
 public:
  // Never destroyed: workers may outlive static destruction, and after a fork the child drops its parent's pool
  // unjoined.
  static ThreadPool& instance() {
    std::lock_guard<std::mutex> lock(instance_mutex());
    ThreadPool*& pool = instance_pointer();
    if (pool == nullptr) {
      pool = new ThreadPool;
      register_fork_handler();
    }
    return *pool;
  }

  void run(int n, void (*body)(void*, int), void* arg) {
    if (n <= 1 || inside_job()) {
      for (int worker = 0; worker < n; ++worker) body(arg, worker);
      return;
    }
    std::lock_guard<std::mutex> turn(callers_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < n - 1 && start_worker()) continue;
      body_ = body;
      arg_ = arg;
      next_ = 1;
      count_ = n;
      running_ = 0;
      ++generation_;
    }
    wake_.notify_all();
    inside_job() = true;
    body(arg, 0);
    inside_job() = false;
    std::unique_lock<std::mutex> lock(mutex_);
    // Slots that no worker has picked up yet have nothing left to do but would be waited for; take them back.
    next_ = count_;
    done_.wait(lock, [this] { return running_ == 0; });
    body_ = nullptr;
  }

 private:
  static bool& inside_job() {
    thread_local bool inside = false;
    return inside;
  }
  static std::mutex& instance_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static ThreadPool*& instance_pointer() {
    static ThreadPool* pool = nullptr;
    return pool;
  }
  static void register_fork_handler() {
#if !defined(_WIN32)
    static const int registered = pthread_atfork([] { instance_mutex().lock(); }, [] { instance_mutex().unlock(); },
                                                 [] {
                                                   instance_pointer() = nullptr;
                                                   instance_mutex().unlock();
                                                 });
    (void)registered;
#endif
  }

  // Whether the system gives one more: jobs do without where it does not, and the next one asks again.
  bool start_worker() {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++workers_;
    return true;
  }

  void work() {
    inside_job() = true;
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen && body_ != nullptr; });
      seen = generation_;
      if (next_ >= count_) continue;
      const int slot = next_++;
      ++running_;
      const auto body = body_;
      void* const arg = arg_;
      lock.unlock();
      body(arg, slot);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  void (*body_)(void*, int) = nullptr;
  void* arg_ = nullptr;
  int workers_ = 0, next_ = 0, count_ = 0, running_ = 0;
  std::uint64_t generation_ = 0;
};

}  // namespace

Executor default_executor(int num_threads) {
  if (num_threads < 0)
    throw Error("flash_attn: num_threads must be 0 (one per hardware thread) or more, got " +
                std::to_string(num_threads));
  Executor executor;
  // Asked once: glibc 2.36 opens a file for it, 7 us of each call, 35 to 55 where caches are cold.
  static const int hardware = static_cast<int>(std::thread::hardware_concurrency());
  executor.num_threads = num_threads > 0 ? num_threads : max_of(1, hardware);
  executor.run = [](void*, int n, void (*body)(void*, int), void* arg) { ThreadPool::instance().run(n, body, arg); };
  return executor;
}

}  // namespace flash_attn
