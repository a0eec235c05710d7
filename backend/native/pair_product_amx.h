// c[rows, 16 · groups] (+)= rows · packed by AMX tiles. All tiles are 16 rows of 64 bytes; the rows behind `count` in
// the last tile of rows are computed too and mean nothing.
#pragma once

#include "pair_tiles.h"

namespace {

// Tile registers by number, so that templates can name them.
template <int TILE>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void tile_load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int SUM, int LEFT, int RIGHT>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

// Holds the tile registers.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

// Registers: ROWS × GROUPS sums, at most 4; then the right tiles, then two that the left ones share.
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
template <int FIRST, int GROUPS, int AT = 0>
inline void load_right(const Pair* tiles) {
  if constexpr (AT < GROUPS) {
    tile_load<FIRST + AT>(tiles + AT * BLOCK * BLOCK, 64);
    load_right<FIRST, GROUPS, AT + 1>(tiles);
  }
}
template <int ROWS, int GROUPS, int AT = 0>
inline void add_products(const RowTile* rows, std::int64_t step) {
  if constexpr (AT < ROWS * GROUPS) {
    constexpr int RIGHT = ROWS * GROUPS, LEFT = RIGHT + GROUPS + AT / GROUPS % 2;
    const RowTile& left = rows[AT / GROUPS];
    if constexpr (AT % GROUPS == 0) tile_load<LEFT>(left.data + step * STEP, left.stride * 2);
    tile_dot<AT, LEFT, RIGHT + AT % GROUPS>();
    add_products<ROWS, GROUPS, AT + 1>(rows, step);
  }
}

template <int ROWS, int GROUPS>
inline void multiply_block(const RowTile* rows, const PairTiles& packed, std::int64_t group, float* c,
                           std::int64_t c_stride, bool accumulate) {
  c += group * BLOCK;
  sums_begin<ROWS, GROUPS>(c, c_stride, accumulate);
  for (std::int64_t step = 0; step < packed.steps; ++step) {
    load_right<ROWS * GROUPS, GROUPS>(packed.tile(step, group));
    add_products<ROWS, GROUPS>(rows, step);
  }
  sums_end<ROWS, GROUPS>(c, c_stride);
}

template <int ROWS, int GROUPS>
inline void multiply_rows(const RowTile* rows, const PairTiles& packed, float* c, std::int64_t c_stride, bool accumulate) {
  std::int64_t group = 0;
  for (; group + GROUPS <= packed.groups; group += GROUPS)
    multiply_block<ROWS, GROUPS>(rows, packed, group, c, c_stride, accumulate);
  for (; group < packed.groups; ++group) multiply_block<ROWS, 1>(rows, packed, group, c, c_stride, accumulate);
}

inline void multiply(const RowTile* rows, std::int64_t count, const PairTiles& packed, float* c, std::int64_t c_stride,
                     bool accumulate) {
  std::int64_t tiles = (count + BLOCK - 1) / BLOCK, at = 0;
  if (packed.groups == 1)
    for (; at + 4 <= tiles; at += 4)
      multiply_rows<4, 1>(rows + at, packed, c + at * BLOCK * c_stride, c_stride, accumulate);
  for (; at + 2 <= tiles; at += 2)
    multiply_rows<2, 2>(rows + at, packed, c + at * BLOCK * c_stride, c_stride, accumulate);
  for (; at < tiles; ++at)
    multiply_rows<1, 2>(rows + at, packed, c + at * BLOCK * c_stride, c_stride, accumulate);
}

}  // namespace
