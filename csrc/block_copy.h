// Copies of scattered blocks between two memory regions. Raw pointers, no framework.
#pragma once

#include <cstddef>
#include <cstdint>

namespace banaserve {

enum class CopyFault {
  none,
  dst_out_of_bounds,
  src_out_of_bounds,
  overlap,
};

struct CopyCheck {
  CopyFault fault;
  std::size_t position;  // of the first offset at fault
};

// One memory region: `size` bytes from `base`.
struct Region {
  std::uintptr_t base;
  std::int64_t size;
};

// Whether copying `num_bytes` for each pair of offsets stays within both regions, with no source
// overlapping its own destination. Touches neither region.
CopyCheck check_copies(Region dst, Region src, const std::int64_t* dst_offsets,
                       const std::int64_t* src_offsets, std::size_t num_copies,
                       std::int64_t num_bytes) noexcept;

// Copies `num_bytes` for each pair of offsets, in order. The copies must have passed
// `check_copies`. `streaming` writes past the caches where the processor can: for targets that
// this processor does not read soon.
void copy_blocks(Region dst, Region src, const std::int64_t* dst_offsets,
                 const std::int64_t* src_offsets, std::size_t num_copies, std::int64_t num_bytes,
                 bool streaming) noexcept;

}  // namespace banaserve
