// The left side of a product: float32 rows, and the forms in which a packed matrix takes them.
#pragma once

namespace slipstream {
namespace {

// Whether products are computed in bfloat16. A single row is memory-bound anyway, so it keeps its precision.
inline bool rounds(const Matrix& m, int64_t rows) {
    return Vec::kBf16Dot && m.dtype == kBfloat16 && !m.input_bits && rows > 1;
}

// Rows prepared for one matrix. For a packed matrix, each thread lays out a few rows for itself, because they
// pass through its own caches once per matrix; in all other cases the rows themselves are read.
struct Operand {
    Rows rows;
    // bfloat16 terms whose sum is the rows, `apart` items from each other, operand_terms of them. Each term
    // holds blocks of rows (see RowBlock), zero beyond the inputs; for int4 in the order of its codes (see
    // Nibbled). Null: the rows themselves are read.
    const Bf16* terms = nullptr;
    int64_t apart = 0;
    // The first `in_lanes` rows in lanes, see lanes.h; the other fields hold the remaining rows, counted from
    // there.
    const Bf16* lanes = nullptr;
    int64_t in_lanes = 0, lanes_apart = 0;
    // Rows in lanes for a matrix whose codes are integers, see lanes_bytes.h; the last `in_narrow` of these
    // rows have two lanes each. The integers of lane l are multiples of `units[l]`. Or the codes of all rows,
    // see lanes_rounded.h.
    const uint8_t* byte_lanes = nullptr;
    int64_t in_narrow = 0;
    const float *units = nullptr, *lane_sums = nullptr;
    const float* sums = nullptr;         // over each group of int4
    int64_t stride = 0, sums_stride = 0; // per row
    // A single row in digits (see digits.h) that are `stride` apart, in multiples of `unit`; so are its sums.
    const uint8_t* digits = nullptr;
    const int32_t* starts =
        nullptr; // initial values of the sums, sixteen for each digit (see start_sixes); not for int4
    float unit = 0;
    // A single row in words (see words.h), likewise; or several rows, each in multiples of its own unit in
    // `units`: in lanes, or with `by_rows` laid out like the single row.
    const int16_t* words = nullptr;
    bool by_rows = false;
    // A single row for a dense bfloat16 matrix, `parted`: of each 2 * Vec::kWidth inputs first those of even
    // index, then the others; zero beyond the inputs.
    const float* parted = nullptr;
    const float* floats = nullptr; // rows for small-float formats, `stride` apart, see few_floats.h
    // For rows that are rounded: their codes (null if the rows themselves hold the integers) and the grid of
    // each row.
    const uint8_t* codes = nullptr;
    const Grid* grids = nullptr;
};

// From this many rows on, copying a panel of the matrix into scratch pays off. Measured with cold weights,
// 2048 x 2048 in bfloat16: at 16 rows `dots` takes 3/4 of the time, at 64 9/10, at 512 6/5.
constexpr int64_t kManyRows = 48;
// The maximum number of rows that a packed matrix is multiplied with while it is read once; for more rows,
// unpacking it pays off.
constexpr int64_t kFewRows = kManyRows - 1;
constexpr int64_t kOperandStep = 128; // operands are padded to a multiple of this
constexpr int kMostTerms = 3;

// Up to 8 rows that are multiplied with a packed matrix together. For each kOperandStep inputs the rows lie
// one after another, so that one register addresses all of them and none of them conflict in the cache.
struct RowBlock {
    int64_t first, rows;
    static RowBlock at(int64_t first, int64_t count) { return {first, least(8, count - first)}; }
};

// This many rows left over after whole groups of sixteen always go in lanes of bytes; see Fewest.
constexpr int64_t kFewestNarrow = 7;

#if defined(SLIPSTREAM_BF16_DOT) && !defined(SLIPSTREAM_AMX)
constexpr int64_t kFewestCodesInLanes = 5;

// Whether rows rounded to bytes go in lanes. With a zero point per row their values do not fit in a signed
// byte.
inline bool in_code_lanes(const Matrix& m, int64_t rows) {
    return in_codes(m) && !m.input_zero && rows >= kFewestCodesInLanes && rows <= kFewRows;
}
#endif

inline bool wants_operand(const Matrix& m, int64_t rows) {
    return Vec::kBf16Dot && m.format != kPlain && !in_codes(m) && rows <= kFewRows;
}

// The number of bfloat16 terms, of eight bits each, that a row is split into: enough for all bits of its
// dtype.
inline int operand_terms(const Matrix& m) {
    return m.input_bits || m.dtype == kBfloat16 ? 1 : (m.dtype == kFloat16 ? 2 : kMostTerms);
}

// Minimum numbers of rows left over after whole groups of sixteen: from `narrow` on, up to eight of them go
// in lanes of bytes with two lanes each; from `wide` on, all do with one lane each. Measured on a Zen 4; rows
// of several terms gain earlier, and so do rows of one digit.
struct Fewest {
    int64_t narrow, wide;
    static Fewest of([[maybe_unused]] const Matrix& m) {
#ifdef SLIPSTREAM_AMX
        // A tile multiplies a whole group of rows in the time of one row. Measured on an Emerald Rapids, two
        // threads, 5632 x 2048 from memory, in us:
        //
        // rows                    1     2     4     8    16    32
        // int8, tiles           487   593   562   502   568   769
        // int8, vectors         488   616   848   609   797  1444
        // int4, tiles           302   762   784   756  1249  1737
        // int4, vectors         292   515   791   720  1245  2349
        // int4 rounded, tiles         890  1051  1053  1060  1555
        // int4 rounded, vectors       568   998   770  1092  1839
        //
        // With int4, sums of each group of 32 inputs are stored, so two or three rows stay with vectors.
        if (m.format == kInt8)
            return digits_of(m) == 2 ? Fewest{1, 9} : Fewest{kLaneGroup, 1};
        return {digits_of(m) == 1 ? 5 : 4, 9};
#else
        if (operand_terms(m) > 1)
            return {4, 11};
        return digits_of(m) == 1 ? Fewest{5, 11} : Fewest{kFewestNarrow, 13};
#endif
    }
};

// Whether a single row is parted for a dense matrix.
inline bool takes_parted(const Matrix& m, int64_t rows) {
    return rows == 1 && m.format == kPlain && m.dtype == kBfloat16 && !m.runs[0].transposed;
}

inline int64_t operand_stride(int64_t inputs) {
    return ceil_div(inputs, kOperandStep) * kOperandStep;
}

// The minimum number of rows in a block for which the inputs for int4 are permuted 512 at a time.
constexpr int kFewestTurned = 4;

// The order of inputs for int4. For fewer rows than kFewestTurned: that of Int4Codes::load, 128 at a time.
// For others: first 512 at a time in the order of Int4Codes::turned, then 128 at a time, and if at most 64
// are left, those in the order of Int4Codes::wide.
struct Nibbled {
    static constexpr int64_t kTurned = 4 * kOperandStep, kWide = 64;
    Nibbled(int64_t some, int64_t group, int64_t rows) : inputs(ceil_div(some, group) * group) {
        const bool turns = rows >= kFewestTurned;
        turned = turns ? inputs / kTurned * kTurned : 0;
        whole = turns && inputs % kOperandStep <= kWide ? inputs / kOperandStep * kOperandStep : inputs;
    }
    int64_t inputs, turned, whole; // inputs in whole groups; how many are turned; all but the wide ones
};

inline int64_t operand_sums(int64_t inputs) {
    return ceil_div(inputs, 32 * 16) * 16; // one per smallest group, in whole vectors
}

// Bytes of rounded rows that are kept as integers, with their grids.
inline int64_t whole_bytes(int64_t stride, int64_t rows) {
    return rows * (stride * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(Grid)));
}

// Bytes of scratch that `prepare` needs per thread.
inline int64_t operand_bytes(int64_t inputs, int64_t rows) {
    if (rows >= kManyRows)
        return 0;
    const int64_t grids = static_cast<int64_t>(sizeof(Grid)), item = Vec::kBf16Dot ? 1 : 4;
    const int64_t rounded = rows * (operand_stride(inputs) * item + grids);
#ifndef SLIPSTREAM_BF16_DOT // two words take as much as a float, and need sums
    const int64_t by_rows = rounded + rows * 2 * operand_sums(inputs) * static_cast<int64_t>(sizeof(float));
    return rows > 1 ? most(by_rows, WordLanes::bytes(inputs, rows)) : by_rows;
#endif
    if (rows > kFewRows)
        return rounded;
    const int64_t terms = kMostTerms * static_cast<int64_t>(sizeof(Bf16));
    const int64_t room = ceil_div(rows, kLaneGroup) * kLaneGroup;
    const int64_t stride = operand_stride(inputs), sums = operand_sums(inputs) * 4;
    // The integers, followed by two digits of each, or one term, with their sums.
    const int64_t whole = whole_bytes(stride, rows) + 64 + room * (stride * 3 + sums);
    return most(most(rounded, room * (stride * terms + sums)), whole);
}

// The offset of the lanes, which follow the codes and grids of rounded rows.
inline int64_t code_lanes_at(int64_t stride, int64_t rows) {
    return ceil_div(rows * (stride + static_cast<int64_t>(sizeof(Grid))), 64) * 64;
}

// Rows rounded to eight bits: as codes, or as floats on their grids if the instruction set has no byte
// products.
inline Operand rounded_operand(const Rows& rows, const Matrix& m, char* scratch) {
    Operand x = {rows};
    x.stride = operand_stride(m.inputs);
    auto* grids = reinterpret_cast<Grid*>(scratch + rows.count * x.stride * (Vec::kBf16Dot ? 1 : 4));
    for (int64_t r = 0; r < rows.count; ++r) {
        const float* row = rows.full + r * rows.stride;
        grids[r] = grid_of(row, m.inputs, m.input_zero != 0);
#ifdef SLIPSTREAM_BF16_DOT
        auto* to = reinterpret_cast<uint8_t*>(scratch) + r * x.stride;
        round_row(row, m.inputs, grids[r], to);
        std::memset(to + m.inputs, 0, static_cast<size_t>(x.stride - m.inputs));
        x.codes = reinterpret_cast<uint8_t*>(scratch);
        x.grids = grids;
#else
        round_row(row, m.inputs, grids[r], reinterpret_cast<float*>(scratch) + r * x.stride);
        x.rows = {reinterpret_cast<float*>(scratch), nullptr, x.stride, rows.count};
#endif
    }
#if defined(SLIPSTREAM_BF16_DOT) && !defined(SLIPSTREAM_AMX)
    if (in_code_lanes(m, rows.count)) {
        const CodeLanes room(m.inputs, rows.count);
        auto* lanes = reinterpret_cast<uint8_t*>(scratch) + code_lanes_at(x.stride, rows.count);
        room.fill(x.codes, x.stride, rows.count, m.inputs, lanes);
        x.byte_lanes = lanes;
        x.starts = room.starts(lanes);
    }
#endif
    return x;
}

#ifdef SLIPSTREAM_BF16_DOT
// Writes rows rounded to eight bits as integers: their codes minus the zero point. The scale is left to be
// applied to the result. Returns the end of the used scratch.
inline char* whole_rows(const Rows& rows, const Matrix& m, Operand& x, char* scratch) {
    const int64_t stride = operand_stride(m.inputs);
    auto* whole = reinterpret_cast<float*>(scratch);
    auto* grids = reinterpret_cast<Grid*>(whole + rows.count * stride);
    for (int64_t r = 0; r < rows.count; ++r) {
        const float* row = rows.full + r * rows.stride;
        grids[r] = grid_of(row, m.inputs, m.input_zero != 0);
        round_row(row, m.inputs, Grid{grids[r].times, 1, grids[r].zero}, whole + r * stride);
    }
    x.rows = {whole, nullptr, stride, rows.count};
    x.grids = grids;
    return reinterpret_cast<char*>(whole) + ceil_div(whole_bytes(stride, rows.count), 64) * 64;
}
#endif

#ifdef SLIPSTREAM_BF16_DOT
// The order of the inputs in a term for a given matrix.
struct TermOrder {
    TermOrder(const Matrix& m, int64_t rows)
        : int4(is_int4(m)), fp6(is_fp6(m)), nibbled(m.inputs, int4 ? m.group : kOperandStep, rows),
          sixes(turned_sixes(m)) {}
    // Writes inputs k to k + 128 to `to`; each preceding block lies `step` elements earlier.
    void put(const Bf16* from, int64_t k, Bf16* to, int64_t step) const {
        if (int4 && k < nibbled.whole)
            interleave_nibbles(from, to);
        else if (int4)
            part_nibbles(from, to);
        else
            copy_lanes(from, to);
        if (int4 && k < nibbled.turned && (k + kOperandStep) % Nibbled::kTurned == 0)
            turn_nibbles(to - 3 * step, step);
        if (fp6 && k < sixes && (k + kOperandStep) % Sixes::kTurned == 0)
            turn_sixes(to - step, step);
        for (int64_t j = 0; fp6 && k >= sixes && j < kOperandStep; j += 64)
            part_sixes(to + j);
    }
    bool int4, fp6;
    Nibbled nibbled;
    int64_t sixes;
};

// Splits one row into terms that are `apart` items from each other, with `step` items between consecutive
// blocks of kOperandStep inputs.
inline void split_row(const float* x, int64_t n, const TermOrder& order, int terms, Bf16* to, int64_t apart,
                      int64_t step) {
    alignas(64) Bf16 parts[kMostTerms][kOperandStep];
    for (int64_t k = 0; k < n; k += kOperandStep, to += step) {
        for (int64_t j = 0; j < kOperandStep; j += Vec::kWidth) {
            Vec left = Vec::load(x + k + j, most(0, least(n - k - j, Vec::kWidth)));
            for (int i = 0; i < terms; ++i) {
                left.store(parts[i] + j);
                left = left - Vec::load(parts[i] + j);
            }
        }
        for (int i = 0; i < terms; ++i)
            order.put(parts[i], k, to + i * apart, step);
    }
}

inline void sum_groups(const float* x, int64_t n, int64_t group, float* sums, int64_t count) {
    for (int64_t g = 0; g < count; ++g) {
        Vec sum = Vec::set(0);
        for (int64_t j = g * group; j < least(n, (g + 1) * group); j += Vec::kWidth)
            sum = sum + Vec::load(x + j, least(n - j, Vec::kWidth));
        sums[g] = sum.sum();
    }
}
#endif

#ifdef SLIPSTREAM_BF16_DOT
inline void digit_operand(const Matrix& m, Operand& x, char* scratch) {
    const int count = digits_of(m);
    auto* digits = reinterpret_cast<uint8_t*>(scratch);
    x.digits = digits;
    x.stride = operand_stride(m.inputs);
    x.unit = split_digits(x.rows.full, m, digits, x.stride);
    char* rest = scratch + count * x.stride;
    if (is_int4(m)) {
        x.sums = reinterpret_cast<float*>(rest);
        sum_digits(digits, x.stride, count, m.group, reinterpret_cast<float*>(rest), operand_sums(m.inputs));
    } else {
        x.starts = reinterpret_cast<int32_t*>(rest);
        if (is_fp6(m))
            start_sixes(digits, x.stride, count, m, reinterpret_cast<int32_t*>(rest));
        else
            start_digits(digits, x.stride, count, reinterpret_cast<int32_t*>(rest));
    }
}
#endif

#ifdef SLIPSTREAM_BF16_DOT
// Lays out the first rows in lanes of bytes; returns the end of the used scratch.
inline char* byte_lanes(const Rows& rows, const Matrix& m, Operand& x, char* scratch) {
    const int digits = digits_of(m);
    const Fewest fewest = Fewest::of(m);
    const int64_t wide = rows_in_lanes(rows.count, fewest.wide), left = rows.count - wide;
    x.in_narrow = left >= fewest.narrow ? least(left, kLaneGroup / 2) : 0;
    x.in_lanes = wide + x.in_narrow;
    const int64_t groups = ceil_div(wide, kLaneGroup), all = groups + (x.in_narrow > 0);
    const ByteRoom room(m, digits);
    auto* lanes = reinterpret_cast<uint8_t*>(scratch);
    if (!all)
        return scratch;
    x.byte_lanes = lanes;
    x.lanes_apart = all * room.digits;
    auto* starts = reinterpret_cast<int32_t*>(lanes + digits * x.lanes_apart);
    auto* sums = reinterpret_cast<float*>(starts + all * room.starts);
    auto* units = sums + all * room.sums;
    x.starts = starts, x.lane_sums = sums, x.units = units;
    for (int64_t g = 0; g < all; ++g, lanes += room.digits) {
        const bool narrow = g == groups;
        const int64_t first = g * kLaneGroup, count = narrow ? x.in_narrow : least(kLaneGroup, wide - first);
        const float* from = rows.full + least(first, wide) * rows.stride;
        const bool pairs = kByTiles && narrow && digits == 2;
        fill_digits({from, nullptr, rows.stride, count}, 1 + narrow, pairs, m, lanes, x.lanes_apart,
                    units + first);
        start_lanes(lanes, x.lanes_apart, pairs ? 1 : 1 + narrow, pairs ? 1 : digits, m,
                    starts + g * room.starts, m.format == kInt4 ? sums + g * room.sums : nullptr);
    }
    return reinterpret_cast<char*>(units + all * kLaneGroup);
}

// Splits the rows from `first` on into terms.
inline void packed_terms(const Rows& rows, const Matrix& m, int64_t first, Operand& x, char* scratch) {
    const int terms = operand_terms(m);
    const int64_t count = rows.count - first;
    x.stride = operand_stride(m.inputs);
    x.sums_stride = operand_sums(m.inputs);
    x.apart = count * x.stride;
    auto* to = reinterpret_cast<Bf16*>(scratch);
    auto* sums = reinterpret_cast<float*>(to + terms * x.apart);
    x.terms = to;
    x.sums = sums;
    RowBlock block = RowBlock::at(0, count);
    for (int64_t r = 0; r < count; ++r) {
        if (r == block.first + block.rows)
            block = RowBlock::at(r, count);
        const float* row = rows.full + (first + r) * rows.stride;
        const int64_t at = block.first * x.stride + (r - block.first) * kOperandStep;
        split_row(row, m.inputs, TermOrder(m, block.rows), terms, to + at, x.apart,
                  block.rows * kOperandStep);
        if (m.format == kInt4)
            sum_groups(row, m.inputs, m.group, sums + r * x.sums_stride, x.sums_stride);
    }
}
#endif

} // namespace
} // namespace slipstream
