// Products with Q4_0 and Q8_0 blocks beside sums in double precision, where no Python runs: in an emulator.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "product.h"

extern "C" {
int64_t selfspec_panel();
int64_t selfspec_panel_bytes(int64_t kind, int64_t in);
void selfspec_pack_blocks(const uint8_t*, int64_t, const int64_t*, int64_t, const Product*, int64_t, int64_t, int64_t,
                          int64_t);
int64_t selfspec_linear_floats(const Product*, int64_t, int64_t);
void selfspec_linear(const Product*, const float*, int64_t, float*, const float*, float, float*, int64_t);
}

static uint32_t state = 1;
static uint32_t random_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }

// The largest error of an output, in units of the largest output; 9 if bits depend on the number of tokens.
static double error_of(int64_t kind, int64_t digits, int64_t threads) {
    constexpr int64_t IN = 256, OUT = 100, N = 5;
    int64_t size = kind == Q4_0 ? 18 : 34, row = IN / 32 * size, panel = selfspec_panel();
    std::vector<uint8_t> blocks(OUT * row);
    for (uint8_t& one : blocks) one = uint8_t(random_bits());
    for (int64_t at = 0; at < OUT * row; at += size) blocks[at] = 0, blocks[at + 1] = 0x2c;  // 1 / 16 in float16
    int64_t panels = (OUT + panel - 1) / panel, bytes = selfspec_panel_bytes(kind, IN);
    std::vector<char> memory(panels * bytes + 64);
    char* packed = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
    Product p{packed, nullptr, IN, OUT, kind, nullptr, digits};
    selfspec_pack_blocks(blocks.data(), row, nullptr, OUT, &p, 0, OUT, 0, threads);
    std::vector<float> x(N * IN), y(N * OUT), single(OUT), work(selfspec_linear_floats(&p, N, threads));
    for (float& one : x) one = float(random_bits() % 2001) / 1000 - 1;
    selfspec_linear(&p, x.data(), N, y.data(), nullptr, 0, work.data(), threads);
    double most = 0, largest = 0;
    for (int64_t t = 0; t < N; t++) {
        selfspec_linear(&p, x.data() + t * IN, 1, single.data(), nullptr, 0, work.data(), 1);
        if (std::memcmp(single.data(), y.data() + t * OUT, sizeof(float) * OUT)) return 9;
        for (int64_t o = 0; o < OUT; o++) {
            double sum = 0;
            for (int64_t i = 0; i < IN; i++) {
                const uint8_t* numbers = blocks.data() + o * row + i / 32 * size + 2;
                int64_t j = i % 32;
                int q = kind == Q4_0 ? int(j < 16 ? numbers[j] & 15 : numbers[j - 16] >> 4) - 8 : int8_t(numbers[j]);
                sum += q / 16. * x[t * IN + i];
            }
            most = std::fmax(most, std::fabs(sum - y[t * OUT + o])), largest = std::fmax(largest, std::fabs(sum));
        }
    }
    return most / largest;
}

int main() {
    double most = 0;
    for (int64_t kind : {Q4_0, Q8_0})
        for (int64_t digits : {2, 3})
            for (int64_t threads : {1, 2}) {
                double error = error_of(kind, digits, threads);
                std::printf("kind %d, %d bytes, %d threads: %.2g\n", int(kind), int(digits), int(threads), error);
                most = std::fmax(most, digits == 2 ? error / 1e-4 : error / 1e-6);
            }
    return most < 1 ? 0 : 1;
}
