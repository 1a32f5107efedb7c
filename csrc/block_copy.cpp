#include "block_copy.h"

#include <cstring>

namespace banaserve {
namespace {

bool fits(std::int64_t offset, std::int64_t num_bytes, std::int64_t size) {
  // Written so that no sum can overflow.
  return offset >= 0 && num_bytes <= size && offset <= size - num_bytes;
}

}  // namespace

CopyCheck check_copies(Region dst, Region src, const std::int64_t* dst_offsets,
                       const std::int64_t* src_offsets, std::size_t num_copies,
                       std::int64_t num_bytes) noexcept {
  const auto length = static_cast<std::uintptr_t>(num_bytes);
  for (std::size_t i = 0; i < num_copies; ++i) {
    if (!fits(dst_offsets[i], num_bytes, dst.size)) return {CopyFault::dst_out_of_bounds, i};
    if (!fits(src_offsets[i], num_bytes, src.size)) return {CopyFault::src_out_of_bounds, i};
    const auto to = dst.base + static_cast<std::uintptr_t>(dst_offsets[i]);
    const auto from = src.base + static_cast<std::uintptr_t>(src_offsets[i]);
    const auto distance = to > from ? to - from : from - to;
    if (distance < length) return {CopyFault::overlap, i};
  }
  return {CopyFault::none, num_copies};
}

void copy_blocks(Region dst, Region src, const std::int64_t* dst_offsets,
                 const std::int64_t* src_offsets, std::size_t num_copies,
                 std::int64_t num_bytes) noexcept {
  auto* const to = reinterpret_cast<std::byte*>(dst.base);
  const auto* const from = reinterpret_cast<const std::byte*>(src.base);
  for (std::size_t i = 0; i < num_copies; ++i) {
    std::memcpy(to + dst_offsets[i], from + src_offsets[i], static_cast<std::size_t>(num_bytes));
  }
}

}  // namespace banaserve
