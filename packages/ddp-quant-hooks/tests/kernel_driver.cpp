// The CPU kernels without Python, for tools that see every memory access: kernel_driver SEED CASES MOST_VALUES.
//
// Each case has values and messages of random bits in buffers that end where their memory does. All instruction
// sets, with one thread and with several, must write the same bytes.

#include <cstdio>
#include <cstdlib>
#include <random>

#include "../src/ddp_quant_hooks/csrc/cpu_kernels.cpp"

namespace {

using Bytes = std::vector<uint8_t>;

std::mt19937_64 generator;

int64_t below(int64_t limit) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(limit)); }

Bytes random_bytes(int64_t count) {
    Bytes bytes(static_cast<size_t>(count));
    for (auto& byte : bytes) byte = static_cast<uint8_t>(generator());
    bytes.shrink_to_fit();
    return bytes;
}

struct Case {
    int64_t values, block, ranks;
    int dtype, format, new_format, rotate, new_rotate;
    bool with_residual, with_new_residual;
    Bytes tensor;
    std::vector<uint16_t> residual;
    std::vector<Bytes> messages;

    int64_t message_bytes(int kind) const {
        int64_t blocks = blocks_of(values, block);
        return payload_bytes(kind, blocks * block) + 4 * blocks;
    }
};

Case random_case(int64_t most) {
    Case one{};
    one.values = 1 + below(most);
    one.block = 32 << below(6);
    one.ranks = 1 + below(4);
    one.dtype = static_cast<int>(below(3));
    one.format = static_cast<int>(below(3));
    one.new_format = static_cast<int>(below(3));
    bool rotate = below(2);
    one.rotate = rotate && one.format != kFp16;
    one.new_rotate = rotate && one.new_format != kFp16;
    one.with_residual = below(2);
    one.with_new_residual = below(2);
    one.tensor = random_bytes(value_bytes(one.dtype, one.values));
    one.residual.resize(static_cast<size_t>(one.values));
    one.residual.shrink_to_fit();
    for (auto& number : one.residual) number = static_cast<uint16_t>(generator());
    for (int64_t rank = 0; rank < one.ranks; ++rank)
        one.messages.push_back(random_bytes(one.message_bytes(one.format)));
    // Numbers of usual magnitudes as well as any bits.
    if (one.dtype == kFloat32 && below(2))
        for (int64_t i = 0; i < one.values; ++i) {
            float value = static_cast<float>(below(2001) - 1000) / 7.0f;
            memcpy(one.tensor.data() + 4 * i, &value, 4);
        }
    return one;
}

// The output of a kernel, with an instruction set and a number of threads.
Bytes run_case(const Case& one, int kernel, int instruction_set, int threads) {
    Bytes tensor = one.tensor;
    std::vector<uint16_t> new_residual(one.residual.size(), 7);
    Bytes message(static_cast<size_t>(one.message_bytes(kernel == 0 ? one.format : one.new_format)), 7);
    std::vector<const uint8_t*> addresses;
    for (auto& each : one.messages) addresses.push_back(each.data());
    Work work{};
    work.values = one.values;
    work.block = one.block;
    work.tensor = tensor.data();
    work.dtype = one.dtype;
    work.messages = addresses.data();
    work.ranks = one.ranks;
    work.format = one.format;
    work.rotate = one.rotate;
    work.message = message.data();
    work.message_format = kernel == 0 ? one.format : one.new_format;
    work.message_rotate = kernel == 0 ? one.rotate : one.new_rotate;
    work.residual = one.with_residual ? one.residual.data() : nullptr;
    work.new_residual = one.with_new_residual ? new_residual.data() : nullptr;
    if (quant_run(kernel, instruction_set, threads, &work) != 0) {
        std::fprintf(stderr, "kernel %d does not run with instruction set %d\n", kernel, instruction_set);
        std::exit(1);
    }
    Bytes written = tensor;
    if (kernel != 2) {
        written = message;
        auto bytes = reinterpret_cast<const uint8_t*>(new_residual.data());
        written.insert(written.end(), bytes, bytes + 2 * new_residual.size());
    }
    return written;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) return 2;
    generator.seed(std::strtoull(arguments[1], nullptr, 10));
    int64_t cases = std::atoll(arguments[2]), most = std::atoll(arguments[3]), runs = 0;
    for (int64_t number = 0; number < cases; ++number) {
        Case one = random_case(most);
        for (int kernel = 0; kernel < 3; ++kernel) {
            Bytes expected;
            for (int set = 0; quant_instruction_set(set); ++set) {
                for (int threads : {1, 4}) {
                    Bytes written = run_case(one, kernel, set, threads);
                    if (expected.empty()) expected = written;
                    // It is not specified which NaN a processor makes from two of them: decoded garbage is
                    // not compared.
                    if (kernel != 2 && written != expected) {
                        std::fprintf(stderr, "case %lld: kernel %d differs with %s and %d threads\n",
                                     static_cast<long long>(number), kernel, quant_instruction_set(set), threads);
                        return 1;
                    }
                    ++runs;
                }
            }
        }
    }
    std::printf("%lld runs, all alike\n", static_cast<long long>(runs));
    return 0;
}
