// What makes several streams of a token's embedding, and one state of those of the last block.
//
// Source: Gemma 3n, as transformers computes it.
#pragma once

namespace slipstream {
namespace {

// A row's mean square.
inline float mean_square(const float* x, int64_t n) {
    return squares_of(x, 0.0f, n) / static_cast<float>(n);
}

// x = x times such a factor that its root mean square is `size`.
inline void scale_to(float* x, int64_t n, float size) {
    constexpr float kLeast = 1e-5f;
    multiply_row(x, n, size / std::sqrt(std::fmax(mean_square(x, n), kLeast)));
}

class SplitStreams {
public:
    void take(Scratch& scratch, const Frame& frame, int64_t tokens, int64_t rows, int threads) {
        others_ = frame.others, tokens_ = tokens, rows_ = rows;
        if (!any())
            return;
        hidden_ = frame.embed.inputs;
        const int64_t most_rows = most(tokens, rows);
        bool rounds = false;
        for (int64_t i = 0; i < others_; ++i)
            rounds = rounds || rounds_rows(frame.split[i], tokens) || rounds_rows(frame.join[i], rows);
        projected_ = scratch.part<float>(others_ * most_rows * hidden_);
        gathered_ = scratch.part<float>(others_ * rows * hidden_);
        rounded_ = scratch.part<Bf16>(rounds ? most(tokens, others_ * rows) * hidden_ : 0);
        const int64_t few = most(tokens < kManyRows ? tokens : 0, rows < kManyRows ? rows : 0);
        products_.take(scratch, {most_rows, hidden_, few, hidden_, 0}, threads);
    }

    bool any() const { return others_ > 0; }
    int64_t count() const { return others_ + 1; }

    // Projects all embeddings `(T, C)`.
    void split(const Frame& frame, const float* embedded, Team& team, int rank) const {
        bool rounds = false;
        for (int64_t i = 0; i < others_; ++i)
            rounds = rounds || rounds_rows(frame.split[i], tokens_);
        if (rounds)
            each_one(team, tokens_,
                     [&](int64_t t) { copy_row(embedded + t * hidden_, rounded_ + t * hidden_, hidden_); });
        for (int64_t i = 0; i < others_; ++i)
            project(products_,
                    {embedded, rounds_rows(frame.split[i], tokens_) ? rounded_ : nullptr, hidden_, tokens_},
                    frame.split[i], projected_ + i * tokens_ * hidden_, team, rank);
    }

    // Writes the streams of token t, `(S, C)`.
    void enter(int64_t t, const float* embedded, float* streams) const {
        std::memcpy(streams, embedded, static_cast<size_t>(hidden_) * sizeof(float));
        const float size = std::sqrt(mean_square(embedded, hidden_));
        for (int64_t i = 0; i < others_; ++i) {
            float* to = streams + (i + 1) * hidden_;
            std::memcpy(to, projected_ + (i * tokens_ + t) * hidden_,
                        static_cast<size_t>(hidden_) * sizeof(float));
            scale_to(to, hidden_, size);
        }
    }

    // Projects the streams of some rows back; `streams(r)` returns those of row r, `(S, C)`.
    template <class F>
    void join(const Frame& frame, F streams, Team& team, int rank) const {
        each_one(team, rows_, [&](int64_t r) {
            for (int64_t i = 0; i < others_; ++i) {
                const int64_t at = (i * rows_ + r) * hidden_;
                const float* from = streams(r) + (i + 1) * hidden_;
                std::memcpy(gathered_ + at, from, static_cast<size_t>(hidden_) * sizeof(float));
                if (rounds_rows(frame.join[i], rows_))
                    copy_row(from, rounded_ + at, hidden_);
            }
        });
        for (int64_t i = 0; i < others_; ++i) {
            const int64_t at = i * rows_ * hidden_;
            project(
                products_,
                {gathered_ + at, rounds_rows(frame.join[i], rows_) ? rounded_ + at : nullptr, hidden_, rows_},
                frame.join[i], projected_ + at, team, rank);
        }
    }

    // Writes the state of row r, `(C,)`, once the streams are projected back.
    void leave(int64_t r, const float* streams, float* row) const {
        std::memcpy(row, streams, static_cast<size_t>(hidden_) * sizeof(float));
        const float size = std::sqrt(mean_square(streams, hidden_));
        for (int64_t i = 0; i < others_; ++i) {
            float* other = projected_ + (i * rows_ + r) * hidden_;
            scale_to(other, hidden_, size);
            add_row(row, row, other, hidden_, 1.0f, Scale{});
        }
        multiply_row(row, hidden_, 1.0f / static_cast<float>(count()));
    }

private:
    int64_t others_ = 0, hidden_ = 0, tokens_ = 0, rows_ = 0;
    ProductRoom products_;
    float *projected_ = nullptr, *gathered_ = nullptr;
    Bf16* rounded_ = nullptr;
};

} // namespace
} // namespace slipstream
