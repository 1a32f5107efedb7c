// The Python door of csrc/cuda: banaserve._native_cuda.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gpu_copy.h"
#include "gpu_slab.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Addresses = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<banaserve::CopyPair> pairs_of(const Addresses& dst, const Addresses& src,
                                          std::int64_t num_bytes, std::uintptr_t stream) {
  if (dst.size() != src.size()) throw nb::value_error("src is not as long as dst");
  if (num_bytes < 0) throw nb::value_error("num_bytes is negative");
  if (stream == 0) throw nb::value_error("stream is the default stream");
  std::vector<banaserve::CopyPair> pairs(dst.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (dst.data()[i] == 0) throw nb::value_error("dst holds a null address");
    if (src.data()[i] == 0) throw nb::value_error("src holds a null address");
    pairs[i] = {static_cast<std::uint64_t>(dst.data()[i]),
                static_cast<std::uint64_t>(src.data()[i])};
  }
  return pairs;
}

template <auto copy>
void copy_on_stream(const Addresses& dst, const Addresses& src, std::int64_t num_bytes,
                    std::uintptr_t stream) {
  const auto pairs = pairs_of(dst, src, num_bytes, stream);
  cudaError_t error;
  {
    nb::gil_scoped_release release;
    error = copy(pairs.data(), pairs.size(), static_cast<std::size_t>(num_bytes),
                 reinterpret_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return;
  // CUDA would report it once more, as that of a later call.
  cudaGetLastError();
  throw std::runtime_error(cudaGetErrorString(error));
}

// A range of a slab, checked.
void require_inside(const banaserve::GpuSlab& slab, std::int64_t offset, std::int64_t num_bytes) {
  const auto size = static_cast<std::int64_t>(slab.size());
  if (offset < 0 || num_bytes < 0 || num_bytes > size || offset > size - num_bytes) {
    throw nb::value_error("offset and num_bytes do not lie within the slab");
  }
}

void bind_slab(nb::module_& module) {
  using banaserve::GpuSlab;
  nb::class_<GpuSlab>(module, "GpuSlab",
                      R"(Reserved addresses of a GPU; granules of them are backed by memory.

Nothing on the device may use a granule when it is unmapped, or the slab when it is dropped.

Raises:
    ValueError: Names the argument at fault.
    MemoryError: There are no addresses left.
    RuntimeError: There is no driver, or it refuses.)")
      .def(
          "__init__",
          [](GpuSlab* self, std::int64_t num_bytes, int device) {
            if (num_bytes <= 0) throw nb::value_error("num_bytes is not positive");
            if (device < 0) throw nb::value_error("device is negative");
            new (self) GpuSlab(static_cast<std::size_t>(num_bytes), device);
          },
          "num_bytes"_a, "device"_a)
      .def_prop_ro("address", &GpuSlab::address)
      .def_prop_ro("num_bytes", &GpuSlab::size)
      .def_prop_ro("granule_bytes", &GpuSlab::granule_bytes)
      .def_prop_ro("mapped_bytes", &GpuSlab::mapped_bytes)
      .def(
          "map",
          [](GpuSlab& self, std::int64_t offset, std::int64_t num_bytes) {
            require_inside(self, offset, num_bytes);
            const nb::gil_scoped_release release;
            return self.map(static_cast<std::size_t>(offset), static_cast<std::size_t>(num_bytes));
          },
          "offset"_a, "num_bytes"_a,
          "Back every granule that the range touches; the offsets of those that were not, which "
          "are "
          "not cleared.\n\n"
          "Raises:\n    MemoryError: Memory is short; nothing has changed.")
      .def(
          "unmap",
          [](GpuSlab& self, std::int64_t offset, std::int64_t num_bytes) {
            require_inside(self, offset, num_bytes);
            const nb::gil_scoped_release release;
            return self.unmap(static_cast<std::size_t>(offset),
                              static_cast<std::size_t>(num_bytes));
          },
          "offset"_a, "num_bytes"_a,
          "Give up every granule that lies wholly inside the range; the bytes given up.");
}

}  // namespace

NB_MODULE(_native_cuda, module) {
  module.doc() = "Native parts of banaserve for NVIDIA GPUs.";
  module.def("copy_batch", &copy_on_stream<banaserve::copy_batch>, "dst"_a.noconvert(),
             "src"_a.noconvert(), "num_bytes"_a, "stream"_a,
             R"(Queue copies on the copy engines, in one call, in any order.

Args:
    dst: [num_copies] int64, addresses in device memory or pinned host memory. Read at once.
    src: [num_copies] int64, the same.
    num_bytes: Of each copy.
    stream: A CUDA stream's handle; not the default stream.

Raises:
    ValueError: Names the argument at fault; nothing has been queued.
    RuntimeError: CUDA refuses.)");
  module.def("copy_by_kernel", &copy_on_stream<banaserve::copy_by_kernel>, "dst"_a.noconvert(),
             "src"_a.noconvert(), "num_bytes"_a, "stream"_a,
             "copy_batch, as a kernel: for many small blocks.");
  bind_slab(module);
}
