// How the kernels on a GPU read and write values, 16 bytes at a time wherever memory is aligned.

#ifndef DDP_QUANT_HOOKS_GPU_MEMORY_H
#define DDP_QUANT_HOOKS_GPU_MEMORY_H

#include "block_math.h"

namespace gpu_memory {

using namespace block_math;

constexpr int kWarp = 32;

template <int kBytes>
struct alignas(kBytes) Piece {
    uint32_t words[kBytes / 4];
};

BLOCK_MATH bool is_aligned(const void* memory) { return (reinterpret_cast<uint64_t>(memory) & 15) == 0; }

// Copies whole words between memory and registers. `aligned`: of the memory's start, from which all offsets here are
// multiples of kBytes.
template <int kBytes>
BLOCK_MATH void read(void* registers, const void* memory, bool aligned) {
    constexpr int kPiece = kBytes < 16 ? kBytes : 16;
    auto target = static_cast<Piece<kPiece>*>(registers);
    auto source = static_cast<const uint8_t*>(memory);
    #pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i, source += kPiece) {
        if (aligned) {
            target[i] = *reinterpret_cast<const Piece<kPiece>*>(source);
        } else {
            #pragma unroll
            for (int k = 0; k < kPiece; k += 4)
                target[i].words[k / 4] = source[k] | source[k + 1] << 8 | source[k + 2] << 16 |
                                         static_cast<uint32_t>(source[k + 3]) << 24;
        }
    }
}

template <int kBytes>
BLOCK_MATH void write(void* memory, const void* registers, bool aligned) {
    constexpr int kPiece = kBytes < 16 ? kBytes : 16;
    auto target = static_cast<uint8_t*>(memory);
    auto source = static_cast<const Piece<kPiece>*>(registers);
    #pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i, target += kPiece) {
        if (aligned) {
            *reinterpret_cast<Piece<kPiece>*>(target) = source[i];
        } else {
            #pragma unroll
            for (int k = 0; k < kPiece; ++k) target[k] = static_cast<uint8_t>(source[i].words[k / 4] >> k % 4 * 8);
        }
    }
}

struct Stored32 {
    using Stored = float;
    BLOCK_MATH float widen(float value) { return value; }
    BLOCK_MATH float narrow(float value) { return value; }
};

template <class Half>
struct Stored16 {
    using Stored = uint16_t;
    BLOCK_MATH float widen(uint16_t value) { return Half::widen(value); }
    // A mean that was finite stays so: quantised values and residuals can be a little larger than the largest.
    BLOCK_MATH uint16_t narrow(float value) { return Half::narrow(clamp_to(value, Half::kLargest)); }
};

// Reads the first `count` of kUnit values; the others are zeros.
template <class Value, int kUnit>
BLOCK_MATH void load(float* values, const typename Value::Stored* from, int64_t count, bool aligned) {
    alignas(16) typename Value::Stored stored[kUnit];
    if (count >= kUnit) {
        read<sizeof stored>(stored, from, aligned);
    } else {
        #pragma unroll
        for (int i = 0; i < kUnit; ++i) stored[i] = i < count ? from[i] : 0;
    }
    #pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = Value::widen(stored[i]);
}

// Writes the first `count` of kUnit values.
template <class Value, int kUnit>
BLOCK_MATH void store(typename Value::Stored* to, const float* values, int64_t count, bool aligned) {
    alignas(16) typename Value::Stored stored[kUnit];
    #pragma unroll
    for (int i = 0; i < kUnit; ++i) stored[i] = Value::narrow(values[i]);
    if (count >= kUnit) {
        write<sizeof stored>(to, stored, aligned);
    } else {
        #pragma unroll
        for (int i = 0; i < kUnit; ++i)
            if (i < count) to[i] = stored[i];
    }
}

// ---- a maximum among lanes ----

BLOCK_MATH int32_t larger(int32_t left, int32_t right) { return left > right ? left : right; }

// Among each kLanes lanes, a power of two. All lanes of a warp must come here.
template <int kLanes>
BLOCK_MATH int32_t largest_of(int32_t number) {
    #pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
        number = larger(number, __shfl_xor_sync(0xffffffffu, number, step));
    return number;
}

}  // namespace gpu_memory

#endif
