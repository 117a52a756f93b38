// A few rows in lanes of bytes times a packed matrix of any format with integer codes.
#pragma once

namespace slipstream {
namespace {

#ifdef SLIPSTREAM_BF16_DOT

// out[r * os + o - begin] = x row r . row o of a packed matrix, before the row's factor is applied, for the
// rows in lanes.
inline void multiply_bytes(const Operand& x, const Matrix& m, int64_t begin, int64_t end, float* out,
                           int64_t os) {
    const auto run = [&](auto codes, auto minima) {
        using F = decltype(codes);
        constexpr bool kMinima = decltype(minima)::value;
        const int digits = digits_of(m);
        if (digits == 2)
            multiply_byte_lanes<F, 2, kMinima>(x, m, begin, end, out, os);
        else if (digits == 3)
            multiply_byte_lanes<F, 3, kMinima>(x, m, begin, end, out, os);
        else if constexpr (std::is_same<F, BytesOfInt4>::value) // rows that are rounded on input
            multiply_byte_lanes<F, 1, kMinima>(x, m, begin, end, out, os);
    };
    switch (m.format) {
    case kInt8:
        return run(BytesOfInt8(), std::false_type());
    case kInt4:
        return run(BytesOfInt4(), std::true_type());
    case kInt4Symmetric:
        return run(BytesOfInt4(), std::false_type());
    default:
        return run(BytesOfSixes(), std::false_type());
    }
}

#endif

} // namespace
} // namespace slipstream
