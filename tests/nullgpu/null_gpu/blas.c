// cuBLAS without a GPU, see null_gpu.h: products are not computed.
#include "null_gpu.h"

enum { LIBRARY_VERSION = 130100, DESCRIPTION_BYTES = 512, ALGORITHM_BYTES = 96 };

static int handle[64];

static int describe(void** description) {
  *description = calloc(1, DESCRIPTION_BYTES);
  return 0;
}

static int give_zero(int* value) {
  *value = 0;
  return 0;
}

int cublasCreate_v2(void** made) {
  *made = handle;
  return 0;
}

int cublasLtCreate(void** made) { return cublasCreate_v2(made); }

int cublasGetVersion_v2(void* of, int* version) {
  *version = LIBRARY_VERSION;
  return 0;
}

unsigned long cublasLtGetVersion(void) { return LIBRARY_VERSION; }

int cublasGetPointerMode_v2(void* of, int* mode) { return give_zero(mode); }

int cublasGetMathMode(void* of, int* mode) { return give_zero(mode); }

int cublasGetSmCountTarget(void* of, int* count) { return give_zero(count); }

int cublasGetAtomicsMode(void* of, int* mode) { return give_zero(mode); }

int cublasGetStream_v2(void* of, void** stream) {
  *stream = NULL;
  return 0;
}

int cublasLtMatmulDescCreate(void** made, int compute, int scale) { return describe(made); }

int cublasLtMatrixLayoutCreate(void** made, int type, unsigned long rows, unsigned long columns,
                               long stride) {
  return describe(made);
}

int cublasLtMatmulPreferenceCreate(void** made) { return describe(made); }

int cublasLtMatmulAlgoGetHeuristic(void* of, void* operation, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* algorithms, int* found) {
  memset(algorithms, 0, ALGORITHM_BYTES);
  *found = 1;
  return 0;
}

const char* cublasGetStatusString(int status) { return "a status of the null GPU"; }
