// The GPU kernels for products of a gradient and its low-rank factors. Every sum has the order of cpu_low_rank.h.

#include "gpu_memory.h"
#include "rotation.h"

namespace low_rank_kernels {

using namespace block_math;
using namespace gpu_memory;

constexpr int kThreads = 128;   // of a thread block
constexpr int kSums = 16;       // along a row; a row has so many threads
constexpr int kRowsOfSum = 256; // down a column
constexpr int kFactors = 8;     // columns of a factor at a time
constexpr int kMostRank = 64;   // whose Gram matrix fits into shared memory
constexpr double kDependent = 1.0 / 4294967296.0;
constexpr double kLeastSquare = 1.0 / 16384.0;

// The parameter of a launch. Python makes it (`FactorCall.words` of kernels/low_rank.py), and every program asserts
// its size. Pointers that a kernel does not use are null.
struct Work {
    int64_t rows, columns, rank;
    void* values;
    const uint16_t* residual;
    uint16_t* new_residual;
    const float* left;
    const float* right;
    const float* mean_right;
    float* sums;     // a factor that a kernel writes
    float* weights;  // find_basis writes it
    void* scratch;   // sums of blocks of rows, fp32; or what factors need, fp64
};

template <class Value>
BLOCK_MATH float element_of(const Work& work, int64_t index) {
    float value = Value::widen(static_cast<const typename Value::Stored*>(work.values)[index]);
    return work.residual ? with_residual(value, work.residual[index]) : value;
}

// sums[k][row] = matrix[row] . right[k]: a thread block does some rows, and kFactors columns of the factor.
template <class Value>
BLOCK_MATH void multiply(const Work& work) {
    constexpr int kRows = kThreads / kSums;
    int64_t tiles = (work.rows + kRows - 1) / kRows, row = blockIdx.x % tiles * kRows + threadIdx.x / kSums;
    int64_t first = blockIdx.x / tiles * kFactors, lane = threadIdx.x % kSums;
    float sums[kFactors] = {};
    if (row < work.rows)
        for (int64_t column = lane; column < work.columns; column += kSums) {
            float value = element_of<Value>(work, row * work.columns + column);
            #pragma unroll
            for (int k = 0; k < kFactors; ++k)
                if (first + k < work.rank)
                    sums[k] = sums[k] + value * work.right[(first + k) * work.columns + column];
        }
    #pragma unroll
    for (int k = 0; k < kFactors; ++k) {
        #pragma unroll
        for (int step = kSums / 2; step; step /= 2) sums[k] = sums[k] + exchanged(sums[k], step);
        if (lane == 0 && row < work.rows && first + k < work.rank) work.sums[(first + k) * work.rows + row] = sums[k];
    }
}

// scratch[block][k] = left[k] . matrix, of a block of rows.
template <class Value>
BLOCK_MATH void multiply_block(const Work& work) {
    int64_t tiles = (work.columns + kThreads - 1) / kThreads, column = blockIdx.x % tiles * kThreads + threadIdx.x;
    int64_t first = blockIdx.x / tiles * kFactors, block = blockIdx.y;
    if (column >= work.columns) return;
    int64_t begin = block * kRowsOfSum, end = begin + kRowsOfSum;
    end = end < work.rows ? end : work.rows;
    float sums[kFactors] = {};
    for (int64_t row = begin; row < end; ++row) {
        float value = element_of<Value>(work, row * work.columns + column);
        #pragma unroll
        for (int k = 0; k < kFactors; ++k)
            if (first + k < work.rank) sums[k] = sums[k] + value * work.left[(first + k) * work.rows + row];
    }
    auto scratch = static_cast<float*>(work.scratch);
    #pragma unroll
    for (int k = 0; k < kFactors; ++k)
        if (first + k < work.rank) scratch[(block * work.rank + first + k) * work.columns + column] = sums[k];
}

// sums = the sum of all blocks.
BLOCK_MATH void add_blocks(const Work& work) {
    int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, count = work.rank * work.columns;
    if (index >= count) return;
    auto scratch = static_cast<const float*>(work.scratch);
    float total = 0.0f;
    for (int64_t begin = 0; begin < work.rows; begin += kRowsOfSum, scratch += count) total = total + scratch[index];
    work.sums[index] = total;
}

// matrix = left . mean_right, and what is left of the rank's own: matrix - left . right.
template <class Value>
BLOCK_MATH void restore(const Work& work) {
    int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= work.rows * work.columns) return;
    int64_t row = index / work.columns, column = index % work.columns;
    float own = 0.0f, mean = 0.0f;
    for (int64_t k = 0; k < work.rank; ++k) {
        float left = work.left[k * work.rows + row];
        own = own + left * work.right[k * work.columns + column];
        mean = mean + left * work.mean_right[k * work.columns + column];
    }
    work.new_residual[index] = bfloat16_of(element_of<Value>(work, index) - own);
    static_cast<typename Value::Stored*>(work.values)[index] = Value::narrow(mean == mean ? mean : quiet_nan());
}

// ---- factors alone, in fp64, by one thread block ----

// NaN wins.
BLOCK_MATH double larger(double value, double largest) {
    return value > largest || value != value ? value : largest;
}

BLOCK_MATH double from_lane(double value, int step) {
    int32_t words[2];
    memcpy(words, &value, 8);
    words[0] = __shfl_xor_sync(0xffffffffu, words[0], step);
    words[1] = __shfl_xor_sync(0xffffffffu, words[1], step);
    memcpy(&value, words, 8);
    return value;
}

// The largest value of all threads, which must all call this.
BLOCK_MATH double largest_of_all(double value) {
    __shared__ double of_warp[kThreads / kWarp];
    #pragma unroll
    for (int step = kWarp / 2; step; step /= 2) value = larger(from_lane(value, step), value);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    double largest = 0.0;
    #pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) largest = larger(of_warp[warp], largest);
    return largest;
}

BLOCK_MATH double largest_square(const float* values, int64_t length) {
    double largest = 0.0;
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
        double value = values[i];
        largest = larger(value * value, largest);
    }
    return largest_of_all(largest);
}

// roots[i] = the root of the squares of row i of a factor, relative to the largest.
BLOCK_MATH void take_roots(const float* factor, int64_t length, int64_t rank, const double* weights, double* roots) {
    double largest = 0.0;
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
        double total = 0.0;
        for (int64_t k = 0; k < rank; ++k) {
            double value = factor[k * length + i];
            total = total + value * value * weights[k];
        }
        roots[i] = total;
        largest = larger(total, largest);
    }
    largest = largest_of_all(largest);
    for (int64_t i = threadIdx.x; i < length; i += kThreads)
        roots[i] = sqrt((largest == 0.0 ? 0.0 : roots[i] / largest) + kLeastSquare);
}

// The dot product of two columns by kSums threads next to each other. All threads of a warp must call this.
BLOCK_MATH double dot(const float* one, const float* other, int64_t length) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x % kSums; i < length; i += kSums)
        sum = sum + static_cast<double>(one[i]) * static_cast<double>(other[i]);
    #pragma unroll
    for (int step = kSums / 2; step; step /= 2) sum = sum + from_lane(sum, step);
    return sum;
}

// Cholesky's factor of the Gram matrix of columns, column by column; the pivot of a dropped column is 0.
BLOCK_MATH void factorize(const float* columns, int64_t length, int rank, double* lower, double* pivots) {
    constexpr int kTeams = kThreads / kSums;
    for (int first = 0; first < rank * rank; first += kTeams) {
        int pair = first + threadIdx.x / kSums, i = pair / rank, j = pair % rank;
        bool wanted = pair < rank * rank && j <= i;
        double product = dot(columns + (wanted ? i : 0) * length, columns + (wanted ? j : 0) * length, length);
        if (wanted && threadIdx.x % kSums == 0) lower[pair] = product;
        if (wanted && threadIdx.x % kSums == 0 && i == j) pivots[i] = product;
    }
    for (int k = 0; k < rank; ++k) {
        __syncthreads();
        double pivot = lower[k * rank + k];
        bool dropped = pivot <= kDependent * pivots[k];  // not if it is NaN
        double root = dropped ? 0.0 : sqrt(pivot);
        __syncthreads();
        for (int i = k + threadIdx.x; i < rank; i += kThreads)
            lower[i * rank + k] = dropped ? 0.0 : lower[i * rank + k] / root;
        if (threadIdx.x == 0) pivots[k] = root;
        __syncthreads();
        for (int pair = threadIdx.x; pair < rank * rank; pair += kThreads) {
            int i = pair / rank, j = pair % rank;
            if (j > k && j <= i) lower[pair] = lower[pair] - lower[i * rank + k] * lower[j * rank + k];
        }
    }
    __syncthreads();
}

BLOCK_MATH void find_basis(const Work& work) {
    __shared__ double lower[kMostRank * kMostRank], of_columns[kMostRank];
    int64_t length = work.rows, rank = work.rank;
    auto scales = static_cast<double*>(work.scratch), basis = scales + length;
    for (int64_t k = 0; k < rank; ++k) {
        double largest = largest_square(work.left + k * length, length);
        if (threadIdx.x == 0) of_columns[k] = largest == 0.0 ? 0.0 : 1.0 / largest;
    }
    __syncthreads();
    take_roots(work.left, length, rank, of_columns, scales);
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
        scales[i] = sqrt(scales[i]);
        for (int64_t k = 0; k < rank; ++k)
            work.sums[k * length + i] = static_cast<float>(work.left[k * length + i] / scales[i]);
    }
    __syncthreads();
    factorize(work.sums, length, static_cast<int>(rank), lower, of_columns);
    for (int64_t i = threadIdx.x; i < length; i += kThreads)
        for (int64_t k = 0; k < rank; ++k) {
            double column = work.sums[k * length + i];
            for (int64_t before = 0; before < k; ++before)
                column = column - lower[k * rank + before] * basis[before * length + i];
            column = of_columns[k] == 0.0 ? 0.0 : column / of_columns[k];
            basis[k * length + i] = column;
            work.sums[k * length + i] = static_cast<float>(column * scales[i]);
            work.weights[k * length + i] = static_cast<float>(column / scales[i]);
        }
}

BLOCK_MATH void follow(const Work& work) {
    __shared__ double of_columns[kMostRank];
    auto roots = static_cast<double*>(work.scratch);
    for (int64_t k = 0; k < work.rank; ++k) {
        double largest = largest_square(work.left + k * work.rows, work.rows);
        if (threadIdx.x == 0) of_columns[k] = largest;
    }
    __syncthreads();
    take_roots(work.mean_right, work.columns, work.rank, of_columns, roots);
    for (int64_t k = 0; k < work.rank; ++k) {
        const float* from = work.mean_right + k * work.columns;
        double largest = 0.0;
        for (int64_t i = threadIdx.x; i < work.columns; i += kThreads)
            largest = larger(fabs(from[i] / roots[i]), largest);
        largest = largest_of_all(largest);
        int exponent;
        double power = frexp(largest, &exponent) / largest;  // of two, so that nothing is rounded
        for (int64_t i = threadIdx.x; i < work.columns; i += kThreads) {
            int64_t place = k * work.columns + i;
            work.sums[place] = largest == 0.0 ? turned_by(1.0f, sign_at(static_cast<uint32_t>(place)))
                                              : static_cast<float>(from[i] / roots[i] * power);
        }
    }
}

}  // namespace low_rank_kernels
