#include "xxh3.h"

#include <dlfcn.h>

#include <new>
#include <stdexcept>
#include <string>

namespace banaserve {
namespace {

void* find(void* library, const char* name) {
  if (void* const found = ::dlsym(library, name)) return found;
  throw std::runtime_error(std::string("the xxhash package's library has no ") + name +
                           ": install a wheel of xxhash 3.5 or later");
}

template <typename Function>
void assign(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(find(library, name));
}

}  // namespace

Xxh3Library load_xxh3(const char* path) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  Xxh3Library functions{};
  assign(functions.create, library, "XXH3_createState");
  assign(functions.free, library, "XXH3_freeState");
  assign(functions.reset, library, "XXH3_64bits_reset");
  assign(functions.digest, library, "XXH3_64bits_digest");
  // Takes the widest instructions that the processor has; older versions have SSE2 alone.
  if (void* const update = ::dlsym(library, "XXH3_64bits_update_dispatch")) {
    functions.update = reinterpret_cast<decltype(functions.update)>(update);
  } else {
    assign(functions.update, library, "XXH3_64bits_update");
  }
  return functions;
}

Xxh3::Xxh3(const Xxh3Library& library) : library_(library), state_(library.create()) {
  if (state_ == nullptr) throw std::bad_alloc();
  library_.reset(state_);
}

}  // namespace banaserve
