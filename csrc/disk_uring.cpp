// The io_uring engine, on the system calls themselves: what it needs of liburing is little.

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <utility>

#include "disk_queue.h"

namespace banaserve {
namespace {

constexpr std::uint64_t probe_tag = ~std::uint64_t{0};

// Larger transfers are begun by a thread of the kernel: pinning the pages of 3 MB and queueing them
// takes 0.3 ms, which would be the caller's.
constexpr std::int64_t max_inline_bytes = 128 * 1024;

[[noreturn]] void fail(int number, const char* what) {
  throw std::system_error(number, std::generic_category(), what);
}

// The rings that a process shares with the kernel. Not thread-safe.
class Ring {
 public:
  explicit Ring(unsigned num_entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, num_entries, &params));
    if (fd_ < 0) fail(errno, "io_uring_setup");
    try {
      map(params);
    } catch (...) {
      release();
      throw;
    }
  }

  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // The caller never has more entries under way than the ring has.
  void push(const io_uring_sqe& sqe) {
    const unsigned tail = *sq_tail_;
    sqes_[tail & sq_mask_] = sqe;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++num_unsubmitted_;
  }

  // Hands over what was pushed and waits for `min_complete` completions. -errno where the kernel
  // has not taken everything; it stays in the ring for the next call.
  int enter(unsigned min_complete) {
    const unsigned flags = min_complete ? IORING_ENTER_GETEVENTS : 0;
    for (;;) {
      const long taken = ::syscall(__NR_io_uring_enter, fd_, num_unsubmitted_, min_complete, flags,
                                   nullptr, std::size_t{0});
      if (taken < 0 && errno == EINTR) continue;
      if (taken < 0) return -errno;
      num_unsubmitted_ -= static_cast<unsigned>(taken);
      return num_unsubmitted_ ? -EAGAIN : 0;
    }
  }

  bool pop(io_uring_cqe& cqe) {
    const unsigned head = *cq_head_;
    if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return false;
    cqe = cqes_[head & cq_mask_];
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    return true;
  }

  void signal_on(int event_fd) {
    if (::syscall(__NR_io_uring_register, fd_, IORING_REGISTER_EVENTFD, &event_fd, 1) < 0) {
      fail(errno, "io_uring_register");
    }
  }

  unsigned num_unsubmitted() const { return num_unsubmitted_; }

 private:
  void map(const io_uring_params& params) {
    // Linux 5.5 has both: one mapping for both rings, and no completion is ever dropped.
    constexpr unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    if ((params.features & needed) != needed) fail(ENOSYS, "io_uring of this kernel is too old");
    rings_size_ =
        std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                              params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_size_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map_at(rings_size_, IORING_OFF_SQ_RING);
    sqes_ = static_cast<io_uring_sqe*>(map_at(sqes_size_, IORING_OFF_SQES));
    sq_tail_ = at<unsigned>(params.sq_off.tail);
    sq_array_ = at<unsigned>(params.sq_off.array);
    sq_mask_ = *at<unsigned>(params.sq_off.ring_mask);
    cq_head_ = at<unsigned>(params.cq_off.head);
    cq_tail_ = at<unsigned>(params.cq_off.tail);
    cqes_ = at<io_uring_cqe>(params.cq_off.cqes);
    cq_mask_ = *at<unsigned>(params.cq_off.ring_mask);
  }

  void* map_at(std::size_t size, off_t offset) {
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, offset);
    if (memory == MAP_FAILED) fail(errno, "mmap of io_uring");
    return memory;
  }

  template <typename T>
  T* at(unsigned offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(rings_) + offset);
  }

  void release() {
    if (sqes_ != nullptr) ::munmap(sqes_, sqes_size_);
    if (rings_ != nullptr) ::munmap(rings_, rings_size_);
    ::close(fd_);
  }

  int fd_ = -1;
  void* rings_ = nullptr;
  std::size_t rings_size_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  std::size_t sqes_size_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned cq_mask_ = 0;
  unsigned num_unsubmitted_ = 0;
};

class UringQueue final : public DiskQueue {
 public:
  UringQueue(unsigned depth, int event_fd)
      : depth_(depth), event_fd_(event_fd), ring_(std::bit_ceil(depth)) {
    probe();
    ring_.signal_on(event_fd);
    transfers_.resize(depth);
    for (unsigned i = depth; i > 0; --i) free_.push_back(i - 1);
  }

  ~UringQueue() override { drain(); }

  std::string_view engine() const override { return "io_uring"; }

  bool submit(DiskRequest request) override {
    const std::lock_guard lock(mutex_);
    if (num_in_flight_ == depth_) return false;
    ++num_in_flight_;
    const unsigned place = free_.back();
    free_.pop_back();
    transfers_[place] = std::make_unique<DiskTransfer>(std::move(request));
    push(place);
    flush();
    return true;
  }

  std::vector<DiskCompletion> poll() override {
    const std::lock_guard lock(mutex_);
    reset_event(event_fd_);
    reap();
    flush();
    num_in_flight_ -= static_cast<unsigned>(ended_.size());
    return std::exchange(ended_, {});
  }

  void drain() override {
    const std::lock_guard lock(mutex_);
    for (reap(); ended_.size() < num_in_flight_; reap()) ring_.enter(1);
    if (!ended_.empty()) set_event(event_fd_);
  }

  unsigned num_in_flight() const override {
    const std::lock_guard lock(mutex_);
    return num_in_flight_;
  }

 private:
  // Containers may allow io_uring_setup and forbid the rest.
  void probe() {
    io_uring_sqe sqe{};
    sqe.opcode = IORING_OP_NOP;
    sqe.user_data = probe_tag;
    ring_.push(sqe);
    if (const int error = ring_.enter(1); error < 0) fail(-error, "io_uring_enter");
    io_uring_cqe cqe;
    if (!ring_.pop(cqe) || cqe.user_data != probe_tag || cqe.res != 0) {
      fail(ENOSYS, "io_uring does nothing");
    }
  }

  void push(unsigned place) {
    const DiskTransfer& transfer = *transfers_[place];
    io_uring_sqe sqe{};
    sqe.opcode = transfer.request().is_write ? IORING_OP_WRITEV : IORING_OP_READV;
    sqe.fd = transfer.request().fd;
    sqe.off = static_cast<std::uint64_t>(transfer.offset());
    sqe.addr = reinterpret_cast<std::uint64_t>(transfer.parts());
    sqe.len = transfer.num_parts();
    sqe.user_data = place;
    if (transfer.num_bytes_left() > max_inline_bytes) sqe.flags = IOSQE_ASYNC;
    ring_.push(sqe);
  }

  // Where the kernel is short of memory, `poll` tries again.
  void flush() {
    if (ring_.num_unsubmitted() != 0 && ring_.enter(0) < 0) set_event(event_fd_);
  }

  void reap() {
    io_uring_cqe cqe;
    while (ring_.pop(cqe)) {
      const auto place = static_cast<unsigned>(cqe.user_data);
      if (!transfers_[place]->advance(cqe.res)) {
        push(place);
        continue;
      }
      ended_.push_back(transfers_[place]->completion());
      transfers_[place].reset();
      free_.push_back(place);
    }
  }

  const unsigned depth_;
  const int event_fd_;
  mutable std::mutex mutex_;
  Ring ring_;
  // The kernel reads a transfer's parts until its completion: they must not move.
  std::vector<std::unique_ptr<DiskTransfer>> transfers_;
  std::vector<unsigned> free_;
  std::vector<DiskCompletion> ended_;
  unsigned num_in_flight_ = 0;
};

}  // namespace

std::unique_ptr<DiskQueue> make_uring_queue(unsigned depth, int event_fd) {
  return std::make_unique<UringQueue>(depth, event_fd);
}

}  // namespace banaserve
