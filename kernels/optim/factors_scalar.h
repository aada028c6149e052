// This header computes a step's factors from the user's settings, in float64 and rounded to float32
// at the end: the same bits on processors and GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/optim/update_scalar.h"

namespace thalweg {

// torch.nn.utils.clip_grad_norm_ adds this to a norm before it divides by it.
inline constexpr double kTorchNormEpsilon = 1e-6;

// OptimSettings are the settings of a group of parameters.
struct OptimSettings {
  double lr = 0;
  const float* lr_at = nullptr;  // where lr is read instead, unless null
  double weight_decay = 0;
  double max_grad_norm = 0;  // gradients are scaled down to this norm; 0: no clipping
  double norm_epsilon = 0;   // added to the norm: kTorchNormEpsilon, 0 in apex's clipping
  bool maximize = false;
};

struct AdamSettings : OptimSettings {
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  bool decoupled = false;  // true for AdamW
  bool bias_correction = true;
};

struct SgdSettings : OptimSettings {
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
};

struct LambSettings : AdamSettings {
  bool grad_averaging = true;
  bool trust_ratio = true;
};

// Returns base^exponent, 0 <= base <= 1, correctly rounded except for at most one result in 2^20:
// it squares pairs of doubles, whose second is what the first leaves out.
THALWEG_HD inline double PowerOf(double base, uint64_t exponent) {
  double power = 1, power_rest = 0;
  double square = base, square_rest = 0;
  for (; exponent != 0; exponent /= 2) {
    if (exponent % 2 != 0) {
      const double product = power * square;
      power_rest = Fma(power, square, -product) + (power * square_rest + power_rest * square);
      power = product + power_rest;
      power_rest = product - power + power_rest;
    }
    const double product = square * square;
    square_rest = Fma(square, square, -product) + 2 * (square * square_rest);
    square = product + square_rest;
    square_rest = product - square + square_rest;
  }
  return power;
}

struct BiasCorrections {
  double first = 1;
  double second_root = 1;
};

// `step` counts from 1.
THALWEG_HD inline BiasCorrections BiasCorrectionsAt(const AdamSettings& s, double step) {
  if (!s.bias_correction) return {};
  const auto t = static_cast<uint64_t>(step);
  return {1 - PowerOf(s.beta1, t), std::sqrt(1 - PowerOf(s.beta2, t))};
}

THALWEG_HD inline double RateOf(const OptimSettings& s) {
  return s.lr_at == nullptr ? s.lr : double{*s.lr_at};
}

// Returns what gradients are multiplied by. `unscale` is 1/scale; `squares` is the sum of the
// squares of all scaled gradients, used where max_grad_norm is set.
THALWEG_HD inline double GradFactorOf(const OptimSettings& s, double unscale, double squares) {
  double factor = s.maximize ? -unscale : unscale;
  if (s.max_grad_norm > 0 && !std::isinf(s.max_grad_norm)) {
    const double norm = std::sqrt(squares) * unscale;
    const double share = s.max_grad_norm / (norm + s.norm_epsilon);
    // The condition is not share < 1: a norm that is NaN must not look like one within the bound.
    if (!(share >= 1)) factor *= share;
  }
  return factor;
}

// `grad` is GradFactorOf().
THALWEG_HD inline AdamFactors FactorsOf(const AdamSettings& s, const BiasCorrections& corrections,
                                        double grad) {
  const double lr = RateOf(s);
  AdamFactors factors;
  factors.grad = static_cast<float>(grad);
  factors.decay = s.decoupled ? static_cast<float>(1 - lr * s.weight_decay) : 1.0f;
  factors.l2 = s.decoupled ? 0.0f : static_cast<float>(s.weight_decay);
  factors.first = static_cast<float>(1 - s.beta1);
  factors.second_keep = static_cast<float>(s.beta2);
  factors.second = static_cast<float>(1 - s.beta2);
  factors.epsilon = static_cast<float>(s.epsilon * corrections.second_root);
  factors.step = static_cast<float>(lr * corrections.second_root / corrections.first);
  return factors;
}

// A parameter's first step uses the gradient as its momentum.
THALWEG_HD inline SgdFactors FactorsOf(const SgdSettings& s, bool is_first, double grad) {
  SgdFactors factors;
  factors.grad = static_cast<float>(grad);
  factors.l2 = static_cast<float>(s.weight_decay);
  factors.keep = is_first ? 0.0f : static_cast<float>(s.momentum);
  factors.take = is_first ? 1.0f : static_cast<float>(1 - s.dampening);
  factors.momentum = static_cast<float>(s.momentum);
  factors.lr = static_cast<float>(RateOf(s));
  factors.nesterov = s.nesterov;
  return factors;
}

THALWEG_HD inline LambFactors FactorsOf(const LambSettings& s, const BiasCorrections& corrections,
                                        double grad) {
  const auto decay = static_cast<float>(s.weight_decay);
  LambFactors factors;
  factors.grad = static_cast<float>(grad);
  factors.l2 = s.decoupled ? 0.0f : decay;
  factors.decay = s.decoupled ? decay : 0.0f;
  factors.first_keep = static_cast<float>(s.beta1);
  factors.first = s.grad_averaging ? static_cast<float>(1 - s.beta1) : 1.0f;
  factors.second_keep = static_cast<float>(s.beta2);
  factors.second = static_cast<float>(1 - s.beta2);
  factors.correction = static_cast<float>(corrections.second_root / corrections.first);
  factors.epsilon = static_cast<float>(s.epsilon * corrections.second_root);
  return factors;
}

// Returns lr times the trust ratio, which is 1 where one of the norms is 0.
THALWEG_HD inline float TrustedRate(float lr, double param_squares, double update_squares) {
  if (param_squares == 0 || update_squares == 0) return lr;
  return static_cast<float>(lr * std::sqrt(param_squares / update_squares));
}

}  // namespace thalweg
