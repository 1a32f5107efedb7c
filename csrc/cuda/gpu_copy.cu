#include <algorithm>
#include <vector>

#include "gpu_copy.h"

namespace banaserve {
namespace {

constexpr unsigned num_threads = 256;
constexpr unsigned unroll = 4;
// Tiles of one pair beyond this many share a block of threads.
constexpr std::size_t max_tiles = 64;
// As many as fit the 4 KiB of arguments that every driver takes: no pair lies in memory that would
// have to outlive the launch.
constexpr std::size_t max_pairs = 250;

struct Pairs {
  CopyPair pair[max_pairs];
};

// [grid.y] pairs, each of `num_words` words, cut into tiles over grid.x.
template <typename Word>
__global__ void __launch_bounds__(num_threads)
    copy_pairs(const __grid_constant__ Pairs pairs, std::size_t num_words) {
  const CopyPair pair = pairs.pair[blockIdx.y];
  auto* const to = reinterpret_cast<Word*>(pair.dst);
  const auto* const from = reinterpret_cast<const Word*>(pair.src);
  constexpr std::size_t tile = num_threads * unroll;
  for (std::size_t first = blockIdx.x * tile; first < num_words; first += gridDim.x * tile) {
    Word words[unroll];
#pragma unroll
    for (unsigned i = 0; i < unroll; ++i) {
      const std::size_t at = first + i * num_threads + threadIdx.x;
      if (at < num_words) words[i] = __ldcs(from + at);
    }
#pragma unroll
    for (unsigned i = 0; i < unroll; ++i) {
      const std::size_t at = first + i * num_threads + threadIdx.x;
      if (at < num_words) __stcs(to + at, words[i]);
    }
  }
}

template <typename Word>
cudaError_t launch(const CopyPair* pairs, std::size_t num_copies, std::size_t num_bytes,
                   cudaStream_t stream) {
  const std::size_t num_words = num_bytes / sizeof(Word);
  const std::size_t tile = num_threads * unroll;
  const auto num_tiles = static_cast<unsigned>(std::min(max_tiles, (num_words + tile - 1) / tile));
  for (std::size_t first = 0; first < num_copies; first += max_pairs) {
    const std::size_t count = std::min(max_pairs, num_copies - first);
    Pairs some{};
    std::copy_n(pairs + first, count, some.pair);
    copy_pairs<Word><<<dim3(num_tiles, static_cast<unsigned>(count)), num_threads, 0, stream>>>(
        some, num_words);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t copy_by_kernel(const CopyPair* pairs, std::size_t num_copies, std::size_t num_bytes,
                           cudaStream_t stream) {
  if (num_copies == 0 || num_bytes == 0) return cudaSuccess;
  std::uint64_t bits = num_bytes;
  for (std::size_t i = 0; i < num_copies; ++i) bits |= pairs[i].dst | pairs[i].src;
  if (bits % sizeof(uint4) == 0) return launch<uint4>(pairs, num_copies, num_bytes, stream);
  if (bits % sizeof(unsigned) == 0) return launch<unsigned>(pairs, num_copies, num_bytes, stream);
  return launch<unsigned char>(pairs, num_copies, num_bytes, stream);
}

cudaError_t copy_batch(const CopyPair* pairs, std::size_t num_copies, std::size_t num_bytes,
                       cudaStream_t stream) {
  if (num_copies == 0 || num_bytes == 0) return cudaSuccess;
#if CUDART_VERSION >= 13000
  std::vector<void*> dst(num_copies);
  std::vector<const void*> src(num_copies);
  const std::vector<std::size_t> sizes(num_copies, num_bytes);
  for (std::size_t i = 0; i < num_copies; ++i) {
    dst[i] = reinterpret_cast<void*>(pairs[i].dst);
    src[i] = reinterpret_cast<const void*>(pairs[i].src);
  }
  cudaMemcpyAttributes attributes{};
  // Sources are written on other streams before, and events order these copies behind them.
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
  return cudaMemcpyBatchAsync(dst.data(), src.data(), sizes.data(), num_copies, &attributes, &first,
                              1, stream);
#else
  for (std::size_t i = 0; i < num_copies; ++i) {
    const cudaError_t error = cudaMemcpyAsync(reinterpret_cast<void*>(pairs[i].dst),
                                              reinterpret_cast<const void*>(pairs[i].src),
                                              num_bytes, cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
#endif
}

}  // namespace banaserve
