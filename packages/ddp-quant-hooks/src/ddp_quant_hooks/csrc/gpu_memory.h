// How the GPU kernels read and write values: 16 bytes at a time where memory is aligned.

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

// Stores a piece in one instruction. Compilers for sm_80 and sm_90 store each word separately otherwise
// (NVRTC 13.5).
template <int kBytes>
BLOCK_MATH void store_piece(void* memory, const Piece<kBytes>& piece) {
#if defined(__CUDACC_RTC__)
    auto address = __cvta_generic_to_global(memory);
    if constexpr (kBytes == 16) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(piece.words[0]),
                     "r"(piece.words[1]), "r"(piece.words[2]), "r"(piece.words[3]) : "memory");
        return;
    }
    if constexpr (kBytes == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(piece.words[0]), "r"(piece.words[1])
                     : "memory");
        return;
    }
#endif
    *static_cast<Piece<kBytes>*>(memory) = piece;
}

// Copies whole words, or less than one, between memory and registers. kAligned: memory is a multiple of kBytes, or of 16.
template <int kBytes, bool kAligned>
BLOCK_MATH void read(void* registers, const void* memory) {
    if constexpr (kBytes < 4) {
        memcpy(registers, memory, kBytes);
        return;
    }
    constexpr int kPiece = kBytes < 4 ? 4 : kBytes < 16 ? kBytes : 16;
    auto target = static_cast<Piece<kPiece>*>(registers);
    auto source = static_cast<const uint8_t*>(memory);
    #pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i, source += kPiece) {
        if constexpr (kAligned) target[i] = *reinterpret_cast<const Piece<kPiece>*>(source);
        else memcpy(target + i, source, kPiece);  // byte by byte
    }
}

template <int kBytes, bool kAligned>
BLOCK_MATH void write(void* memory, const void* registers) {
    if constexpr (kBytes < 4) {
        memcpy(memory, registers, kBytes);
        return;
    }
    constexpr int kPiece = kBytes < 4 ? 4 : kBytes < 16 ? kBytes : 16;
    auto target = static_cast<uint8_t*>(memory);
    auto source = static_cast<const Piece<kPiece>*>(registers);
    #pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i, target += kPiece) {
        if constexpr (kAligned) store_piece(target, source[i]);
        else memcpy(target, source + i, kPiece);
    }
}

// Values as they are stored, in registers.
template <class Value, int kUnit>
struct alignas(16) Unit {
    typename Value::Stored stored[kUnit];
};

// Reads the first `count` of kUnit values; the others are zeros.
template <class Value, int kUnit, bool kAligned>
BLOCK_MATH void read_unit(Unit<Value, kUnit>& unit, const typename Value::Stored* from, int64_t count) {
    if (count >= kUnit) {
        read<sizeof unit.stored, kAligned>(unit.stored, from);
    } else {
        #pragma unroll
        for (int i = 0; i < kUnit; ++i) unit.stored[i] = i < count ? from[i] : 0;
    }
}

// Writes the first `count` of kUnit values.
template <class Value, int kUnit, bool kAligned>
BLOCK_MATH void write_unit(typename Value::Stored* to, const Unit<Value, kUnit>& unit, int64_t count) {
    if (count >= kUnit) {
        write<sizeof unit.stored, kAligned>(to, unit.stored);
    } else {
        #pragma unroll
        for (int i = 0; i < kUnit; ++i)
            if (i < count) to[i] = unit.stored[i];
    }
}

template <class Value, int kUnit, bool kAligned>
BLOCK_MATH void load(float* values, const typename Value::Stored* from, int64_t count) {
    Unit<Value, kUnit> unit;
    read_unit<Value, kUnit, kAligned>(unit, from, count);
    #pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = Value::widen(unit.stored[i]);
}

template <class Value, int kUnit, bool kAligned>
BLOCK_MATH void store(typename Value::Stored* to, const float* values, int64_t count) {
    Unit<Value, kUnit> unit;
    #pragma unroll
    for (int i = 0; i < kUnit; ++i) unit.stored[i] = Value::narrow(values[i]);
    write_unit<Value, kUnit, kAligned>(to, unit, count);
}

// ---- among lanes ----

BLOCK_MATH int32_t larger(int32_t left, int32_t right) { return left > right ? left : right; }

// Combines the numbers of each kLanes lanes, a power of two, with `join`. All lanes of a warp must call this.
template <int kLanes, class Join>
BLOCK_MATH int32_t of_lanes(int32_t number, Join join) {
    #pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
        number = join(number, __shfl_xor_sync(0xffffffffu, number, step));
    return number;
}

// The value of the lane that is `step` away.
BLOCK_MATH float exchanged(float value, int step) {
    return float_of(static_cast<uint32_t>(__shfl_xor_sync(0xffffffffu, static_cast<int32_t>(bits_of(value)), step)));
}

}  // namespace gpu_memory

#endif
