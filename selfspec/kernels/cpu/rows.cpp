// Rows of a matrix, of floats or of packed blocks: see `RowTable`.

#include <algorithm>

#include "blocks.h"

static float half_float(const char* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    float size = std::ldexp(float((half & 0x3ff) + (half & 0x7c00 ? 0x400 : 0)), std::max(half >> 10 & 31, 1) - 25);
    return half & 0x8000 ? -size : size;
}

// One output's numbers in a block, four inputs per word.
static void numbers_of(int64_t kind, const char* block, int64_t output, uint32_t (&words)[WORDS]) {
    auto word = [&](int64_t at) {
        uint32_t bits;
        std::memcpy(&bits, block + (at * PANEL + output) * 4, sizeof bits);
        return bits;
    };
    for (int64_t j = 0; j < 4; j++) {
        if (kind == Q8_0) {
            words[2 * j] = word(2 * j), words[2 * j + 1] = word(2 * j + 1);
            continue;
        }
        uint32_t both = word(j);
        for (int64_t part = 0; part < 2; part++) {
            uint32_t more = shape_of(kind).bits == 5 ? word(4) >> (4 * part + j) & 0x01010101
                            : kind == Q6_K           ? word(4 + part) >> 2 * j & 0x03030303
                                                     : 0;
            words[2 * j + part] = (both >> 4 * part & 0x0f0f0f0f) | more << 4;
        }
    }
}

// The weights of one output, as dequantising the file gives them.
static void dequantise(const Product& p, int64_t output, float* out) {
    int64_t kind = kind_of(p, output / PANEL), lane = output % PANEL, size = BLOCK / 2;
    BlockShape shape = shape_of(kind);
    const char *block = p.packed + panel_at(p, output / PANEL), *super = block;
    bool has_minimum = shape.offset == 0;
    for (int64_t b = 0; b < p.in / BLOCK; b++, block += shape.bytes() * PANEL, out += BLOCK) {
        if (shape.super && b % PER_SUPER == 0) super = block, block += shape.super * PANEL;
        const char* scales = block + shape.numbers() * PANEL;
        float scale[2], minimum = 0;
        if (kind == Q6_K) {
            for (int half = 0; half < 2; half++)
                scale[half] = half_float(super + lane * 2) * int8_t(scales[half * PANEL + lane]);
        } else if (shape.super == 4) {
            scale[0] = scale[1] = half_float(super + lane * 2) * uint8_t(scales[lane]);
            minimum = -(half_float(super + (PANEL + lane) * 2) * uint8_t(scales[PANEL + lane]));
        } else {
            scale[0] = scale[1] = half_float(scales + lane * 2);
            if (has_minimum) minimum = half_float(scales + (PANEL + lane) * 2);
        }
        uint32_t words[WORDS];
        numbers_of(kind, block, lane, words);
        uint8_t numbers[BLOCK];
        std::memcpy(numbers, words, sizeof numbers);
        int offset = int(shape.offset);
        for (int half = 0; half < 2; half++)
            for (int64_t i = half * size; i < (half + 1) * size; i++)
                out[i] = float(numbers[i] - offset) * scale[half] + minimum;
    }
}

extern "C" const float* selfspec_row(const RowTable* table, int64_t row, int64_t size, float* memory) {
    if (table->floats) return table->floats + row * size;
    dequantise(*table->packed, row, memory);
    return memory;
}
