// c[rows, 16 · groups] (+)= rows · packed, in float32.
//
// Batch invariance: an element of c is one chain of additions along the summed dimension, pair by pair, whatever rows
// and columns are computed with it; additions of zeros at its end change nothing.
#pragma once

#include "pair_tiles.h"
#include "rows_ahead.h"

namespace {

#if defined(MTP_AVX512)

template <int ROWS, int GROUPS>
inline void multiply_block(RowTile rows, const PairTiles& packed, std::int64_t group, float* c, std::int64_t c_stride,
                           bool accumulate, RowsAhead& ahead) {
  __m512 acc[ROWS][GROUPS];
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g)
      acc[r][g] = accumulate ? _mm512_loadu_ps(c + r * c_stride + g * BLOCK) : _mm512_setzero_ps();
  for (std::int64_t step = 0; step < packed.steps; ++step) {
    ahead.fetch(ROWS * GROUPS);
    const Pair* tile = packed.tile(step, group);
    for (int pair = 0; pair < BLOCK; ++pair) {
      __m512bh columns[GROUPS];
      for (int g = 0; g < GROUPS; ++g) columns[g] = (__m512bh)_mm512_load_si512(tile + (g * BLOCK + pair) * BLOCK);
      for (int r = 0; r < ROWS; ++r) {
        Pair value;
        __builtin_memcpy(&value, rows.data + r * rows.stride + step * STEP + 2 * pair, sizeof value);
        __m512bh row = (__m512bh)_mm512_set1_epi32(value);
        for (int g = 0; g < GROUPS; ++g) acc[r][g] = _mm512_dpbf16_ps(acc[r][g], row, columns[g]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g) _mm512_storeu_ps(c + r * c_stride + g * BLOCK, acc[r][g]);
}

#else

template <int ROWS, int GROUPS>
inline void multiply_block(RowTile rows, const PairTiles& packed, std::int64_t group, float* c, std::int64_t c_stride,
                           bool accumulate, RowsAhead& ahead) {
  static_assert(GROUPS == 1);
  constexpr int VECS = BLOCK / LANES;
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) acc[r][v] = accumulate ? load(c + r * c_stride + v * LANES) : Vec{};
  for (std::int64_t step = 0; step < packed.steps; ++step) {
    ahead.fetch(ROWS * GROUPS);
    float wide[ROWS][STEP];
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < STEP; i += LANES) store(wide[r] + i, load(rows.data + r * rows.stride + step * STEP + i));
    const Pair* tile = packed.tile(step, group);
    for (int pair = 0; pair < BLOCK; ++pair)
      for (int v = 0; v < VECS; ++v) {
        Bits columns;
        __builtin_memcpy(&columns, tile + pair * BLOCK + v * LANES, sizeof columns);
        Vec even = (Vec)(columns << 16), odd = (Vec)(columns & 0xffff0000u);
        for (int r = 0; r < ROWS; ++r) {
          acc[r][v] = acc[r][v] + wide[r][2 * pair] * even;
          acc[r][v] = acc[r][v] + wide[r][2 * pair + 1] * odd;
        }
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) store(c + r * c_stride + v * LANES, acc[r][v]);
}

#endif

template <int ROWS>
inline void multiply_rows(RowTile rows, const PairTiles& packed, float* c, std::int64_t c_stride, bool accumulate,
                          RowsAhead& ahead) {
  std::int64_t group = 0;
#if defined(MTP_AVX512)
  for (; group + 2 <= packed.groups; group += 2)
    multiply_block<ROWS, 2>(rows, packed, group, c + group * BLOCK, c_stride, accumulate, ahead);
#endif
  for (; group < packed.groups; ++group)
    multiply_block<ROWS, 1>(rows, packed, group, c + group * BLOCK, c_stride, accumulate, ahead);
}

#if defined(MTP_AVX512)
constexpr int MOST_ROWS = 8;
#else
constexpr int MOST_ROWS = 4;
#endif

// `ahead` is told of the products.
inline void multiply(const RowTile* tiles, std::int64_t count, const PairTiles& packed, float* c, std::int64_t c_stride,
                     bool accumulate, RowsAhead& ahead) {
  for (std::int64_t at = 0; at < count;) {
    RowTile rows = tiles[at / BLOCK];
    rows.data += at % BLOCK * rows.stride;
    std::int64_t left = least(count - at, BLOCK - at % BLOCK);
    float* to = c + at * c_stride;
    if (left >= MOST_ROWS) {
      multiply_rows<MOST_ROWS>(rows, packed, to, c_stride, accumulate, ahead);
      at += MOST_ROWS;
    } else if (left >= 2) {
      multiply_rows<2>(rows, packed, to, c_stride, accumulate, ahead);
      at += 2;
    } else {
      multiply_rows<1>(rows, packed, to, c_stride, accumulate, ahead);
      ++at;
    }
  }
}

struct TileRegisters {  // nothing to set up
  TileRegisters() {}
};

}  // namespace
