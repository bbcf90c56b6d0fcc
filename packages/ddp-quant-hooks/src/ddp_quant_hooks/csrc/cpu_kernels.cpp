// The CPU kernels: encode, reduce and decode messages of quantized blocks.
//
// A message of n values in blocks of B is [payload of ceil(n / B) blocks][one fp32 scale per block]; the last
// block is padded with zeros. The loops are plain; the compiler vectorizes them, once for each instruction
// set below, and the caller chooses one at run time. The arithmetic is that of block_math.h, so all of them
// give identical bits.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_low_rank.h"
#include "cpu_rotation.h"

namespace {

using namespace block_math;

using cpu_rotation::kMostBlock;               // a block of floats fits on the stack and in the L1 cache
constexpr int64_t kAheadBytes = 16 << 10;      // four pages
constexpr int64_t kValuesPerThread = 1 << 18;  // starting a thread costs about as much as 20,000 values

// The arguments of one call. Pointers that a kernel does not use are null. Python makes it (`_Work` of kernels/cpu.py),
// with the same members in the same order.
struct Work {
    int64_t values, block;
    void* tensor;                       // encode reads it, decode writes it
    int dtype;
    const uint8_t* const* messages;     // in rank order
    int64_t ranks;
    int format;                         // of `messages`
    int rotate;                         // whether blocks of `messages` can be rotated
    uint8_t* message;                   // encode and reduce write it
    int message_format;
    int message_rotate;
    const uint16_t* residual;           // bf16, added before encoding; null: none
    uint16_t* new_residual;             // bf16
};

// ---- one block ----

BLOCK_MATH int32_t largest_of(const float* __restrict values, int64_t block) {
    int32_t largest = 0;
    for (int64_t i = 0; i < block; ++i) largest = std::max(largest, magnitude_bits(values[i]));
    return largest;
}

BLOCK_MATH int32_t smallest_of(const float* __restrict values, int64_t block) {
    int32_t smallest = kInfinityBits;
    for (int64_t i = 0; i < block; ++i) smallest = std::min(smallest, magnitude_bits(values[i]));
    return smallest;
}

// Writes the numbers for the values that `scaled` returns.
template <class Numbers, class Scaled>
BLOCK_MATH void write_scaled(int64_t half, Scaled scaled, uint8_t* __restrict payload) {
    if constexpr (Numbers::bytes(2) == 2)
        for (int64_t i = 0; i < 2 * half; ++i) payload[i] = static_cast<uint8_t>(nearest(scaled(i)));
    else
        for (int64_t i = 0; i < half; ++i) Numbers::write(payload, i, half, scaled(i), scaled(half + i));
}

#if defined(__x86_64__)
// Writes 32 values times a factor as 8-bit integers, like `nearest`. Compilers know no bounds of the integers, and
// narrow them with three times as many instructions.
__attribute__((target("avx2"))) inline void write_32(const float* values, float factor, uint8_t* payload) {
    __m256i numbers[4];
    for (int i = 0; i < 4; ++i)
        numbers[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + 8 * i), _mm256_set1_ps(factor)));
    __m256i low = _mm256_packs_epi32(numbers[0], numbers[1]), high = _mm256_packs_epi32(numbers[2], numbers[3]);
    __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // both halves of the vectors were packed apart
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload), bytes);
}
#endif

// The mean magnitude: sums of values half of the block apart, then a quarter, and so on.
BLOCK_MATH float mean_magnitude_of(const float* __restrict values, int64_t block) {
    alignas(64) float sums[kMostBlock / 2];
    float share = 1.0f / static_cast<float>(block);
    for (int64_t i = 0; i < block / 2; ++i)
        sums[i] = std::abs(values[i]) * share + std::abs(values[block / 2 + i]) * share;
    for (int64_t half = block / 4; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    return sums[0];
}

// Writes the signs of a block.
BLOCK_MATH void write_signs(const float* __restrict values, int64_t half, uint8_t* __restrict payload) {
    for (int64_t i = 0; i < half; i += 4) {
#if defined(__x86_64__)
        int first = _mm_movemask_ps(_mm_loadu_ps(values + i)), second = _mm_movemask_ps(_mm_loadu_ps(values + half + i));
        payload[i / 4] = static_cast<uint8_t>(first | second << 4);
#else
        payload[i / 4] = 0;
        for (int64_t j = i; j < i + 4; ++j) Int1::write(payload, j, half, values[j], values[half + j]);
#endif
    }
}

template <class Numbers, int kLanes>
BLOCK_MATH void write_numbers(const float* __restrict values, int64_t half, Encoding by, uint8_t* __restrict payload) {
    if constexpr (Numbers::bytes(8) == 1) return write_signs(values, half, payload);
    auto unshifted = [=](int64_t i) __attribute__((always_inline)) { return values[i] * by.inverse; };
    auto shifted = [=](int64_t i) __attribute__((always_inline)) { return scaled(values[i], by); };
    if (by.shift != 1.0f) return write_scaled<Numbers>(half, shifted, payload);
    // The usual case: one multiplication less.
#if defined(__x86_64__)
    if constexpr (kLanes == 8 && Numbers::bytes(2) == 2) {
        for (int64_t i = 0; i < 2 * half; i += 32) write_32(values + i, by.inverse, payload + i);
        return;
    }
#endif
    write_scaled<Numbers>(half, unshifted, payload);
}

// Writes the scale with the signs of a block, four at a time.
BLOCK_MATH void decode_signs(const uint8_t* __restrict payload, int64_t half, float scale, float* __restrict values) {
    using Bits = cpu_rotation::Vectors<4>::Bits;
    constexpr Bits kFirst = {1, 2, 4, 8}, kSecond = {16, 32, 64, 128};
    Bits plain = Bits{} + bits_of(scale);
    for (int64_t i = 0; i < half; i += 4) {
        Bits signs = Bits{} + payload[i / 4];
        Bits first = reinterpret_cast<Bits>((signs & kFirst) == kFirst) << 31 ^ plain;
        Bits second = reinterpret_cast<Bits>((signs & kSecond) == kSecond) << 31 ^ plain;
        memcpy(values + i, &first, sizeof first);
        memcpy(values + half + i, &second, sizeof second);
    }
}

template <class Numbers>
BLOCK_MATH void decode_numbers(const uint8_t* __restrict payload, int64_t half, float scale, float* __restrict values) {
    if constexpr (Numbers::bytes(8) == 1) return decode_signs(payload, half, scale, values);
    float step = 1.0f / Numbers::kLevels;
    for (int64_t i = 0; i < half; ++i) values[i] = decoded(Numbers::first(payload, i, half), step, scale);
    for (int64_t i = 0; i < half; ++i) values[half + i] = decoded(Numbers::second(payload, i, half), step, scale);
}

// Rotates a block if that pays. Returns the largest magnitude of the rotated block, or 0 if it was not
// rotated.
template <class Numbers, int kLanes>
BLOCK_MATH int32_t rotate_if_it_pays(const float* __restrict values, int64_t block, int32_t largest,
                                     float* __restrict rotated) {
    int32_t limit = magnitude_bits(float_of(static_cast<uint32_t>(largest)) * kPeak), above = 0;
    for (int64_t i = 0; i < block; ++i) above += magnitude_bits(values[i]) > limit;
    if (!is_peaked<Numbers>(above, block) || !may_rotate(smallest_of(values, block), largest)) return 0;
    cpu_rotation::transform<kLanes, true>(values, rotated, block);
    int32_t largest_rotated = largest_of(rotated, block);
    return rotation_pays(largest, largest_rotated, block) ? largest_rotated : 0;
}

// Writes a block's payload and scale, and their rounding errors to `new_residual` (null: not needed).
template <class Numbers, int kLanes>
BLOCK_MATH void encode_block(const float* __restrict values, int64_t block, int64_t count, bool may_be_rotated,
                             uint8_t* __restrict payload, uint8_t* scale, const uint16_t* residual,
                             uint16_t* __restrict new_residual) {
    int64_t half = block / 2;
    int32_t largest = largest_of(values, block);
    Encoding by = encoding_of(largest, Numbers::kLevels);
    if constexpr (kScaledByMean<Numbers>)
        if (is_finite(by.scale)) by.scale = mean_magnitude_of(values, block);
    if (largest == 0 || largest >= kInfinityBits) {
        memcpy(scale, &by.scale, 4);
        std::fill_n(payload, Numbers::bytes(block), uint8_t{0});
        // Not finite: no step will follow, so this one must leave no trace.
        if (new_residual && largest && residual) std::copy_n(residual, count, new_residual);
        else if (new_residual) std::fill_n(new_residual, count, uint16_t{0});
        return;
    }
    alignas(64) float restored[kMostBlock];  // the rotated block, and then the values as a receiver has them
    const float* numbers = values;
    int32_t rotated = 0;  // the largest magnitude of the rotated block, if that is sent
    if constexpr (Numbers::kFew) {
        if (may_be_rotated) rotated = rotate_if_it_pays<Numbers, kLanes>(values, block, largest, restored);
        if (rotated) {
            by = encoding_of(rotated, Numbers::kLevels);
            numbers = restored;
        }
    }
    write_numbers<Numbers, kLanes>(numbers, half, by, payload);
    float sent = rotated ? -by.scale : by.scale;
    memcpy(scale, &sent, 4);
    if (!new_residual) return;
    // In two loops: one loop would use vectors as long as the payload's bytes fill, which are few in a short block.
    decode_numbers<Numbers>(payload, half, restoring(sent, block), restored);
    if constexpr (Numbers::kFew)
        if (rotated) cpu_rotation::restore<kLanes>(restored, block);
    auto store_loss = [&](int64_t end) __attribute__((always_inline)) {
        for (int64_t i = 0; i < end; ++i) new_residual[i] = bfloat16_of_finite(values[i] - restored[i]);
    };
    if (count == block) store_loss(block);
    else store_loss(count);
}

BLOCK_MATH float scale_at(const uint8_t* scales, int64_t index) {
    float scale;
    memcpy(&scale, scales + 4 * index, 4);
    return scale;
}

// Includes the values of one rank in the mean of `before` others.
template <class Numbers>
BLOCK_MATH void include(const uint8_t* __restrict payload, int64_t half, float scale, int64_t before,
                        float* __restrict mean) {
    if (before == 0) return decode_numbers<Numbers>(payload, half, scale, mean);
    float step = 1.0f / Numbers::kLevels, weight = 1.0f / static_cast<float>(before + 1);
    if constexpr (Numbers::bytes(8) == 1) {
        alignas(64) float values[kMostBlock];
        decode_signs(payload, half, scale, values);
        for (int64_t i = 0; i < 2 * half; ++i) mean[i] = running_mean(mean[i], values[i], weight);
        return;
    }
    for (int64_t i = 0; i < half; ++i)
        mean[i] = running_mean(mean[i], decoded(Numbers::first(payload, i, half), step, scale), weight);
    for (int64_t i = 0; i < half; ++i)
        mean[half + i] = running_mean(mean[half + i], decoded(Numbers::second(payload, i, half), step, scale), weight);
}

// The mean over the ranks of block `index`: NaN if a rank's block is not finite. Ranks that rotated it come first, so
// that their mean is restored once.
template <class Numbers, int kLanes>
BLOCK_MATH void mean_block(const Work& work, int64_t block, int64_t index, int64_t blocks,
                           float* __restrict mean) {
    int64_t half = block / 2, payloads = Numbers::bytes(blocks * block), start = index * Numbers::bytes(block);
    float largest = 0.0f;
    bool some_rotated = false;
    for (int64_t rank = 0; rank < work.ranks; ++rank) {
        float scale = scale_at(work.messages[rank] + payloads, index);
        if (!is_finite(scale)) {
            std::fill_n(mean, block, quiet_nan());
            return;
        }
        largest = std::max(largest, scale);
        some_rotated |= is_rotated(scale);
    }
    float shrink = work.ranks > 1 && must_shrink(largest) ? kShrink : 1.0f;
    int64_t included = 0;
    if constexpr (Numbers::kFew)
        if (work.rotate && some_rotated) {
            for (int64_t rank = 0; rank < work.ranks; ++rank) {
                float scale = scale_at(work.messages[rank] + payloads, index);
                if (is_rotated(scale))
                    include<Numbers>(work.messages[rank] + start, half, restoring(scale, block) * shrink, included++, mean);
            }
            cpu_rotation::restore<kLanes>(mean, block);
        }
    for (int64_t rank = 0; rank < work.ranks; ++rank) {
        float scale = scale_at(work.messages[rank] + payloads, index);
        if (!(work.rotate && is_rotated(scale)))
            include<Numbers>(work.messages[rank] + start, half, scale * shrink, included++, mean);
    }
    if (shrink != 1.0f)
        for (int64_t i = 0; i < block; ++i) mean[i] = grown(mean[i]);
}

template <class Value>
BLOCK_MATH void store(const float* __restrict values, int64_t count, typename Value::Stored* __restrict stored) {
    for (int64_t i = 0; i < count; ++i) stored[i] = Value::narrow(values[i]);
}

// ---- the same, once for every instruction set ----

enum Dtype { kFloat32, kBFloat16, kFloat16 };
enum Format { kInt8, kInt4, kFp16, kInt1 };

struct BlockKernels {  // by format, and by dtype
    void (*encode[4])(const float*, int64_t, int64_t, bool, uint8_t*, uint8_t*, const uint16_t*, uint16_t*);
    void (*mean[4])(const Work&, int64_t, int64_t, float*);
    void (*load[3])(const void*, const uint16_t*, int64_t, float*);
    void (*store[3])(const float*, int64_t, void*);
};

using LowRankKernel = void (*)(const cpu_low_rank::Work&, int64_t, int64_t);

struct LowRankKernels {  // by dtype; each does some rows, or columns, of a matrix
    LowRankKernel multiply[3], multiply_transposed[3], restore[3];
    void (*find_basis)(const cpu_low_rank::Work&);
    void (*follow)(const cpu_low_rank::Work&);
};

// Half a block can be shorter than a vector: if the compiler knows the length, it uses shorter vectors.
#define WITH_USUAL_BLOCKS(length, CALL)                                                                        \
    switch (length) {                                                                                          \
        case 32: { constexpr int64_t block = 32; CALL; break; }                                                \
        case 64: { constexpr int64_t block = 64; CALL; break; }                                                \
        case 128: { constexpr int64_t block = 128; CALL; break; }                                              \
        default: { int64_t block = length; CALL; }                                                             \
    }

#define BLOCK_KERNELS(NAME, LANES, TARGET)                                                                     \
    namespace NAME {                                                                                           \
    template <class Numbers>                                                                                   \
    TARGET void encode(const float* values, int64_t length, int64_t count, bool may_be_rotated, uint8_t* payload, \
                       uint8_t* scale, const uint16_t* residual, uint16_t* new_residual) {                     \
        WITH_USUAL_BLOCKS(length, (encode_block<Numbers, LANES>(values, block, count, may_be_rotated, payload, \
                                                                scale, residual, new_residual)))               \
    }                                                                                                          \
    template <class Numbers>                                                                                   \
    TARGET void mean(const Work& work, int64_t index, int64_t blocks, float* values) {                         \
        WITH_USUAL_BLOCKS(work.block, (mean_block<Numbers, LANES>(work, block, index, blocks, values)))        \
    }                                                                                                          \
    template <class Value>                                                                                     \
    TARGET void load(const void* tensor, const uint16_t* residual, int64_t count, float* values) {             \
        auto stored = static_cast<const typename Value::Stored*>(tensor);                                      \
        WITH_USUAL_BLOCKS(count, (cpu_low_rank::load<Value>(stored, residual, block, values)))                 \
    }                                                                                                          \
    template <class Value>                                                                                     \
    TARGET void store(const float* values, int64_t count, void* tensor) {                                      \
        ::store<Value>(values, count, static_cast<typename Value::Stored*>(tensor));                           \
    }                                                                                                          \
    constexpr BlockKernels kernels{{encode<Int8>, encode<Int4>, encode<Fp16>, encode<Int1>},                   \
                                   {mean<Int8>, mean<Int4>, mean<Fp16>, mean<Int1>},                           \
                                   {load<Float32>, load<BFloat16>, load<Float16>},                             \
                                   {store<Float32>, store<BFloat16>, store<Float16>}};                         \
    template <class Value>                                                                                     \
    TARGET void multiply(const cpu_low_rank::Work& work, int64_t first, int64_t last) {                        \
        cpu_low_rank::multiply<LANES, Value>(work, first, last);                                               \
    }                                                                                                          \
    template <class Value>                                                                                     \
    TARGET void multiply_transposed(const cpu_low_rank::Work& work, int64_t first, int64_t last) {             \
        cpu_low_rank::multiply_transposed<LANES, Value>(work, first, last);                                    \
    }                                                                                                          \
    template <class Value>                                                                                     \
    TARGET void restore(const cpu_low_rank::Work& work, int64_t first, int64_t last) {                         \
        cpu_low_rank::restore<LANES, Value>(work, first, last);                                                \
    }                                                                                                          \
    TARGET void find_basis(const cpu_low_rank::Work& work) { cpu_low_rank::find_basis(work); }                 \
    TARGET void follow(const cpu_low_rank::Work& work) { cpu_low_rank::follow(work); }                         \
    constexpr LowRankKernels low_rank{                                                                         \
        {multiply<Float32>, multiply<BFloat16>, multiply<Float16>},                                            \
        {multiply_transposed<Float32>, multiply_transposed<BFloat16>, multiply_transposed<Float16>},           \
        {restore<Float32>, restore<BFloat16>, restore<Float16>},                                               \
        find_basis, follow};                                                                                   \
    }

// `baseline` is what the compiler may always assume: SSE2 on x86-64, NEON on 64-bit ARM.
BLOCK_KERNELS(baseline, 4, )
#if defined(__x86_64__)
BLOCK_KERNELS(avx2, 8, __attribute__((target("avx2"))))
#if defined(__clang__)  // it has no such attribute for the width
BLOCK_KERNELS(avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#else
BLOCK_KERNELS(avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif
#endif

// ---- a range of blocks ----

int64_t blocks_of(int64_t values, int64_t block) { return (values + block - 1) / block; }

int64_t payload_bytes(int format, int64_t values) {
    constexpr int64_t kBits[] = {8, 4, 16, 1};
    return values * kBits[format] / 8;
}


// Requests memory that will be read or written soon: the processor's own prefetching stops at the end of a
// page. Encoding 25 MiB took 0.65 ms with it and 1.08 without, decoding 0.67 and 0.95 (AVX-512). Requests
// beyond the end are harmless, since nothing is read.
template <int kToWrite>
void prefetch(const void* memory, int64_t bytes) {
    auto start = reinterpret_cast<uintptr_t>(memory) + kAheadBytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(start + i), kToWrite);
}

int64_t value_bytes(int dtype, int64_t values) { return dtype == kFloat32 ? 4 * values : 2 * values; }

template <class Number>
Number* at(Number* residual, int64_t start) {
    return residual ? residual + start : nullptr;
}

void encode_value_block(const BlockKernels& kernels, const Work& work, const float* values, int64_t index,
                        int64_t count) {
    int64_t start = index * work.block;
    uint8_t* scales = work.message + payload_bytes(work.message_format, blocks_of(work.values, work.block) * work.block);
    kernels.encode[work.message_format](
        values, work.block, count, work.message_rotate, work.message + payload_bytes(work.message_format, start),
        scales + 4 * index, at(work.residual, start), at(work.new_residual, start));
}

void encode_blocks(const BlockKernels& kernels, const Work& work, int64_t first, int64_t last) {
    alignas(64) float buffer[kMostBlock];
    for (int64_t index = first; index < last; ++index) {
        int64_t start = index * work.block, count = std::min(work.block, work.values - start);
        const void* tensor = static_cast<const uint8_t*>(work.tensor) + value_bytes(work.dtype, start);
        prefetch<0>(tensor, value_bytes(work.dtype, work.block));
        if (work.residual) prefetch<0>(work.residual + start, 2 * work.block);
        if (work.new_residual) prefetch<1>(work.new_residual + start, 2 * work.block);
        const float* values = static_cast<const float*>(tensor);
        if (work.dtype != kFloat32 || count < work.block || work.residual) {
            kernels.load[work.dtype](tensor, at(work.residual, start), count, buffer);
            std::fill(buffer + count, buffer + work.block, 0.0f);
            values = buffer;
        }
        encode_value_block(kernels, work, values, index, count);
    }
}

void reduce_blocks(const BlockKernels& kernels, const Work& work, int64_t first, int64_t last) {
    alignas(64) float mean[kMostBlock], sum[kMostBlock];
    int64_t blocks = blocks_of(work.values, work.block);
    for (int64_t index = first; index < last; ++index) {
        int64_t start = index * work.block, count = std::min(work.block, work.values - start);
        kernels.mean[work.format](work, index, blocks, mean);
        const float* values = mean;
        if (work.residual) {
            kernels.load[kFloat32](mean, work.residual + start, count, sum);
            std::copy(mean + count, mean + work.block, sum + count);
            values = sum;
        }
        encode_value_block(kernels, work, values, index, count);
    }
}

void decode_blocks(const BlockKernels& kernels, const Work& work, int64_t first, int64_t last) {
    alignas(64) float buffer[kMostBlock];
    int64_t blocks = blocks_of(work.values, work.block);
    for (int64_t index = first; index < last; ++index) {
        int64_t start = index * work.block, count = std::min(work.block, work.values - start);
        for (int64_t rank = 0; rank < work.ranks; ++rank)
            prefetch<0>(work.messages[rank] + payload_bytes(work.format, start),
                        payload_bytes(work.format, work.block));
        void* tensor = static_cast<uint8_t*>(work.tensor) + value_bytes(work.dtype, start);
        prefetch<1>(tensor, value_bytes(work.dtype, work.block));
        bool in_place = work.dtype == kFloat32 && count == work.block;
        float* mean = in_place ? static_cast<float*>(tensor) : buffer;
        kernels.mean[work.format](work, index, blocks, mean);
        if (!in_place) kernels.store[work.dtype](mean, count, tensor);
    }
}

using Kernel = void (*)(const BlockKernels&, const Work&, int64_t, int64_t);

struct InstructionSet {
    const char* name;
    const BlockKernels* kernels;
    const LowRankKernels* low_rank;
};

std::vector<InstructionSet> instruction_sets() {  // of this processor, the best first
    std::vector<InstructionSet> sets;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        sets.push_back({"AVX-512", &avx512::kernels, &avx512::low_rank});
    if (__builtin_cpu_supports("avx2")) sets.push_back({"AVX2", &avx2::kernels, &avx2::low_rank});
    sets.push_back({"SSE2", &baseline::kernels, &baseline::low_rank});
#elif defined(__aarch64__)
    sets.push_back({"NEON", &baseline::kernels, &baseline::low_rank});
#else
    sets.push_back({"scalar", &baseline::kernels, &baseline::low_rank});
#endif
    return sets;
}

// Does its part in an environment of its own. Returns whether there was enough memory.
template <class Part>
bool run_part(const Part& part, int64_t first, int64_t last) {
    // Torch can make its threads flush subnormal numbers to zero, which would change bits on this rank only.
    std::fenv_t environment;
    std::feholdexcept(&environment);
    std::fesetenv(FE_DFL_ENV);
    bool done = true;
    try {
        part(first, last);
    } catch (const std::bad_alloc&) {
        done = false;
    }
    std::fesetenv(&environment);
    return done;
}

// Divides `count` pieces of work among at most so many threads. Throws if there is not enough memory.
template <class Part>
void divide(int64_t count, int64_t parts, const Part& part) {
    std::atomic<bool> done = true;
    auto of_thread = [&](int64_t first, int64_t last) {
        if (!run_part(part, first, last)) done = false;
    };
    std::vector<std::thread> others;
    others.reserve(parts);  // nothing below may throw while threads run
    int64_t first = 0;
    for (int64_t number = 1; number < parts; ++number) {
        int64_t last = count * number / parts;
        try {
            others.emplace_back(of_thread, first, last);
        } catch (const std::exception&) {  // no more threads available: this one does the rest
            break;
        }
        first = last;
    }
    of_thread(first, count);
    for (auto& other : others) other.join();
    if (!done) throw std::bad_alloc();
}

int64_t parts_of(int64_t values, int threads) {
    return std::clamp<int64_t>(values / kValuesPerThread, 1, std::max(threads, 1));
}

void run(Kernel kernel, const BlockKernels& kernels, int threads, const Work& work) {
    auto part = [&](int64_t first, int64_t last) { kernel(kernels, work, first, last); };
    divide(blocks_of(work.values, work.block), parts_of(work.values, threads), part);
}

enum LowRank { kMultiply, kMultiplyTransposed, kRestore, kFindBasis, kFollow };

// One of several calls. Python makes it (`CpuKernels.run_on_factors` of kernels/cpu.py), in 64-bit words.
struct LowRankTask {
    int64_t kernel, dtype;
    cpu_low_rank::Work work;
};

void run_low_rank(const LowRankKernels& kernels, int threads, const LowRankTask& task) {
    const cpu_low_rank::Work& work = task.work;
    if (task.kernel >= kFindBasis) {  // of factors alone
        auto whole = task.kernel == kFindBasis ? kernels.find_basis : kernels.follow;
        return divide(1, 1, [&](int64_t, int64_t) { whole(work); });
    }
    const LowRankKernel* by_dtype = task.kernel == kMultiply ? kernels.multiply
                                    : task.kernel == kMultiplyTransposed ? kernels.multiply_transposed
                                                                         : kernels.restore;
    // Threads share the rows or the columns, a cache line of them at a time.
    int64_t length = task.kernel == kMultiplyTransposed ? work.columns : work.rows;
    int64_t pieces = (length + cpu_low_rank::kSums - 1) / cpu_low_rank::kSums;
    auto part = [&](int64_t first, int64_t last) {
        if (first < last)
            by_dtype[task.dtype](work, first * cpu_low_rank::kSums, std::min(last * cpu_low_rank::kSums, length));
    };
    divide(pieces, parts_of(work.rows * work.columns, threads), part);
}

}  // namespace

// ---- the interface; its arguments have been checked ----

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// The name of one that this processor has, the best first; null after the last.
EXPORTED const char* quant_instruction_set(int index) {
    auto sets = instruction_sets();
    return index >= 0 && index < static_cast<int>(sets.size()) ? sets[index].name : nullptr;
}

// The version of the functions here and of Work. A library that was built from other sources must not be
// called.
EXPORTED int quant_abi() { return 6; }

// Returns 0; 1 if there is no such kernel, or no such instruction set on this processor; 2 without enough
// memory.
EXPORTED int quant_run(int kernel, int instruction_set, int threads, const Work* work) {
    constexpr Kernel all[] = {encode_blocks, reduce_blocks, decode_blocks};
    if (kernel < 0 || kernel >= 3 || !quant_instruction_set(instruction_set)) return 1;
    try {
        run(all[kernel], *instruction_sets()[instruction_set].kernels, threads, *work);
    } catch (const std::exception&) {
        return 2;
    }
    return 0;
}

// Does as quant_run, for several products of gradients and their factors, one after another.
EXPORTED int quant_low_rank(int instruction_set, int threads, const LowRankTask* tasks, int64_t count) {
    if (!quant_instruction_set(instruction_set)) return 1;
    const LowRankKernels& kernels = *instruction_sets()[instruction_set].low_rank;
    try {
        for (int64_t i = 0; i < count; ++i) {
            if (tasks[i].kernel < 0 || tasks[i].kernel > kFollow) return 1;
            run_low_rank(kernels, threads, tasks[i]);
        }
    } catch (const std::exception&) {
        return 2;
    }
    return 0;
}

}  // extern "C"
