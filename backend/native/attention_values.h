// Weighted sums of values: the values are packed as pairs of positions, a piece at a time.
#pragma once

#include "pair_product.h"

namespace {

// The weights of an item's queries for one tile of positions: rows [queries][positions], in bfloat16.
struct Weights {
  bf16* data;
  static std::int64_t elements(std::int64_t queries, std::int64_t positions) { return queries * positions; }

  // Of 16 queries and 32 positions from `position` on: floats [positions][queries], of which the upper halves are taken.
  void put(std::int64_t query, std::int64_t position, const Pair rounded[STEP][BLOCK]) {
    alignas(64) Pair pairs[BLOCK][BLOCK], rows[BLOCK][BLOCK];
    for (int pair = 0; pair < BLOCK; ++pair)
      for (int i = 0; i < BLOCK; ++i)
        pairs[pair][i] = rounded[2 * pair][i] >> 16 | (rounded[2 * pair + 1][i] & 0xffff0000u);
    transpose(pairs, rows[0], BLOCK);
    for (int i = 0; i < BLOCK; ++i)
      __builtin_memcpy(data + (query + i) * mtp::ATTENTION_TILE + position, rows[i], sizeof rows[i]);
  }
};

class ValueProduct {
 public:
  static constexpr std::int64_t PIECE = 128;  // positions that are packed at a time

  template <typename Take>
  void take_memory(std::int64_t width, Take take) {
    take(packed_, PIECE / 2 * width);
    take(nothing_, width);
  }

  // result[query][width] = Σ weight · value over `count` positions. The values are tiles of 16 positions; the width is a
  // multiple of 32.
  void multiply(const Weights& weights, std::int64_t queries, const RowTile* values, std::int64_t count,
                std::int64_t width, float* result, std::int64_t stride, RowsAhead& ahead) const {
    __builtin_memset(nothing_, 0, width * sizeof(bf16));
    for (std::int64_t first = 0; first < count; first += PIECE) {
      std::int64_t given = least(PIECE, count - first);
      PairTiles packed{packed_, round_up(given, STEP) / STEP, width / BLOCK};
      auto row = [&](std::int64_t j) {
        const RowTile& tile = values[(first + j) / BLOCK];
        return j < given ? tile.data + j % BLOCK * tile.stride : nothing_;
      };
      for (std::int64_t j = 0; j < packed.steps * STEP; j += 2) {
        interleave(row(j), row(j + 1), packed.tile(j / STEP, 0) + j % STEP / 2 * BLOCK, packed.groups);
      }
      RowTile rows[mtp::ATTENTION_QUERIES / BLOCK];
      for (std::int64_t i = 0; i < queries; i += BLOCK)
        rows[i / BLOCK] = {weights.data + i * mtp::ATTENTION_TILE + first, mtp::ATTENTION_TILE};
      ::multiply(rows, queries, packed, result, stride, first > 0, ahead);
    }
  }

 private:
  Pair* packed_;
  bf16* nothing_;
};

// The columns of a result are in order.
inline void in_order(float*) {}

}  // namespace
