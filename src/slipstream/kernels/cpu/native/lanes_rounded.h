// Rows rounded to bytes, in lanes like the bfloat16 rows of lanes.h: a vector holds the same four inputs of
// sixteen rows, and each group of four int8 weights, read in place, is multiplied with all of them. Sums are
// exact in int32, and equal to those of bytes.h.
//
// Measured on a Zen 5, in us, 1536 x 384 in the cache with one thread and 2048 x 2048 from memory with two:
//
// rows                5    8    9   12   16   17   24   32   47  |    5    8    9   12   16   24   32   47
// lanes              17   18   23   25   26   44   46   48   70  |  114  114  112   94  101  165  172  243
// panels, or rows    22   29   31   41   37   56   56   55   79  |  111  109  113  173  257  309  310  388
#pragma once

namespace slipstream {
namespace {

#if defined(SLIPSTREAM_BF16_DOT) && !defined(SLIPSTREAM_AMX) // AMX uses tiles

struct BytesInLanes {
    using Item = uint8_t;
    using Sum = CodeSums;
    static constexpr int64_t kInputs = 4;
    template <int S, int W>
    static constexpr int kVectors = Bf16InLanes::kVectors<S, W>;
    static Sum start(const int32_t* starts, int s) {
        Sum sum;
        std::memcpy(&sum, starts + s * kLaneGroup, sizeof(sum));
        return sum;
    }
    static Sum none() { return CodeSums::of(Vec::set(0)); }
    // Codes of rows, centred at 128, become signed; signed weights become unsigned.
    static Codes row(const uint8_t* p) { return less_least(Codes::load(p)); }
    static Codes row(const uint8_t* p, int64_t n) { return less_least(Codes::load(p, n), n); }
    static Codes lanes(const uint8_t* p) { return Codes::load(p); }
    template <int W, class... N>
    static Codes weights(const uint8_t* p, N... n) {
        return less_least(Codes::spread<W>(p, n...));
    }
    static Sum add(Sum sum, Codes lanes, Codes weights) { return dot(sum, weights, lanes); }
    template <int S, int W>
    static void store(const Sum (&sums)[S], float* out) {
        for (int s = 0; s < kVectors<S, W>; ++s)
            as_floats(S == 2 && W == 2 ? fold(sums[s], sums[S - 1]) : sums[s]).store(out + s * kLaneGroup);
    }
};

// The layout of rows' codes in lanes, with the initial values of the sums of each lane, which cancel the
// offset of the weights.
struct CodeLanes {
    CodeLanes(int64_t inputs, int64_t rows) {
        with_lanes_of(rows, [&](auto groups, auto shared) {
            parts = decltype(groups)::value;
            items = lane_items<BytesInLanes>(inputs) / decltype(shared)::value;
        });
    }
    int32_t* starts(uint8_t* lanes) const { return reinterpret_cast<int32_t*>(lanes + parts * items); }

    void fill(const uint8_t* codes, int64_t stride, int64_t rows, int64_t inputs, uint8_t* lanes) const {
        lay_in_lanes<BytesInLanes>(codes, stride, rows, inputs, lanes);
        for (int64_t part = 0; part < parts; ++part) {
            CodeSums sum = CodeSums::of(Vec::set(0));
            for (int64_t i = 0; i < items; i += 64)
                sum = dot(sum, Codes::set(Int8Bytes::kAdded), Codes::load(lanes + part * items + i));
            const CodeSums::Lanes less = -sum.v;
            std::memcpy(starts(lanes) + part * kLaneGroup, &less, sizeof(less));
        }
    }

    int64_t parts = 0, items = 0;
};

#endif

} // namespace
} // namespace slipstream
