// The Python door of csrc: banaserve._native.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "block_copy.h"
#include "latency_bindings.h"
#include "prefix_tree_bindings.h"
#include "xxh3.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using banaserve::CopyKind;
using banaserve::Region;
using Offsets = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::array<std::pair<std::string_view, CopyKind>, 2> streaming_kinds{{
    {"avx512", CopyKind::streaming_avx512},
    {"avx2", CopyKind::streaming_avx2},
}};

[[noreturn]] void raise(banaserve::CopyCheck check, std::int64_t num_bytes) {
  const std::string where = "[" + std::to_string(check.position) + "]";
  const std::string length = std::to_string(num_bytes) + " bytes";
  switch (check.fault) {
    case banaserve::CopyFault::dst_out_of_bounds:
      throw nb::value_error(
          ("dst_offsets" + where + ": " + length + " from there do not lie within dst_size")
              .c_str());
    case banaserve::CopyFault::src_out_of_bounds:
      throw nb::value_error(
          ("src_offsets" + where + ": " + length + " from there do not lie within src_size")
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

std::vector<std::string> copy_instructions() {
  std::vector<std::string> names;
  for (const auto& [name, kind] : streaming_kinds) {
    if (banaserve::is_supported(kind)) names.emplace_back(name);
  }
  return names;
}

CopyKind kind_of(bool streaming, const std::string& instructions) {
  if (instructions.empty()) return streaming ? banaserve::streaming_kind() : CopyKind::cached;
  require(streaming, "instructions are for streaming copies");
  for (const auto& [name, kind] : streaming_kinds) {
    if (instructions == name && banaserve::is_supported(kind)) return kind;
  }
  throw nb::value_error("instructions are none of copy_instructions()");
}

// What both kinds of copies take, checked.
struct Copies {
  Region dst;
  Region src;
  Offsets dst_offsets;
  Offsets src_offsets;
  std::int64_t num_bytes;
  CopyKind kind;

  Copies(std::uintptr_t dst_base, std::uintptr_t src_base, Offsets to, Offsets from,
         std::int64_t length, std::int64_t dst_size, std::int64_t src_size, bool streaming,
         const std::string& instructions)
      : dst{dst_base, dst_size},
        src{src_base, src_size},
        dst_offsets(std::move(to)),
        src_offsets(std::move(from)),
        num_bytes(length),
        kind(kind_of(streaming, instructions)) {
    require(num_bytes >= 0, "num_bytes is negative");
    require(dst_size >= 0, "dst_size is negative");
    require(src_size >= 0, "src_size is negative");
    require(dst_offsets.size() == src_offsets.size(), "src_offsets is not as long as dst_offsets");
    if (is_empty()) return;
    require(dst_base != 0, "dst_base is null");
    require(src_base != 0, "src_base is null");
    const auto check = banaserve::check_copies(dst, src, dst_offsets.data(), src_offsets.data(),
                                               dst_offsets.size(), num_bytes);
    if (check.fault != banaserve::CopyFault::none) raise(check, num_bytes);
  }

  bool is_empty() const { return dst_offsets.size() == 0 || num_bytes == 0; }
};

void copy_regions(std::uintptr_t dst_base, std::uintptr_t src_base, Offsets dst_offsets,
                  Offsets src_offsets, std::int64_t num_bytes, std::int64_t dst_size,
                  std::int64_t src_size, bool streaming, const std::string& instructions) {
  const Copies copies(dst_base, src_base, std::move(dst_offsets), std::move(src_offsets), num_bytes,
                      dst_size, src_size, streaming, instructions);
  if (copies.is_empty()) return;
  nb::gil_scoped_release release;
  banaserve::copy_blocks(copies.dst, copies.src, copies.dst_offsets.data(),
                         copies.src_offsets.data(), copies.dst_offsets.size(), copies.num_bytes,
                         copies.kind);
}

// Needs the GIL, which keeps two threads from writing the library at once.
const banaserve::Xxh3Library& xxh3() {
  static std::optional<banaserve::Xxh3Library> library;
  if (!library) {
    const auto path =
        nb::cast<std::string>(nb::module_::import_("xxhash._xxhash").attr("__file__"));
    library = banaserve::load_xxh3(path.c_str());
  }
  return *library;
}

std::uint64_t copy_regions_checksummed(std::uintptr_t dst_base, std::uintptr_t src_base,
                                       Offsets dst_offsets, Offsets src_offsets,
                                       std::int64_t num_bytes, std::int64_t dst_size,
                                       std::int64_t src_size, bool streaming,
                                       const std::string& instructions) {
  const Copies copies(dst_base, src_base, std::move(dst_offsets), std::move(src_offsets), num_bytes,
                      dst_size, src_size, streaming, instructions);
  banaserve::Xxh3 checksum(xxh3());
  if (copies.is_empty()) return checksum.digest();
  nb::gil_scoped_release release;
  banaserve::copy_blocks(copies.dst, copies.src, copies.dst_offsets.data(),
                         copies.src_offsets.data(), copies.dst_offsets.size(), copies.num_bytes,
                         copies.kind, checksum);
  return checksum.digest();
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Native parts of banaserve.";
  module.def("copy_instructions", &copy_instructions,
             "What streaming copies may use on this processor, widest first: avx512, avx2.");
  module.def("copy_regions", &copy_regions, "dst_base"_a, "src_base"_a, "dst_offsets"_a.noconvert(),
             "src_offsets"_a.noconvert(), "num_bytes"_a, "dst_size"_a, "src_size"_a,
             "streaming"_a = false, "instructions"_a = "",
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
    instructions: For streaming: one of copy_instructions(); empty for the widest.

Raises:
    ValueError: Names the argument at fault; nothing has been copied.)");
  module.def("copy_regions_checksummed", &copy_regions_checksummed, "dst_base"_a, "src_base"_a,
             "dst_offsets"_a.noconvert(), "src_offsets"_a.noconvert(), "num_bytes"_a, "dst_size"_a,
             "src_size"_a, "streaming"_a = false, "instructions"_a = "",
             R"(copy_regions, and the XXH3-64 of everything copied, in the order of the copies.

Each byte is read from memory once for both.

Raises:
    ValueError: Names the argument at fault; nothing has been copied.
    RuntimeError: The xxhash package's library cannot be used.)");
  bind_prefix_tree(module);
  bind_latency(module);
}
