// The GPU kernels for PyTorch's 8-bit numbers. Messages have the layout of kernels/affine.py:
// [one byte per value, padded to a multiple of 16][scale of each channel][zero point of each channel].
//
// A thread block processes one channel, or a piece of a long one. The values of a short channel are read
// twice, the second time from the cache. For long channels, a kernel of its own finds the extremes first.
// kAligned: tensors and messages start at multiples of 16 bytes, and channels at multiples of kUnit values.

#include "affine_math.h"
#include "gpu_memory.h"

namespace affine_kernels {

using namespace affine_math;
using namespace gpu_memory;

constexpr int kThreads = 128;   // of a thread block
constexpr int kUnit = 4;        // values per thread at a time
constexpr int kPiece = 1 << 13; // values per thread block

// The parameter of a launch. Python makes it (`AffineWork` of kernels/programs.py), and every program asserts
// that both agree. Pointers that a kernel does not use are null.
template <int kMessages>
struct Work {
    int64_t values, channel;  // the number of values, and of those in a channel
    void* tensor;             // encode reads it, decode writes it
    uint8_t* message;         // encode writes it
    int32_t* extremes;        // the members of each channel's Extremes, zeros at first
    const uint8_t* messages[kMessages];
};

struct Byte { using Stored = uint8_t; };

// A thread block's values: all in one channel.
struct Span {
    int64_t channels, channel, first, last;

    template <class W>
    __device__ __forceinline__ explicit Span(const W& work) {
        int64_t pieces = (work.channel + kPiece - 1) / kPiece;
        channels = (work.values + work.channel - 1) / work.channel;
        channel = blockIdx.x / pieces;
        first = channel * work.channel + blockIdx.x % pieces * kPiece;
        int64_t end = (channel + 1) * work.channel;
        end = end < first + kPiece ? end : first + kPiece;
        last = end < work.values ? end : work.values;
    }

    __device__ __forceinline__ int64_t thread_first() const { return first + threadIdx.x * kUnit; }
};

BLOCK_MATH float* parameters_in(uint8_t* message, int64_t values) {
    return reinterpret_cast<float*>(message + (values + 15) / 16 * 16);
}

BLOCK_MATH Parameters parameters_at(const uint8_t* message, int64_t values, const Span& span) {
    const float* all = parameters_in(const_cast<uint8_t*>(message), values);
    return {all[span.channel], all[span.channels + span.channel]};
}

// All threads of a thread block must call this; all get the result.
template <class Value, bool kAligned, class W>
BLOCK_MATH Extremes find_extremes(const W& work, const Span& span) {
    auto tensor = static_cast<const typename Value::Stored*>(work.tensor);
    Extremes found = {0, 0};
    for (int64_t i = span.thread_first(); i < span.last; i += kThreads * kUnit) {
        float values[kUnit];
        load<Value, kUnit, kAligned>(values, tensor + i, span.last - i);
        #pragma unroll
        for (int k = 0; k < kUnit; ++k) {
            Extremes own = extremes_of(values[k]);
            found = {larger(found.below, own.below), larger(found.above, own.above)};
        }
    }
    __shared__ int32_t of_warp[2][kThreads / kWarp];
    found = {of_lanes<kWarp>(found.below, larger), of_lanes<kWarp>(found.above, larger)};
    if (threadIdx.x % kWarp == 0) {
        of_warp[0][threadIdx.x / kWarp] = found.below;
        of_warp[1][threadIdx.x / kWarp] = found.above;
    }
    __syncthreads();
    #pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp)
        found = {larger(found.below, of_warp[0][warp]), larger(found.above, of_warp[1][warp])};
    return found;
}

template <class Value, bool kAligned, class W>
BLOCK_MATH void write_numbers(const W& work, const Span& span, Extremes extremes) {
    Parameters by = parameters_of(extremes);
    auto tensor = static_cast<const typename Value::Stored*>(work.tensor);
    for (int64_t i = span.thread_first(); i < span.last; i += kThreads * kUnit) {
        float values[kUnit];
        Unit<Byte, kUnit> numbers;
        load<Value, kUnit, kAligned>(values, tensor + i, span.last - i);
        #pragma unroll
        for (int k = 0; k < kUnit; ++k) numbers.stored[k] = number_of(values[k], by);
        write_unit<Byte, kUnit, kAligned>(work.message + i, numbers, span.last - i);
    }
    if (threadIdx.x == 0) {  // every piece of a long channel writes the same
        float* parameters = parameters_in(work.message, work.values);
        parameters[span.channel] = by.scale;
        parameters[span.channels + span.channel] = by.zero_point;
    }
}

// ---- the kernels ----

template <class Value, bool kAligned>
BLOCK_MATH void encode_short_channels(const Work<1>& work) {
    Span span(work);
    write_numbers<Value, kAligned>(work, span, find_extremes<Value, kAligned>(work, span));
}

template <class Value, bool kAligned>
BLOCK_MATH void find_extremes_of_long_channels(const Work<1>& work) {
    Span span(work);
    Extremes found = find_extremes<Value, kAligned>(work, span);
    if (threadIdx.x == 0) {
        atomicMax(work.extremes + 2 * span.channel, found.below);
        atomicMax(work.extremes + 2 * span.channel + 1, found.above);
    }
}

template <class Value, bool kAligned>
BLOCK_MATH void encode_long_channels(const Work<1>& work) {
    Span span(work);
    write_numbers<Value, kAligned>(work, span, {work.extremes[2 * span.channel], work.extremes[2 * span.channel + 1]});
}

template <class Value, bool kAligned, int kRanks>
BLOCK_MATH void decode(const Work<kRanks>& work) {
    Span span(work);
    float largest = 0.0f;
    #pragma unroll 4
    for (int rank = 0; rank < kRanks; ++rank) {
        float scale = parameters_at(work.messages[rank], work.values, span).scale;
        largest = scale > largest ? scale : largest;
    }
    float shrink = shrink_for(largest);
    auto tensor = static_cast<typename Value::Stored*>(work.tensor);
    for (int64_t i = span.thread_first(); i < span.last; i += kThreads * kUnit) {
        float sums[kUnit] = {};
        #pragma unroll 4
        for (int rank = 0; rank < kRanks; ++rank) {
            const uint8_t* message = work.messages[rank];
            Parameters by = parameters_at(message, work.values, span);
            Unit<Byte, kUnit> numbers;
            read_unit<Byte, kUnit, kAligned>(numbers, message + i, span.last - i);
            #pragma unroll
            for (int k = 0; k < kUnit; ++k) sums[k] = sums[k] + term(numbers.stored[k], by, shrink);
        }
        #pragma unroll
        for (int k = 0; k < kUnit; ++k) {
            float mean = mean_of(sums[k], static_cast<float>(kRanks), shrink);
            sums[k] = mean == mean ? mean : quiet_nan();
        }
        store<Value, kUnit, kAligned>(tensor + i, sums, span.last - i);
    }
}

}  // namespace affine_kernels
