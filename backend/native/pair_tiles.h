// Operands of products whose right side lies along its columns: rows in tiles of 16, and columns in packed pairs.
#pragma once

#include "simd.h"

namespace {

constexpr std::int64_t STEP = 32;   // elements of the summed dimension in a tile
constexpr std::int64_t BLOCK = 16;  // rows, pairs or columns in a tile

typedef std::uint32_t Pair;  // two bfloat16 that follow each other in the summed dimension

// 16 rows of the left operand.
struct RowTile {
  const bf16* data;
  std::int64_t stride;
};

// The right operand [32 · steps, 16 · groups]: tile (step, group) holds 16 pairs of rows × 16 columns. The tiles of a step
// lie together, `stride` of them.
struct PairTiles {
  Pair* data;
  std::int64_t steps, groups, stride;
  PairTiles() : PairTiles(nullptr, 0, 0) {}
  PairTiles(Pair* data, std::int64_t steps, std::int64_t groups) : PairTiles(data, steps, groups, groups) {}
  PairTiles(Pair* data, std::int64_t steps, std::int64_t groups, std::int64_t stride)
      : data(data), steps(steps), groups(groups), stride(stride) {}
  Pair* tile(std::int64_t step, std::int64_t group) const { return data + (step * stride + group) * BLOCK * BLOCK; }
  // Groups [first, first + count), as far as there are any.
  PairTiles columns(std::int64_t first, std::int64_t count) const {
    return {tile(0, first), steps, least(count, groups - first), stride};
  }
};

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// to[j][i] = from[i][j].
inline void transpose(const Pair from[BLOCK][BLOCK], Pair* to, std::int64_t stride) {
#if defined(MTP_AMX) || defined(MTP_AVX512)
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    __m512i low = _mm512_load_si512(from[i]), high = _mm512_load_si512(from[i + 1]);
    a[i] = _mm512_unpacklo_epi32(low, high);
    a[i + 1] = _mm512_unpackhi_epi32(low, high);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * stride, _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
  }
#else
  for (int j = 0; j < BLOCK; ++j)
    for (int i = 0; i < BLOCK; ++i) to[j * stride + i] = from[i][j];
#endif
}

// Column i is the vector of `width` elements at column(i), for i < columns; what is missing is 0.
template <typename Column>
inline void pack_columns(const PairTiles& packed, std::int64_t columns, std::int64_t width, Column column) {
  for (std::int64_t group = 0; group < packed.groups; ++group) {
    std::int64_t count = least(BLOCK, columns - group * BLOCK);
    for (std::int64_t step = 0; step < packed.steps; ++step) {
      alignas(64) Pair block[BLOCK][BLOCK] = {};
      std::int64_t given = least(STEP, width - step * STEP);
      for (std::int64_t i = 0; i < count; ++i)
        __builtin_memcpy(block[i], column(group * BLOCK + i) + step * STEP, given * sizeof(bf16));
      transpose(block, packed.tile(step, group), BLOCK);
    }
  }
}

// to[i] = (low[i], high[i]) for the columns of `groups` tiles.
inline void interleave(const bf16* low, const bf16* high, Pair* to, std::int64_t groups) {
#if defined(MTP_AMX) || defined(MTP_AVX512)
  // Numbers of the elements of `low`, and from 32 on of `high`.
  const __m512i pair = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_add_epi32(pair, _mm512_set1_epi32(32)), 16));
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (; groups >= 2; groups -= 2, low += 2 * BLOCK, high += 2 * BLOCK, to += 2 * BLOCK * BLOCK) {
    __m512i even = _mm512_loadu_si512(low), odd = _mm512_loadu_si512(high);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(even, first, odd));
    _mm512_store_si512(to + BLOCK * BLOCK, _mm512_permutex2var_epi16(even, second, odd));
  }
#endif
  for (; groups; --groups, low += BLOCK, high += BLOCK, to += BLOCK * BLOCK)
    for (int i = 0; i < BLOCK; ++i) to[i] = low[i] | Pair(high[i]) << 16;
}

// Row j is the vector of `width` elements at rows[j], for j < count; what is missing is 0. `spare` is room for two
// rows. Calls fetch(j) between the rows, to have something read meanwhile.
template <typename Fetch>
inline void pack_rows(const PairTiles& packed, const bf16* const* rows, std::int64_t count, std::int64_t width,
                      bf16* spare, Fetch fetch) {
  std::int64_t padded = packed.groups * BLOCK;
  for (std::int64_t j = 0; j < packed.steps * STEP; j += 2) {
    const bf16* from[2];
    for (int k = 0; k < 2; ++k) {
      fetch(j + k);
      if (j + k < count && width == padded) {
        from[k] = rows[j + k];
        continue;
      }
      bf16* copy = spare + k * padded;
      __builtin_memset(copy, 0, padded * sizeof(bf16));
      if (j + k < count) __builtin_memcpy(copy, rows[j + k], width * sizeof(bf16));
      from[k] = copy;
    }
    interleave(from[0], from[1], packed.tile(j / STEP, 0) + j % STEP / 2 * BLOCK, packed.groups);
  }
}

}  // namespace
