// The Python door of csrc: banaserve._native.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "block_copy.h"
#include "disk_queue_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Offsets = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void raise(banaserve::CopyCheck check, std::int64_t num_bytes) {
  const std::string where = "[" + std::to_string(check.position) + "]";
  const std::string length = std::to_string(num_bytes) + " bytes";
  switch (check.fault) {
    case banaserve::CopyFault::dst_out_of_bounds:
      throw nb::value_error(
          ("dst_offsets" + where + ": " + length + " from there do not lie " + "within dst_size")
              .c_str());
    case banaserve::CopyFault::src_out_of_bounds:
      throw nb::value_error(
          ("src_offsets" + where + ": " + length + " from there do not lie " + "within src_size")
              .c_str());
    default:
      throw nb::value_error(
          ("dst_offsets" + where + " and src_offsets" + where + " name memory that overlaps")
              .c_str());
  }
}

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void copy_regions(std::uintptr_t dst_base, std::uintptr_t src_base, Offsets dst_offsets,
                  Offsets src_offsets, std::int64_t num_bytes, std::int64_t dst_size,
                  std::int64_t src_size, bool streaming) {
  require(num_bytes >= 0, "num_bytes is negative");
  require(dst_size >= 0, "dst_size is negative");
  require(src_size >= 0, "src_size is negative");
  require(dst_offsets.size() == src_offsets.size(), "src_offsets is not as long as dst_offsets");
  const std::size_t num_copies = dst_offsets.size();
  if (num_copies == 0 || num_bytes == 0) return;
  require(dst_base != 0, "dst_base is null");
  require(src_base != 0, "src_base is null");
  const banaserve::Region dst{dst_base, dst_size};
  const banaserve::Region src{src_base, src_size};
  const std::int64_t* const to = dst_offsets.data();
  const std::int64_t* const from = src_offsets.data();
  const auto check = banaserve::check_copies(dst, src, to, from, num_copies, num_bytes);
  if (check.fault != banaserve::CopyFault::none) raise(check, num_bytes);
  nb::gil_scoped_release release;
  banaserve::copy_blocks(dst, src, to, from, num_copies, num_bytes, streaming);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Native parts of banaserve.";
  module.def("copy_regions", &copy_regions, "dst_base"_a, "src_base"_a, "dst_offsets"_a.noconvert(),
             "src_offsets"_a.noconvert(), "num_bytes"_a, "dst_size"_a, "src_size"_a,
             "streaming"_a = false,
             R"(Copy num_bytes for each pair of offsets, in order, without the GIL.

Args:
    dst_base: Address of the target region.
    src_base: Address of the source region.
    dst_offsets: [num_copies] int64, contiguous; bytes from dst_base. Not changed meanwhile.
    src_offsets: [num_copies] int64, contiguous; bytes from src_base. Not changed meanwhile.
    num_bytes: Of each copy.
    dst_size: Bytes of the target region.
    src_size: Bytes of the source region.
    streaming: Write past the caches: for targets that this processor does not read soon.

Raises:
    ValueError: Names the argument at fault; nothing has been copied.)");
  bind_disk_queue(module);
}
