// The matrix product that linear layers and experts share: blocks of rows of w times blocks of packed rows of x.
//
// Batch invariance: an element of the result is summed in the same order whatever else is computed with it. Without
// AMX it has one vector of sums, filled along K in steps of PACK elements and then added up in a fixed order. With AMX
// it is one element of a tile, to which the hardware adds 32 products at a time. Elements of int8 weights become bf16,
// which holds them exactly, and are summed in that order too; the sum is multiplied by the row's scale.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr std::int64_t BLOCK_N = 32, BLOCK_M = 32;
constexpr std::int64_t GROUP = 16;  // packed rows that lie together

// Packed rows [group · GROUP, …): their number, and where they begin.
struct Packed {
  const bf16* data;
  std::int64_t m, k;  // as given to packed_size
  std::int64_t blocks() const { return (m + BLOCK_M - 1) / BLOCK_M; }
  std::int64_t rows_in(std::int64_t block) const {
    std::int64_t rest = mtp::packed_rows(m) - block * BLOCK_M;
    return rest < BLOCK_M ? rest : BLOCK_M;
  }
};

// What a product may have fetched from memory meanwhile: rows that are multiplied next, a part of them with each block of x.
struct Fetch {
  const mtp::Weight& next;  // null rows: nothing
  std::int64_t block, blocks;
};

}  // namespace

#if defined(MTP_AMX)
#include "product_amx.h"
#else
#include "product_dot.h"
#endif

namespace {

// Rows of int8 become bf16 once, where they are multiplied with several blocks of x; longer ones with each block.
class WideRows {
 public:
  // `n` ≤ BLOCK_N rows of w for products with x.
  mtp::Weight of(const mtp::Weight& w, std::int64_t n, const Packed& x) {
    if (!w.int8 || x.blocks() == 1 || x.k > LONGEST) return w;
    std::int64_t width = mtp::packed_width(x.k);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int8_t* row = static_cast<const std::int8_t*>(w.rows) + i * w.stride;
      std::int64_t at = 0;
      for (; at + PACK <= x.k; at += PACK) store_pack(rows_ + i * width + at, load_pack(row + at));
      if (at < x.k) store_pack(rows_ + i * width + at, load_pack(row + at, x.k - at));
    }
    return {rows_, width, w.scale, false};
  }

 private:
  static constexpr std::int64_t LONGEST = 8192;
  alignas(64) bf16 rows_[BLOCK_N * LONGEST];
};

// out[m][n] for `n` ≤ BLOCK_N rows of w and the packed rows of one block; out is [BLOCK_M][BLOCK_N]. `next`: the rows of a
// weight that are read after these, or null ones.
inline void product(const mtp::Weight& w, std::int64_t n, const Packed& x, std::int64_t block, const mtp::Weight& next,
                    float* out) {
  std::int64_t width = mtp::packed_width(x.k), rows = x.rows_in(block);
  const bf16* packed = x.data + block * BLOCK_M * width;
  Fetch fetch{next, block, x.blocks()};
  if (w.int8)
    unscaled(static_cast<const std::int8_t*>(w.rows), w.stride, n, packed, rows, x.k, fetch, out);
  else
    unscaled(static_cast<const bf16*>(w.rows), w.stride, n, packed, rows, x.k, fetch, out);
  if (!w.scale) return;
  for (std::int64_t i = 0; i < n; i += LANES) {
    Vec scale = load_part(w.scale + i, least(LANES, n - i));
    for (std::int64_t m = 0; m < rows; ++m) store(out + m * BLOCK_N + i, load(out + m * BLOCK_N + i) * scale);
  }
}

}  // namespace
