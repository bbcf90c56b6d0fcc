// Which blocks are rotated before they are encoded, and how: element by element, for every compiled backend.
//
// A few large values make a block's scale large, which leaves hardly any levels for the others. The rotation
// spreads every value over the whole block: values get fixed random signs, and then the Walsh-Hadamard
// transform, sums and differences of values 1, 2, 4, ... apart. Its numbers are sent with the scale's sign
// bit set. The same transform, followed by the signs and divided by the number of values, restores the block.

#ifndef DDP_QUANT_HOOKS_ROTATION_H
#define DDP_QUANT_HOOKS_ROTATION_H

#include "block_math.h"

namespace block_math {

// The sign bit to flip for the value at a place of its block. A hash, so that no pattern of a gradient
// matches it.
BLOCK_MATH constexpr uint32_t sign_at(uint32_t place) {
    uint32_t hash = (place + 1u) * 0x9e3779b1u;
    hash = (hash ^ (hash >> 15)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    return hash & 0x80000000u;
}

BLOCK_MATH float turned_by(float value, uint32_t sign) { return float_of(bits_of(value) ^ sign); }

// Of a power of two.
BLOCK_MATH float root_of(int64_t block) {
    float root = 1.0f;
    for (; block >= 4; block /= 4) root *= 2.0f;
    return block == 2 ? root * 1.41421356237309504880f : root;
}

// Whether rotating a block may pay: few of its values are above this fraction of the largest. `above`: how
// many.
constexpr float kPeak = 0.25f;
template <class Numbers>
BLOCK_MATH bool is_peaked(int32_t above, int64_t block) {
    return above * Numbers::kPeaked < static_cast<int32_t>(block);
}

// Whether no result of the rotation can overflow or be subnormal. Blocks with zeros are not rotated, because
// a zero must stay zero: it belongs to a parameter that took no part.
BLOCK_MATH bool may_rotate(int32_t smallest, int32_t largest) {
    constexpr int32_t kLow = (127 - 100) << 23, kHigh = (127 + 100) << 23;  // 2^-100 and 2^100
    return smallest > 0 && largest >= kLow && largest <= kHigh;
}

// Whether the rotated block has smaller rounding errors, given the largest magnitudes of both.
BLOCK_MATH bool rotation_pays(int32_t largest, int32_t rotated, int64_t block) {
    return float_of(static_cast<uint32_t>(rotated)) < float_of(static_cast<uint32_t>(largest)) * root_of(block);
}

BLOCK_MATH bool is_rotated(float scale) { return bits_of(scale) >> 31; }

// The factor for the numbers of a rotated block before the transform restores it; exact.
BLOCK_MATH float restoring(float scale, int64_t block) {
    return is_rotated(scale) ? -scale * (1.0f / static_cast<float>(block)) : scale;
}

}  // namespace block_math

#endif
