// NVML without a GPU, see null_gpu.h.
#include <stdio.h>

#include "null_gpu.h"

typedef int nvmlReturn_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };

static int handles[NULL_GPU_MOST];

static int index_of(void* device) { return (int)((int*)device - handles); }

nvmlReturn_t nvmlInit_v2(void) { return SUCCESS; }

nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return SUCCESS; }

nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  *count = null_gpu_installed();
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= (unsigned)null_gpu_installed()) return INVALID_ARGUMENT;
  *device = &handles[index];
  return SUCCESS;
}

// By these names torch counts GPUs without starting CUDA, which no fork would survive.
nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }

nvmlReturn_t nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetUUID(void* device, char* uuid, unsigned size) {
  snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012d", index_of(device) + 1);
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const char* number = strrchr(uuid, '-');
  return nvmlDeviceGetHandleByIndex_v2(number ? atoi(number + 1) - 1 : 0, device);
}

nvmlReturn_t nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = index_of(device);
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = NULL_GPU_MAJOR;
  *minor = NULL_GPU_MINOR;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(void* device, char* name, unsigned size) {
  snprintf(name, size, "%s", NULL_GPU_NAME);
  return SUCCESS;
}

// Total, free, used; the second form begins with its version and reserved memory after the total.
nvmlReturn_t nvmlDeviceGetMemoryInfo(void* device, unsigned long long* sizes) {
  sizes[0] = NULL_GPU_BYTES;
  sizes[1] = NULL_GPU_BYTES - NULL_GPU_TAKEN_BYTES;
  sizes[2] = NULL_GPU_TAKEN_BYTES;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void* device, unsigned long long* sizes) {
  sizes[1] = NULL_GPU_BYTES;
  sizes[2] = 0;
  sizes[3] = NULL_GPU_BYTES - NULL_GPU_TAKEN_BYTES;
  sizes[4] = NULL_GPU_TAKEN_BYTES;
  return SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "%s", NULL_GPU_DRIVER);
  return SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = NULL_GPU_CUDA;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(void* device, unsigned* percents) {
  percents[0] = 5;
  percents[1] = 3;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(void* device, void* peer, int kind, int* status) {
  *status = 0;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(void* device, int kind, unsigned* mhz) {
  *mhz = 1980;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(void* device, int kind, unsigned* mhz) {
  *mhz = 1980;
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* found) {
  *count = 0;
  return SUCCESS;
}

const char* nvmlErrorString(nvmlReturn_t error) { return "an error of the null GPU"; }
