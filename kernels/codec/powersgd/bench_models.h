// The matrices of a model, for the benchmarks of PowerSGD.
#pragma once

#include <cstddef>

namespace thalweg {

struct Matrices {
  size_t rows;
  size_t cols;
  size_t count;
};

// The convolutions and the classifier.
inline constexpr Matrices kResNet50[] = {
    {64, 147, 1},    {64, 64, 1},    {64, 576, 3},   {256, 64, 4},   {64, 256, 2},   {128, 256, 1},
    {128, 1152, 4},  {512, 128, 4},  {512, 256, 1},  {128, 512, 3},  {256, 512, 1},  {256, 2304, 6},
    {1024, 256, 6},  {1024, 512, 1}, {256, 1024, 5}, {512, 1024, 1}, {512, 4608, 3}, {2048, 512, 3},
    {2048, 1024, 1}, {512, 2048, 2}, {1000, 2048, 1}};

}  // namespace thalweg
