#include "disk_queue.h"

#include <unistd.h>

#include <cerrno>

namespace banaserve {

std::int64_t DiskTransfer::num_bytes_left() const {
  std::int64_t num_bytes = 0;
  for (std::size_t i = first_part_; i < request_.parts.size(); ++i) {
    num_bytes += static_cast<std::int64_t>(request_.parts[i].iov_len);
  }
  return num_bytes;
}

bool DiskTransfer::advance(std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result < 0) {
    result_ = result;
    return true;
  }
  if (result == 0) {
    // The end of the file. A write that makes no progress would be tried for ever.
    result_ = request_.is_write ? -EIO : moved_;
    return true;
  }
  moved_ += result;
  auto left = static_cast<std::size_t>(result);
  while (first_part_ < request_.parts.size() && left >= request_.parts[first_part_].iov_len) {
    left -= request_.parts[first_part_++].iov_len;
  }
  result_ = moved_;
  if (first_part_ == request_.parts.size()) return true;
  iovec& part = request_.parts[first_part_];
  part.iov_base = static_cast<std::byte*>(part.iov_base) + left;
  part.iov_len -= left;
  return false;
}

void set_event(int event_fd) {
  const std::uint64_t one = 1;
  // Fails only where the counter is at its limit, and then it is readable.
  [[maybe_unused]] const auto written = ::write(event_fd, &one, sizeof one);
}

void reset_event(int event_fd) {
  std::uint64_t count = 0;
  // Fails only where nothing was signalled.
  [[maybe_unused]] const auto count_bytes = ::read(event_fd, &count, sizeof count);
}

}  // namespace banaserve
