// The Python door of the disk queue.

#include "disk_queue_bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "disk_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr unsigned max_depth = 4096;
constexpr std::size_t max_parts = 16;

// A part of memory: address and length in bytes.
using Part = std::pair<std::uintptr_t, std::int64_t>;

[[noreturn]] void raise_os_error(int number, const char* what) {
  errno = number;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, what);
  throw nb::python_error();
}

class EventFd {
 public:
  EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) raise_os_error(errno, "eventfd");
  }
  ~EventFd() { ::close(fd_); }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class PyDiskQueue {
 public:
  PyDiskQueue(unsigned depth, const std::string& engine) : depth_(depth) {
    if (depth < 1 || depth > max_depth) throw nb::value_error("depth is not within 1 to 4096");
    if (engine != "auto" && engine != "io_uring" && engine != "threads") {
      throw nb::value_error("engine is none of auto, io_uring, threads");
    }
    try {
      if (engine != "threads") {
        queue_ = banaserve::make_uring_queue(depth, event_.get());
        return;
      }
    } catch (const std::system_error& error) {
      if (engine != "auto") raise_os_error(error.code().value(), "io_uring");
      fallback_reason_ = error.what();
    }
    queue_ = banaserve::make_thread_queue(depth, event_.get());
  }

  ~PyDiskQueue() { close(); }

  std::string engine() const { return std::string(queue_->engine()); }
  const std::string& fallback_reason() const { return fallback_reason_; }
  unsigned depth() const { return depth_; }
  int fd() const { return event_.get(); }

  unsigned num_in_flight() const {
    nb::gil_scoped_release release;
    return queue_->num_in_flight();
  }

  bool submit(bool is_write, std::uint64_t tag, int fd, std::int64_t offset,
              const std::vector<Part>& parts) {
    if (closed_) throw nb::value_error("the queue is closed");
    banaserve::DiskRequest request{tag, fd, is_write, offset, checked(offset, parts)};
    nb::gil_scoped_release release;
    return queue_->submit(std::move(request));
  }

  nb::list poll() {
    std::vector<banaserve::DiskCompletion> ended;
    {
      nb::gil_scoped_release release;
      ended = queue_->poll();
    }
    nb::list list;
    for (const auto& completion : ended) {
      list.append(nb::make_tuple(completion.tag, completion.result));
    }
    return list;
  }

  void close() {
    closed_ = true;
    nb::gil_scoped_release release;
    queue_->drain();
  }

 private:
  static std::vector<iovec> checked(std::int64_t offset, const std::vector<Part>& parts) {
    if (parts.empty() || parts.size() > max_parts) {
      throw nb::value_error("parts are not 1 to 16");
    }
    std::int64_t end = offset;
    bool aligned = offset % banaserve::disk_alignment == 0;
    if (offset < 0) throw nb::value_error("offset is negative");
    std::vector<iovec> vectors;
    for (const auto& [address, num_bytes] : parts) {
      if (address == 0) throw nb::value_error("an address in parts is null");
      if (num_bytes <= 0) throw nb::value_error("a length in parts is not positive");
      if (__builtin_add_overflow(end, num_bytes, &end)) {
        throw nb::value_error("parts reach beyond the largest offset");
      }
      aligned = aligned && address % banaserve::disk_alignment == 0 &&
                num_bytes % banaserve::disk_alignment == 0;
      vectors.push_back({reinterpret_cast<void*>(address), static_cast<std::size_t>(num_bytes)});
    }
    if (!aligned) {
      throw nb::value_error("offset, addresses and lengths must be multiples of 4096");
    }
    return vectors;
  }

  const unsigned depth_;
  EventFd event_;
  std::string fallback_reason_;
  std::unique_ptr<banaserve::DiskQueue> queue_;
  bool closed_ = false;
};

}  // namespace

void bind_disk_queue(nb::module_& module) {
  nb::class_<PyDiskQueue>(module, "DiskQueue",
                          R"(Reads and writes of files that end on their own.

At most ``depth`` are under way. Short reads and writes are continued inside. Offsets, addresses
and lengths are multiples of 4096, as direct I/O wants them. The memory must stay where it is until
the completion has been returned by ``poll``. Nothing waits while it holds the GIL.

Args:
    depth: 1 to 4096.
    engine: "io_uring", "threads", or "auto": threads where the system refuses io_uring.

Raises:
    OSError: io_uring was asked for and the system refuses it.)")
      .def(nb::init<unsigned, const std::string&>(), "depth"_a, "engine"_a = "auto")
      .def_prop_ro("engine", &PyDiskQueue::engine, "Which engine runs: io_uring or threads.")
      .def_prop_ro("fallback_reason", &PyDiskQueue::fallback_reason,
                   "Why auto took threads; empty where it did not.")
      .def_prop_ro("depth", &PyDiskQueue::depth, "As given.")
      .def_prop_ro("fd", &PyDiskQueue::fd,
                   "An eventfd, readable when poll may have something to return.")
      .def_prop_ro("num_in_flight", &PyDiskQueue::num_in_flight,
                   "Accepted and not yet returned by poll.")
      .def(
          "submit_read",
          [](PyDiskQueue& queue, std::uint64_t tag, int fd, std::int64_t offset,
             const std::vector<Part>& parts) {
            return queue.submit(false, tag, fd, offset, parts);
          },
          "tag"_a, "fd"_a, "offset"_a, "parts"_a,
          R"(Begin to fill parts, a list of (address, length), from offset on.

Returns:
    False where depth requests are under way.

Raises:
    ValueError: An argument is not aligned or out of range, or the queue is closed.)")
      .def(
          "submit_write",
          [](PyDiskQueue& queue, std::uint64_t tag, int fd, std::int64_t offset,
             const std::vector<Part>& parts) { return queue.submit(true, tag, fd, offset, parts); },
          "tag"_a, "fd"_a, "offset"_a, "parts"_a, "Like submit_read, from memory to the file.")
      .def("poll", &PyDiskQueue::poll,
           R"(What has ended since the last call, as a list of (tag, result).

A result is the number of bytes, fewer than asked for only at the end of the file, or -errno.)")
      .def("close", &PyDiskQueue::close,
           "Wait for everything under way. poll still returns what ended; submitting raises.");
}
