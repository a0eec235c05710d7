// The matrix product that linear layers and experts share: blocks of rows of w times blocks of packed rows of x.
//
// Batch invariance: an element of the result is summed in the same order whatever else is computed with it. Without
// AMX it has one vector of sums, filled along K in steps of PACK elements and then added up in a fixed order. With AMX
// it is one element of a tile, to which the hardware adds 32 products at a time.
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

}  // namespace

#if defined(MTP_AMX)
#include "product_amx.h"
#else
#include "product_dot.h"
#endif
