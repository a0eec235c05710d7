// The kernels, compiled once for each instruction set ("level") in a namespace of its name, and the table by which the
// level is chosen at run time. Kernels take ranges of independent work items, so that any number of threads may share
// them; no result depends on how the items are shared out.
#pragma once

#include <cstdint>

#include "attention.h"

namespace mtp {

using bf16 = std::uint16_t;

// Rows of a weight, which may lie apart (stride in elements): of bf16 or int8, with a scale for each row or without.
struct Weight {
  const void* rows;
  std::int64_t stride;
  const float* scale;  // or null
  bool int8;

  std::int64_t element_size() const { return int8 ? 1 : sizeof(bf16); }
  Weight from(std::int64_t row) const {
    return {static_cast<const char*>(rows) + row * stride * element_size(), stride, scale ? scale + row : nullptr, int8};
  }
};

// y[M, N] = x[M, K] · w[N, K]ᵀ + bias[N]. Rows of x may lie apart (stride in elements).
struct Linear {
  const bf16* x;
  std::int64_t x_stride;
  Weight w;
  const bf16* bias;  // or null
  void* y;           // float if `wide`, else bf16; rows follow each other
  bool wide;
  std::int64_t m, n, k;
  bf16* packed;  // room for `packed_size(m, k)` elements
};

// Rows of x as the products take them: as they are up to 16, else filled up to a multiple of 16.
constexpr std::int64_t packed_rows(std::int64_t m) { return m <= 16 ? m : (m + 15) / 16 * 16; }
constexpr std::int64_t packed_width(std::int64_t k) { return (k + 31) / 32 * 32; }
constexpr std::int64_t packed_size(std::int64_t m, std::int64_t k) { return packed_rows(m) * packed_width(k); }

// y[M, N] = x[M, K] · w[N, K]ᵀ with w in float32.
struct WideLinear {
  const bf16* x;
  std::int64_t x_stride;
  const float* w;
  float* y;
  std::int64_t m, n, k;
};

// y[t, head] = w[head] · x[t, head] for each head. w is [heads, n, k]: its elements lie next to each other along k
// (`head_along`) or along n (`head_pairs`, which takes both).
struct HeadLinear {
  static constexpr std::int64_t MOST_K = 1 << 11;
  const bf16* x;
  std::int64_t token_stride, head_stride;
  const bf16* w;
  std::int64_t w_head_stride, n_stride, k_stride;
  bf16* y;
  std::int64_t tokens, heads, n, k;
  bf16* packed;  // of `head_along`: room for `packed_size(tokens, k)` elements of each head
};

// Rows [tokens, heads, width] that may lie apart.
struct Rows {
  const bf16* data;
  std::int64_t token_stride, head_stride, tokens, heads, width;
};

// y = x / sqrt(mean(x²) + eps) · weight over `width`; of x + residual if there is one, which is kept in `sum`.
struct RmsNorm {
  Rows x;
  const bf16* residual;  // [tokens · heads, width] or null
  bf16* sum;
  const bf16* weight;
  float eps;
  bf16* y;
};

// Rotates the first 2 · `half` elements of each row.
struct Rotary {
  Rows x;
  const float *cos, *sin;  // [tokens, half]
  std::int64_t half;
  bool interleaved;
  bf16* y;
};

struct WriteCache {
  Rows values;
  const std::int64_t* slots;
  bf16* cache;  // [slots, heads · width]
};

// Rows of latent and rope parts: the first is normalised, the second rotated, and both go into the cache.
struct LatentCache {
  const bf16* x;
  std::int64_t x_stride, tokens, latent_width, half;
  const bf16* weight;
  float eps;
  const float *cos, *sin;
  bool interleaved;
  const std::int64_t* slots;
  bf16 *latent, *rope;
};

// y = x + other for rows of `width`.
struct Add {
  const bf16 *x, *other;
  std::int64_t width;
  bf16* y;
};

// silu(gate) · up of rows [gate, up].
struct Swiglu {
  const bf16* x;
  std::int64_t x_stride, rows, width;
  bf16* y;
};

struct Routing {
  const float *logits, *bias;
  std::int64_t tokens, experts, top_k, groups, top_groups;
  bool normalize;
  float scaling;
  float* scratch;  // [tokens, 3 · experts]
  std::int64_t* ids;
  float* weights;
};

// The pairs (token, expert) sorted by expert: pairs [starts[e], starts[e + 1]) are those of expert e, and pair p is
// number `order[p]` of ids [tokens, top_k]; place[order[p]] = p. The packed rows of an expert begin with row rows[e].
struct Experts {
  const bf16* x;
  std::int64_t x_stride;
  Weight gate_up, down;  // [experts · 2 · width, hidden], [experts · hidden, width]
  const float* weights;  // [tokens, top_k]
  std::int64_t tokens, top_k, hidden, width, num_active;
  const std::int64_t *active, *starts, *rows, *order, *place;
  bf16 *packed, *inner, *packed_inner;  // rows of hidden, [pairs, width], rows of width
  float* results;                       // [pairs, hidden]
  bf16* y;
};

// Each row of logits is searched in parts.
struct MostLikely {
  const void* logits;  // [rows, vocab], float if `wide`, else bf16
  bool wide;
  std::int64_t rows, vocab, parts;
  float* values;         // [rows, parts], the greatest of each part
  std::int64_t* tokens;  // [rows, parts], where it is
  std::int64_t* result;  // [rows]
};

// Work items: `…_items`, or what the comment says.
#define MTP_ALL_KERNELS(use, level)                                                                     \
  use(level, pack_items, std::int64_t, (std::int64_t m))                                                \
  use(level, linear_pack, void, (const Linear&, std::int64_t begin, std::int64_t end)) /* pack_items */ \
  use(level, linear_items, std::int64_t, (const Linear&))                                               \
  use(level, linear, void, (const Linear&, std::int64_t begin, std::int64_t end))                       \
  use(level, wide_linear_items, std::int64_t, (const WideLinear&))                                      \
  use(level, wide_linear, void, (const WideLinear&, std::int64_t begin, std::int64_t end))              \
  use(level, head_along_pack, void, (const HeadLinear&, std::int64_t begin, std::int64_t end)) /* heads */ \
  use(level, head_along_items, std::int64_t, (const HeadLinear&))                                       \
  use(level, head_along, void, (const HeadLinear&, std::int64_t begin, std::int64_t end))               \
  use(level, head_takes_pairs, bool, (const HeadLinear&)) /* whether `head_pairs` is the one to call */ \
  use(level, head_pairs_items, std::int64_t, (const HeadLinear&))                                       \
  use(level, head_pairs, void, (const HeadLinear&, std::int64_t begin, std::int64_t end))               \
  use(level, rms_norm, void, (const RmsNorm&, std::int64_t begin, std::int64_t end))         /* rows */ \
  use(level, rotary, void, (const Rotary&, std::int64_t begin, std::int64_t end))          /* tokens */ \
  use(level, write_cache, void, (const WriteCache&, std::int64_t begin, std::int64_t end)) /* tokens */ \
  use(level, write_latent, void, (const LatentCache&, std::int64_t begin, std::int64_t end)) /* tokens */ \
  use(level, add_rows, void, (const Add&, std::int64_t begin, std::int64_t end))             /* rows */ \
  use(level, swiglu_rows, void, (const Swiglu&, std::int64_t begin, std::int64_t end))       /* rows */ \
  use(level, route, void, (const Routing&, std::int64_t begin, std::int64_t end))          /* tokens */ \
  use(level, experts_pack, void, (const Experts&, std::int64_t begin, std::int64_t end))   /* active */ \
  use(level, experts_up_items, std::int64_t, (const Experts&))                                          \
  use(level, experts_up, void, (const Experts&, std::int64_t begin, std::int64_t end))                  \
  use(level, experts_pack_inner, void, (const Experts&, std::int64_t begin, std::int64_t end)) /* active */ \
  use(level, experts_down_items, std::int64_t, (const Experts&))                                        \
  use(level, experts_down, void, (const Experts&, std::int64_t begin, std::int64_t end))                \
  use(level, experts_sum, void, (const Experts&, std::int64_t begin, std::int64_t end))    /* tokens */ \
  use(level, most_likely, void, (const MostLikely&, std::int64_t begin, std::int64_t end))  /* parts */ \
  use(level, most_likely_of_parts, void, (const MostLikely&, std::int64_t begin, std::int64_t end)) /* rows */ \
  use(level, attention_memory, std::int64_t, (const Attention&)) /* bytes that `attend` needs at a multiple of 64 */ \
  /* `next`: whose first keys are to be fetched, or null; `fetched`: this item was that of the call before. */ \
  use(level, attend, void, (const Attention&, const AttentionItem&, bool fetched, const AttentionItem* next, \
                            float* partials, void* memory))                                                  \
  use(level, fold_partials, void, (const Attention&, const AttentionItem&, std::int64_t query, float* partials))

#define MTP_DECLARE(level, kernel, result, parameters) result kernel parameters;
#define MTP_DECLARE_KERNELS(level)       \
  namespace level {                      \
  MTP_ALL_KERNELS(MTP_DECLARE, level)    \
  }
MTP_DECLARE_KERNELS(amx)
MTP_DECLARE_KERNELS(avx512)
MTP_DECLARE_KERNELS(avx2)
MTP_DECLARE_KERNELS(portable)

struct Kernels {
  const char* level;
#define MTP_POINTER(level, kernel, result, parameters) decltype(&level::kernel) kernel;
  MTP_ALL_KERNELS(MTP_POINTER, portable)
#undef MTP_POINTER
};

// Those of the level in use.
const Kernels& kernels();

}  // namespace mtp
