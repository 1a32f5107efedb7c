#include "gpu_slab.h"

#include <cuda_runtime_api.h>

#include <new>
#include <stdexcept>
#include <string>

namespace banaserve {
namespace {

// All of these functions are as old as this version.
constexpr unsigned driver_version = 11000;

template <typename Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, driver_version, cudaEnableDefault, &status);
  if (error != cudaSuccess || found == nullptr) {
    cudaGetLastError();  // or CUDA would report it as that of a later call
    throw std::runtime_error(std::string("this driver has no ") + name + ": " +
                             cudaGetErrorString(error));
  }
  function = reinterpret_cast<Function>(found);
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
  if (result == CUDA_ERROR_INVALID_DEVICE) {
    throw std::invalid_argument("device is none of this machine's");
  }
  throw std::runtime_error(std::string(what) + " failed with CUDA error " + std::to_string(result));
}

VirtualMemory load() {
  VirtualMemory driver{};
  find(driver.granularity, "cuMemGetAllocationGranularity");
  find(driver.reserve, "cuMemAddressReserve");
  find(driver.free_addresses, "cuMemAddressFree");
  find(driver.create, "cuMemCreate");
  find(driver.release, "cuMemRelease");
  find(driver.map, "cuMemMap");
  find(driver.unmap, "cuMemUnmap");
  find(driver.set_access, "cuMemSetAccess");
  return driver;
}

}  // namespace

const VirtualMemory& VirtualMemory::get() {
  static const VirtualMemory driver = load();
  return driver;
}

GpuSlab::GpuSlab(std::size_t num_bytes, int device) : driver_(VirtualMemory::get()) {
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  check(driver_.granularity(&granule_bytes_, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
  granules_.resize((num_bytes + granule_bytes_ - 1) / granule_bytes_);
  check(driver_.reserve(&address_, size(), 0, 0, 0), "cuMemAddressReserve");
}

GpuSlab::~GpuSlab() {
  for (std::size_t i = 0; i < granules_.size(); ++i) {
    if (granules_[i] != 0) unmap_granule(i);
  }
  driver_.free_addresses(address_, size());
}

std::vector<std::size_t> GpuSlab::map(std::size_t offset, std::size_t num_bytes) {
  if (num_bytes == 0) return {};
  const std::lock_guard lock(mutex_);
  const std::size_t last = (offset + num_bytes - 1) / granule_bytes_;
  std::vector<std::size_t> backed;
  backed.reserve(granules_.size());
  try {
    for (std::size_t i = offset / granule_bytes_; i <= last; ++i) {
      if (granules_[i] != 0) continue;
      map_granule(i);
      backed.push_back(i * granule_bytes_);
    }
  } catch (...) {
    for (const std::size_t at : backed) unmap_granule(at / granule_bytes_);
    throw;
  }
  return backed;
}

std::size_t GpuSlab::unmap(std::size_t offset, std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t before = mapped_bytes();
  const std::size_t end = (offset + num_bytes) / granule_bytes_;
  for (std::size_t i = (offset + granule_bytes_ - 1) / granule_bytes_; i < end; ++i) {
    if (granules_[i] != 0) unmap_granule(i);
  }
  return before - mapped_bytes();
}

void GpuSlab::map_granule(std::size_t i) {
  CUmemGenericAllocationHandle memory = 0;
  check(driver_.create(&memory, granule_bytes_, &properties_, 0), "cuMemCreate");
  const CUdeviceptr at = address_ + i * granule_bytes_;
  if (const CUresult result = driver_.map(at, granule_bytes_, 0, memory, 0)) {
    driver_.release(memory);
    check(result, "cuMemMap");
  }
  granules_[i] = memory;
  ++num_mapped_;
  const CUmemAccessDesc access{properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (const CUresult result = driver_.set_access(at, granule_bytes_, &access, 1)) {
    unmap_granule(i);
    check(result, "cuMemSetAccess");
  }
}

void GpuSlab::unmap_granule(std::size_t i) noexcept {
  driver_.unmap(address_ + i * granule_bytes_, granule_bytes_);
  driver_.release(granules_[i]);
  granules_[i] = 0;
  --num_mapped_;
}

}  // namespace banaserve
