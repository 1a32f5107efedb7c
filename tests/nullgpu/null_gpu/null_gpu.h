// A GPU that computes nothing, for tests of the Python on CUDA's path without a GPU: its memory is
// memory of the process at addresses of its own, copies are carried out, and kernels do nothing.
// Stands for libcudart (runtime.c), libcuda (driver.c), cuBLAS (blas.c) and NVML (nvml.c).
// Functions that are not written out succeed and do nothing; ../environment_files.py generates
// them.
#pragma once

#include <stdlib.h>
#include <string.h>

#define NULL_GPU_NAME "NVIDIA H100 80GB HBM3"
#define NULL_GPU_DRIVER "580.159.04"
#define NULL_GPU_CUDA 13000
#define NULL_GPU_MAJOR 9
#define NULL_GPU_MINOR 0
#define NULL_GPU_BYTES 85000000000ull
// What the contexts of other processes would take.
#define NULL_GPU_TAKEN_BYTES 600000000ull
// Addresses of GPU memory; the driver's reservations lie in the upper part.
#define NULL_GPU_BASE 0x500000000000ull
#define NULL_GPU_RESERVED 0x508000000000ull
#define NULL_GPU_END 0x510000000000ull
#define NULL_GPU_MOST 16

static inline int null_gpu_is_device(const void* pointer) {
  unsigned long long address = (unsigned long long)pointer;
  return address >= NULL_GPU_BASE && address < NULL_GPU_END;
}

// Number of GPUs of the machine: the value of BANASERVE_NULL_GPU, 1 if it is not a number.
static inline int null_gpu_installed(void) {
  const char* said = getenv("BANASERVE_NULL_GPU");
  int number = said ? atoi(said) : 1;
  return number < 1 ? 1 : number > NULL_GPU_MOST ? NULL_GPU_MOST : number;
}

// Number of GPUs that CUDA_VISIBLE_DEVICES leaves.
static inline int null_gpu_visible(void) {
  const char* said = getenv("CUDA_VISIBLE_DEVICES");
  if (!said) return null_gpu_installed();
  if (!*said) return 0;
  int number = 1;
  for (const char* at = said; *at; at++) number += *at == ',';
  return number;
}
