// Makes the sketch of a vocabulary projection, with what the sketch lacks along some directions and a bound
// on the remaining error; see kernels/cpu/sketch.py for definitions, and screen.h for its use.
#pragma once

#include <cmath>
#include <limits>

namespace slipstream {
namespace {

// Unpacks row o of a packed matrix to float32; whole vectors are written.
inline void unpack_row(const Matrix& m, int64_t o, float* out) {
    decode(m, o, 1, 0, m.inputs, out, m.inputs);
    const Vec factor = Vec::set(row_factors(m)[o]);
    for (int64_t j = 0; j < m.inputs; j += Vec::kWidth)
        (Vec::load(out + j) * factor).store(out + j);
}

// Some columns of several rows, packed separately before they are placed next to the other columns in the
// sketch.
struct SketchedPart {
    Matrix packed = {};

    void take(Scratch& scratch, const Matrix& sketch, int64_t rows, int64_t inputs) {
        packed.format = sketch.format;
        packed.dtype = kFloat32;
        packed.group = sketch.group;
        packed.outputs = rows;
        packed.inputs = inputs;
        for (int plane : {kCodes, kScales, kMinima, kFactors}) {
            const int64_t bytes = row_bytes(sketch, plane, inputs) * rows;
            packed.planes[plane] = scratch.part<char>(bytes);
            packed.plane_bytes[plane] = bytes;
        }
    }
    static int64_t row_bytes(const Matrix& sketch, int plane, int64_t inputs) {
        if (plane == kFactors)
            return 4;
        return plane == kCodes ? inputs / 2 : inputs / sketch.group * 2;
    }
    void pack(const float* dense, int64_t rows, float* room) const {
        PackCall call = {};
        call.dense = dense;
        call.stride = packed.inputs;
        call.dtype = kFloat32;
        call.packed = packed;
        pack_groups(call, 0, rows, room);
    }
    // Copies row r to row `at` of the sketch, after `before` inputs.
    void put(int64_t r, const Matrix& sketch, int64_t at, int64_t before) const {
        for (int plane : {kCodes, kScales, kMinima}) {
            const int64_t own = row_bytes(sketch, plane, packed.inputs);
            auto* to = static_cast<char*>(const_cast<void*>(sketch.planes[plane])) +
                       at * row_bytes(sketch, plane, sketch.inputs) + row_bytes(sketch, plane, before);
            std::memcpy(to, static_cast<const char*>(packed.planes[plane]) + r * own,
                        static_cast<size_t>(own));
        }
    }
};

class Sketching {
public:
    Sketching(const SketchCall& call, char* base, int threads)
        : call_(call), inputs_(call.head.inputs), directions_(call.sketch.inputs - call.head.inputs),
          base_(base), threads_(threads) {}

    int64_t bytes() const {
        Own own;
        return own.take(*this, nullptr) * threads_;
    }

    void run(Team& team, int rank) const {
        Own own;
        own.take(*this, base_ + own.take(*this, nullptr) * rank);
        each(team, call_.count, kTile, [&](int64_t begin, int64_t end) { tile(own, begin, end - begin); });
    }

private:
    static constexpr int64_t kTile = 8;

    struct Own {
        float *rows, *along, *lacking, *room, *values;
        SketchedPart weights, beside;

        // Allocates from `base` on; returns the number of bytes.
        int64_t take(const Sketching& all, char* base) {
            Scratch scratch(base);
            along = scratch.part<float>(kTile * all.directions_);
            rows = scratch.part<float>(kTile * all.inputs_);
            lacking = scratch.part<float>(kTile * all.directions_);
            room = scratch.part<float>(kTile * most(all.inputs_, all.directions_));
            values = scratch.part<float>(most(all.inputs_, all.directions_));
            weights.take(scratch, all.call_.sketch, kTile, all.inputs_);
            beside.take(scratch, all.call_.sketch, kTile, all.directions_);
            return scratch.used();
        }
    };

    // Sketches `count` tokens of the call from `begin` on.
    void tile(const Own& own, int64_t begin, int64_t count) const {
        const Matrix& sketch = call_.sketch;
        float squares[kTile];
        for (int64_t r = 0; r < count; ++r) {
            float* row = own.rows + r * inputs_;
            const int64_t token = call_.first + begin + r;
            if (call_.head.format == kPlain)
                read_row(call_.head, token, row);
            else
                unpack_row(call_.head, token, row);
            squares[r] = squares_of(row, 0.0f, inputs_);
            if (!std::isfinite(squares[r])) // the score of such a token is always computed
                std::memset(row, 0, static_cast<size_t>(inputs_) * sizeof(float));
        }
        own.weights.pack(own.rows, count, own.room);
        for (int64_t r = 0; r < count; ++r) {
            float *row = own.rows + r * inputs_, *lacking = own.lacking + r * directions_;
            unpack_row(own.weights.packed, r, own.values);
            call_.lengths[begin + r] =
                std::sqrt(squares[r]) + std::sqrt(squares_of(own.values, 0.0f, inputs_));
            for (int64_t j = 0; j < inputs_; j += Vec::kWidth)
                (Vec::load(row + j) - Vec::load(own.values + j)).store(row + j);
            float largest = 0;
            for (int64_t k = 0; k < directions_; ++k) {
                const float along = product_of(row, call_.directions + k * inputs_, inputs_);
                own.along[r * directions_ + k] = along;
                lacking[k] = along / call_.stretch;
                largest = std::fmax(largest, std::fabs(lacking[k]));
            }
            // Both parts of a row share one multiplier; if the second part needs another one, it is left out.
            if (row_factors(own.weights.packed)[r] != 1.0f || row_multiplier(largest) != 1.0f)
                std::memset(lacking, 0, static_cast<size_t>(directions_) * sizeof(float));
        }
        own.beside.pack(own.lacking, count, own.room);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t token = call_.first + begin + r;
            const float* error = own.rows + r * inputs_;
            unpack_row(own.beside.packed, r, own.values);
            float off = 0, beside = 0;
            for (int64_t k = 0; k < directions_; ++k) {
                const float along = own.along[r * directions_ + k];
                const float part = (along - own.values[k] * call_.stretch) / call_.along;
                off += part * part;
                beside += own.values[k] * own.values[k];
            }
            const float rest = sum_over(error, inputs_, [&, j = int64_t{0}](Vec sum, Vec v) mutable {
                const Vec part = v / Vec::load(call_.weights + j);
                j += Vec::kWidth;
                return fma(part, part, sum);
            });
            const bool is_number = std::isfinite(squares[r]);
            // The error of a sum of squares in float32 is less than this rounding up.
            call_.errors[token] =
                is_number ? std::sqrt(rest + off) * (1 + 0x1p-13f) : std::numeric_limits<float>::infinity();
            call_.lengths[begin + r] = is_number ? call_.lengths[begin + r] + std::sqrt(beside) : 0.0f;
            own.weights.put(r, sketch, token, 0);
            own.beside.put(r, sketch, token, inputs_);
            static_cast<float*>(const_cast<void*>(sketch.planes[kFactors]))[token] =
                row_factors(own.weights.packed)[r];
        }
    }

    const SketchCall& call_;
    const int64_t inputs_, directions_;
    char* base_;
    const int threads_;
};

inline int64_t sketch_bytes(const SketchCall& call, int threads) {
    return Sketching(call, nullptr, threads).bytes();
}

inline void sketch(const SketchCall& call, char* base, Team& team, int rank) {
    Sketching(call, base, team.size()).run(team, rank);
}

} // namespace
} // namespace slipstream
