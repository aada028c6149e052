// These macros mark code that compiles for processors and for GPUs from one source.
#pragma once

#if defined(__CUDACC__)
// THALWEG_HD marks code that runs on either: the formulas on which both must agree.
#define THALWEG_HD __host__ __device__
// THALWEG_DEVICE marks a kernel's body: a GPU's threads run it, or those of kernels/emulator.
#define THALWEG_DEVICE __device__
#else
#define THALWEG_HD
#define THALWEG_DEVICE
#endif
