// Limits which vector instructions the kernels use, so that a test can run a node as if it had an
// older processor.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace thalweg {

// Limits all kernels of this process to `capability`, in torch's words (ATEN_CPU_CAPABILITY):
// "avx512" and "" set no limit, "avx2" leaves AVX2 and older, and "default" leaves what every
// processor of this architecture has. A limit only takes away: on a processor without AVX-512,
// "avx512" changes nothing. InvalidArgument: any other text, or "avx2" and "avx512" where the
// processor is not x86. Not thread-safe: call it before the first kernel runs.
absl::Status LimitCpuCapability(const std::string& capability);

// Returns the name of the instruction set that the kernels use, such as "AVX2".
std::string CpuCapability();

}  // namespace thalweg
