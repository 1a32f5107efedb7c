// Kernels that the null GPU computes after all, see kernels.c.
#pragma once

#include <stddef.h>

#define NULL_GPU_MOST_ARGUMENTS 16

union null_gpu_argument {
  char* pointer;
  int number;
};

struct null_gpu_kernel {
  const char* name;
  // A letter for each argument: p for a pointer, i for a number.
  const char* arguments;
  void (*run)(const union null_gpu_argument* arguments, int blocks_x, int blocks_y);
};

// A kernel as it was loaded: Triton leaves numbers out that are 1.
struct null_gpu_function {
  const struct null_gpu_kernel* kernel;  // NULL for one that does nothing
  int sizes[NULL_GPU_MOST_ARGUMENTS];    // of its arguments, in bytes
};

// Finds the kernel of that name in a cubin; one without a kernel if its arguments are others.
void null_gpu_load(struct null_gpu_function* function, const char* cubin, const char* name);

void null_gpu_launch(const struct null_gpu_function* function, void** arguments, int blocks_x,
                     int blocks_y);
