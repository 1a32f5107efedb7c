// The engine for systems that forbid io_uring: blocking calls on a few threads.

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "disk_queue.h"

namespace banaserve {
namespace {

constexpr unsigned max_threads = 8;

class ThreadQueue final : public DiskQueue {
 public:
  ThreadQueue(unsigned depth, int event_fd) : depth_(depth), event_fd_(event_fd) {
    try {
      for (unsigned i = 0; i < std::min(depth, max_threads); ++i) {
        threads_.emplace_back([this] { work(); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadQueue() override { stop(); }

  std::string_view engine() const override { return "threads"; }

  bool submit(DiskRequest request) override {
    {
      const std::lock_guard lock(mutex_);
      if (num_in_flight_ == depth_) return false;
      ++num_in_flight_;
      waiting_.emplace_back(std::move(request));
    }
    changed_.notify_one();
    return true;
  }

  std::vector<DiskCompletion> poll() override {
    reset_event(event_fd_);
    const std::lock_guard lock(mutex_);
    num_in_flight_ -= static_cast<unsigned>(ended_.size());
    return std::exchange(ended_, {});
  }

  void drain() override {
    std::unique_lock lock(mutex_);
    all_ended_.wait(lock, [this] { return ended_.size() == num_in_flight_; });
  }

  unsigned num_in_flight() const override {
    const std::lock_guard lock(mutex_);
    return num_in_flight_;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      DiskTransfer transfer = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      while (!transfer.advance(move_some(transfer))) {
      }
      lock.lock();
      ended_.push_back(transfer.completion());
      set_event(event_fd_);
      if (ended_.size() == num_in_flight_) all_ended_.notify_all();
    }
  }

  static std::int64_t move_some(const DiskTransfer& transfer) {
    const int fd = transfer.request().fd;
    const auto num_parts = static_cast<int>(transfer.num_parts());
    const ssize_t moved = transfer.request().is_write
                              ? ::pwritev(fd, transfer.parts(), num_parts, transfer.offset())
                              : ::preadv(fd, transfer.parts(), num_parts, transfer.offset());
    return moved < 0 ? -errno : moved;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const unsigned depth_;
  const int event_fd_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable all_ended_;
  std::deque<DiskTransfer> waiting_;
  std::vector<DiskCompletion> ended_;
  unsigned num_in_flight_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskQueue> make_thread_queue(unsigned depth, int event_fd) {
  return std::make_unique<ThreadQueue>(depth, event_fd);
}

}  // namespace banaserve
