// The kernels on a GPU: encode, reduce and decode messages of quantised blocks.
//
// Python compiles this text with NVRTC for one kernel, dtype, format, block size and number of messages at a time
// (kernels/programs.py): all of them are constants here. A message lies as in cpu_kernels.cpp, and the arithmetic
// is block_math.h's, so every backend gives the same bits.
//
// A team of lanes has a block in its registers: a part of a warp, or several warps if the block is long. A lane has units of it: kUnit values in a row of
// the block's first half, and those at the same place of its second half, which int4 packs together. Kernels choose
// kUnit so that a lane moves 16 bytes at a time on the side with more bytes.

#include "gpu_memory.h"

namespace block_kernels {

using namespace gpu_memory;

constexpr int kThreads = 256;  // of a thread block
constexpr int kMostValues = 32;  // of a lane

struct Shard {  // consecutive values, and their message
    int64_t values;
    void* tensor;           // encode reads it, decode writes it
    uint8_t* message;       // encode and reduce write it
    const float* residual;  // added before encoding; null: none
    float* new_residual;    // what the message loses; null: nowhere
};

// What one launch works on; shards are the grid's second dimension. Python makes it (kernels/cuda.py), with the same
// members in the same order. Pointers that a kernel does not use are null.
template <int kShards, int kMessages>
struct Work {
    Shard shards[kShards];
    const uint8_t* messages[kMessages];  // that are averaged: in rank order, of one shard after the other
};

// ---- a team's block ----

// A power of two: a lane for each unit up to a warp, and then as many as keep a lane's values in its registers.
BLOCK_MATH constexpr int lanes_for(int units, int block) {
    int lanes = 1;
    while (lanes < units && (lanes < kWarp || block > lanes * kMostValues)) lanes *= 2;
    return lanes;
}

// A lane's part of the block that its team has.
template <class NumbersOfPayload, int kBlockValues, int kUnitValues>
struct Block {
    using Numbers = NumbersOfPayload;
    static constexpr int kBlock = kBlockValues, kHalf = kBlock / 2, kUnit = kUnitValues;
    static constexpr int kUnitsOfTeam = kHalf / kUnit;
    static constexpr int kLanes = lanes_for(kUnitsOfTeam, kBlock);
    static constexpr int kUnits = (kUnitsOfTeam + kLanes - 1) / kLanes;  // of a lane
    static constexpr int kTeams = kThreads / kLanes;                     // of a thread block
    static constexpr bool kPacked = Numbers::bytes(2) == 1;
    static constexpr int kUnitBytes = static_cast<int>(Numbers::bytes(2 * kUnit));
    static constexpr float kStep = 1.0f / Numbers::kLevels;

    float values[kUnits][2][kUnit];  // of a unit in both halves
    int64_t count, index, blocks;    // values of the shard; which block this is, of how many
    int lane;

    __device__ __forceinline__ explicit Block(int64_t count) : count(count), blocks((count + kBlock - 1) / kBlock) {
        index = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes;
        lane = static_cast<int>(threadIdx.x) % kLanes;
    }

    // Where in the block a unit starts, and how many of its values there are.
    __device__ __forceinline__ int place(int unit, int half) const { return half * kHalf + (unit * kLanes + lane) * kUnit; }
    __device__ __forceinline__ bool has(int unit) const {
        return index < blocks && (kUnitsOfTeam % kLanes == 0 || unit * kLanes + lane < kUnitsOfTeam);
    }
    __device__ __forceinline__ int64_t start(int unit, int half) const { return index * kBlock + place(unit, half); }
    __device__ __forceinline__ int64_t left(int unit, int half) const { return has(unit) ? count - start(unit, half) : 0; }

    template <class Value>
    __device__ __forceinline__ void load_values(const void* tensor) {
        auto from = static_cast<const typename Value::Stored*>(tensor);
        bool aligned = is_aligned(tensor);
        #pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                load<Value, kUnit>(values[unit][half], from + start(unit, half), left(unit, half), aligned);
    }

    template <class Value>
    __device__ __forceinline__ void store_values(void* tensor) const {
        auto to = static_cast<typename Value::Stored*>(tensor);
        bool aligned = is_aligned(tensor);
        #pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                store<Value, kUnit>(to + start(unit, half), values[unit][half], left(unit, half), aligned);
    }

    // ---- a unit's payload: as Numbers lays out a block of 2 kUnit values ----

    // Where it is in a message: the bytes of the first half, or of both.
    __device__ __forceinline__ int64_t payload(int unit, int half) const {
        return index * Numbers::bytes(kBlock) + (kPacked ? place(unit, 0) : Numbers::bytes(place(unit, half)));
    }

    __device__ __forceinline__ void load_payload(uint8_t* bytes, const uint8_t* message, int unit) const {
        bool aligned = is_aligned(message);
        if constexpr (kPacked) {
            read<kUnitBytes>(bytes, message + payload(unit, 0), aligned);
        } else {
            read<kUnitBytes / 2>(bytes, message + payload(unit, 0), aligned);
            read<kUnitBytes / 2>(bytes + kUnitBytes / 2, message + payload(unit, 1), aligned);
        }
    }

    __device__ __forceinline__ void store_payload(uint8_t* message, const uint8_t* bytes, int unit) const {
        bool aligned = is_aligned(message);
        if constexpr (kPacked) {
            write<kUnitBytes>(message + payload(unit, 0), bytes, aligned);
        } else {
            write<kUnitBytes / 2>(message + payload(unit, 0), bytes, aligned);
            write<kUnitBytes / 2>(message + payload(unit, 1), bytes + kUnitBytes / 2, aligned);
        }
    }

    BLOCK_MATH float number(const uint8_t* bytes, int half, int i) {
        return half ? Numbers::second(bytes, i, kUnit) : Numbers::first(bytes, i, kUnit);
    }

    __device__ __forceinline__ float load_scale(const uint8_t* message) const {
        float scale;
        read<4>(&scale, message + blocks * Numbers::bytes(kBlock) + 4 * index, is_aligned(message));
        return scale;
    }

    __device__ __forceinline__ void store_scale(uint8_t* message, float scale) const {
        write<4>(message + blocks * Numbers::bytes(kBlock) + 4 * index, &scale, is_aligned(message));
    }
};

// ---- encoding ----

template <class B>
BLOCK_MATH void add_residual(B& block, const float* residual) {
    bool aligned = is_aligned(residual);
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float kept[B::kUnit];
            load<Stored32, B::kUnit>(kept, residual + block.start(unit, half), block.left(unit, half), aligned);
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i)
                block.values[unit][half][i] = with_residual(block.values[unit][half][i], kept[i]);
        }
}

// All lanes of a thread block must come here.
template <class B>
BLOCK_MATH int32_t largest_of_team(const B& block) {
    int32_t largest = 0;
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i)
                largest = larger(largest, magnitude_bits(block.values[unit][half][i]));
    largest = largest_of<(B::kLanes < kWarp ? B::kLanes : kWarp)>(largest);
    if constexpr (B::kLanes > kWarp) {
        __shared__ int32_t of_warp[kThreads / kWarp];
        int warp = static_cast<int>(threadIdx.x) / kWarp, first = static_cast<int>(threadIdx.x) / B::kLanes * B::kLanes / kWarp;
        of_warp[warp] = largest;  // equal in all its lanes
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < B::kLanes / kWarp; ++i) largest = larger(largest, of_warp[first + i]);
    }
    return largest;
}

// What a unit's payload lost of half its values, for the next step.
template <class B>
BLOCK_MATH void store_loss(const B& block, const Shard& shard, const uint8_t* bytes, int unit, int half,
                           int32_t largest, float scale) {
    int64_t start = block.start(unit, half), left = block.left(unit, half);
    float lost[B::kUnit] = {};
    if (largest >= kInfinityBits) {  // a step that will not be made, so it must leave no trace
        if (shard.residual) load<Stored32, B::kUnit>(lost, shard.residual + start, left, is_aligned(shard.residual));
    } else if (largest != 0) {
        #pragma unroll
        for (int i = 0; i < B::kUnit; ++i)
            lost[i] = block.values[unit][half][i] - decoded(B::number(bytes, half, i), B::kStep, scale);
    }
    store<Stored32, B::kUnit>(shard.new_residual + start, lost, left, is_aligned(shard.new_residual));
}

// Writes the block's payload and scale, and what they lose. All lanes of a thread block must come here.
template <class B>
BLOCK_MATH void encode_block(B& block, const Shard& shard) {
    if (shard.residual) add_residual(block, shard.residual);
    int32_t largest = largest_of_team(block);
    if (block.index >= block.blocks) return;

    Encoding by = encoding_of(largest, B::Numbers::kLevels);
    bool has_numbers = largest != 0 && largest < kInfinityBits;
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit) {
        if (!block.has(unit)) continue;
        alignas(16) uint8_t bytes[B::kUnitBytes] = {};
        if (has_numbers) {
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i)
                B::Numbers::write(bytes, i, B::kUnit, scaled(block.values[unit][0][i], by),
                                  scaled(block.values[unit][1][i], by));
        }
        block.store_payload(shard.message, bytes, unit);
        if (shard.new_residual) {
            store_loss(block, shard, bytes, unit, 0, largest, by.scale);
            store_loss(block, shard, bytes, unit, 1, largest, by.scale);
        }
    }
    if (block.lane == 0) block.store_scale(shard.message, by.scale);
}

// ---- the mean over the ranks ----

template <bool kFirst, class B>
BLOCK_MATH void include(B& block, const uint8_t* message, float scale, float weight) {
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit) {
        alignas(16) uint8_t bytes[B::kUnitBytes] = {};
        if (block.has(unit)) block.load_payload(bytes, message, unit);
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i) {
                float value = decoded(B::number(bytes, half, i), B::kStep, scale);
                float& mean = block.values[unit][half][i];
                mean = kFirst ? value : running_mean(mean, value, weight);
            }
    }
}

// Returns whether the block is finite on every rank; else it is NaN.
template <int kRanks, class B>
BLOCK_MATH bool average(B& block, const uint8_t* const* messages) {
    constexpr int kUnrolled = kRanks * B::kUnits <= 16 ? kRanks : 2;
    bool there = block.index < block.blocks, finite = true;
    float largest = 0.0f;
    #pragma unroll kUnrolled
    for (int rank = 0; rank < kRanks; ++rank) {
        float scale = there ? block.load_scale(messages[rank]) : 0.0f;
        finite = finite && is_finite(scale);
        largest = scale > largest ? scale : largest;
    }
    float shrink = kRanks > 1 && must_shrink(largest) ? kShrink : 1.0f;
    include<true>(block, messages[0], (there ? block.load_scale(messages[0]) : 0.0f) * shrink, 1.0f);
    #pragma unroll kUnrolled
    for (int rank = 1; rank < kRanks; ++rank) {
        float scale = (there ? block.load_scale(messages[rank]) : 0.0f) * shrink;
        include<false>(block, messages[rank], scale, 1.0f / static_cast<float>(rank + 1));
    }
    if (shrink == 1.0f && finite) return true;
    #pragma unroll
    for (int unit = 0; unit < B::kUnits; ++unit)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int i = 0; i < B::kUnit; ++i) {
                float& mean = block.values[unit][half][i];
                mean = finite ? grown(mean) : quiet_nan();
            }
    return finite;
}

// ---- the kernels ----

template <class Value, class Numbers, int kBlock, int kShards>
BLOCK_MATH void encode(const Work<kShards, 1>& work) {
    const Shard& shard = work.shards[blockIdx.y];
    Block<Numbers, kBlock, 16 / sizeof(typename Value::Stored)> block(shard.values);
    block.template load_values<Value>(shard.tensor);
    encode_block(block, shard);
}

template <class Numbers, class NewNumbers, int kBlock, int kRanks>
BLOCK_MATH void reduce(const Work<1, kRanks>& work) {
    const Shard& shard = work.shards[0];
    constexpr int kUnit = Numbers::bytes(2) == 4 ? 8 : 16;  // values of 16 bytes of payload
    Block<Numbers, kBlock, kUnit> mean(shard.values);
    average<kRanks>(mean, work.messages);
    Block<NewNumbers, kBlock, kUnit> block(shard.values);
    memcpy(block.values, mean.values, sizeof block.values);
    encode_block(block, shard);
}

template <class Value, class Numbers, int kBlock, int kShards, int kRanks>
BLOCK_MATH void decode(const Work<kShards, kShards * kRanks>& work) {
    const Shard& shard = work.shards[blockIdx.y];
    Block<Numbers, kBlock, 16 / sizeof(typename Value::Stored)> block(shard.values);
    average<kRanks>(block, work.messages + blockIdx.y * kRanks);
    block.template store_values<Value>(shard.tensor);
}

}  // namespace block_kernels
