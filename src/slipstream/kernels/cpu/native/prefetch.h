// What products of many rows prefetch: the panels that a thread has next, of this matrix or of the one that
// follows it. A thread does one to four panels of a matrix of SmolLM2, and the first of them would otherwise
// be loaded from memory while nothing is multiplied. (A Zen 5 keeps prefetched lines in L1 only, where they
// do not last until then: there it makes no difference.)
#pragma once

namespace slipstream {
namespace {

// The memory range of rows [begin, begin + rows) of a matrix; empty unless they are contiguous.
inline Ahead rows_ahead(const Matrix& m, int64_t begin, int64_t rows) {
    if (rows <= 0)
        return {};
    if (m.format != kPlain) {
        const int64_t bytes = m.plane_bytes[kCodes] / m.outputs;
        const char* at = static_cast<const char*>(m.planes[kCodes]) + begin * bytes;
        return {at, at + rows * bytes};
    }
    int64_t first = 0, i = 0;
    while (i + 1 < m.num_runs && begin >= first + m.runs[i].rows)
        first += m.runs[i++].rows;
    const Run& run = m.runs[i];
    const int64_t n = least(rows, first + run.rows - begin), size = m.dtype == kFloat32 ? 4 : 2;
    if (n <= 0 || run.transposed)
        return {};
    const char* at = static_cast<const char*>(run.data) + (begin - first) * run.stride * size;
    return {at, at + ((n - 1) * run.stride + m.inputs) * size};
}

// The panels of the matrix that follows a product; empty without a matrix.
struct Following {
    const Matrix* m = nullptr;
    int64_t outputs = 0, second = 0, width = 0;
};

} // namespace
} // namespace slipstream
