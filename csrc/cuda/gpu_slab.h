// Address space of a GPU whose memory comes and goes by granules. Raw pointers, no framework.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace banaserve {

// The driver's functions for virtual memory, found at run time: the module loads without a driver.
struct VirtualMemory {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_addresses;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;

  // Throws std::runtime_error where there is no driver, or one that is too old.
  static const VirtualMemory& get();
};

// `size` bytes of address space on one device, rounded up to granules. Thread-safe. Nothing on the
// device may use a granule when it is unmapped, or the slab when it ends.
class GpuSlab {
 public:
  // Throws std::runtime_error, std::bad_alloc; std::invalid_argument for a device that is not
  // there.
  GpuSlab(std::size_t num_bytes, int device);
  ~GpuSlab();
  GpuSlab(const GpuSlab&) = delete;
  GpuSlab& operator=(const GpuSlab&) = delete;

  CUdeviceptr address() const { return address_; }
  std::size_t size() const { return granules_.size() * granule_bytes_; }
  std::size_t granule_bytes() const { return granule_bytes_; }
  std::size_t mapped_bytes() const { return num_mapped_ * granule_bytes_; }

  // Backs every granule that the range touches, and leaves those that are backed as they are. The
  // offsets of those that it has backed, which are not cleared. Throws std::bad_alloc and changes
  // nothing where memory is short; std::runtime_error. The range lies within the slab.
  std::vector<std::size_t> map(std::size_t offset, std::size_t num_bytes);

  // Gives up every granule that lies wholly inside the range; bytes that were backed.
  std::size_t unmap(std::size_t offset, std::size_t num_bytes);

 private:
  void map_granule(std::size_t i);
  void unmap_granule(std::size_t i) noexcept;

  const VirtualMemory& driver_;
  CUmemAllocationProp properties_{};
  std::size_t granule_bytes_ = 0;
  CUdeviceptr address_ = 0;
  std::mutex mutex_;                                    // of the granules
  std::vector<CUmemGenericAllocationHandle> granules_;  // 0: not backed
  std::atomic<std::size_t> num_mapped_ = 0;
};

}  // namespace banaserve
