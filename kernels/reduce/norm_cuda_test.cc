#include "kernels/reduce/norm_cuda.h"

#include <cmath>
#include <random>
#include <vector>

#include "kernels/launch/test_device.h"

namespace thalweg::norm_cuda_test {
namespace {

class NormCudaTest : public DeviceTest {
 protected:
  static double OnDevice(const std::vector<float>& a, const std::vector<float>* b) {
    const DeviceBuffer device_a(a, 4);
    const DeviceBuffer device_b(b == nullptr ? a : *b);
    const DeviceBuffer partials(SquaredNormPartials(a.size()) * sizeof(double));
    EXPECT_TRUE(SquaredNormOnDevice(nullptr, device_a.As<float>(),
                                    b == nullptr ? nullptr : device_b.As<float>(), a.size(),
                                    partials.As<double>())
                    .ok());
    EXPECT_TRUE(FinishDevice().ok());
    double sum = 0;
    for (const double partial : partials.ContentAs<double>()) sum += partial;
    return sum;
  }
};

TEST_F(NormCudaTest, IsTheSquaredNormInFloat64) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  for (const size_t elems : {1u, 31u, 257u, 65536u, 65537u, 150001u}) {
    std::vector<float> a(elems), b(elems);
    long double sum = 0, of_a = 0;
    for (size_t i = 0; i < elems; ++i) {
      a[i] = normal(random);
      b[i] = normal(random) * 1e-3f;
      const long double value = static_cast<long double>(a[i]) + b[i];
      sum += value * value;
      of_a += static_cast<long double>(a[i]) * a[i];
    }
    // Each of `elems` additions of positive numbers, and two operations before it, rounds by at
    // most 2^-53.
    const double allowed = (static_cast<double>(elems) + 2) * 0x1p-53;
    EXPECT_NEAR(OnDevice(a, &b) / static_cast<double>(sum), 1.0, allowed) << elems;
    EXPECT_NEAR(OnDevice(a, nullptr) / static_cast<double>(of_a), 1.0, allowed) << elems;
    EXPECT_EQ(OnDevice(a, &b), OnDevice(a, &b));
  }
}

TEST_F(NormCudaTest, ThereIsNothingToSumUpWithoutElements) {
  EXPECT_EQ(SquaredNormPartials(0), 0u);
  EXPECT_TRUE(SquaredNormOnDevice(nullptr, nullptr, nullptr, 0, nullptr).ok());
}

TEST_F(NormCudaTest, NanShows) {
  EXPECT_TRUE(std::isnan(OnDevice({1.0f, std::nanf(""), 2.0f}, nullptr)));
}

}  // namespace
}  // namespace thalweg::norm_cuda_test
