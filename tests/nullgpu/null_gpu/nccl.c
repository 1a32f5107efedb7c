// NCCL between GPUs that compute nothing, see null_gpu.h: a rank keeps what it has, no rank waits
// for another one.
#include "null_gpu.h"

typedef void* cudaStream_t;
typedef struct {
  char bytes[128];
} ncclUniqueId;
typedef struct {
  int rank, num_ranks;
} communicator;

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, VERSION = 22809 };

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? sizes[type] : 0;
}

static int keep(const void* sent, void* received, size_t count, int type) {
  if (sent && received && sent != received) memmove(received, sent, count * size_of(type));
  return SUCCESS;
}

int ncclGetVersion(int* version) {
  *version = VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 1, sizeof *id);
  return SUCCESS;
}

const char* ncclGetErrorString(int error) { return "an error of the null GPU"; }

const char* ncclGetLastError(void* of) { return ncclGetErrorString(SUCCESS); }

// ---- communicators

int ncclCommInitRankConfig(void** made, int num_ranks, ncclUniqueId id, int rank, void* how) {
  communicator* found = malloc(sizeof *found);
  *found = (communicator){rank, num_ranks};
  *made = found;
  return SUCCESS;
}

int ncclCommInitRank(void** made, int num_ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, num_ranks, id, rank, NULL);
}

int ncclCommInitRankScalable(void** made, int num_ranks, int rank, int num_ids, ncclUniqueId* ids,
                             void* how) {
  return ncclCommInitRankConfig(made, num_ranks, *ids, rank, how);
}

int ncclCommCount(const communicator* of, int* count) {
  *count = of->num_ranks;
  return SUCCESS;
}

int ncclCommUserRank(const communicator* of, int* rank) {
  *rank = of->rank;
  return SUCCESS;
}

int ncclCommGetAsyncError(void* of, int* error) {
  *error = SUCCESS;
  return SUCCESS;
}

int ncclCommWindowRegister(void* of, void* buffer, size_t size, void** window, int flags) {
  *window = buffer;
  return SUCCESS;
}

int ncclCommRegister(void* of, void* buffer, size_t size, void** handle) {
  *handle = buffer;
  return SUCCESS;
}

int ncclMemAlloc(void** pointer, size_t size) { return INVALID_ARGUMENT; }

// ---- collectives

int ncclAllReduce(const void* sent, void* received, size_t count, int type, int operation, void* of,
                  cudaStream_t stream) {
  return keep(sent, received, count, type);
}

int ncclReduce(const void* sent, void* received, size_t count, int type, int operation, int root,
               const communicator* of, cudaStream_t stream) {
  return of->rank == root ? keep(sent, received, count, type) : SUCCESS;
}

int ncclBroadcast(const void* sent, void* received, size_t count, int type, int root,
                  const communicator* of, cudaStream_t stream) {
  return of->rank == root ? keep(sent, received, count, type) : SUCCESS;
}

int ncclAllGather(const void* sent, void* received, size_t count, int type, const communicator* of,
                  cudaStream_t stream) {
  return keep(sent, (char*)received + of->rank * count * size_of(type), count, type);
}

int ncclReduceScatter(const void* sent, void* received, size_t count, int type, int operation,
                      const communicator* of, cudaStream_t stream) {
  return keep((const char*)sent + of->rank * count * size_of(type), received, count, type);
}
