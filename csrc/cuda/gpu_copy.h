// Copies of scattered blocks on a GPU's stream. Raw pointers, no framework.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace banaserve {

// One copy: addresses that the device can use, in its own memory or in pinned host memory.
struct CopyPair {
  std::uint64_t dst;
  std::uint64_t src;
};

// Queues `num_bytes` for each pair on the copy engines, in one call. The pairs are read before it
// returns; the copies run in any order. `stream` is not the default stream.
cudaError_t copy_batch(const CopyPair* pairs, std::size_t num_copies, std::size_t num_bytes,
                       cudaStream_t stream);

// Queues the same as a kernel: each block of threads moves a part of one pair. Faster than the copy
// engines for many small blocks, and takes multiprocessors from whatever else runs.
cudaError_t copy_by_kernel(const CopyPair* pairs, std::size_t num_copies, std::size_t num_bytes,
                           cudaStream_t stream);

}  // namespace banaserve
