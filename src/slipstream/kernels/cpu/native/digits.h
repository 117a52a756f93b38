// Represents a row as integers whose signed 8-bit digits are the operands of byte products.
#pragma once

namespace slipstream {
namespace {

inline bool is_int4(const Matrix& m) {
    return m.format == kInt4 || m.format == kInt4Symmetric;
}

// Return how many digits represent the dtype of a matrix: two for 15 bits and a sign, relative to the row's
// largest magnitude, or three for 23 bits and a sign (float32). Rows that are rounded on input need as many
// as their rounded width.
inline int digits_of(const Matrix& m) {
    if (m.input_bits)
        return m.input_zero ? 2 : 1;
    return m.dtype == kFloat32 ? 3 : 2;
}

// Whether rounded rows are multiplied as their byte codes. With formats that have groups they are integers in
// digits, like any other row.
inline bool in_codes(const Matrix& m) {
    return m.input_bits && m.format == kInt8;
}

#ifdef SLIPSTREAM_BF16_DOT

// Whether a row is split into digits; the int32 lanes can hold the sums of at most this many inputs.
inline bool takes_digits(const Matrix& m) {
    return in_bytes(m) && m.inputs <= 1 << 19;
}

inline bool is_fp6(const Matrix& m) {
    return m.format == kFp6E2m3 || m.format == kFp6E3m2;
}

// Return how many inputs of fp6 are processed 256 at a time; 0 for other formats.
inline int64_t turned_sixes(const Matrix& m) {
    return is_fp6(m) ? ceil_div(m.inputs, m.group) * m.group / Sixes::kTurned * Sixes::kTurned : 0;
}

// The position of each digit. For int4, digits that multiply with low and high nibbles are separated, see
// Nibbles; for fp6, those that multiply with one register of Sixes::turned are adjacent.
struct DigitOrder {
    explicit DigitOrder(const Matrix& m) : int4(is_int4(m)), turned(turned_sixes(m)) {}
    int64_t at(int64_t j) const {
        if (j < turned)
            return (j & ~int64_t{255}) + (j & 48) * 4 + (j & 192) / 4 + (j & 15);
        return int4 ? (j & ~int64_t{127}) + (j & 16) * 4 + (j & 96) / 2 : j;
    }
    bool int4;
    int64_t turned;
};

// How a row is converted to integers: the factor, and the unit that the integers are multiples of. The unit
// is NaN if the row holds NaN or infinity. Rounded rows are integers already.
struct Places {
    float times, unit;
    static Places of(const float* x, const Matrix& m) {
        if (m.input_bits)
            return {1, 1};
        const Grid grid = grid_of(x, m.inputs, false); // grid of the highest digit
        const float below = digits_of(m) == 2 ? 256.0f : 65536.0f;
        return {grid.times * below, grid.scale / below};
    }
};

// Split the row into integers and return their unit; the digits of each place take `stride` bytes, with zeros
// beyond the inputs.
inline float split_digits(const float* x, const Matrix& m, uint8_t* digits, int64_t stride) {
    const DigitOrder order(m);
    const int count = digits_of(m);
    const int64_t n = m.inputs;
    const Places places = Places::of(x, m);
    const Vec times = Vec::set(places.times);
    int64_t j = 0;
    for (; j + Vec::kWidth <= n; j += Vec::kWidth)
        store_digits(Vec::load(x + j) * times, count, digits + order.at(j), stride);
    for (; j < stride; j += Vec::kWidth)
        store_digits(Vec::load(x + j, most(0, n - j)) * times, count, digits + order.at(j), stride);
    return places.unit;
}

// Compute the start values of the sums, 16 lanes per digit, which cancel the offset that was added to the
// codes.
inline void start_digits(const uint8_t* digits, int64_t stride, int count, int32_t* starts) {
    for (int i = 0; i < count; ++i, digits += stride, starts += 16) {
        CodeSums sums = CodeSums::of(Vec::set(0));
        for (int64_t k = 0; k < stride; k += 64)
            sums = dot(sums, Codes::set(Int8Bytes::kAdded), Codes::load(digits + k));
        const CodeSums::Lanes less = -sums.v;
        std::memcpy(starts, &less, sizeof(less));
    }
}

// Compute the start values for fp6: per 256 inputs, then per 64 of the rest, as digit_dot_sixes expects them.
inline void start_sixes(const uint8_t* digits, int64_t stride, int count, const Matrix& m, int32_t* starts) {
    const int64_t turned = turned_sixes(m);
    for (int64_t k = 0; k < m.inputs;) {
        const int64_t end = k + (k < turned ? Sixes::kTurned : 64);
        CodeSums all = CodeSums::of(Vec::set(0));
        for (int i = 0; i < count; ++i) {
            all = i == 1 ? raise(all) : (i == 2 ? CodeSums::of(Vec::set(0)) : all);
            for (int64_t j = k; j < end; j += 64)
                all = dot(all, Codes::set(Fp6Bytes::kAdded), Codes::load(digits + i * stride + j));
            const CodeSums::Lanes less = -all.v;
            if (i > 0)
                std::memcpy(starts + 16 * (i - 1), &less, sizeof(less));
        }
        starts += 16 * (count - 1);
        k = end;
    }
}

// Inputs after which the int32 sums of rows in lanes are flushed: the combined products of the two highest
// digits with int8 codes still fit.
constexpr int64_t kBytesDeep = 512;

// Return how many of these inputs share a scale: a group, or all of them if the format has no groups.
inline int64_t lane_span(const Matrix& m) {
    return m.format == kInt8 ? kBytesDeep : m.group;
}

// Whether rows in lanes are multiplied by AMX tiles, which take signed codes.
constexpr bool kByTiles =
#ifdef SLIPSTREAM_AMX
    true;
#else
    false;
#endif

// Return the offset added to the codes, because the vector instructions take them unsigned. Tiles take int8
// as it is; int4 with minima starts at code 0.
inline int added_in_lanes(const Matrix& m) {
    if (kByTiles && (m.format == kInt8 || m.format == kInt4))
        return 0;
    return m.format == kInt8 ? Int8Bytes::kAdded : is_int4(m) ? 8 : Fp6Bytes::kAdded;
}

// Sizes of one group of rows in lanes, in items. A row has one of sixteen lanes; if at most eight rows are
// left, each has two lanes, which alternate between fours of inputs or, with tiles, hold one of two digits
// each.
//
// digits   [fours of inputs][row in group][input]
//          zeros beyond the rows and the inputs; the digits of all groups are contiguous
// starts   [span][digit][lane]
//          start values of the sums, which cancel the offset of the codes
// sums     [span][lane]
//          sums of the rows, in their units
struct ByteRoom {
    ByteRoom(const Matrix& m, int count)
        : digits(ceil_div(m.inputs, 64) * 64 * kLaneGroup),
          starts(ceil_div(m.inputs, lane_span(m)) * count * kLaneGroup),
          sums(ceil_div(m.inputs, lane_span(m)) * kLaneGroup) {}
    int64_t digits, starts, sums;
};

// Transpose 64 bytes of each of sixteen rows in groups of four, or of eight rows in groups of eight.
inline void turn_bytes(const uint8_t* square, int lanes, uint8_t* to) {
    if (lanes == 1)
        return transpose(reinterpret_cast<const float*>(square), kLaneGroup, reinterpret_cast<float*>(to),
                         kLaneGroup);
    transpose_eight(square, 64, to);
}

// Fill a group of rows with `lanes` lanes per row; digit places are `apart` bytes from each other. With
// `pairs`, two digits have a lane each and share one place. `units` has one entry per lane.
inline void fill_digits(const Rows& x, int lanes, bool pairs, const Matrix& m, uint8_t* digits, int64_t apart,
                        float* units) {
    alignas(64) uint8_t squares[3][kLaneGroup * 64];
    std::memset(squares, 0, sizeof(squares));
    const int count = digits_of(m), filled = pairs ? 1 : count, turned = pairs ? 1 : lanes;
    const int64_t next_row = pairs ? 128 : 64, next_digit = pairs ? 64 : sizeof(squares[0]);
    float times[kLaneGroup];
    for (int64_t r = 0; r < kLaneGroup / lanes; ++r) {
        const Places places = Places::of(x.full + least(r, x.count - 1) * x.stride, m);
        times[r] = places.times;
        for (int64_t i = 0; i < lanes; ++i)
            units[r * lanes + i] = pairs && i == 0 ? 256 * places.unit : places.unit;
    }
    for (int64_t i = 0; i < m.inputs; i += 64, digits += 64 * (kLaneGroup / turned)) {
        for (int64_t r = 0; r < x.count; ++r)
            for (int64_t j = 0; j < 64; j += Vec::kWidth) {
                const int64_t left = most(0, least(m.inputs - i - j, Vec::kWidth));
                const Vec part = Vec::load(x.full + r * x.stride + i + j, left);
                store_digits(part * Vec::set(times[r]), count, squares[0] + r * next_row + j, next_digit);
            }
        for (int d = 0; d < filled; ++d)
            turn_bytes(squares[d], turned, digits + d * apart);
    }
}

// Compute the start values of the sums per lane, which cancel the offset of the codes, and, unless `sums` is
// null, the sums of the lanes themselves.
inline void start_lanes(const uint8_t* digits, int64_t apart, int lanes, int count, const Matrix& m,
                        int32_t* starts, float* sums) {
    const int64_t span = lane_span(m);
    const int added = added_in_lanes(m);
    for (int64_t k = 0; k < m.inputs; k += span) {
        CodeSums all[3];
        for (int d = 0; d < count; ++d, starts += kLaneGroup) {
            all[d] = CodeSums::of(Vec::set(0));
            for (int64_t i = k; i < least(k + span, m.inputs); i += 4 * lanes)
                all[d] =
                    dot(all[d], Codes::set(1), Codes::load(digits + d * apart + i * (kLaneGroup / lanes)));
            const CodeSums::Lanes less = all[d].v * -added;
            std::memcpy(starts, &less, sizeof(less));
        }
        if (!sums)
            continue;
        Vec whole = as_floats(count == 1 ? all[0] : raise(all[0]) + all[1]);
        if (count == 3)
            whole = fma(whole, Vec::set(256), as_floats(all[2]));
        whole.store(sums);
        sums += kLaneGroup;
    }
}

// Compute the sums of the row over each group of int4, in the row's unit, followed by zeros.
inline void sum_digits(const uint8_t* digits, int64_t stride, int count, int64_t group, float* sums,
                       int64_t room) {
    const int shift = group == 32 ? 0 : (group == 64 ? 1 : 2); // from blocks of 32 inputs to groups
    std::memset(sums, 0, static_cast<size_t>(room) * sizeof(float));
    for (int64_t k = 0; k < stride; k += 128) {
        CodeSums all = CodeSums::of(Vec::set(0));
        for (int i = 0; i < count; ++i)
            for (int half = 0; half < 2; ++half) {
                const Codes part = Codes::load(digits + i * stride + k + 64 * half);
                all = dot(i && !half ? raise(all) : all, Codes::set(1), part);
            }
        float* at = sums + (k / 32 >> shift);
        if (!shift) {
            store_fours(all, at);
            continue;
        }
        float fours[4];
        store_fours(all, fours);
        for (int j = 0; j < 4; ++j)
            at[j >> shift] += fours[j];
    }
}

#endif

} // namespace
} // namespace slipstream
