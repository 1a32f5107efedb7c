#include "block_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace banaserve {
namespace {

// What is hashed while it lies in the first-level cache.
constexpr std::size_t tile_bytes = 8 * 1024;

bool fits(std::int64_t offset, std::int64_t num_bytes, std::int64_t size) {
  // Written so that no sum can overflow.
  return offset >= 0 && num_bytes <= size && offset <= size - num_bytes;
}

using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t num_bytes);

void copy_cached(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

#if defined(__x86_64__)
// Bytes before the first address that is a multiple of `width`.
std::size_t bytes_before(const std::byte* to, std::size_t width, std::size_t num_bytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % width;
  return std::min(num_bytes, misaligned ? width - misaligned : 0);
}

// Past the caches saves reading the target before it is overwritten: 1.2 to 1.6 times memcpy into a
// pool that is larger than the cache, on an EPYC of the third generation.
__attribute__((target("avx2"))) void copy_avx2(std::byte* to, const std::byte* from,
                                               std::size_t num_bytes) {
  constexpr std::size_t step = 4 * sizeof(__m256i);
  std::size_t i = bytes_before(to, sizeof(__m256i), num_bytes);
  std::memcpy(to, from, i);
  for (; i + step <= num_bytes; i += step) {
    const auto* const source = reinterpret_cast<const __m256i*>(from + i);
    auto* const target = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  std::memcpy(to + i, from + i, num_bytes - i);
}

__attribute__((target("avx512f"))) void copy_avx512(std::byte* to, const std::byte* from,
                                                    std::size_t num_bytes) {
  constexpr std::size_t step = 4 * sizeof(__m512i);
  std::size_t i = bytes_before(to, sizeof(__m512i), num_bytes);
  std::memcpy(to, from, i);
  for (; i + step <= num_bytes; i += step) {
    const auto* const source = reinterpret_cast<const __m512i*>(from + i);
    auto* const target = reinterpret_cast<__m512i*>(to + i);
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_loadu_si512(source + 1);
    const __m512i c = _mm512_loadu_si512(source + 2);
    const __m512i d = _mm512_loadu_si512(source + 3);
    _mm512_stream_si512(target, a);
    _mm512_stream_si512(target + 1, b);
    _mm512_stream_si512(target + 2, c);
    _mm512_stream_si512(target + 3, d);
  }
  std::memcpy(to + i, from + i, num_bytes - i);
}
#endif

Copy copy_of(CopyKind kind) {
#if defined(__x86_64__)
  if (kind == CopyKind::streaming_avx2) return copy_avx2;
  if (kind == CopyKind::streaming_avx512) return copy_avx512;
#endif
  return copy_cached;
}

// Whoever is told that the copies are done must see what went past the caches.
void make_visible([[maybe_unused]] CopyKind kind) {
#if defined(__x86_64__)
  if (kind != CopyKind::cached) _mm_sfence();
#endif
}

}  // namespace

bool is_supported(CopyKind kind) noexcept {
#if defined(__x86_64__)
  if (kind == CopyKind::streaming_avx2) return __builtin_cpu_supports("avx2");
  if (kind == CopyKind::streaming_avx512) return __builtin_cpu_supports("avx512f");
#endif
  return kind == CopyKind::cached;
}

CopyKind streaming_kind() noexcept {
  for (const auto kind : {CopyKind::streaming_avx512, CopyKind::streaming_avx2}) {
    if (is_supported(kind)) return kind;
  }
  return CopyKind::cached;
}

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
                 const std::int64_t* src_offsets, std::size_t num_copies, std::int64_t num_bytes,
                 CopyKind kind) noexcept {
  const Copy copy = copy_of(kind);
  auto* const to = reinterpret_cast<std::byte*>(dst.base);
  const auto* const from = reinterpret_cast<const std::byte*>(src.base);
  for (std::size_t i = 0; i < num_copies; ++i) {
    copy(to + dst_offsets[i], from + src_offsets[i], static_cast<std::size_t>(num_bytes));
  }
  make_visible(kind);
}

void copy_blocks(Region dst, Region src, const std::int64_t* dst_offsets,
                 const std::int64_t* src_offsets, std::size_t num_copies, std::int64_t num_bytes,
                 CopyKind kind, Xxh3& checksum) noexcept {
  const Copy copy = copy_of(kind);
  alignas(64) std::byte tile[tile_bytes];
  // What is hashed is what is written, also where somebody writes to the source meanwhile.
  const auto copy_and_hash = [&](std::byte* target, const std::byte* source, std::size_t num) {
    std::byte* const seen = kind == CopyKind::cached ? target : tile;
    std::memcpy(seen, source, num);
    checksum.update(seen, num);
    if (seen == tile) copy(target, tile, num);
  };
  auto* const to = reinterpret_cast<std::byte*>(dst.base);
  const auto* const from = reinterpret_cast<const std::byte*>(src.base);
  const auto length = static_cast<std::size_t>(num_bytes);
  for (std::size_t i = 0; i < num_copies; ++i) {
    std::byte* const target = to + dst_offsets[i];
    const std::byte* const source = from + src_offsets[i];
    for (std::size_t done = 0; done < length; done += tile_bytes) {
      const std::size_t num = std::min(tile_bytes, length - done);
      copy_and_hash(target + done, source + done, num);
    }
  }
  make_visible(kind);
}

}  // namespace banaserve
