// The rotation of a block on the CPU (rotation.h), in vectors of kLanes floats. The compiler does not
// vectorize loops whose steps are shorter than a vector, so these are written as vectors, with extensions
// that GCC and Clang support on every processor.

#ifndef DDP_QUANT_HOOKS_CPU_ROTATION_H
#define DDP_QUANT_HOOKS_CPU_ROTATION_H

#include <array>
#include <utility>

#include "rotation.h"

namespace cpu_rotation {

using namespace block_math;

constexpr int64_t kMostBlock = 1024;

constexpr auto kSigns = [] {
    std::array<uint32_t, kMostBlock> signs{};
    for (uint32_t place = 0; place < kMostBlock; ++place) signs[place] = sign_at(place);
    return signs;
}();

template <int kLanes>
struct Vectors {
    typedef float Floats __attribute__((vector_size(4 * kLanes)));
    typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
};

// Sums and differences of values kStep apart in a vector: a + b at the lower place, -b + a at the upper.
template <int kLanes, int kStep, int... kLane>
BLOCK_MATH void add_within(typename Vectors<kLanes>::Floats& values, std::integer_sequence<int, kLane...>) {
    using Floats = typename Vectors<kLanes>::Floats;
    using Bits = typename Vectors<kLanes>::Bits;
    constexpr Bits kUpper = {(kLane & kStep ? 0x80000000u : 0u)...};
#if defined(__clang__)
    Floats others = __builtin_shufflevector(values, values, (kLane ^ kStep)...);
#else
    Floats others = __builtin_shuffle(values, Bits{(kLane ^ kStep)...});
#endif
    values = reinterpret_cast<Floats>(reinterpret_cast<Bits>(values) ^ kUpper) + others;
}

// The transform of kVectors consecutive vectors, to another place or in place.
template <int kLanes, int kVectors, bool kSignsBefore>
BLOCK_MATH void transform_part(const float* from, float* to, const uint32_t* signs) {
    using Floats = typename Vectors<kLanes>::Floats;
    using Bits = typename Vectors<kLanes>::Bits;
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    Floats values[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
        memcpy(&values[i], from + i * kLanes, sizeof values[i]);
        if constexpr (kSignsBefore) {
            Bits turning;
            memcpy(&turning, signs + i * kLanes, sizeof turning);
            values[i] = reinterpret_cast<Floats>(reinterpret_cast<Bits>(values[i]) ^ turning);
        }
        add_within<kLanes, 1>(values[i], lanes);
        add_within<kLanes, 2>(values[i], lanes);
        if constexpr (kLanes > 4) add_within<kLanes, 4>(values[i], lanes);
        if constexpr (kLanes > 8) add_within<kLanes, 8>(values[i], lanes);
    }
#pragma GCC unroll 3
    for (int step = 1; step < kVectors; step *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i)
            if (!(i & step)) {
                Floats left = values[i], right = values[i + step];
                values[i] = left + right;
                values[i + step] = left - right;
            }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) memcpy(to + i * kLanes, &values[i], sizeof values[i]);
}

// Writes the transform of a block: a power of two of at least 32 values.
template <int kLanes, bool kSignsBefore>
BLOCK_MATH void transform(const float* from, float* to, int64_t block) {
    constexpr int64_t kPart = 8 * kLanes;
    const uint32_t* signs = kSigns.data();
    if (block >= kPart)
        for (int64_t i = 0; i < block; i += kPart)
            transform_part<kLanes, 8, kSignsBefore>(from + i, to + i, signs + i);
    else if (block >= kPart / 2)
        transform_part<kLanes, 4, kSignsBefore>(from, to, signs);
    else
        transform_part<kLanes, 2, kSignsBefore>(from, to, signs);
    for (int64_t step = kPart; step < block; step *= 2)
        for (int64_t start = 0; start < block; start += 2 * step) {
            float *low = to + start, *high = low + step;
            for (int64_t i = 0; i < step; ++i) {
                float left = low[i], right = high[i];
                low[i] = left + right;
                high[i] = left - right;
            }
        }
}

// Takes numbers times their restoring scale.
template <int kLanes>
BLOCK_MATH void restore(float* values, int64_t block) {
    transform<kLanes, false>(values, values, block);
    for (int64_t i = 0; i < block; ++i) values[i] = turned_by(values[i], kSigns[i]);
}

}  // namespace cpu_rotation

#endif
