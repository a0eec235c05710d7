// Weighted sums of values by AMX tiles. The right operand is the values as they lie: 16 positions by 32 columns, whose
// pairs are two columns, not two positions. So a weight stands in two left tiles, in one before a 0 and in the other behind one:
// one's products are the sums of the even columns, the other's those of the odd ones. That is twice the products, and far
// less than it takes to pack the values first.
#pragma once

#include "pair_product_amx.h"

namespace {

// The weights of an item's queries for one tile of positions: left tiles [queries / 16][positions / 16][even, odd].
struct Weights {
  Pair* data;
  static std::int64_t elements(std::int64_t queries, std::int64_t positions) { return 2 * queries * positions; }
  Pair* tile(std::int64_t query, std::int64_t position) const {
    return data + 2 * (query * mtp::ATTENTION_TILE + position * BLOCK);
  }

  // Of 16 queries and 32 positions from `position` on: floats [positions][queries], of which the upper halves are taken.
  void put(std::int64_t query, std::int64_t position, const Pair rounded[STEP][BLOCK]) {
    for (std::int64_t half = 0; half < STEP; half += BLOCK) {
      alignas(64) Pair rows[BLOCK][BLOCK];
      transpose(rounded + half, rows[0], BLOCK);
      Pair* to = tile(query, position + half);
      for (int i = 0; i < BLOCK; ++i) {
        __m512i row = _mm512_load_si512(rows[i]);
        _mm512_store_si512(to + i * BLOCK, _mm512_srli_epi32(row, 16));
        _mm512_store_si512(to + (BLOCK + i) * BLOCK, _mm512_and_si512(row, _mm512_set1_epi32(0xffff0000)));
      }
    }
  }
};

class ValueProduct {
 public:
  template <typename Take>
  void take_memory(std::int64_t, Take) {}

  // result[query][width] = Σ weight · value over `count` positions. The values are tiles of 16 positions; the width is a
  // multiple of 32.
  void multiply(const Weights& weights, std::int64_t queries, const RowTile* values, std::int64_t count,
                std::int64_t width, float* result, std::int64_t stride, RowsAhead& ahead) const {
    std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
    for (std::int64_t query = 0; query < queries; query += BLOCK, result += BLOCK * stride) {
      const Pair* left = weights.tile(query, 0);
      std::int64_t column = 0;
      for (; column + 2 * STEP <= width; column += 2 * STEP)
        add<2>(left, values, blocks, column, result, stride, ahead);
      if (column < width) add<1>(left, values, blocks, column, result, stride, ahead);
    }
  }

 private:
  // Registers: even and odd columns of each tile, then the weights' two and tiles of values.
  template <int TILES>
  static void add(const Pair* left, const RowTile* values, std::int64_t blocks, std::int64_t column, float* result,
                  std::int64_t stride, RowsAhead& ahead) {
    sums_begin<1, 2 * TILES>(result + column, stride, false);
    for (std::int64_t block = 0; block < blocks; ++block, left += 2 * BLOCK * BLOCK) {
      ahead.fetch(TILES * BLOCK);
      const bf16* right = values[block].data + column;
      tile_load<6>(right, values[block].stride * 2);
      tile_load<4>(left, 64);
      tile_dot<0, 4, 6>();
      tile_load<5>(left + BLOCK * BLOCK, 64);
      tile_dot<1, 5, 6>();
      if constexpr (TILES == 2) {
        tile_load<7>(right + STEP, values[block].stride * 2);
        tile_dot<2, 4, 7>();
        tile_dot<3, 5, 7>();
      }
    }
    sums_end<1, 2 * TILES>(result + column, stride);
  }
};

// Puts 32 columns of a result in order: the even ones come before the odd ones.
inline void in_order(float* columns) {
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 even = _mm512_loadu_ps(columns), odd = _mm512_loadu_ps(columns + BLOCK);
  _mm512_storeu_ps(columns, _mm512_permutex2var_ps(even, first, odd));
  _mm512_storeu_ps(columns + BLOCK, _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd));
}

}  // namespace
