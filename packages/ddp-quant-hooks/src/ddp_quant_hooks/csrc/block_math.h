// The arithmetic of one block, element by element, shared by all compiled backends.
//
// A block is sent as small numbers q and one fp32 scale, the largest magnitude of its values. The same source
// is compiled for processors (cpu_kernels.cpp) and for GPUs (block_kernels.cu). It consists of plain IEEE
// fp32 and integer arithmetic, with one rounding per operator in the order written (compile without
// contraction to fused multiply-add), so all instruction sets and torch's own operators give identical bits.

#ifndef DDP_QUANT_HOOKS_BLOCK_MATH_H
#define DDP_QUANT_HOOKS_BLOCK_MATH_H

#if defined(__CUDACC_RTC__)  // NVRTC has no headers of the host
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
#define BLOCK_MATH static __device__ __forceinline__
#else
#include <cstdint>
#include <cstring>
#define BLOCK_MATH static inline __attribute__((always_inline))
#endif

namespace block_math {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kLargest = 3.40282346638528859812e+38f;
constexpr float kLargestBFloat16 = 3.38953138925153547590e+38f;

BLOCK_MATH uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

BLOCK_MATH float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// One fixed NaN: processors differ in the NaN that they produce.
BLOCK_MATH float quiet_nan() { return float_of(0x7fc00000u); }

// Ordered like the magnitudes, with infinity above every number and NaN above infinity. A maximum of floats
// would drop a NaN.
BLOCK_MATH int32_t magnitude_bits(float value) { return static_cast<int32_t>(bits_of(value) & 0x7fffffffu); }

BLOCK_MATH bool is_finite(float value) { return magnitude_bits(value) < kInfinityBits; }

// NaN stays.
BLOCK_MATH float clamp_to(float value, float limit) {
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

BLOCK_MATH float clamp_to_finite(float value) { return clamp_to(value, kLargest); }

// ---- 16-bit floats ----

BLOCK_MATH float float_of_bfloat16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

BLOCK_MATH uint16_t bfloat16_of_finite(float value) {
    uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

BLOCK_MATH uint16_t bfloat16_of(float value) {
    return (bits_of(value) & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : bfloat16_of_finite(value);
}

BLOCK_MATH float float_of_float16(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    // Move exponent and mantissa to their places in fp32. The power of two corrects the exponent's bias, and
    // makes a subnormal half normal.
    uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}

BLOCK_MATH uint16_t float16_of(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    // Between 0.5 and 1, fp32 counts in steps of 2^-24, as a subnormal half does.
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | half);
}

// ---- values in tensors ----

struct Float32 {
    using Stored = float;
    BLOCK_MATH float widen(float value) { return value; }
    BLOCK_MATH float narrow(float value) { return value; }
};

// A finite mean stays finite: quantized values and residuals can slightly exceed the largest number.
struct BFloat16 {
    using Stored = uint16_t;
    BLOCK_MATH float widen(uint16_t half) { return float_of_bfloat16(half); }
    BLOCK_MATH uint16_t narrow(float value) { return bfloat16_of(clamp_to(value, kLargestBFloat16)); }
};

struct Float16 {
    using Stored = uint16_t;
    BLOCK_MATH float widen(uint16_t half) { return float_of_float16(half); }
    BLOCK_MATH uint16_t narrow(float value) { return float16_of(clamp_to(value, 65504.0f)); }
};

// ---- one block ----

// How the values of a block become numbers of at most `levels`.
struct Encoding {
    float shift;    // a power of two that keeps `inverse` a normal number
    float inverse;  // levels / largest magnitude, of shifted values
    float scale;    // what is sent: the largest magnitude, 0 or NaN
};

BLOCK_MATH float shift_for(float largest) {
    return largest < 0x1p-100f ? 0x1p64f : largest > 0x1p100f ? 0x1p-64f : 1.0f;
}

// `largest`: the maximum of magnitude_bits over the block.
BLOCK_MATH Encoding encoding_of(int32_t largest, float levels) {
    if (largest == 0) return {1.0f, 0.0f, 0.0f};
    if (largest >= kInfinityBits) return {1.0f, 0.0f, quiet_nan()};
    float scale = float_of(static_cast<uint32_t>(largest));
    float shift = shift_for(scale);
    return {shift, levels / (scale * shift), scale};
}

BLOCK_MATH float scaled(float value, Encoding by) { return (value * by.shift) * by.inverse; }

// Round to the nearest integer, ties to even, for |value| < 2^22: the sum has no bits left for a fraction.
BLOCK_MATH int32_t nearest(float value) {
    return static_cast<int32_t>(bits_of(value + 12582912.0f)) - 0x4b400000;
}

BLOCK_MATH float decoded(float number, float step, float scale) { return scale * (number * step); }

// The value to encode: the residual of earlier steps, in bf16, is added. A finite value stays finite.
BLOCK_MATH float with_residual(float value, uint16_t residual) {
    float sum = clamp_to_finite(value + float_of_bfloat16(residual));
    return is_finite(value) ? sum : value;
}

// ---- the mean of one block over the ranks ----

// A running mean, not a sum: equal values keep their bits, and only a difference can overflow.
BLOCK_MATH float running_mean(float mean, float value, float weight) { return mean + (value - mean) * weight; }

// The scales of blocks this large are multiplied by this, so that no difference overflows; undone afterwards.
constexpr float kShrink = 0.25f;
BLOCK_MATH bool must_shrink(float largest) { return largest >= 0x1p100f; }
BLOCK_MATH float grown(float mean) { return clamp_to_finite(mean * (1.0f / kShrink)); }

// ---- the numbers in a payload: number i of the first half of a block, and of the second ----

// An integer of a few bits, in two's complement: with the sign bit flipped it is `kBias` more than the
// number.
template <int kBias>
BLOCK_MATH float number_of(const uint8_t* bits, int64_t i, uint32_t mask, uint32_t sign, int shift) {
#if defined(FOUR_AT_A_TIME)  // on a GPU, where converting integers has a quarter of the throughput of adding floats
    uint32_t word;
    memcpy(&word, bits + i / 4 * 4, 4);
    word = ((word >> shift) & (mask * 0x01010101u)) ^ (sign * 0x01010101u);
    // The byte becomes the last one of a float between 2^23 and 2^24.
    return float_of(__byte_perm(word, 0x4b000000u, 0x7440u | (i & 3))) - static_cast<float>(0x800000 + kBias);
#else
    return static_cast<float>(static_cast<int32_t>(((bits[i] >> shift) & mask) ^ sign) - kBias);
#endif
}

struct Int8 {
    static constexpr float kLevels = 127.0f;
    static constexpr bool kFew = true;
    static constexpr int kPeaked = 3;  // rotated if less than one value in three is large (rotation.h)
    BLOCK_MATH constexpr int64_t bytes(int64_t values) { return values; }
    BLOCK_MATH float first(const uint8_t* payload, int64_t i, int64_t) { return number_of<128>(payload, i, 255, 128, 0); }
    BLOCK_MATH float second(const uint8_t* payload, int64_t i, int64_t half) { return first(payload, half + i, half); }
    BLOCK_MATH void write(uint8_t* payload, int64_t i, int64_t half, float first, float second) {
        payload[i] = static_cast<uint8_t>(nearest(first));
        payload[half + i] = static_cast<uint8_t>(nearest(second));
    }
};

struct Int4 {  // the first half of a block is in the low bits
    static constexpr float kLevels = 7.0f;
    static constexpr bool kFew = true;
    static constexpr int kPeaked = 2;
    BLOCK_MATH constexpr int64_t bytes(int64_t values) { return values / 2; }
    BLOCK_MATH float first(const uint8_t* payload, int64_t i, int64_t) { return number_of<8>(payload, i, 15, 8, 0); }
    BLOCK_MATH float second(const uint8_t* payload, int64_t i, int64_t) { return number_of<8>(payload, i, 15, 8, 4); }
    BLOCK_MATH void write(uint8_t* payload, int64_t i, int64_t, float first, float second) {
        payload[i] = static_cast<uint8_t>((nearest(first) & 15) | ((nearest(second) & 15) << 4));
    }
};

struct Fp16 {  // from -1 to 1
    static constexpr float kLevels = 1.0f;
    static constexpr bool kFew = false;
    BLOCK_MATH constexpr int64_t bytes(int64_t values) { return 2 * values; }
    BLOCK_MATH float first(const uint8_t* payload, int64_t i, int64_t) {
        uint16_t number;
        memcpy(&number, payload + 2 * i, 2);
        return float_of_float16(number);
    }
    BLOCK_MATH float second(const uint8_t* payload, int64_t i, int64_t half) { return first(payload, half + i, half); }
    BLOCK_MATH void write(uint8_t* payload, int64_t i, int64_t half, float first, float second) {
        uint16_t low = float16_of(first), high = float16_of(second);
        memcpy(payload + 2 * i, &low, 2);
        memcpy(payload + 2 * (half + i), &high, 2);
    }
};

struct Int1 {  // signs: a byte has those of four values in the first half of a block, and four in the second
    static constexpr float kLevels = 1.0f;
    static constexpr bool kFew = false;
    BLOCK_MATH constexpr int64_t bytes(int64_t values) { return values / 8; }
    BLOCK_MATH float sign(uint32_t byte, int64_t place) { return 1.0f - static_cast<float>(byte >> place << 1 & 2); }
    BLOCK_MATH float first(const uint8_t* payload, int64_t i, int64_t) { return sign(payload[i / 4], i % 4); }
    BLOCK_MATH float second(const uint8_t* payload, int64_t i, int64_t) { return sign(payload[i / 4], 4 + i % 4); }
    // The payload must be zero before.
    BLOCK_MATH void write(uint8_t* payload, int64_t i, int64_t, float first, float second) {
        uint32_t signs = bits_of(first) >> 31 | bits_of(second) >> 31 << 4;
        payload[i / 4] = static_cast<uint8_t>(payload[i / 4] | signs << i % 4);
    }
};

// Whether a block's scale is its mean magnitude, and not its largest one.
template <class Numbers>
constexpr bool kScaledByMean = false;
template <>
constexpr bool kScaledByMean<Int1> = true;

}  // namespace block_math

#endif
