// Reads and writes of files that end on their own, announced on an eventfd. Raw pointers, no
// framework.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace banaserve {

// What direct I/O may ask of an address, an offset and a length on any common device.
inline constexpr std::int64_t disk_alignment = 4096;

struct DiskRequest {
  std::uint64_t tag;
  int fd;
  bool is_write;
  std::int64_t offset;
  std::vector<iovec> parts;  // of memory, in the order of the file
};

struct DiskCompletion {
  std::uint64_t tag;
  std::int64_t result;  // bytes moved, fewer than asked for only at the end of the file; or -errno
};

// A request and how far it has come.
class DiskTransfer {
 public:
  explicit DiskTransfer(DiskRequest request) : request_(std::move(request)) {}

  const DiskRequest& request() const { return request_; }
  std::int64_t offset() const { return request_.offset + moved_; }
  const iovec* parts() const { return request_.parts.data() + first_part_; }
  unsigned num_parts() const { return static_cast<unsigned>(request_.parts.size() - first_part_); }
  std::int64_t num_bytes_left() const;
  DiskCompletion completion() const { return {request_.tag, result_}; }

  // Takes in what one system call returned (bytes or -errno). True when nothing is left to do.
  bool advance(std::int64_t result);

 private:
  DiskRequest request_;
  std::size_t first_part_ = 0;
  std::int64_t moved_ = 0;
  std::int64_t result_ = 0;
};

// At most `depth` requests at a time. Every method may be called from any thread.
class DiskQueue {
 public:
  virtual ~DiskQueue() = default;
  DiskQueue() = default;
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  virtual std::string_view engine() const = 0;

  // Begins a request; false where `depth` are under way. The memory is used until its completion.
  virtual bool submit(DiskRequest request) = 0;

  // What has ended since the last call. Resets the eventfd.
  virtual std::vector<DiskCompletion> poll() = 0;

  // Waits for everything under way. `poll` still returns what ended; `submit` must not follow.
  virtual void drain() = 0;

  // Accepted and not yet returned by `poll`.
  virtual unsigned num_in_flight() const = 0;
};

// Both signal `event_fd`, which must outlive them, and throw std::system_error where the system
// refuses what they need.
std::unique_ptr<DiskQueue> make_uring_queue(unsigned depth, int event_fd);
std::unique_ptr<DiskQueue> make_thread_queue(unsigned depth, int event_fd);

// Makes `event_fd` readable, or not readable.
void set_event(int event_fd);
void reset_event(int event_fd);

}  // namespace banaserve
