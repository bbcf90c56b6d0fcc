// The CPU kernels: encode, reduce and decode messages of quantized blocks.
//
// A message of n values in blocks of B is [payload of ceil(n / B) blocks][one fp32 scale per block]; the last
// block is padded with zeros. The loops are plain; the compiler vectorizes them, once for each instruction
// set below, and the caller chooses one at run time. The arithmetic is that of block_math.h, so all of them
// give identical bits.

#include <algorithm>
#include <cfenv>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

#include "cpu_rotation.h"

namespace {

using namespace block_math;

using cpu_rotation::kMostBlock;               // a block of floats fits on the stack and in the L1 cache
constexpr int64_t kAheadBytes = 16 << 10;      // four pages
constexpr int64_t kValuesPerThread = 1 << 18;  // starting a thread costs about as much as 20,000 values

// The arguments of one call. Pointers that a kernel does not use are null. Python makes it (kernels/cpu.py),
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
    const void* residual;               // added before encoding; null: none
    void* new_residual;
    int residual_dtype;                 // of both: kFloat32 or kBFloat16
};

struct Float32 {
    using Stored = float;
    BLOCK_MATH float widen(float value) { return value; }
    BLOCK_MATH float narrow(float value) { return value; }
};

template <class Half>
struct Stored16 : Half {
    using Stored = uint16_t;
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

template <class Numbers>
BLOCK_MATH void write_numbers(const float* __restrict values, int64_t half, Encoding by, uint8_t* __restrict payload) {
    auto unshifted = [=](int64_t i) __attribute__((always_inline)) { return values[i] * by.inverse; };
    auto shifted = [=](int64_t i) __attribute__((always_inline)) { return scaled(values[i], by); };
    if (by.shift == 1.0f)  // the usual case: one multiplication less
        write_scaled<Numbers>(half, unshifted, payload);
    else
        write_scaled<Numbers>(half, shifted, payload);
}

template <class Numbers>
BLOCK_MATH void decode_numbers(const uint8_t* __restrict payload, int64_t half, float scale, float* __restrict values) {
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
    cpu_rotation::rotate<kLanes>(values, rotated, block);
    int32_t largest_rotated = largest_of(rotated, block);
    return rotation_pays(largest, largest_rotated, block) ? largest_rotated : 0;
}

struct BFloat16Residual : Stored16<BFloat16> {  // for finite blocks
    BLOCK_MATH uint16_t narrow(float lost) { return bfloat16_of_finite(lost); }
};

// Stores the rounding errors of the first `count` values. In two loops: one loop would use vectors as long as
// the payload's bytes fill, which are few in a short block.
template <class Numbers, class Kept>
BLOCK_MATH void store_loss(const float* __restrict values, int64_t block, int64_t count,
                           const uint8_t* __restrict payload, float scale,
                           typename Kept::Stored* __restrict new_residual) {
    alignas(64) float numbers[kMostBlock];
    int64_t half = block / 2;
    for (int64_t i = 0; i < half; ++i) numbers[i] = Numbers::first(payload, i, half);
    for (int64_t i = 0; i < half; ++i) numbers[half + i] = Numbers::second(payload, i, half);
    float step = 1.0f / Numbers::kLevels;
    for (int64_t i = 0; i < count; ++i) new_residual[i] = Kept::narrow(values[i] - decoded(numbers[i], step, scale));
}

// Writes a block's payload and scale, and their rounding errors to `new_residual` (null: not needed).
template <class Numbers, class Kept, int kLanes>
BLOCK_MATH void encode_block(const float* __restrict values, int64_t block, int64_t count, bool may_be_rotated,
                             uint8_t* __restrict payload, uint8_t* scale, const typename Kept::Stored* residual,
                             typename Kept::Stored* __restrict new_residual) {
    int64_t half = block / 2;
    int32_t largest = largest_of(values, block);
    Encoding by = encoding_of(largest, Numbers::kLevels);
    if (largest == 0 || largest >= kInfinityBits) {
        memcpy(scale, &by.scale, 4);
        std::fill_n(payload, Numbers::bytes(block), uint8_t{0});
        // Not finite: no step will follow, so this one must leave no trace.
        if (new_residual && largest && residual) memcpy(new_residual, residual, sizeof *residual * count);
        else if (new_residual) memset(new_residual, 0, sizeof *new_residual * count);
        return;
    }
    if constexpr (Numbers::kFew) {
        alignas(64) float rotated[kMostBlock];
        int32_t turned = may_be_rotated ? rotate_if_it_pays<Numbers, kLanes>(values, block, largest, rotated) : 0;
        if (turned) {
            by = encoding_of(turned, Numbers::kLevels);
            write_numbers<Numbers>(rotated, half, by, payload);
            float sent = -by.scale;
            memcpy(scale, &sent, 4);
            if (!new_residual) return;
            decode_numbers<Numbers>(payload, half, restoring(sent, block), rotated);
            cpu_rotation::restore<kLanes>(rotated, block);
            for (int64_t i = 0; i < count; ++i) new_residual[i] = Kept::narrow(values[i] - rotated[i]);
            return;
        }
    }
    write_numbers<Numbers>(values, half, by, payload);
    memcpy(scale, &by.scale, 4);
    if (!new_residual) return;
    if (count == block) store_loss<Numbers, Kept>(values, block, block, payload, by.scale, new_residual);
    else store_loss<Numbers, Kept>(values, block, count, payload, by.scale, new_residual);
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

template <class Half>
BLOCK_MATH void widen(const uint16_t* __restrict halves, int64_t count, float* __restrict values) {
    for (int64_t i = 0; i < count; ++i) values[i] = Half::widen(halves[i]);
}

// A finite mean stays finite: quantized values and residuals can slightly exceed the largest number.
template <class Half>
BLOCK_MATH void narrow(const float* __restrict values, int64_t count, uint16_t* __restrict halves) {
    for (int64_t i = 0; i < count; ++i) halves[i] = Half::narrow(clamp_to(values[i], Half::kLargest));
}

template <class Value, class Kept>
BLOCK_MATH void add_residual(const typename Value::Stored* __restrict values, const typename Kept::Stored* __restrict residual,
                             int64_t count, float* __restrict sum) {
    for (int64_t i = 0; i < count; ++i) sum[i] = with_residual(Value::widen(values[i]), Kept::widen(residual[i]));
}

// ---- the same, once for every instruction set ----

enum Dtype { kFloat32, kBFloat16, kFloat16 };
enum Format { kInt8, kInt4, kBFloat16Numbers, kFloat16Numbers };

struct BlockKernels {
    void (*encode[4][2])(const float*, int64_t, int64_t, bool, uint8_t*, uint8_t*, const void*, void*);  // [format][residuals]
    void (*mean[4])(const Work&, int64_t, int64_t, float*);
    void (*widen[3])(const uint16_t*, int64_t, float*);
    void (*narrow[3])(const float*, int64_t, uint16_t*);
    void (*add_residual[3][2])(const void*, const void*, int64_t, float*);
};

// Half a block can be shorter than a vector: if the compiler knows the length, it uses shorter vectors.
#define COMMA ,
#define WITH_USUAL_BLOCKS(length, CALL)                                                                        \
    switch (length) {                                                                                          \
        case 32: { constexpr int64_t block = 32; CALL; break; }                                                \
        case 64: { constexpr int64_t block = 64; CALL; break; }                                                \
        case 128: { constexpr int64_t block = 128; CALL; break; }                                              \
        default: { int64_t block = length; CALL; }                                                             \
    }

#define OF_RESIDUALS(KERNEL, OF) {KERNEL<OF, Float32>, KERNEL<OF, BFloat16Residual>}

#define BLOCK_KERNELS(NAME, LANES, TARGET)                                                                     \
    namespace NAME {                                                                                           \
    template <class Numbers, class Kept>                                                                       \
    TARGET void encode(const float* values, int64_t length, int64_t count, bool may_be_rotated, uint8_t* payload,\
                       uint8_t* scale, const void* old_residual, void* lost) {                                 \
        auto residual = static_cast<const typename Kept::Stored*>(old_residual);                               \
        auto new_residual = static_cast<typename Kept::Stored*>(lost);                                         \
        WITH_USUAL_BLOCKS(length, (encode_block<Numbers, Kept, LANES>(values, block, count, may_be_rotated, payload, scale, \
                                                                      residual, new_residual)))                \
    }                                                                                                          \
    template <class Numbers>                                                                                   \
    TARGET void mean(const Work& work, int64_t index, int64_t blocks, float* values) {                         \
        WITH_USUAL_BLOCKS(work.block, mean_block<Numbers COMMA LANES>(work, block, index, blocks, values))     \
    }                                                                                                          \
    template <class Half>                                                                                      \
    TARGET void widen(const uint16_t* halves, int64_t count, float* values) {                                  \
        ::widen<Half>(halves, count, values);                                                                  \
    }                                                                                                          \
    template <class Half>                                                                                      \
    TARGET void narrow(const float* values, int64_t count, uint16_t* halves) {                                 \
        ::narrow<Half>(values, count, halves);                                                                 \
    }                                                                                                          \
    template <class Value, class Kept>                                                                         \
    TARGET void add_residual(const void* tensor, const void* old_residual, int64_t count, float* sum) {        \
        auto values = static_cast<const typename Value::Stored*>(tensor);                                      \
        auto residual = static_cast<const typename Kept::Stored*>(old_residual);                               \
        WITH_USUAL_BLOCKS(count, (::add_residual<Value, Kept>(values, residual, block, sum)))                  \
    }                                                                                                          \
    constexpr BlockKernels kernels{                                                                            \
        {OF_RESIDUALS(encode, Int8), OF_RESIDUALS(encode, Int4), OF_RESIDUALS(encode, Halves<BFloat16>),       \
         OF_RESIDUALS(encode, Halves<Float16>)},                                                               \
        {mean<Int8>, mean<Int4>, mean<Halves<BFloat16>>, mean<Halves<Float16>>},                               \
        {nullptr, widen<BFloat16>, widen<Float16>},                                                            \
        {nullptr, narrow<BFloat16>, narrow<Float16>},                                                          \
        {OF_RESIDUALS(add_residual, Float32), OF_RESIDUALS(add_residual, Stored16<BFloat16>),                  \
         OF_RESIDUALS(add_residual, Stored16<Float16>)}};                                                                                         \
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
    return format == kInt8 ? values : format == kInt4 ? values / 2 : 2 * values;
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

// The address of value `start` of a residual; null without a residual.
template <class Memory>
Memory* residual_at(Memory* residual, const Work& work, int64_t start) {
    using Byte = std::conditional_t<std::is_const_v<Memory>, const uint8_t, uint8_t>;
    return residual ? static_cast<Byte*>(residual) + value_bytes(work.residual_dtype, start) : nullptr;
}

void encode_value_block(const BlockKernels& kernels, const Work& work, const float* values, int64_t index,
                        int64_t count) {
    int64_t start = index * work.block;
    uint8_t* scales = work.message + payload_bytes(work.message_format, blocks_of(work.values, work.block) * work.block);
    kernels.encode[work.message_format][work.residual_dtype](
        values, work.block, count, work.message_rotate, work.message + payload_bytes(work.message_format, start),
        scales + 4 * index, residual_at(work.residual, work, start), residual_at(work.new_residual, work, start));
}

void encode_blocks(const BlockKernels& kernels, const Work& work, int64_t first, int64_t last) {
    alignas(64) float buffer[kMostBlock];
    for (int64_t index = first; index < last; ++index) {
        int64_t start = index * work.block, count = std::min(work.block, work.values - start);
        prefetch<0>(static_cast<const uint8_t*>(work.tensor) + value_bytes(work.dtype, start),
                    value_bytes(work.dtype, work.block));
        int64_t kept_bytes = value_bytes(work.residual_dtype, work.block);
        if (work.residual) prefetch<0>(residual_at(work.residual, work, start), kept_bytes);
        if (work.new_residual) prefetch<1>(residual_at(work.new_residual, work, start), kept_bytes);
        const void* tensor = static_cast<const uint8_t*>(work.tensor) + value_bytes(work.dtype, start);
        const float* values = static_cast<const float*>(tensor);
        if (work.dtype != kFloat32 || count < work.block || work.residual) {
            if (work.residual)
                kernels.add_residual[work.dtype][work.residual_dtype](
                    tensor, residual_at(work.residual, work, start), count, buffer);
            else if (work.dtype == kFloat32)
                memcpy(buffer, values, 4 * count);
            else
                kernels.widen[work.dtype](static_cast<const uint16_t*>(tensor), count, buffer);
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
            kernels.add_residual[kFloat32][work.residual_dtype](mean, residual_at(work.residual, work, start), count, sum);
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
        prefetch<1>(static_cast<const uint8_t*>(work.tensor) + value_bytes(work.dtype, start),
                    value_bytes(work.dtype, work.block));
        float* values = static_cast<float*>(work.tensor) + start;
        bool in_place = work.dtype == kFloat32 && count == work.block;
        float* mean = in_place ? values : buffer;
        kernels.mean[work.format](work, index, blocks, mean);
        if (in_place) continue;
        if (work.dtype == kFloat32)
            memcpy(values, buffer, 4 * count);
        else
            kernels.narrow[work.dtype](buffer, count, static_cast<uint16_t*>(work.tensor) + start);
    }
}

using Kernel = void (*)(const BlockKernels&, const Work&, int64_t, int64_t);

struct InstructionSet {
    const char* name;
    bool available;
    const BlockKernels& kernels;
};

std::vector<InstructionSet> instruction_sets() {  // the best first
    return {
#if defined(__x86_64__)
        {"AVX-512",
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
         avx512::kernels},
        {"AVX2", static_cast<bool>(__builtin_cpu_supports("avx2")), avx2::kernels},
        {"SSE2", true, baseline::kernels},
#elif defined(__aarch64__)
        {"NEON", true, baseline::kernels},
#else
        {"scalar", true, baseline::kernels},
#endif
    };
}

void run_range(Kernel kernel, const BlockKernels& kernels, const Work& work, int64_t first, int64_t last) {
    // Torch can make its threads flush subnormal numbers to zero, which would change bits on this rank only.
    std::fenv_t environment;
    std::feholdexcept(&environment);
    std::fesetenv(FE_DFL_ENV);
    kernel(kernels, work, first, last);
    std::fesetenv(&environment);
}

void run(Kernel kernel, const BlockKernels& kernels, int threads, const Work& work) {
    int64_t blocks = blocks_of(work.values, work.block);
    int64_t parts = std::clamp<int64_t>(work.values / kValuesPerThread, 1, std::max(threads, 1));
    std::vector<std::thread> others;
    others.reserve(parts);  // nothing below may throw while threads run
    int64_t first = 0;
    for (int64_t part = 1; part < parts; ++part) {
        int64_t last = blocks * part / parts;
        try {
            others.emplace_back(run_range, kernel, std::cref(kernels), std::cref(work), first, last);
        } catch (const std::exception&) {  // no more threads available: this one does the rest
            break;
        }
        first = last;
    }
    run_range(kernel, kernels, work, first, blocks);
    for (auto& other : others) other.join();
}

}  // namespace

// ---- the interface; its arguments have been checked ----

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED const char* quant_instruction_set(int index) {
    auto sets = instruction_sets();
    return index >= 0 && index < static_cast<int>(sets.size()) ? sets[index].name : nullptr;
}

EXPORTED int quant_instruction_set_available(int index) {
    auto sets = instruction_sets();
    return index >= 0 && index < static_cast<int>(sets.size()) && sets[index].available;
}

// The version of the functions here and of Work. A library that was built from other sources must not be
// called.
EXPORTED int quant_abi() { return 2; }

// Returns 0; 1 if there is no such kernel, or no such instruction set on this processor; 2 without enough
// memory.
EXPORTED int quant_run(int kernel, int instruction_set, int threads, const Work* work) {
    constexpr Kernel all[] = {encode_blocks, reduce_blocks, decode_blocks};
    if (kernel < 0 || kernel >= 3 || !quant_instruction_set_available(instruction_set)) return 1;
    try {
        run(all[kernel], instruction_sets()[instruction_set].kernels, threads, *work);
    } catch (const std::exception&) {
        return 2;
    }
    return 0;
}

}  // extern "C"
