// The kernels, compiled once for each instruction set ("level") in a namespace of its name, and the table by which the
// level is chosen at run time. Kernels take ranges of independent work items, so that any number of threads may share
// them; no result depends on how the items are shared out.
#pragma once

#include <cstdint>

#include "attention.h"

namespace mtp {

using bf16 = std::uint16_t;

// y[M, N] = x[M, K] · w[N, K]ᵀ + bias[N]. Rows of x and w may lie apart (strides in elements).
struct Linear {
  const bf16* x;
  std::int64_t x_stride;
  const bf16* w;
  std::int64_t w_stride;
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

#define MTP_DECLARE_KERNELS(level)                                                                        \
  namespace level {                                                                                       \
  std::int64_t pack_items(std::int64_t m);                                                                \
  void linear_pack(const Linear&, std::int64_t begin, std::int64_t end);   /* items: pack_items(m) */     \
  std::int64_t linear_items(const Linear&);                                                               \
  void linear(const Linear&, std::int64_t begin, std::int64_t end);        /* items: linear_items */      \
  std::int64_t attention_memory(const Attention&);  /* bytes that `attend` needs, on a multiple of 64 */  \
  void attend(const Attention&, const AttentionItem&, float* partials, void* memory);                     \
  void fold_partials(const Attention&, const AttentionItem&, std::int64_t query, float* partials);        \
  }

#define MTP_ALL_KERNELS(use, level) \
  use(level, pack_items) use(level, linear_pack) use(level, linear_items) use(level, linear) \
  use(level, attention_memory) use(level, attend) use(level, fold_partials)

MTP_DECLARE_KERNELS(amx)
MTP_DECLARE_KERNELS(avx512)
MTP_DECLARE_KERNELS(avx2)
MTP_DECLARE_KERNELS(portable)

struct Kernels {
  const char* level;
#define MTP_POINTER(level, kernel) decltype(&level::kernel) kernel;
  MTP_ALL_KERNELS(MTP_POINTER, portable)
#undef MTP_POINTER
};

// Those of the level in use.
const Kernels& kernels();

}  // namespace mtp
