// CUDA's driver without a GPU, see null_gpu.h.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>

#include "kernels.h"
#include "null_gpu.h"
#undef cuGetProcAddress

static int only_context;
static char* next_reservation = (char*)NULL_GPU_RESERVED;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = NULL_GPU_CUDA;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = null_gpu_visible();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  snprintf(name, size, "%s", NULL_GPU_NAME);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  memset(uuid, device + 1, sizeof *uuid);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* size, CUdevice device) {
  *size = NULL_GPU_BYTES;
  return CUDA_SUCCESS;
}

// Numbers of attributes are those of the runtime.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  int (*of_runtime)(int*, int, int) = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
  *value = 1;
  if (of_runtime) of_runtime(value, which, device);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)&only_context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return cuCtxGetCurrent(context);
}

CUresult cuCtxGetDevice(CUdevice* device) {
  int (*of_runtime)(int*) = dlsym(RTLD_DEFAULT, "cudaGetDevice");
  *device = 0;
  if (of_runtime) of_runtime(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

// A module is its image, which Triton keeps until it has the function.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = malloc(sizeof(struct null_gpu_function));
  null_gpu_load((struct null_gpu_function*)*function, (const char*)module, name);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void** arguments,
                          void** extra) {
  const struct null_gpu_function* found = (const struct null_gpu_function*)function;
  if (found->kernel) null_gpu_launch(found, arguments, how->gridDimX, how->gridDimY);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                            : 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "an error of the null GPU";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)value = pointer;
  else
    *(int*)value = null_gpu_is_device((void*)pointer) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* how) {
  *count = 16;
  return CUDA_SUCCESS;
}

// ---- memory whose addresses are reserved before it is there

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  *total = NULL_GPU_BYTES;
  *free_bytes = NULL_GPU_BYTES - NULL_GPU_TAKEN_BYTES;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags which) {
  *size = 2 << 20;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t alignment, CUdeviceptr near,
                             unsigned long long flags) {
  int map = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* found = mmap(next_reservation, size, PROT_NONE, map, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  next_reservation += size + (2 << 20);
  *pointer = (CUdeviceptr)found;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  munmap((void*)pointer, size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  static long number = 1;
  *handle = __sync_fetch_and_add(&number, 1);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  mprotect((void*)pointer, size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  madvise((void*)pointer, size, MADV_DONTNEED);
  mprotect((void*)pointer, size, PROT_NONE);
  return CUDA_SUCCESS;
}

// ---- entry points

static CUresult succeed(void) { return CUDA_SUCCESS; }

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* result) {
  char newer[256];
  void* found = dlsym(RTLD_DEFAULT, name);
  snprintf(newer, sizeof newer, "%s_v2", name);
  if (!found) found = dlsym(RTLD_DEFAULT, newer);
  *function = found ? found : (void*)succeed;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
