// Products of a gradient and its low-rank factors on the CPU, in vectors of kLanes floats.
//
// A matrix is the sum of a gradient and what earlier steps have left of it. Factors are stored column by column, as
// `rank` rows. Every sum has one order, whatever the width of a vector and the number of threads, and no operator is
// fused with another, so all instruction sets and torch's own operators (kernels/low_rank.py) give identical bits:
// - along a row of the matrix there are 16 sums, of every 16th product each, which are then added in pairs;
// - down its columns, blocks of 256 rows are summed one row after another, and then the sums of the blocks;
// - over the factors' columns, one after another.

#ifndef DDP_QUANT_HOOKS_CPU_LOW_RANK_H
#define DDP_QUANT_HOOKS_CPU_LOW_RANK_H

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu_rotation.h"

namespace cpu_low_rank {

using namespace block_math;

constexpr int64_t kSums = 16;        // along a row
constexpr int64_t kRowsOfSum = 256;  // down a column
constexpr int64_t kTile = 512;       // columns at a time: 8 factor columns of them fill half of the L1 cache
constexpr int kRowsAtOnce = 4;

// The arguments of one call. Pointers that a kernel does not use are null. Python makes it (`FactorCall.words` of
// kernels/low_rank.py): 64-bit words in the same order.
struct Work {
    int64_t rows, columns, rank;
    void* values;              // the gradient; `restore` writes the mean's
    const uint16_t* residual;  // bf16; null: none
    uint16_t* new_residual;    // bf16; `restore` writes it
    const float* left;         // rank x rows
    const float* right;        // rank x columns
    const float* mean_right;   // rank x columns
    float* sums;               // a factor that a kernel writes
    float* weights;            // `find_basis` writes rank x rows
};

template <int kLanes>
using Floats = typename cpu_rotation::Vectors<kLanes>::Floats;

template <int kLanes>
BLOCK_MATH Floats<kLanes> loaded(const float* from) {
    Floats<kLanes> values;
    memcpy(&values, from, sizeof values);
    return values;
}

template <int kLanes>
BLOCK_MATH void stored(Floats<kLanes> values, float* to) {
    memcpy(to, &values, sizeof values);
}

// Requests the memory of kRows rows that are computed later, of the 16 columns from `column` on: loading does not
// overlap arithmetic by itself. Into the L2 cache: the L1 cache is full of factors, and has too few requests under way
// (7.2 million values took 6.5 ms that way, 4.2 in this one). 64 bytes are a cache line of values, and half of one of
// bf16.
template <int kRows>
BLOCK_MATH void request_rows(const Work& work, int64_t value_bytes, int64_t row, int64_t column) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
        int64_t at = (row + i) * work.columns + column;
        __builtin_prefetch(static_cast<const char*>(work.values) + at * value_bytes, 0, 2);
        if (work.residual && column % 32 == 0) __builtin_prefetch(work.residual + at, 0, 2);
    }
}

// Writes the sums of values and their residuals; see with_residual().
template <class Value>
BLOCK_MATH void add_residual(const typename Value::Stored* __restrict values, const uint16_t* __restrict residual,
                             int64_t count, float* __restrict to) {
    // Hardly ever is a sum not finite, and all others need no further look: so all are looked at together.
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        to[i] = Value::widen(values[i]) + float_of_bfloat16(residual[i]);
        largest = std::max(largest, magnitude_bits(to[i]));
    }
    if (largest >= kInfinityBits)
        for (int64_t i = 0; i < count; ++i) to[i] = with_residual(Value::widen(values[i]), residual[i]);
}

// Writes values with their residuals, which may be null.
template <class Value>
BLOCK_MATH void load(const typename Value::Stored* __restrict values, const uint16_t* __restrict residual, int64_t count,
                     float* __restrict to) {
    if (residual) return add_residual<Value>(values, residual, count, to);
    for (int64_t i = 0; i < count; ++i) to[i] = Value::widen(values[i]);
}

// Writes `count` elements of the matrix, from row `row` and column `column` on, and zeros up to a multiple of 16.
template <class Value>
BLOCK_MATH void load_matrix(const Work& work, int64_t row, int64_t column, int64_t count, float* __restrict to) {
    int64_t start = row * work.columns + column;
    auto values = static_cast<const typename Value::Stored*>(work.values) + start;
    load<Value>(values, work.residual ? work.residual + start : nullptr, count, to);
    for (int64_t i = count; i % kSums; ++i) to[i] = 0.0f;
}

// ---- sums[k][row] = matrix[row] . right[k] ----

// Adds products of a tile of some rows and some factor columns to their 16 sums.
template <int kLanes, int kRows, int kFactors, class Request>
BLOCK_MATH void add_products(const float* matrix, const float* right, int64_t columns, float* sums, int64_t rank,
                             Request request) {
    constexpr int kParts = kSums / kLanes;
    for (int part = 0; part < kParts; ++part) {
        Floats<kLanes> sum[kRows][kFactors];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
            for (int k = 0; k < kFactors; ++k)
                sum[row][k] = loaded<kLanes>(sums + (row * rank + k) * kSums + part * kLanes);
        for (int64_t i = part * kLanes; i < columns; i += kSums) {
            if (part == 0) request(i);
            Floats<kLanes> factor[kFactors];
#pragma GCC unroll 4
            for (int k = 0; k < kFactors; ++k) factor[k] = loaded<kLanes>(right + k * kTile + i);
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) {
                Floats<kLanes> values = loaded<kLanes>(matrix + row * kTile + i);
#pragma GCC unroll 4
                for (int k = 0; k < kFactors; ++k) sum[row][k] += values * factor[k];
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
            for (int k = 0; k < kFactors; ++k)
                stored<kLanes>(sum[row][k], sums + (row * rank + k) * kSums + part * kLanes);
    }
}

// Returns the sum of kSums sums, the first half added to the second again and again. Written as vectors: the compiler
// does not vectorize such short loops.
BLOCK_MATH float added_in_pairs(const float* sums) {
    float halves[kSums / 2], quarters[kSums / 4];
    stored<8>(loaded<8>(sums) + loaded<8>(sums + 8), halves);
    stored<4>(loaded<4>(halves) + loaded<4>(halves + 4), quarters);
    return (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
}

template <int kLanes, class Value>
BLOCK_MATH void multiply(const Work& work, int64_t first, int64_t last) {
    int64_t rank = work.rank, tiles = (work.columns + kTile - 1) / kTile;
    // The right factor tile by tile, padded with zeros.
    std::vector<float> right(static_cast<size_t>(tiles * rank * kTile));
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t k = 0; k < rank; ++k) {
            const float* from = work.right + k * work.columns + tile * kTile;
            std::copy_n(from, std::min(kTile, work.columns - tile * kTile), right.data() + (tile * rank + k) * kTile);
        }
    std::vector<float> sums(static_cast<size_t>(kRowsAtOnce * rank * kSums));
    alignas(64) float matrix[kRowsAtOnce * kTile];
    for (int64_t row = first; row < last; row += kRowsAtOnce) {
        int64_t rows = std::min<int64_t>(kRowsAtOnce, last - row);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            int64_t column = tile * kTile, columns = std::min(kTile, work.columns - column), k = 0;
            for (int64_t i = 0; i < rows; ++i) load_matrix<Value>(work, row + i, column, columns, matrix + i * kTile);
            const float* factors = right.data() + tile * rank * kTile;
            float* to = sums.data();
            auto next = [&](int64_t i) __attribute__((always_inline)) {
                request_rows<kRowsAtOnce>(work, sizeof(typename Value::Stored), row + kRowsAtOnce, column + i);
            };
            auto nothing = [](int64_t) {};
            if (rank >= 4) {
                add_products<kLanes, kRowsAtOnce, 4>(matrix, factors, columns, to, rank, next);
                k = 4;
            } else {
                add_products<kLanes, kRowsAtOnce, 1>(matrix, factors, columns, to, rank, next);
                k = 1;
            }
            for (; k + 4 <= rank; k += 4)
                add_products<kLanes, kRowsAtOnce, 4>(matrix, factors + k * kTile, columns, to + k * kSums, rank, nothing);
            for (; k < rank; ++k)
                add_products<kLanes, kRowsAtOnce, 1>(matrix, factors + k * kTile, columns, to + k * kSums, rank, nothing);
        }
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t k = 0; k < rank; ++k) {
                work.sums[k * work.rows + row + i] = added_in_pairs(sums.data() + (i * rank + k) * kSums);
            }
    }
}

// ---- sums[k] = left[k] . matrix ----

// Factor columns at once: AVX-512 has registers for the 16 weights of four.
template <int kLanes>
constexpr int kFactorsAdded = kLanes == 16 ? 4 : 2;

// Adds the products of kRowsAtOnce rows of a tile and kFactors factor columns, row after row.
template <int kLanes, int kFactors, class Request>
BLOCK_MATH void add_rows(const float* matrix, const float* left, int64_t rows_of_left, int64_t columns, float* sums,
                         Request request) {
    Floats<kLanes> weight[kFactors][kRowsAtOnce];
#pragma GCC unroll 4
    for (int k = 0; k < kFactors; ++k)
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) weight[k][row] = Floats<kLanes>{} + left[k * rows_of_left + row];
    for (int64_t i = 0; i < columns; i += kLanes) {
        if (i % kSums == 0) request(i);
        Floats<kLanes> sum[kFactors];
#pragma GCC unroll 4
        for (int k = 0; k < kFactors; ++k) sum[k] = loaded<kLanes>(sums + k * kTile + i);
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            Floats<kLanes> values = loaded<kLanes>(matrix + row * kTile + i);
#pragma GCC unroll 4
            for (int k = 0; k < kFactors; ++k) sum[k] += values * weight[k][row];
        }
#pragma GCC unroll 4
        for (int k = 0; k < kFactors; ++k) stored<kLanes>(sum[k], sums + k * kTile + i);
    }
}

template <int kLanes, class Value>
BLOCK_MATH void multiply_transposed(const Work& work, int64_t first, int64_t last) {
    int64_t rank = work.rank;
    std::vector<float> sums(static_cast<size_t>(rank * kTile)), left(static_cast<size_t>(rank * kRowsOfSum));
    alignas(64) float matrix[kRowsAtOnce * kTile] = {};
    for (int64_t k = 0; k < rank; ++k) std::fill_n(work.sums + k * work.columns + first, last - first, 0.0f);
    for (int64_t block = 0; block < work.rows; block += kRowsOfSum) {
        int64_t rows = std::min(kRowsOfSum, work.rows - block);
        std::fill(left.begin(), left.end(), 0.0f);
        for (int64_t k = 0; k < rank; ++k)
            std::copy_n(work.left + k * work.rows + block, rows, left.data() + k * kRowsOfSum);
        for (int64_t column = first; column < last; column += kTile) {
            int64_t columns = std::min(kTile, last - column);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
                for (int64_t i = 0; i < kRowsAtOnce; ++i)
                    if (row + i < rows)
                        load_matrix<Value>(work, block + row + i, column, columns, matrix + i * kTile);
                    else  // the last rows of the matrix: times zero, nothing is added
                        std::fill_n(matrix + i * kTile, kTile, 0.0f);
                const float* weights = left.data() + row;
                float* to = sums.data();
                auto next = [&](int64_t i) __attribute__((always_inline)) {
                    int64_t following = block + row + kRowsAtOnce;
                    request_rows<kRowsAtOnce>(work, sizeof(typename Value::Stored), following, column + i);
                };
                auto nothing = [](int64_t) {};
                constexpr int kFactors = kFactorsAdded<kLanes>;
                int64_t k = rank >= kFactors ? kFactors : 1;
                if (rank >= kFactors)
                    add_rows<kLanes, kFactors>(matrix, weights, kRowsOfSum, columns, to, next);
                else
                    add_rows<kLanes, 1>(matrix, weights, kRowsOfSum, columns, to, next);
                for (; k + kFactors <= rank; k += kFactors)
                    add_rows<kLanes, kFactors>(matrix, weights + k * kRowsOfSum, kRowsOfSum, columns, to + k * kTile, nothing);
                for (; k < rank; ++k)
                    add_rows<kLanes, 1>(matrix, weights + k * kRowsOfSum, kRowsOfSum, columns, to + k * kTile, nothing);
            }
            for (int64_t k = 0; k < rank; ++k) {
                float* total = work.sums + k * work.columns + column;
                for (int64_t i = 0; i < columns; ++i) total[i] += sums[static_cast<size_t>(k * kTile + i)];
            }
        }
    }
}

// ---- matrix = left . mean_right, and what is left of the rank's own: matrix - left . right ----

// As bfloat16_of() and Value::narrow() do, which the compiler vectorizes in long loops only.
template <int kLanes>
BLOCK_MATH void store_bfloat16(Floats<kLanes> values, uint16_t* to) {
    using Bits = typename cpu_rotation::Vectors<kLanes>::Bits;
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    Bits bits = reinterpret_cast<Bits>(values), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Bits or_nan = (bits & 0x7fffffffu) > 0x7f800000u ? Bits{} + 0x7fc0u : rounded;
    Halves halves = __builtin_convertvector(or_nan, Halves);
    memcpy(to, &halves, sizeof halves);
}

template <int kLanes, class Value>
BLOCK_MATH void store_narrowed(Floats<kLanes> values, typename Value::Stored* to) {
    values = values == values ? values : Floats<kLanes>{} + quiet_nan();
    if constexpr (std::is_same_v<Value, Float32>) {
        stored<kLanes>(values, to);
    } else if constexpr (std::is_same_v<Value, BFloat16>) {
        Floats<kLanes> limit = Floats<kLanes>{} + kLargestBFloat16;
        values = values < -limit ? -limit : values;
        store_bfloat16<kLanes>(values > limit ? limit : values, to);
    } else {
        float numbers[kLanes];
        stored<kLanes>(values, numbers);
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = Value::narrow(numbers[lane]);
    }
}

constexpr int kVectors = 2;  // of a row at once
// Rows at once: AVX-512 has registers for the 16 sums of four (7.2 million values, rank 8: 5.7 ms instead of 7.5).
template <int kLanes>
constexpr int kRowsRestored = kLanes == 16 ? 4 : 2;

// Where a row of the mean and one of the residual go.
template <class Value>
struct RestoredRow {
    typename Value::Stored* values;
    uint16_t* residual;
};

// Restores some vectors of some rows. `left` has one column of the factor after another; `factors` likewise, of both
// right factors, next to each other.
template <int kLanes, class Value>
BLOCK_MATH void restore_vectors(const float* left, const float* factors, int64_t rank, const float* matrix,
                                const RestoredRow<Value>* to, int64_t column) {
    constexpr int kRows = kRowsRestored<kLanes>;
    constexpr int64_t kColumns = kVectors * kLanes;
    Floats<kLanes> own[kRows][kVectors] = {}, mean[kRows][kVectors] = {};
    for (int64_t k = 0; k < rank; ++k, left += kRows, factors += 2 * kColumns) {
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) {
            Floats<kLanes> right = loaded<kLanes>(factors + i * kLanes);
            Floats<kLanes> mean_right = loaded<kLanes>(factors + kColumns + i * kLanes);
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) {
                own[row][i] += left[row] * right;
                mean[row][i] += left[row] * mean_right;
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) {
            Floats<kLanes> whole = loaded<kLanes>(matrix + row * kTile + i * kLanes);
            store_bfloat16<kLanes>(whole - own[row][i], to[row].residual + column + i * kLanes);
            store_narrowed<kLanes, Value>(mean[row][i], to[row].values + column + i * kLanes);
        }
}

template <int kLanes, class Value>
BLOCK_MATH void restore(const Work& work, int64_t first, int64_t last) {
    using Stored = typename Value::Stored;
    constexpr int kRows = kRowsRestored<kLanes>;
    constexpr int64_t kColumns = kVectors * kLanes;
    int64_t rank = work.rank, padded = (work.columns + kColumns - 1) / kColumns * kColumns;
    std::vector<float> factors(static_cast<size_t>(2 * rank * padded));  // padded with zeros
    for (int64_t column = 0; column < padded; column += kColumns)
        for (int64_t k = 0; k < rank; ++k) {
            float* to = factors.data() + 2 * (column * rank + k * kColumns);
            int64_t count = std::clamp<int64_t>(work.columns - column, 0, kColumns);
            std::copy_n(work.right + k * work.columns + column, count, to);
            std::copy_n(work.mean_right + k * work.columns + column, count, to + kColumns);
        }
    std::vector<float> left(static_cast<size_t>(kRows * rank));
    alignas(64) float matrix[kRows * kTile] = {};
    // Instead of rows behind the last one, and of columns behind the last ones.
    Stored no_values[kRows][kTile];
    uint16_t no_residual[kRows][kTile];
    for (int64_t row = first; row < last; row += kRows) {
        int64_t rows = std::min<int64_t>(kRows, last - row);
        for (int64_t k = 0; k < rank; ++k)
            for (int64_t i = 0; i < rows; ++i)
                left[static_cast<size_t>(kRows * k + i)] = work.left[k * work.rows + row + i];
        for (int64_t tile = 0; tile < work.columns; tile += kTile) {
            int64_t count = std::min(kTile, work.columns - tile), whole = count / kColumns * kColumns;
            RestoredRow<Value> to[kRows], none[kRows];
            for (int64_t i = 0; i < kRows; ++i) {
                none[i] = {no_values[i], no_residual[i]};
                int64_t start = (row + i) * work.columns + tile;
                to[i] = i < rows ? RestoredRow<Value>{static_cast<Stored*>(work.values) + start, work.new_residual + start}
                                 : none[i];
                if (i < rows) load_matrix<Value>(work, row + i, tile, count, matrix + i * kTile);
            }
            const float* both = factors.data() + 2 * tile * rank;
            for (int64_t column = 0; column < count; column += kColumns) {
                // Not of the very next rows: two are done before their memory has come (7.4 ms instead of 8.7).
                for (int64_t i = 0; i < kColumns; i += kSums) {
                    int64_t at = tile + column + i;
                    request_rows<kRows>(work, sizeof(Stored), row + 2 * kRows, at);
                    if (at % 32 == 0)
                        for (int64_t k = row + 2 * kRows; k < row + 3 * kRows; ++k)
                            __builtin_prefetch(work.new_residual + k * work.columns + at, 1, 2);
                }
                restore_vectors<kLanes, Value>(left.data(), both + 2 * column * rank, rank, matrix + column,
                                               column < whole ? to : none, column);
            }
            for (int64_t i = 0; i < rows; ++i) {
                std::copy(no_values[i] + whole, no_values[i] + count, to[i].values + whole);
                std::copy(no_residual[i] + whole, no_residual[i] + count, to[i].residual + whole);
            }
        }
    }
}

// ---- factors alone, in fp64 ----

// A column is dropped if the squared length of what the columns before it leave is a smaller part of its own.
constexpr double kDependent = 0x1p-32;
// Added to mean squares of rows and columns, which are relative to the largest one.
constexpr double kLeastSquare = 0x1p-14;

// The largest magnitude; NaN wins. Of bits, of which the compiler can compare many at a time.
BLOCK_MATH double largest_magnitude(const std::vector<double>& values) {
    int64_t largest = 0;
    for (double value : values) {
        int64_t bits;
        memcpy(&bits, &value, sizeof bits);
        largest = std::max(largest, bits & INT64_MAX);
    }
    double found;
    memcpy(&found, &largest, sizeof found);
    return found;
}

BLOCK_MATH double largest_square(const float* values, int64_t length) {
    int32_t largest = 0;
    for (int64_t i = 0; i < length; ++i) largest = std::max(largest, magnitude_bits(values[i]));
    double value = float_of(static_cast<uint32_t>(largest));
    return value * value;
}

// Adds the squares of a factor's column, times a weight, to the squares of the matrix's rows, or columns.
BLOCK_MATH void add_squares(const float* column, int64_t length, double weight, double* __restrict squares) {
    for (int64_t i = 0; i < length; ++i) {
        double value = column[i];
        squares[i] += value * value * weight;
    }
}

// Replaces squares by their roots, relative to the largest one.
BLOCK_MATH void take_roots(std::vector<double>& squares) {
    double largest = largest_magnitude(squares);
    for (double& square : squares) square = std::sqrt((largest == 0.0 ? 0.0 : square / largest) + kLeastSquare);
}

BLOCK_MATH double dot(const float* __restrict one, const float* __restrict other, int64_t length) {
    alignas(64) double sums[kSums] = {};
    int64_t whole = length / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums)
        for (int64_t lane = 0; lane < kSums; ++lane)
            sums[lane] += static_cast<double>(one[i + lane]) * static_cast<double>(other[i + lane]);
    for (int64_t i = whole; i < length; ++i)
        sums[i - whole] += static_cast<double>(one[i]) * static_cast<double>(other[i]);
    for (int64_t half = kSums / 2; half; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[half + lane];
    return sums[0];
}

// Cholesky's factor of the Gram matrix of the columns, column by column. The pivot of a dropped column is 0.
BLOCK_MATH void factorize(const float* columns, int64_t length, int64_t rank, double* lower, double* pivots) {
    for (int64_t i = 0; i < rank; ++i)
        for (int64_t j = 0; j <= i; ++j) lower[i * rank + j] = dot(columns + i * length, columns + j * length, length);
    for (int64_t k = 0; k < rank; ++k) pivots[k] = lower[k * rank + k];
    for (int64_t k = 0; k < rank; ++k) {
        double pivot = lower[k * rank + k];
        bool dropped = pivot <= kDependent * pivots[k];  // not if it is NaN
        double root = dropped ? 0.0 : std::sqrt(pivot);
        for (int64_t i = k; i < rank; ++i) lower[i * rank + k] = dropped ? 0.0 : lower[i * rank + k] / root;
        for (int64_t i = k + 1; i < rank; ++i)
            for (int64_t j = k + 1; j <= i; ++j) lower[i * rank + j] -= lower[i * rank + k] * lower[j * rank + k];
        pivots[k] = root;
    }
}

// sums = rows' scales times an orthonormal basis of what left's columns, divided by the scales, span; weights = the
// same divided by the scales.
BLOCK_MATH void find_basis(const Work& work) {
    int64_t rank = work.rank, length = work.rows;
    std::vector<double> scales(static_cast<size_t>(length));
    for (int64_t k = 0; k < rank; ++k) {
        const float* column = work.left + k * length;
        double largest = largest_square(column, length);
        add_squares(column, length, largest == 0.0 ? 0.0 : 1.0 / largest, scales.data());
    }
    take_roots(scales);
    for (double& scale : scales) scale = std::sqrt(scale);
    for (int64_t k = 0; k < rank; ++k)
        for (int64_t i = 0; i < length; ++i)
            work.sums[k * length + i] = static_cast<float>(work.left[k * length + i] / scales[static_cast<size_t>(i)]);
    std::vector<double> lower(static_cast<size_t>(rank * rank)), pivots(static_cast<size_t>(rank));
    factorize(work.sums, length, rank, lower.data(), pivots.data());
    constexpr int64_t kPart = 64;
    std::vector<double> basis(static_cast<size_t>(rank * kPart));
    for (int64_t start = 0; start < length; start += kPart) {
        int64_t count = std::min(kPart, length - start);
        const double* scale = scales.data() + start;
        for (int64_t k = 0; k < rank; ++k) {
            double* __restrict column = basis.data() + k * kPart;
            float* left = work.sums + k * length + start;
            float* weights = work.weights + k * length + start;
            for (int64_t i = 0; i < count; ++i) column[i] = left[i];
            for (int64_t before = 0; before < k; ++before) {
                const double* other = basis.data() + before * kPart;
                double share = lower[static_cast<size_t>(k * rank + before)];
                for (int64_t i = 0; i < count; ++i) column[i] -= share * other[i];
            }
            double pivot = pivots[static_cast<size_t>(k)];
            for (int64_t i = 0; i < count; ++i) column[i] = pivot == 0.0 ? 0.0 : column[i] / pivot;
            for (int64_t i = 0; i < count; ++i) left[i] = static_cast<float>(column[i] * scale[i]);
            for (int64_t i = 0; i < count; ++i) weights[i] = static_cast<float>(column[i] / scale[i]);
        }
    }
}

// sums = the right factor of the next step: mean_right divided by the roots of its columns' mean squares, and by a
// power of two.
BLOCK_MATH void follow(const Work& work) {
    std::vector<double> roots(static_cast<size_t>(work.columns)), column(static_cast<size_t>(work.columns));
    for (int64_t k = 0; k < work.rank; ++k) {
        double weight = largest_square(work.left + k * work.rows, work.rows);
        add_squares(work.mean_right + k * work.columns, work.columns, weight, roots.data());
    }
    take_roots(roots);
    for (int64_t k = 0; k < work.rank; ++k) {
        const float* from = work.mean_right + k * work.columns;
        float* to = work.sums + k * work.columns;
        for (int64_t i = 0; i < work.columns; ++i) column[static_cast<size_t>(i)] = from[i] / roots[static_cast<size_t>(i)];
        double largest = largest_magnitude(column);
        int exponent;
        double power = std::frexp(largest, &exponent) / largest;  // of two, so that nothing is rounded
        for (int64_t i = 0; i < work.columns; ++i)
            // A column of zeros would stay zero for ever.
            to[i] = largest == 0.0 ? turned_by(1.0f, sign_at(static_cast<uint32_t>(k * work.columns + i)))
                                   : static_cast<float>(column[static_cast<size_t>(i)] * power);
    }
}

}  // namespace cpu_low_rank

#endif
