// Products by AMX tiles. Rows of w are loaded as they lie, 16 rows by 32 elements; packed rows of x are the other
// operand: for each 32 elements of K, 16 rows of pairs (x[i][2p], x[i][2p + 1]) for the rows i of a group.
#pragma once

#include "tile_registers.h"

namespace {

constexpr std::int64_t STEP = 32;  // elements of K in a tile

// Rows of 16 floats become columns.
inline void transpose(Vec rows[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
}

// Lays out the rows of one group, row i from `row(i)` (null: zeros).
template <typename Row>
inline void pack_group(bf16* packed, std::int64_t m, std::int64_t k, std::int64_t group, Row row) {
  std::int64_t width = mtp::packed_width(k), first = group * GROUP;
  std::int64_t columns = least(GROUP, mtp::packed_rows(m) - first);
  packed += first * width;
  const bf16* rows[GROUP];
  for (std::int64_t i = 0; i < columns; ++i) rows[i] = first + i < m ? row(first + i) : nullptr;
  for (std::int64_t at = 0; at < width; at += STEP, packed += STEP * columns) {
    Vec block[16] = {};
    std::int64_t count = least(STEP, k - at);
    for (std::int64_t i = 0; i < columns; ++i)
      if (rows[i]) block[i] = (Vec)load_pack(rows[i] + at, count);
    if (columns == 1) {
      __builtin_memcpy(packed, block, sizeof(Vec));
      continue;
    }
    transpose(block);
    for (std::int64_t pair = 0; pair < 16; ++pair)
      _mm512_mask_storeu_epi32(packed + pair * 2 * columns, __mmask16((1u << columns) - 1), (__m512i)block[pair]);
  }
}

// Holds the tile registers: 0 … 3 results, 4 and 5 rows of w, 6 and 7 packed rows of x.
class ProductSession {
 public:
  ProductSession() = default;
  ProductSession(const ProductSession&) = delete;
  ~ProductSession() {
    if (columns_) tile_release();
  }

  // Before products with x. Shaping the registers takes as long as reading some of w: not again for the same shape.
  void prepare(const Packed& x) {
    std::int64_t columns = least(GROUP, mtp::packed_rows(x.m));
    if (columns == columns_) return;
    columns_ = columns;
    struct alignas(64) {
      std::uint8_t palette, start, reserved[14];
      std::uint16_t bytes[16];
      std::uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      bool weights = tile == 4 || tile == 5;
      config.bytes[tile] = std::uint16_t(weights ? 64 : 4 * columns);
      config.rows[tile] = 16;
    }
    tile_config(&config);
  }

 private:
  std::int64_t columns_ = 0;
};

// A copy of rows of w in bf16, where they are int8, or do not fill tiles: those of both tiles, and elements of K, are
// filled up with zeros.
struct WeightTile {
  alignas(64) bf16 rows[2 * 16 * STEP];
  template <typename T>
  void fill(const T* w, std::int64_t w_stride, std::int64_t n, std::int64_t count) {
    if (n < 32) __builtin_memset(rows + n * STEP, 0, (32 - n) * STEP * sizeof(bf16));
    if (count == STEP)
      for (std::int64_t i = 0; i < n; ++i) store_pack(rows + i * STEP, load_pack(w + i * w_stride));
    else
      for (std::int64_t i = 0; i < n; ++i) store_pack(rows + i * STEP, load_pack(w + i * w_stride, count));
  }
};

// Fetches into the second cache what a product is to fetch of the next n rows of w: some cache lines in each step, in the
// order in which they lie. Tiles read 32 rows side by side, and of those the machine does not see what comes next.
class NextRows {
 public:
  NextRows(const Fetch& fetch, std::int64_t n, std::int64_t k) {
    const mtp::Weight& rows = fetch.next;
    std::int64_t bytes = rows.rows && rows.stride == k ? n * k * rows.element_size() : 0;
    std::int64_t steps = (k + STEP - 1) / STEP;
    lines_ = (bytes + 64 * steps * fetch.blocks - 1) / (64 * steps * fetch.blocks);
    at_ = static_cast<const char*>(rows.rows) + fetch.block * steps * lines_ * 64;
    end_ = static_cast<const char*>(rows.rows) + bytes;
  }
  void step() {
    for (std::int64_t i = 0; i < lines_ && at_ < end_; ++i, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char *at_, *end_;
  std::int64_t lines_;  // of a step
};

template <bool TWO_N, bool TWO_M>
inline void product_step(const bf16* w, std::int64_t w_stride, const bf16* x, std::int64_t group, std::int64_t columns) {
  tile_load<6>(x, 4 * columns);
  if (TWO_M) tile_load<7>(x + group, 64);
  tile_load<4>(w, w_stride * 2);
  tile_dot<0, 4, 6>();
  if (TWO_M) tile_dot<1, 4, 7>();
  if (TWO_N) {
    tile_load<5>(w + 16 * w_stride, w_stride * 2);
    tile_dot<2, 5, 6>();
    if (TWO_M) tile_dot<3, 5, 7>();
  }
}

// `columns` rows of x in the first group; the second, `group` elements behind it, has 16.
template <bool TWO_N, bool TWO_M, typename T>
inline void product_tiles(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* x, std::int64_t group,
                          std::int64_t columns, std::int64_t k, NextRows next_rows, float* out) {
  constexpr int N = TWO_N ? 32 : 16;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  std::int64_t at = 0;
  if constexpr (sizeof(T) == sizeof(bf16))
    for (; n == N && at + STEP <= k; at += STEP) {
      next_rows.step();
      product_step<TWO_N, TWO_M>(w + at, w_stride, x + at * columns, group, columns);
    }
  // What was just stored takes a while until tiles can be loaded from it: filled one step ahead.
  WeightTile copies[2];
  if (at < k) copies[0].fill(w + at, w_stride, n, least(STEP, k - at));
  for (int turn = 0; at < k; at += STEP, turn ^= 1) {
    std::int64_t next = at + STEP;
    if (next < k) copies[turn ^ 1].fill(w + next, w_stride, n, least(STEP, k - next));
    next_rows.step();
    product_step<TWO_N, TWO_M>(copies[turn].rows, STEP, x + at * columns, group, columns);
  }
  alignas(64) float tiles[4][16][16];
  if (columns == 1) {
    tile_store<0>(tiles[0], 4);
    if (TWO_N) tile_store<2>(tiles[0][1], 4);
    __builtin_memcpy(out, tiles[0], N * sizeof(float));
    return;
  }
  tile_store<0>(tiles[0], 64);
  if (TWO_M) tile_store<1>(tiles[1], 64);
  if (TWO_N) tile_store<2>(tiles[2], 64);
  if (TWO_N && TWO_M) tile_store<3>(tiles[3], 64);
  for (int tile = 0; tile < 4; ++tile) {
    if ((tile >= 2 && !TWO_N) || (tile % 2 && !TWO_M)) continue;
    Vec block[16];
    for (int i = 0; i < 16; ++i) block[i] = load(tiles[tile][i]);
    transpose(block);
    for (std::int64_t i = 0; i < columns; ++i) store(out + (tile % 2 * 16 + i) * BLOCK_N + tile / 2 * 16, block[i]);
  }
}

// out[m][n] for `n` ≤ BLOCK_N rows of w, without scales, and `rows` ≤ BLOCK_M packed rows.
template <typename T>
inline void unscaled(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* packed, std::int64_t rows,
                     std::int64_t k, const Fetch& fetch, float* out) {
  std::int64_t columns = least(GROUP, rows), group = GROUP * mtp::packed_width(k);
  NextRows next(fetch, n, k);
  if (n > 16 && rows > 16) product_tiles<true, true>(w, w_stride, n, packed, group, columns, k, next, out);
  else if (n > 16) product_tiles<true, false>(w, w_stride, n, packed, group, columns, k, next, out);
  else if (rows > 16) product_tiles<false, true>(w, w_stride, n, packed, group, columns, k, next, out);
  else product_tiles<false, false>(w, w_stride, n, packed, group, columns, k, next, out);
}

}  // namespace
