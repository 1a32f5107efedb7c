// XXH3-64, from the library that comes with the Python package xxhash.
#pragma once

#include <cstddef>
#include <cstdint>

namespace banaserve {

// The functions of xxhash's C interface that are used; its states are opaque here.
struct Xxh3Library {
  void* (*create)();
  int (*free)(void* state);
  int (*reset)(void* state);
  int (*update)(void* state, const void* data, std::size_t num_bytes);
  std::uint64_t (*digest)(const void* state);
};

// Finds them in the shared library at `path`, which stays loaded. Throws std::runtime_error where
// they are not there.
Xxh3Library load_xxh3(const char* path);

// One checksum in the making. Throws std::bad_alloc.
class Xxh3 {
 public:
  explicit Xxh3(const Xxh3Library& library);
  ~Xxh3() { library_.free(state_); }
  Xxh3(const Xxh3&) = delete;
  Xxh3& operator=(const Xxh3&) = delete;

  void update(const std::byte* data, std::size_t num_bytes) noexcept {
    library_.update(state_, data, num_bytes);
  }
  std::uint64_t digest() const noexcept { return library_.digest(state_); }

 private:
  const Xxh3Library& library_;
  void* const state_;
};

}  // namespace banaserve
