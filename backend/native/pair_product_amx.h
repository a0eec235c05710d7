// c[rows, 16 · groups] (+)= rows · packed by AMX tiles. All tiles are 16 rows of 64 bytes; the rows behind `count` in
// the last tile of rows are computed too and mean nothing.
#pragma once

#include "pair_tiles.h"
#include "rows_ahead.h"
#include "tile_registers.h"

namespace {

// Holds the tile registers.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    tile_config(&config);
  }
  ~TileRegisters() { tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

// Registers: ROWS × GROUPS sums, at most 4; two that the left tiles share, and two for the right ones. So ROWS or GROUPS is
// at most 2.
template <int ROWS, int GROUPS, int AT = 0>
inline void sums_begin(float* c, std::int64_t c_stride, bool accumulate) {
  if constexpr (AT < ROWS * GROUPS) {
    if (accumulate) tile_load<AT>(c + AT / GROUPS * BLOCK * c_stride + AT % GROUPS * BLOCK, c_stride * 4);
    else tile_zero<AT>();
    sums_begin<ROWS, GROUPS, AT + 1>(c, c_stride, accumulate);
  }
}
template <int ROWS, int GROUPS, int AT = 0>
inline void sums_end(float* c, std::int64_t c_stride) {
  if constexpr (AT < ROWS * GROUPS) {
    tile_store<AT>(c + AT / GROUPS * BLOCK * c_stride + AT % GROUPS * BLOCK, c_stride * 4);
    sums_end<ROWS, GROUPS, AT + 1>(c, c_stride);
  }
}
template <int ROWS, int GROUPS, int AT = 0>
inline void add_products(const RowTile* rows, const Pair* right, std::int64_t step) {
  if constexpr (AT < ROWS * GROUPS) {
    constexpr int ROW = AT / GROUPS, GROUP = AT % GROUPS, LEFT = 4 + ROW % 2, RIGHT = 6 + GROUP % 2;
    if constexpr (GROUP == 0) tile_load<LEFT>(rows[ROW].data + step * STEP, rows[ROW].stride * 2);
    if constexpr (ROW == 0) tile_load<RIGHT>(right + GROUP * BLOCK * BLOCK, 64);
    tile_dot<AT, LEFT, RIGHT>();
    add_products<ROWS, GROUPS, AT + 1>(rows, right, step);
  }
}

template <int ROWS, int GROUPS>
inline void multiply_block(const RowTile* rows, const PairTiles& packed, std::int64_t group, float* c,
                           std::int64_t c_stride, bool accumulate, RowsAhead& ahead) {
  c += group * BLOCK;
  sums_begin<ROWS, GROUPS>(c, c_stride, accumulate);
  for (std::int64_t step = 0; step < packed.steps; ++step) {
    ahead.fetch(ROWS * GROUPS * BLOCK);
    add_products<ROWS, GROUPS>(rows, packed.tile(step, group), step);
  }
  sums_end<ROWS, GROUPS>(c, c_stride);
}

// All rows by GROUPS groups of columns, whose tiles stay in the nearest cache meanwhile.
template <int GROUPS>
inline void multiply_columns(const RowTile* rows, std::int64_t tiles, const PairTiles& packed, std::int64_t group, float* c,
                             std::int64_t c_stride, bool accumulate, RowsAhead& ahead) {
  constexpr int ROWS = 4 / GROUPS;
  std::int64_t at = 0;
  for (; at + ROWS <= tiles; at += ROWS)
    multiply_block<ROWS, GROUPS>(rows + at, packed, group, c + at * BLOCK * c_stride, c_stride, accumulate, ahead);
  for (; at < tiles; ++at)
    multiply_block<1, GROUPS>(rows + at, packed, group, c + at * BLOCK * c_stride, c_stride, accumulate, ahead);
}

// `ahead` is told of the products.
inline void multiply(const RowTile* rows, std::int64_t count, const PairTiles& packed, float* c, std::int64_t c_stride,
                     bool accumulate, RowsAhead& ahead) {
  std::int64_t tiles = (count + BLOCK - 1) / BLOCK, group = 0;
  if (tiles == 1)
    for (; group + 4 <= packed.groups; group += 4)
      multiply_columns<4>(rows, tiles, packed, group, c, c_stride, accumulate, ahead);
  for (; group + 2 <= packed.groups; group += 2)
    multiply_columns<2>(rows, tiles, packed, group, c, c_stride, accumulate, ahead);
  for (; group < packed.groups; ++group)
    multiply_columns<1>(rows, tiles, packed, group, c, c_stride, accumulate, ahead);
}

}  // namespace
