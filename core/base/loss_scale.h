// A loss scale is the factor by which a loss was multiplied before its backward, and which its
// gradients therefore carry. Residuals, which are left out of gradients and added to later ones,
// are in units of gradients under one loss scale; the scale may have changed by then.
#pragma once

#include <span>

namespace thalweg {

// The scale while nobody has named one.
inline constexpr double kUnknownLossScale = 0;
// Gradients without a loss scale, and residuals in true units, have this one.
inline constexpr double kNoLossScale = 1;

// Returns whether `scale` is unknown, or positive and finite.
bool IsLossScale(double scale);

// Returns whether a residual has to be multiplied in order to get from one scale to another; it
// stays as it is while one of them is unknown.
bool ChangesUnits(double from, double to);

// Converts a residual from units of the loss scale `scale` to those of `to`, which it puts there
// unless that is unknown: the residual's own stays known then.
// Powers of two are exact as long as the elements stay normal numbers; those that float32 cannot
// hold become 0, because an infinite residual would make all later results infinite.
void Rescale(std::span<float> residual, double& scale, double to);

}  // namespace thalweg
