// The function table of one instruction set; the last header that every isa_*.cpp includes.
#pragma once

// clang-format off: each header depends on those before it
#include "bf13.h"
#include "formats.h"
#ifdef SLIPSTREAM_BF16_DOT
#include "isa_avx512_bytes.h"
#include "isa_avx512_packed.h"
#include "isa_avx512_groups.h"
#include "isa_avx512_decode.h"
#endif
#include "dynamic_int8.h"
#include "transpose.h"
#include "lanes.h"
#ifdef SLIPSTREAM_AMX
#include "tiles.h"
#include "lanes_tiles.h"
#endif
#include "digits.h"
#include "lanes_rounded.h"
#include "words.h"
#include "few_floats.h"
#include "operand.h"
#include "operand_words.h"
#include "prepare.h"
#include "one_row.h"
#include "one_row_words.h"
#include "few_words.h"
#include "lanes_words.h"
#include "few_transposed.h"
#include "few.h"
#include "lane_codes.h"
#include "lanes_bytes.h"
#ifdef SLIPSTREAM_AMX
#include "few_tiles.h"
#include "lanes_byte_tiles.h"
#endif
#include "few_bytes.h"
#include "bytes.h"
#include "rows.h"
#include "work_share.h"
#include "transposed.h"
#include "dots.h"
#include "matmul.h"
#include "functions.h"
#include "gemm.h"
#include "gemm_grouped.h"
#include "gemm_words.h"
#ifdef SLIPSTREAM_AMX
#include "gemm_amx.h"
#endif
#include "prefetch.h"
#include "product.h"
#include "rounded_hidden.h"
#include "attention_tile.h"
#include "rounded_functions.h"
#ifdef SLIPSTREAM_AMX
#include "attention_amx.h"
#endif
#include "attention_few.h"
#include "attention_plan.h"
#include "attention_types.h"
#include "attention_room.h"
#include "attention.h"
#include "attention_team.h"
#include "attention_calls.h"
#include "project.h"
#include "feed_forward.h"
#include "routing.h"
#include "experts.h"
#include "linear.h"
#include "inputs.h"
#include "latent.h"
#include "heads.h"
#include "recurrent_work.h"
#include "selective.h"
#include "recurrence.h"
#include "streams.h"
#include "layers.h"
#include "next_panels.h"
#include "stack.h"
#include "sequences.h"
#include "text.h"
#include "pack.h"
#include "sketch.h"
#include "exponential_noise.h"
#include "argmax.h"
#include "screen.h"
#include "top_k_top_p.h"
#include "sampling.h"
#include "embeddings.h"
#include "split_streams.h"
#include "narrow.h"
#include "frame.h"
// clang-format on

namespace slipstream {
namespace {

inline int64_t norm_bytes(const NormCall& call, int threads) {
    return (call.width + 16) * static_cast<int64_t>(sizeof(float)) * threads;
}

// Norms in float32; each result is rounded once.
inline void norm(const NormCall& call, char* base, Team& team, int rank) {
    const int64_t width = call.width;
    float* row = reinterpret_cast<float*>(base) + rank * ceil_div(width, 16) * 16;
    each(team, call.rows, ceil_div(call.rows, 4 * static_cast<int64_t>(team.size())),
         [&](int64_t begin, int64_t end) {
             for (int64_t r = begin; r < end; ++r) {
                 read_row(call.x, call.dtype, r * width, row, width);
                 norm_row(row, row, width, call.norm);
                 write_row(row, call.out, call.dtype, r * width, width);
             }
         });
}

inline int64_t model_bytes(const ModelCall& call, int threads) {
    return Model(call, nullptr, threads).bytes();
}

inline void model(const ModelCall& call, char* base, Team& team, int rank) {
    Model(call, base, team.size()).run(team, rank);
}

constexpr Kernels table() {
    return {linear_bytes,
            feed_bytes,
            experts_bytes,
            draw_bytes,
            norm_bytes,
            attention_bytes,
            paged_attention_bytes,
            stack_bytes,
            text_bytes,
            pack_bytes,
            sketch_bytes,
            model_bytes,
            linear,
            feed,
            experts,
            draw,
            norm,
            attention,
            paged_attention,
            stack,
            text,
            pack,
            sketch,
            model};
}

} // namespace
} // namespace slipstream
