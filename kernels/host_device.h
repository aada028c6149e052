// Marks what compiles for processors and for GPUs from one source.
#pragma once

#if defined(__CUDACC__)
// Runs on either: the formulas that both must agree on.
#define THALWEG_HD __host__ __device__
// The body of a kernel: run by a GPU's threads, or by those of kernels/emulator.
#define THALWEG_DEVICE __device__
#else
#define THALWEG_HD
#define THALWEG_DEVICE
#endif
