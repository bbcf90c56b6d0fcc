// The GPU kernels: encode, reduce and decode messages of quantized blocks.
//
// Python compiles this text with NVRTC for one kernel, dtype, format, block size and number of ranks at a
// time (kernels/programs.py): all of these are constants here. Messages have the layout of
// cpu_kernels.cpp, and the arithmetic is that of block_math.h, so all backends give identical bits.
//
// A team of lanes, a warp or a part of one, has a block in its registers. A lane has units of it: kUnit values in a row
// of the block's first half, and those at the same place of its second half, which int4 packs together. Encoding and
// decoding choose kUnit so that a lane moves 16 bytes of values at a time.

#include "gpu_memory.h"
#include "rotation.h"

namespace block_kernels {

using namespace gpu_memory;

constexpr int kThreads = 128;  // of a thread block

struct Shard {  // consecutive values, and their message
    int64_t values;
    void* tensor;           // encode reads it, decode writes it
    uint8_t* message;       // encode and reduce write it
    const uint16_t* residual;  // bf16, added before encoding; null: none
    uint16_t* new_residual;    // bf16, gets the rounding error; null: not needed
};

// The parameter of a launch: a part for each row of the grid, of which there may be fewer. Python makes it (`Shard` of
// kernels/call.py, and messages), and every program asserts that both agree. Pointers that a kernel does not use are
// null.
template <int kMessages>
struct Part {
    Shard shard;
    const uint8_t* messages[kMessages];  // to average, in rank order
};

template <int kParts, int kMessages>
struct Work {
    Part<kMessages> parts[kParts];
};

// ---- a team's block ----

// Calls visit(unit, half) for each half of a lane's units.
template <class B, class Visit>
BLOCK_MATH void for_each_half(Visit visit) {
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit)
        #pragma unroll
        for (int half = 0; half < 2; ++half) visit(unit, half);
}

// Calls visit(unit, half, i) for each value of a lane.
template <class B, class Visit>
BLOCK_MATH void for_each_value(Visit visit) {
    for_each_half<B>([&](int unit, int half) {
        #pragma unroll
        for (int i = 0; i < B::kUnit; ++i) visit(unit, half, i);
    });
}

// A lane's part of its team's block. kAligned: all tensors and messages start at multiples of 16 bytes.
template <class NumbersOfPayload, int kBlockValues, int kUnitValues, bool kAlignedMemory>
struct Block {
    using Numbers = NumbersOfPayload;
    static constexpr int kBlock = kBlockValues, kHalf = kBlock / 2, kUnit = kUnitValues;
    static constexpr bool kAligned = kAlignedMemory;
    static constexpr int kLanes = kHalf / kUnit < kWarp ? kHalf / kUnit : kWarp;
    static constexpr int kUnits = kHalf / kUnit / kLanes;  // of a lane
    static constexpr int kTeams = kThreads / kLanes;       // of a thread block
    static constexpr int kUnitBytes = static_cast<int>(Numbers::bytes(2 * kUnit));
    static constexpr int kParts = Numbers::bytes(2) <= 1 ? 1 : 2;  // of a unit's payload: packed numbers are in one
    static constexpr int kPartBytes = kUnitBytes / kParts;
    static constexpr float kStep = 1.0f / Numbers::kLevels;

    float values[kUnits][2][kUnit];  // of each unit, in both halves
    int64_t count, index, blocks;    // values of the shard; this block's index, and the number of blocks
    int lane;
    bool there;  // a team past the last block repeats that block and stores nothing

    __device__ __forceinline__ explicit Block(int64_t count) : count(count), blocks((count + kBlock - 1) / kBlock) {
        index = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes;
        lane = static_cast<int>(threadIdx.x) % kLanes;
        there = index < blocks;
        index = there ? index : blocks - 1;
    }

    // Where a unit starts in the block, where in the shard, and how many values the shard has from there on.
    __device__ __forceinline__ int place(int unit, int half) const { return half * kHalf + (unit * kLanes + lane) * kUnit; }
    __device__ __forceinline__ int64_t start(int unit, int half) const { return index * kBlock + place(unit, half); }
    __device__ __forceinline__ int64_t left(int unit, int half) const { return count - start(unit, half); }

    template <class Value>
    __device__ __forceinline__ void load_values(const void* tensor) {
        auto from = static_cast<const typename Value::Stored*>(tensor);
        for_each_half<Block>([&](int unit, int half) {
            load<Value, kUnit, kAligned>(values[unit][half], from + start(unit, half), left(unit, half));
        });
    }

    template <class Value>
    __device__ __forceinline__ void store_values(void* tensor) const {
        auto to = static_cast<typename Value::Stored*>(tensor);
        for_each_half<Block>([&](int unit, int half) {
            if (there) store<Value, kUnit, kAligned>(to + start(unit, half), values[unit][half], left(unit, half));
        });
    }

    // ---- a unit's payload: as Numbers lays out a block of 2 kUnit values ----

    // The place of a part in a message: a packed part has the numbers of both halves.
    __device__ __forceinline__ int64_t payload(int unit, int part) const {
        return index * Numbers::bytes(kBlock) + Numbers::bytes(2 / kParts * place(unit, part));
    }

    __device__ __forceinline__ void load_payload(uint8_t* bytes, const uint8_t* message, int unit) const {
        #pragma unroll
        for (int part = 0; part < kParts; ++part)
            read<kPartBytes, kAligned>(bytes + part * kPartBytes, message + payload(unit, part));
    }

    __device__ __forceinline__ void store_payload(uint8_t* message, const uint8_t* bytes, int unit) const {
        #pragma unroll
        for (int part = 0; part < kParts; ++part)
            write<kPartBytes, kAligned>(message + payload(unit, part), bytes + part * kPartBytes);
    }

    BLOCK_MATH float number(const uint8_t* bytes, int half, int i) {
        return half ? Numbers::second(bytes, i, kUnit) : Numbers::first(bytes, i, kUnit);
    }

    __device__ __forceinline__ float load_scale(const uint8_t* message) const {
        float scale;
        read<4, kAligned>(&scale, message + blocks * Numbers::bytes(kBlock) + 4 * index);
        return scale;
    }

    __device__ __forceinline__ void store_scale(uint8_t* message, float scale) const {
        write<4, kAligned>(message + blocks * Numbers::bytes(kBlock) + 4 * index, &scale);
    }
};

// ---- encoding ----

template <class B>
BLOCK_MATH void add_residual(B& block, const uint16_t* residual) {
    for_each_half<B>([&](int unit, int half) {
        Unit<BFloat16, B::kUnit> kept;
        read_unit<BFloat16, B::kUnit, B::kAligned>(kept, residual + block.start(unit, half), block.left(unit, half));
        #pragma unroll
        for (int i = 0; i < B::kUnit; ++i)
            block.values[unit][half][i] = with_residual(block.values[unit][half][i], kept.stored[i]);
    });
}

template <class B>
BLOCK_MATH int32_t largest_of_team(const B& block, const float (&values)[B::kUnits][2][B::kUnit]) {
    int32_t largest = 0;
    for_each_value<B>([&](int unit, int half, int i) { largest = larger(largest, magnitude_bits(values[unit][half][i])); });
    return of_lanes<B::kLanes>(largest, larger);
}

// The same where either all values of the block are NaN or none: a maximum of floats takes one instruction a value,
// and drops a NaN beside numbers.
template <class B>
BLOCK_MATH int32_t largest_of_mean(const B& block) {
    float largest = fabsf(block.values[0][0][0]);
    for_each_value<B>([&](int unit, int half, int i) { largest = fmaxf(largest, fabsf(block.values[unit][half][i])); });
    return of_lanes<B::kLanes>(magnitude_bits(largest), larger);
}

// The mean magnitude: sums of values half of the block apart, then a quarter, and so on.
template <class B>
BLOCK_MATH float mean_magnitude_of_team(const B& block) {
    float sums[B::kUnits][2][B::kUnit];
    for_each_value<B>([&](int unit, int half, int i) {
        sums[unit][half][i] = fabsf(block.values[unit][half][i]) * (1.0f / B::kBlock);
    });
    for_each_value<B>([&](int unit, int half, int i) {
        if (half == 0) sums[unit][0][i] = sums[unit][0][i] + sums[unit][1][i];
    });
    #pragma unroll
    for (int step = B::kUnits / 2; step > 0; step /= 2)
        for_each_value<B>([&](int unit, int half, int i) {
            if (half == 0 && unit < step) sums[unit][0][i] = sums[unit][0][i] + sums[unit + step][0][i];
        });
    #pragma unroll
    for (int step = B::kLanes / 2; step > 0; step /= 2)
        #pragma unroll
        for (int i = 0; i < B::kUnit; ++i) sums[0][0][i] = sums[0][0][i] + exchanged(sums[0][0][i], step);
    #pragma unroll
    for (int step = B::kUnit / 2; step > 0; step /= 2)
        #pragma unroll
        for (int i = 0; i < step; ++i) sums[0][0][i] = sums[0][0][i] + sums[0][0][i + step];
    return sums[0][0][0];
}

// ---- rotating ----

BLOCK_MATH void add_and_subtract(float& low, float& high) {
    float sum = low + high;
    high = low - high;
    low = sum;
}

// Sums and differences of all values a power of two apart, in the order of rotation.h. All lanes of a warp
// must call this.
template <class B>
BLOCK_MATH void transform(float (&values)[B::kUnits][2][B::kUnit], int lane) {
    #pragma unroll
    for (int step = 1; step < B::kUnit; step *= 2)
        for_each_value<B>([&](int unit, int half, int i) {
            if (!(i & step)) add_and_subtract(values[unit][half][i], values[unit][half][i + step]);
        });
    #pragma unroll
    for (int step = 1; step < B::kLanes; step *= 2)
        for_each_value<B>([&](int unit, int half, int i) {
            float own = values[unit][half][i], other = exchanged(own, step);
            values[unit][half][i] = lane & step ? other - own : own + other;
        });
    #pragma unroll
    for (int step = 1; step < B::kUnits; step *= 2)
        for_each_value<B>([&](int unit, int half, int i) {
            if (!(unit & step)) add_and_subtract(values[unit][half][i], values[unit + step][half][i]);
        });
    for_each_value<B>([&](int unit, int half, int i) {
        if (half == 0) add_and_subtract(values[unit][0][i], values[unit][1][i]);
    });
}

// Writes this lane's values with the signs of their places applied.
template <class B>
BLOCK_MATH void turn(const B& block, const float (&from)[B::kUnits][2][B::kUnit], float (&to)[B::kUnits][2][B::kUnit]) {
    for_each_value<B>([&](int unit, int half, int i) {
        to[unit][half][i] = turned_by(from[unit][half][i], sign_at(static_cast<uint32_t>(block.place(unit, half) + i)));
    });
}

// Rotates the block if that pays. Returns the largest magnitude of the rotated block, or 0 if it was not
// rotated. All lanes of a warp must call this.
template <class B>
BLOCK_MATH int32_t rotate_if_it_pays(const B& block, int32_t largest, float (&rotated)[B::kUnits][2][B::kUnit]) {
    int32_t limit = magnitude_bits(float_of(static_cast<uint32_t>(largest)) * kPeak), above = 0, smallest = kInfinityBits;
    for_each_value<B>([&](int unit, int half, int i) {
        int32_t magnitude = magnitude_bits(block.values[unit][half][i]);
        above += magnitude > limit;
        smallest = magnitude < smallest ? magnitude : smallest;
    });
    above = of_lanes<B::kLanes>(above, [](int32_t left, int32_t right) { return left + right; });
    smallest = of_lanes<B::kLanes>(smallest, [](int32_t left, int32_t right) { return left < right ? left : right; });
    bool may = is_peaked<typename B::Numbers>(above, B::kBlock) && may_rotate(smallest, largest);
    if (!of_lanes<kWarp>(may, larger)) return 0;
    turn(block, block.values, rotated);
    transform<B>(rotated, block.lane);
    int32_t largest_rotated = largest_of_team(block, rotated);
    return may && rotation_pays(largest, largest_rotated, B::kBlock) ? largest_rotated : 0;
}

// Restores a block from its numbers times their restoring scale, if its team has one.
template <class B>
BLOCK_MATH void restore_if(bool rotated, const B& block, float (&values)[B::kUnits][2][B::kUnit]) {
    if (!of_lanes<kWarp>(rotated, larger)) return;
    float restored[B::kUnits][2][B::kUnit];
    memcpy(restored, values, sizeof restored);
    transform<B>(restored, block.lane);
    turn(block, restored, restored);
    if (rotated) memcpy(values, restored, sizeof restored);
}

// Stores the rounding errors of half a unit's values, for the next step. `restored`: the values in the
// message.
template <class B>
BLOCK_MATH void store_loss(const B& block, const Shard& shard, const float (&restored)[B::kUnit], int unit, int half,
                           int32_t largest) {
    int64_t start = block.start(unit, half), left = block.left(unit, half);
    Unit<BFloat16, B::kUnit> lost = {};
    if (largest >= kInfinityBits) {  // no step will follow, so this one must leave no trace
        if (shard.residual) read_unit<BFloat16, B::kUnit, B::kAligned>(lost, shard.residual + start, left);
    } else if (largest != 0) {
        #pragma unroll
        for (int i = 0; i < B::kUnit; ++i)
            lost.stored[i] = bfloat16_of_finite(block.values[unit][half][i] - restored[i]);
    }
    write_unit<BFloat16, B::kUnit, B::kAligned>(shard.new_residual + start, lost, left);
}

// Writes a unit's numbers: of values times `by`, which are small enough where kShifted is false.
template <bool kShifted, class B>
BLOCK_MATH void write_numbers(uint8_t* bytes, const float (&values)[2][B::kUnit], Encoding by) {
    #pragma unroll
    for (int i = 0; i < B::kUnit; ++i) {
        if constexpr (kShifted) {
            B::Numbers::write(bytes, i, B::kUnit, scaled(values[0][i], by), scaled(values[1][i], by));
        } else {
            B::Numbers::write(bytes, i, B::kUnit, values[0][i] * by.inverse, values[1][i] * by.inverse);
        }
    }
}

// Writes the block's payload and scale, and what they lose. All lanes of a warp must come here. kResiduals: whether
// there are any, which are finite: kernels without them keep fewer values in registers. kMean: the values are a mean,
// and so all NaN or none.
template <bool kResiduals, bool kRotate, bool kMean, class B>
BLOCK_MATH void encode_block(B& block, const Shard& shard) {
    if constexpr (kResiduals)
        if (shard.residual) add_residual(block, shard.residual);
    int32_t largest = kMean ? largest_of_mean(block) : largest_of_team(block, block.values);
    Encoding by = encoding_of(largest, B::Numbers::kLevels);
    if constexpr (kScaledByMean<typename B::Numbers>) {
        float mean = mean_magnitude_of_team(block);
        if (is_finite(by.scale)) by.scale = mean;
    }
    bool has_numbers = largest != 0 && largest < kInfinityBits;
    float numbers[B::kUnits][2][B::kUnit];  // what to write: the values, or the rotated ones
    memcpy(numbers, block.values, sizeof numbers);
    bool is_turned = false;
    if constexpr (kRotate) {
        float rotated[B::kUnits][2][B::kUnit];
        int32_t largest_rotated = rotate_if_it_pays(block, largest, rotated);
        is_turned = largest_rotated != 0;
        if (is_turned) {
            by = encoding_of(largest_rotated, B::Numbers::kLevels);
            memcpy(numbers, rotated, sizeof numbers);
        }
    }
    float scale = is_turned ? -by.scale : by.scale;
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit) {
        alignas(16) uint8_t bytes[B::kUnitBytes] = {};
        if (has_numbers && by.shift == 1.0f) {
            write_numbers<false, B>(bytes, numbers[unit], by);
        } else if (has_numbers) {
            write_numbers<true, B>(bytes, numbers[unit], by);
        }
        if (block.there) block.store_payload(shard.message, bytes, unit);
        if constexpr (kResiduals) {
            if (!shard.new_residual) continue;
            float by_scale = kRotate ? restoring(scale, B::kBlock) : scale;
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i) {
                numbers[unit][0][i] = decoded(B::number(bytes, 0, i), B::kStep, by_scale);
                numbers[unit][1][i] = decoded(B::number(bytes, 1, i), B::kStep, by_scale);
            }
        }
    }
    if (block.there && block.lane == 0) block.store_scale(shard.message, scale);
    if constexpr (kResiduals) {
        if (!shard.new_residual) return;
        if constexpr (kRotate) restore_if(is_turned, block, numbers);
        for_each_half<B>([&](int unit, int half) {
            if (block.there) store_loss(block, shard, numbers[unit][half], unit, half, largest);
        });
    }
}

// ---- the mean over the ranks ----

// Which ranks' blocks are included: all, or only those that are rotated, or that are not.
enum Which { kAll, kRotatedOnly, kPlainOnly };

// Includes kCount ranks in the mean, after `before` others. All their memory is requested before any of it is
// used. If not all ranks are included, `included` counts those that are.
template <Which kWhich, bool kFirst, int kCount, class B>
BLOCK_MATH void include(B& block, const uint8_t* const* messages, int before, float shrink, int& included) {
    alignas(16) uint8_t bytes[kCount][B::kUnits][B::kUnitBytes];
    float scales[kCount];
    #pragma unroll
    for (int rank = 0; rank < kCount; ++rank) {
        #pragma unroll
        for (int unit = 0; unit < B::kUnits; ++unit) block.load_payload(bytes[rank][unit], messages[before + rank], unit);
        scales[rank] = block.load_scale(messages[before + rank]);
    }
    #pragma unroll
    for (int rank = 0; rank < kCount; ++rank) {
        if (kWhich != kAll && is_rotated(scales[rank]) != (kWhich == kRotatedOnly)) continue;
        float scale = (kWhich == kRotatedOnly ? restoring(scales[rank], B::kBlock) : scales[rank]) * shrink;
        bool is_first = kWhich == kAll ? kFirst && rank == 0 : included == 0;
        float weight = 1.0f / static_cast<float>((kWhich == kAll ? before + rank : included) + 1);
        ++included;
        for_each_value<B>([&](int unit, int half, int i) {
            float value = decoded(B::number(bytes[rank][unit], half, i), B::kStep, scale);
            float& mean = block.values[unit][half][i];
            mean = is_first ? value : running_mean(mean, value, weight);
        });
    }
}

// Includes the blocks of all ranks that `kWhich` selects.
template <Which kWhich, int kRanks, class B>
BLOCK_MATH void include_ranks(B& block, const uint8_t* const* messages, float shrink, int& included) {
    constexpr int kMost = B::kUnitBytes * B::kUnits > 32 ? 2 : 4;  // ranks at a time, in registers
    constexpr int kGroup = kRanks < kMost ? kRanks : kMost, kRest = kRanks % kGroup;
    include<kWhich, true, kGroup>(block, messages, 0, shrink, included);
    #pragma unroll(kRanks <= 16 ? 16 : 1)
    for (int before = kGroup; before + kGroup <= kRanks; before += kGroup)
        include<kWhich, false, kGroup>(block, messages, before, shrink, included);
    if constexpr (kRest > 0) include<kWhich, false, kRest>(block, messages, kRanks - kRest, shrink, included);
}

// A block that is not finite on some rank is NaN. Ranks that rotated the block come first, so that their mean
// is restored once. All lanes of a warp must call this.
template <bool kRotated, int kRanks, class B>
BLOCK_MATH void average(B& block, const uint8_t* const* messages) {
    bool finite = true, some_rotated = false;
    float largest = 0.0f;
    #pragma unroll 8
    for (int rank = 0; rank < kRanks; ++rank) {
        float scale = block.load_scale(messages[rank]);
        finite = finite && is_finite(scale);
        some_rotated = some_rotated || is_rotated(scale);
        largest = scale > largest ? scale : largest;
    }
    float shrink = kRanks > 1 && must_shrink(largest) ? kShrink : 1.0f;

    int included = 0;
    if constexpr (kRotated) {
        memset(block.values, 0, sizeof block.values);
        if (some_rotated) include_ranks<kRotatedOnly, kRanks>(block, messages, shrink, included);
        restore_if(some_rotated, block, block.values);
        include_ranks<kPlainOnly, kRanks>(block, messages, shrink, included);
    } else {
        include_ranks<kAll, kRanks>(block, messages, shrink, included);
    }

    if (shrink == 1.0f && finite) return;
    for_each_value<B>([&](int unit, int half, int i) {
        float& mean = block.values[unit][half][i];
        mean = finite ? grown(mean) : quiet_nan();
    });
}

// ---- the kernels; kRotate: whether blocks of their messages can be rotated ----

template <class Value, bool kResiduals, class Numbers, int kBlock, bool kAligned, bool kRotate, int kParts>
BLOCK_MATH void encode(const Work<kParts, 1>& work) {
    const Shard& shard = work.parts[blockIdx.y].shard;
    Block<Numbers, kBlock, 16 / sizeof(typename Value::Stored), kAligned> block(shard.values);
    block.template load_values<Value>(shard.tensor);
    encode_block<kResiduals, kRotate, false>(block, shard);
}

template <bool kResiduals, class Numbers, class NewNumbers, int kBlock, bool kAligned, bool kRotated, bool kRotate, int kRanks>
BLOCK_MATH void reduce(const Work<1, kRanks>& work) {
    const Shard& shard = work.parts[0].shard;
    constexpr int kUnit = 8;  // more values of a lane leave room for fewer threads, which wait for memory together
    Block<Numbers, kBlock, kUnit, kAligned> mean(shard.values);
    average<kRotated, kRanks>(mean, work.parts[0].messages);
    Block<NewNumbers, kBlock, kUnit, kAligned> block(shard.values);
    memcpy(block.values, mean.values, sizeof block.values);
    encode_block<kResiduals, kRotate, true>(block, shard);
}

template <class Value, class Numbers, int kBlock, bool kAligned, bool kRotated, int kParts, int kRanks>
BLOCK_MATH void decode(const Work<kParts, kRanks>& work) {
    const Part<kRanks>& part = work.parts[blockIdx.y];
    Block<Numbers, kBlock, 16 / sizeof(typename Value::Stored), kAligned> block(part.shard.values);
    average<kRotated, kRanks>(block, part.messages);
    block.template store_values<Value>(part.shard.tensor);
}

}  // namespace block_kernels
