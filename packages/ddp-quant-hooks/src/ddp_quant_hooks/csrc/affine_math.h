// The arithmetic of PyTorch's 8-bit numbers, as in kernels/affine.py: q = round(x / scale) + zero point, with a scale
// and a zero point for each channel.

#ifndef DDP_QUANT_HOOKS_AFFINE_MATH_H
#define DDP_QUANT_HOOKS_AFFINE_MATH_H

#include "block_math.h"

namespace affine_math {

using namespace block_math;

constexpr float kLevels = 255.0f, kSmallestNormal = 0x1p-126f;

struct Parameters {
    float scale, zero_point;
};

// The largest magnitudes of negative and of positive values. A NaN is in both.
struct Extremes {
    int32_t below, above;
};

BLOCK_MATH Extremes extremes_of(float value) {
    int32_t magnitude = magnitude_bits(value);
    return {value > 0.0f ? 0 : magnitude, value < 0.0f ? 0 : magnitude};
}

BLOCK_MATH Parameters parameters_of(Extremes extremes) {
    if (extremes.below >= kInfinityBits || extremes.above >= kInfinityBits) return {quiet_nan(), 0.0f};
    float lowest = -float_of(static_cast<uint32_t>(extremes.below));
    float highest = float_of(static_cast<uint32_t>(extremes.above));
    float width = highest - lowest;
    if (width == 0.0f) return {1.0f, 0.0f};
    // The difference of finite numbers can overflow.
    float scale = is_finite(width) ? width / kLevels : highest / kLevels - lowest / kLevels;
    // Rounding may make a subnormal quotient much too small, but the range must fit.
    if (scale * kLevels < width && scale < kSmallestNormal) scale = float_of(bits_of(scale) + 1);
    float zero_point = static_cast<float>(-nearest(lowest / scale));
    return {scale, clamp_to(zero_point, kLevels)};
}

BLOCK_MATH uint8_t number_of(float value, Parameters by) {
    if (!is_finite(by.scale)) return 0;
    int32_t number = nearest(value / by.scale) + static_cast<int32_t>(by.zero_point);
    return static_cast<uint8_t>(number < 0 ? 0 : number > 255 ? 255 : number);
}

// ---- the mean over the ranks: a sum, with smaller terms where it could overflow ----

BLOCK_MATH float shrink_for(float largest_scale) { return largest_scale >= 0x1p90f ? 0x1p-20f : 1.0f; }

BLOCK_MATH float term(uint8_t number, Parameters by, float shrink) {
    return (by.scale * shrink) * (static_cast<float>(number) - by.zero_point);
}

BLOCK_MATH float mean_of(float sum, float ranks, float shrink) {
    return clamp_to_finite((sum / ranks) * (1.0f / shrink));
}

}  // namespace affine_math

#endif
