// How much of a matrix a thread claims at a time.
#pragma once

namespace slipstream {
namespace {

constexpr int64_t kMostColumns = 128; // per piece of work

// Outputs per piece of work: a few microseconds of reading, so that threads finish together, and several
// pieces per thread.
inline int64_t grain(const Matrix& m, int64_t outputs, int threads) {
    constexpr int64_t kPieceBytes = 32 << 10, kSpan = 64;
    // The inputs of a column of a transposed matrix are strided: few columns at a time would read half a
    // cache line of each.
    if (m.format == kPlain && m.num_runs && m.runs[0].transposed)
        return most(kSpan,
                    least(kMostColumns, outputs / (2 * static_cast<int64_t>(threads))) / kSpan * kSpan);
    int64_t bytes = m.inputs * (m.dtype == kFloat32 ? 4 : 2);
    if (m.format != kPlain)
        bytes = (m.plane_bytes[kCodes] + m.plane_bytes[kUpper] + m.plane_bytes[kScales] +
                 m.plane_bytes[kMinima]) /
                m.outputs;
    const int64_t piece = least(kPieceBytes / bytes, outputs / (4 * static_cast<int64_t>(threads)));
#ifdef SLIPSTREAM_AMX
    // Whole bands of tiles: a partial band takes as long, and 2048 x 5632 of int8 in pieces of eight rows
    // took twice as long as 5632 x 2048.
    const int64_t band = m.format == kInt8 ? 32 : 16;
    if (m.format != kPlain || m.dtype == kBfloat16)
        return most(band, least(kMostColumns, (piece + band / 2) / band * band));
#endif
    return most(8, least(kMostColumns, piece / 8 * 8));
}

} // namespace
} // namespace slipstream
