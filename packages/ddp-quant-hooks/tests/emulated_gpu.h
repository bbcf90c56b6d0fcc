// Runs a GPU kernel's text on the CPU, thread by thread, and refuses what a GPU would leave undefined.
//
// Included before the text. Every thread of a thread block is a fiber that runs until it has to wait for
// others: at a shuffle for its warp, at a barrier for its thread block.

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // one thread block runs at a time

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx;

namespace emulated_gpu {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;

enum State { kRunning, kAtShuffle, kAtBarrier, kDone };

struct Fibre {
    State state;
    bool started;
    ucontext_t entry;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    int32_t value;
    unsigned mask;
    int step;
};

static std::vector<Fibre> fibres;
static jmp_buf scheduler;
static unsigned current;
static void (*body)(const void*);
static const void* work;

[[noreturn]] static void fail(const char* why) {
    fprintf(stderr, "emulated GPU: %s (thread %u of thread block %u, %u)\n", why, current, blockIdx.x, blockIdx.y);
    abort();
}

// Gives the turn back until the scheduler has done what `state` waits for.
static void wait(State state) {
    fibres[current].state = state;
    if (_setjmp(fibres[current].place) == 0) _longjmp(scheduler, 1);
}

static void run_body() {
    body(work);
    fibres[current].state = kDone;
    _longjmp(scheduler, 1);
}

static void resume(unsigned thread) {
    Fibre& fibre = fibres[thread];
    current = thread;
    threadIdx = {thread, 0, 0};
    fibre.state = kRunning;
    if (_setjmp(scheduler) != 0) return;
    if (fibre.started) _longjmp(fibre.place, 1);
    fibre.started = true;
    setcontext(&fibre.entry);
}

// Exchanges the values of a warp if all its threads wait for that. Returns whether they did.
static bool shuffle_warp(unsigned first) {
    int waiting = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) waiting += fibres[first + lane].state == kAtShuffle;
    if (waiting == 0) return false;
    current = first;
    if (waiting != kWarp) fail("not every thread of a warp came to a shuffle");
    int32_t values[kWarp];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        if (fibres[first + lane].mask != 0xffffffffu) fail("a shuffle's mask leaves out a thread");
        if (fibres[first + lane].step != fibres[first].step) fail("the threads of a warp shuffle differently");
        values[lane] = fibres[first + lane].value;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        fibres[first + lane].value = values[lane ^ static_cast<unsigned>(fibres[first].step)];
        fibres[first + lane].state = kRunning;
    }
    return true;
}

static void run_thread_block(unsigned threads) {
    fibres.resize(threads);
    for (Fibre& fibre : fibres) {
        if (!fibre.stack) fibre.stack = std::make_unique<char[]>(kStack);
        getcontext(&fibre.entry);
        fibre.entry.uc_stack.ss_sp = fibre.stack.get();
        fibre.entry.uc_stack.ss_size = kStack;
        fibre.entry.uc_link = nullptr;
        makecontext(&fibre.entry, run_body, 0);
        fibre.started = false;
        fibre.state = kRunning;
    }
    for (;;) {
        unsigned done = 0, at_barrier = 0;
        for (unsigned thread = 0; thread < threads; ++thread)
            if (fibres[thread].state == kRunning) resume(thread);
        bool shuffled = false;
        for (unsigned first = 0; first < threads; first += kWarp) shuffled |= shuffle_warp(first);
        if (shuffled) continue;
        for (const Fibre& fibre : fibres) {
            done += fibre.state == kDone;
            at_barrier += fibre.state == kAtBarrier;
        }
        if (done == threads) return;
        if (at_barrier != threads) fail("not every thread of a thread block came to a barrier");
        for (Fibre& fibre : fibres) fibre.state = kRunning;
    }
}

template <class Work>
void launch(void (*kernel)(const Work), const void* argument, unsigned threads, unsigned first, unsigned last,
            unsigned height) {
    static void (*the_kernel)(const Work);
    the_kernel = kernel;
    body = [](const void* from) { the_kernel(*static_cast<const Work*>(from)); };
    work = argument;
    for (unsigned y = 0; y < height; ++y)
        for (unsigned x = first; x < last; ++x) {
            blockIdx = {x, y, 0};
            run_thread_block(threads);
        }
}

}  // namespace emulated_gpu

static inline int32_t __shfl_xor_sync(unsigned mask, int32_t value, int step) {
    auto& fibre = emulated_gpu::fibres[emulated_gpu::current];
    fibre.mask = mask;
    fibre.value = value;
    fibre.step = step;
    emulated_gpu::wait(emulated_gpu::kAtShuffle);
    return emulated_gpu::fibres[emulated_gpu::current].value;
}

static inline void __syncthreads() { emulated_gpu::wait(emulated_gpu::kAtBarrier); }

static inline int32_t atomicMax(int32_t* at, int32_t value) {
    int32_t old = *at;
    *at = old > value ? old : value;
    return old;
}

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
