// A row as whole numbers: the digits, of eight bits with a sign, that products of bytes take.
#pragma once

namespace slipstream {
namespace {

inline bool is_int4(const Matrix& m) {
    return m.format == kInt4 || m.format == kInt4Symmetric;
}

// Digits that hold what the dtype of a matrix does: 15 bits and a sign, scaled to the row's largest, or 23
// and a sign in float32; for rows rounded on input, the width they were rounded to.
inline int digits_of(const Matrix& m) {
    if (m.input_bits)
        return m.input_zero ? 2 : 1;
    return m.dtype == kFloat32 ? 3 : 2;
}

// Whether rounded rows meet the codes of a matrix as the bytes that they are rounded to. Beside a format with
// groups they are whole numbers, like the digits of any other row.
inline bool in_codes(const Matrix& m) {
    return m.input_bits && m.format == kInt8;
}

#ifdef SLIPSTREAM_BF16_DOT

// Whether a row becomes digits; lanes of int32 hold the sums of so many inputs.
inline bool takes_digits(const Matrix& m) {
    return in_bytes(m) && m.inputs <= 1 << 19;
}

inline bool is_fp6(const Matrix& m) {
    return m.format == kFp6E2m3 || m.format == kFp6E3m2;
}

// Inputs of fp6 that are taken 256 at a time; of others none.
inline int64_t turned_sixes(const Matrix& m) {
    return is_fp6(m) ? ceil_div(m.inputs, m.group) * m.group / Sixes::kTurned * Sixes::kTurned : 0;
}

// Where digits lie: of int4 those that meet the halves of bytes are apart, see Nibbles; of fp6 those that
// meet one register of Sixes::turned are together.
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

// How a row becomes whole numbers: by what it is multiplied, and of what they are multiples then. The unit is
// NaN where the row holds NaN or infinity; rows that are rounded are whole numbers already.
struct Places {
    float times, unit;
    static Places of(const float* x, const Matrix& m) {
        if (m.input_bits)
            return {1, 1};
        const Grid grid = grid_of(x, m.inputs, false); // of the highest digit
        const float below = digits_of(m) == 2 ? 256.0f : 65536.0f;
        return {grid.times * below, grid.scale / below};
    }
};

// The row in units of what is returned, `stride` digits of each place, and zeros behind the inputs.
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

// Start values of the sums, 16 lanes for each digit: they cancel what was added to the codes.
inline void start_digits(const uint8_t* digits, int64_t stride, int count, int32_t* starts) {
    for (int i = 0; i < count; ++i, digits += stride, starts += 16) {
        CodeSums sums = CodeSums::of(Vec::set(0));
        for (int64_t k = 0; k < stride; k += 64)
            sums = dot(sums, Codes::set(Int8Bytes::kAdded), Codes::load(digits + k));
        const CodeSums::Lanes less = -sums.v;
        std::memcpy(starts, &less, sizeof(less));
    }
}

// The same of fp6, for each 256 inputs and each 64 behind them; as digit_dot_sixes takes them.
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

// Inputs that rows in lanes are multiplied with at a time: the products of their two highest digits with int8
// codes, added up, fit in int32.
constexpr int64_t kBytesDeep = 512;

// How many of those share a scale: a group, or all of them where the format has no groups.
inline int64_t lane_span(const Matrix& m) {
    return m.format == kInt8 ? kBytesDeep : m.group;
}

// Whether rows in lanes are multiplied by the tiles of AMX, which take signed codes.
constexpr bool kByTiles =
#ifdef SLIPSTREAM_AMX
    true;
#else
    false;
#endif

// What is added to the codes, which vectors take without a sign. Tiles take int8 as it is, and int4 with
// minima begins at code 0.
inline int added_in_lanes(const Matrix& m) {
    if (kByTiles && (m.format == kInt8 || m.format == kInt4))
        return 0;
    return m.format == kInt8 ? Int8Bytes::kAdded : is_int4(m) ? 8 : Fp6Bytes::kAdded;
}

// Room for one group of rows in lanes, in items. A row has one of sixteen lanes; where no more than eight
// rows are left, each has two, which take turns at fours of inputs, or with tiles one for each of two digits.
//
// digits   [fours of inputs][row in group][input]
//          zeros beyond the rows and the inputs; those of all groups together
// starts   [span][digit][lane]
//          start values of the sums, which cancel what was added to the codes
// sums     [span][lane]
//          of the rows, in their units
struct ByteRoom {
    ByteRoom(const Matrix& m, int count)
        : digits(ceil_div(m.inputs, 64) * 64 * kLaneGroup),
          starts(ceil_div(m.inputs, lane_span(m)) * count * kLaneGroup),
          sums(ceil_div(m.inputs, lane_span(m)) * kLaneGroup) {}
    int64_t digits, starts, sums;
};

// 64 bytes of each of sixteen rows, or of eight, as lanes of one four or two.
inline void turn_bytes(const uint8_t* square, int lanes, uint8_t* to) {
    if (lanes == 1)
        return transpose(reinterpret_cast<const float*>(square), kLaneGroup, reinterpret_cast<float*>(to),
                         kLaneGroup);
    transpose_eight(square, 64, to);
}

// A group of rows with so many lanes each; the digits of each place are `apart` from those of the next.
// `pairs`: of two digits each has a lane of its own, and they lie in one place. The units are of lanes.
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

// Start values of sums over the lanes, which cancel what was added to the codes; and, unless `sums` is null,
// the sums of the lanes themselves.
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

// The sums of the row, in its units, over each group of int4; zeros behind them.
inline void sum_digits(const uint8_t* digits, int64_t stride, int count, int64_t group, float* sums,
                       int64_t room) {
    const int shift = group == 32 ? 0 : (group == 64 ? 1 : 2); // from blocks of 32 to groups
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
