// This header has the arithmetic of the optimizers, one element at a time, in float32: optim.h says
// what they compute. Every operation rounds once, in the order written here, on every processor.
#pragma once

#include <cmath>

#include "kernels/cast/element.h"
#include "kernels/launch/host_device.h"

namespace thalweg {

// AdamFactors are a step's factors, the same for all elements of a tensor. The corrections of both
// moments are folded into two of them, because processors divide slowly: one division and one root
// remain.
struct AdamFactors {
  float grad = 1;         // 1/scale, negative to ascend
  float decay = 1;        // of the parameter, before the step: 1 - lr·λ
  float l2 = 0;           // λ where it goes through the gradient
  float first = 0;        // 1 - β1
  float second_keep = 0;  // β2
  float second = 0;       // 1 - β2
  float epsilon = 0;      // ε·√(1 - β2^t)
  float step = 0;         // lr·√(1 - β2^t) / (1 - β1^t)
};

struct SgdFactors {
  float grad = 1;
  float l2 = 0;
  float keep = 0;      // of the momentum: μ, 0 in a parameter's first step
  float take = 1;      // of the gradient: 1 - dampening, 1 in a parameter's first step
  float momentum = 0;  // μ, for Nesterov
  float lr = 0;
  bool nesterov = false;
};

struct LambFactors {
  float grad = 1;         // 1/scale/clipping, negative to ascend
  float l2 = 0;           // λ where it goes through the gradient
  float decay = 0;        // λ where it is added to the update
  float first_keep = 0;   // β1
  float first = 0;        // 1 - β1, or 1 without averaging
  float second_keep = 0;  // β2
  float second = 0;       // 1 - β2
  float correction = 1;   // √(1 - β2^t) / (1 - β1^t)
  float epsilon = 0;      // ε·√(1 - β2^t)
};

THALWEG_HD inline float ScaledGradient(float factor, float l2, float param, float grad) {
  const float scaled = grad * factor;
  return l2 != 0 ? Fma(param, l2, scaled) : scaled;
}

// Moves towards `to`, as torch's lerp does, which starts from the nearer end.
THALWEG_HD inline float Approach(float from, float to, float weight) {
  return weight < 0.5f ? Fma(weight, to - from, from) : Fma(weight - 1.0f, to - from, to);
}

THALWEG_HD inline float SecondMoment(float keep, float take, float moment, float grad) {
  return Fma(take * grad, grad, moment * keep);
}

// `largest` is null without AMSGrad.
THALWEG_HD inline float AdamStep(const AdamFactors& f, float param, float grad, float* first,
                                 float* second, float* largest) {
  const float g = ScaledGradient(f.grad, f.l2, param, grad);
  *first = Approach(*first, g, f.first);
  *second = SecondMoment(f.second_keep, f.second, *second, g);
  float bound = *second;
  if (largest != nullptr) {
    // A NaN stays, whichever of the two it is.
    bound = *largest > bound || *largest != *largest ? *largest : bound;
    *largest = bound;
  }
  return param * f.decay + (-f.step * *first) / (std::sqrt(bound) + f.epsilon);
}

// `momentum` is null without momentum.
THALWEG_HD inline float SgdStep(const SgdFactors& f, float param, float grad, float* momentum) {
  float g = ScaledGradient(f.grad, f.l2, param, grad);
  if (momentum != nullptr) {
    *momentum = Fma(*momentum, f.keep, g * f.take);
    g = f.nesterov ? Fma(*momentum, f.momentum, g) : *momentum;
  }
  return Fma(g, -f.lr, param);
}

THALWEG_HD inline void LambMoments(const LambFactors& f, float param, float grad, float* first,
                                   float* second) {
  const float g = ScaledGradient(f.grad, f.l2, param, grad);
  *first = Fma(*first, f.first_keep, g * f.first);
  *second = SecondMoment(f.second_keep, f.second, *second, g);
}

// Computes the update from the new moments.
THALWEG_HD inline float LambUpdate(const LambFactors& f, float param, float first, float second) {
  return Fma(param, f.decay, (first * f.correction) / (std::sqrt(second) + f.epsilon));
}

// `rate` is lr times the trust ratio.
THALWEG_HD inline float LambStep(float rate, float param, float update) {
  return Fma(update, -rate, param);
}

}  // namespace thalweg
