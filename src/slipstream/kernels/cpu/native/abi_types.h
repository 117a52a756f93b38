// Matrices, norms and what every call uses; part of abi.h.
#pragma once

#include <cstdint>

namespace slipstream {

enum Dtype : int32_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kFloat16 = 2,
    kInt8Codes = 3, // int8 keys and values in a cache, with a float32 scale per token and kv head
    kBoolean = 4    // masks, one byte per element
};

enum Status : int32_t {
    kOk = 0,
    kNoIsa = 1,      // the instruction set is unknown, or the processor lacks it
    kNull = 2,       // a required tensor is null
    kDtype = 3,      // unknown dtype
    kShape = 4,      // shapes do not match
    kAlignment = 5,  // a tensor is not aligned to its element size
    kRange = 6,      // an index (slot, block, start) is out of range
    kMemory = 7,     // scratch memory could not be allocated
    kUnsupported = 8 // an option that this version does not support
};

// A run of consecutive rows of a matrix. Element (o, i) is data[o * stride + i], or data[i * stride + o]
// where `transposed`: `stride` is the number of elements between rows, or between input columns.
struct Run {
    const void* data;
    int64_t rows, stride;
    int32_t transposed, unused;
};

// How a matrix is stored: dense, or packed as shown in the docstring of formats/<name>.py.
enum Format : int32_t {
    kPlain = 0,
    kInt8 = 1,
    kInt4 = 2,          // with a minimum per group
    kInt4Symmetric = 3, // without minima
    kFp8 = 4,           // e4m3
    kFp6E2m3 = 5,
    kFp6E3m2 = 6,
    kBf13 = 7,
    kFormats = 8
};

// Planes of a packed matrix, by content. Each plane is contiguous and holds the matrix's rows in order. A row
// takes the number of bytes given in parentheses, where `padded` is the inputs rounded up to whole groups.
enum Plane : int32_t {
    // every format (int8, fp8: inputs; int4, fp6: padded / 2; bf13: padded / 8 * 13); of fp6 the lower four
    // bits
    kCodes = 0,
    kScales = 1,  // int4, fp6: float16 per group, aligned to 2 bytes (2 * groups)
    kMinima = 2,  // int4 with a minimum: float16 per group, aligned to 2 bytes (2 * groups)
    kUpper = 3,   // fp6: the upper two bits of each code (padded / 4)
    kFactors = 4, // every format: float32 per row, aligned to 4 bytes (4)
    kPlanes = 5
};

// An `(outputs, inputs)` matrix. A dense matrix consists of one or more runs of rows (such as a model's
// separate q, k and v), all of one dtype. A packed matrix has planes instead, and `dtype` is the dtype that
// it would be unpacked to.
struct Matrix {
    const Run* runs;  // dense only: `num_runs` runs, whose rows add up to `outputs`
    const void* bias; // `(outputs,)` or null
    int64_t num_runs, outputs, inputs;
    int32_t dtype, bias_dtype;
    int32_t format, group; // inputs per group: int4 32, 64 or 128; fp6 and bf13 64; otherwise 0
    // 0, or 8: each input row is rounded to 8 bits first (int8 and int4, up to 65536 inputs)
    int32_t input_bits;
    int32_t input_zero;           // 0, or 1: that rounding has a zero point; requires input_bits 8
    const void* planes[kPlanes];  // packed only; null where the format lacks the plane
    int64_t plane_bytes[kPlanes]; // must match format, group and shape
};

enum NormKind : int32_t { kNoNorm = 0, kRms = 1, kLayer = 2 };

// A norm over a vector x, with the mean taken as 0 by kRms; kNoNorm passes its input through:
// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (weight + offset) + bias. `count` is the length of both
// weight and bias. Each may be null; without a weight, its factor is 1, whatever `offset` is.
struct Norm {
    const void *weight, *bias;
    int64_t count;
    float eps, offset;
    int32_t kind, weight_dtype, bias_dtype, unused;
};

enum Activation : int32_t {
    kGelu = 0,
    kGeluTanh = 1,
    kQuickGelu = 2,
    kSilu = 3,
    kRelu = 4,
    kRelu2 = 5,
    kRelu6 = 6,
    kLeakyRelu = 7,
    kMish = 8,
    kTanh = 9,
    kSigmoid = 10,
    kLinear = 11,
    kSwigluOai = 12, // gated feed-forwards only
    kActivations = 13
};

} // namespace slipstream
