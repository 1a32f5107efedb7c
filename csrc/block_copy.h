// Copies of scattered blocks between two memory regions. Raw pointers, no framework.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xxh3.h"

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

// How bytes are written: through the caches, or past them with the instructions named.
enum class CopyKind {
  cached,
  streaming_avx2,
  streaming_avx512,
};

// Whether this processor has a kind's instructions.
bool is_supported(CopyKind kind) noexcept;

// The widest kind that this processor has, for targets that it does not read soon.
CopyKind streaming_kind() noexcept;

// Whether copying `num_bytes` for each pair of offsets stays within both regions, with no source
// overlapping its own destination. Touches neither region.
CopyCheck check_copies(Region dst, Region src, const std::int64_t* dst_offsets,
                       const std::int64_t* src_offsets, std::size_t num_copies,
                       std::int64_t num_bytes) noexcept;

// Copies `num_bytes` for each pair of offsets, in order. The copies must have passed
// `check_copies`, and the kind must be supported.
void copy_blocks(Region dst, Region src, const std::int64_t* dst_offsets,
                 const std::int64_t* src_offsets, std::size_t num_copies, std::int64_t num_bytes,
                 CopyKind kind) noexcept;

// The same, and adds what is written to `checksum`, also where the source changes meanwhile. Each
// byte is read from memory once for both.
void copy_blocks(Region dst, Region src, const std::int64_t* dst_offsets,
                 const std::int64_t* src_offsets, std::size_t num_copies, std::int64_t num_bytes,
                 CopyKind kind, Xxh3& checksum) noexcept;

}  // namespace banaserve
