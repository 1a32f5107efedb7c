// CUDA's runtime without a GPU, see null_gpu.h. Loaded by LD_PRELOAD: its functions precede those
// of libcudart, which needs a driver.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "null_gpu.h"

#define ALIGNMENT (2ull << 20)
#define MOST_BLOCKS 65536

struct block {
  char* start;
  size_t size;
  int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[MOST_BLOCKS];
static int num_blocks;
static char* next_address = (char*)NULL_GPU_BASE;
static unsigned long long used_bytes[NULL_GPU_MOST];
static __thread int current_device;

// A real driver does not survive a fork: say where a program relies on it.
static void note_use(const char* function) {
  static int first_process;
  int process = getpid();
  if (first_process && first_process != process)
    fprintf(stderr, "null GPU: %s in process %d, but CUDA was used in %d before the fork\n",
            function, process, first_process);
  first_process = process;
}

// ---- memory

static cudaError_t allocate(void** pointer, size_t size) {
  cudaError_t error = cudaErrorMemoryAllocation;
  size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (!rounded) rounded = ALIGNMENT;
  *pointer = NULL;
  pthread_mutex_lock(&lock);
  if (used_bytes[current_device] + rounded <= NULL_GPU_BYTES && num_blocks < MOST_BLOCKS) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* found = mmap(next_address, rounded, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found != MAP_FAILED) {
      next_address += rounded + ALIGNMENT;
      used_bytes[current_device] += rounded;
      blocks[num_blocks++] = (struct block){found, rounded, current_device};
      *pointer = found;
      error = cudaSuccess;
    }
  }
  pthread_mutex_unlock(&lock);
  return error;
}

static cudaError_t release(void* pointer) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_blocks; i++) {
    if (blocks[i].start != pointer) continue;
    munmap(blocks[i].start, blocks[i].size);
    used_bytes[blocks[i].device] -= blocks[i].size;
    blocks[i] = blocks[--num_blocks];
    break;
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  note_use("cudaMalloc");
  return allocate(pointer, size);
}

cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t stream) {
  return allocate(pointer, size);
}

cudaError_t cudaFree(void* pointer) { return pointer ? release(pointer) : cudaSuccess; }

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) { return release(pointer); }

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  note_use("cudaHostAlloc");
  int map = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *pointer = mmap(NULL, size + 4096, PROT_READ | PROT_WRITE, map, -1, 0);
  return *pointer == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  note_use("cudaMemGetInfo");
  *total = NULL_GPU_BYTES;
  unsigned long long taken = used_bytes[current_device] + NULL_GPU_TAKEN_BYTES;
  *free_bytes = taken < NULL_GPU_BYTES ? NULL_GPU_BYTES - taken : 0;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  found->type = null_gpu_is_device(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->devicePointer = (void*)pointer;
  found->hostPointer = null_gpu_is_device(pointer) ? NULL : (void*)pointer;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_blocks; i++)
    if ((char*)pointer >= blocks[i].start && (char*)pointer < blocks[i].start + blocks[i].size)
      found->device = blocks[i].device;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  return allocate(pointer, 4096);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  static int only;
  *pool = (cudaMemPool_t)&only;
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void* value) {
  *(unsigned long long*)value = 0;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return cudaErrorNotSupported;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  return cudaErrorNotSupported;
}

// ---- copies

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t size, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind) {
  for (size_t row = 0; row < height; row++)
    memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}

cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* sizes,
                                 size_t count, struct cudaMemcpyAttributes* attributes,
                                 size_t* attribute_of, size_t num_attributes, cudaStream_t stream) {
  for (size_t i = 0; i < count; i++) memmove(to[i], from[i], sizes[i]);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  memset(pointer, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  return cudaMemset(pointer, value, size);
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  note_use("cudaGetDeviceCount");
  *count = null_gpu_visible();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  note_use("cudaSetDevice");
  if (device < 0 || device >= null_gpu_visible()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = NULL_GPU_CUDA;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* found, int device) {
  note_use("cudaGetDeviceProperties");
  memset(found, 0, sizeof *found);
  strcpy(found->name, NULL_GPU_NAME);
  memset(&found->uuid, device + 1, sizeof found->uuid);
  found->totalGlobalMem = NULL_GPU_BYTES;
  found->major = NULL_GPU_MAJOR;
  found->minor = NULL_GPU_MINOR;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->l2CacheSize = 52428800;
  found->memoryBusWidth = 5120;
  found->texturePitchAlignment = 32;
  found->textureAlignment = 512;
  found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = 1;
  found->ECCEnabled = found->managedMemory = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr which, int device) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 2147483647;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 2619000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 5120;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 52428800;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = NULL_GPU_MAJOR;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = NULL_GPU_MINOR;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 233472;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 0;
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

// ---- streams, events, graphs

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  static long long number = 0x1000;
  note_use("cudaStreamCreateWithPriority");
  *stream = (cudaStream_t)__sync_add_and_fetch(&number, 16);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// An event is the time at which it was recorded, in milliseconds.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = calloc(1, sizeof(double));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (event) *(double*)event = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (float)(*(double*)to - *(double*)from);
  return cudaSuccess;
}

static int is_capturing;
static cudaStream_t captured_stream;

static enum cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
  return is_capturing && stream == captured_stream ? cudaStreamCaptureStatusActive
                                                   : cudaStreamCaptureStatusNone;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  is_capturing = 1;
  captured_stream = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  is_capturing = 0;
  *graph = calloc(1, 64);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = capture_status(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  *status = capture_status(stream);
  if (id) *id = 7;
  if (graph) *graph = calloc(1, 64);
  if (num_nodes) *num_nodes = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long flags) {
  *made = calloc(1, 64);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

// ---- kernels

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* found, const void* function) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 10 * NULL_GPU_MAJOR + NULL_GPU_MINOR;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* function,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* function,
                                                          int size, size_t shared) {
  *count = 2;
  return cudaSuccess;
}

// Called by the code that nvcc makes of `kernel<<<...>>>()` and of a library's beginning.
void** __cudaRegisterFatBinary(void* binary) { return calloc(1, 64); }

char __cudaInitModule(void** handle) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
  *shared = 0;
  *(void**)stream = NULL;
  return cudaSuccess;
}

// ---- errors, entry points of the driver

cudaError_t cudaGetLastError(void) { return cudaSuccess; }

cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t error) { return error ? "nullGpuError" : "cudaSuccess"; }

const char* cudaGetErrorString(cudaError_t error) {
  return error ? "an error of the null GPU" : "no error";
}

static CUresult succeed(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = driver ? dlsym(driver, name) : NULL;
  *function = found ? found : (void*)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
