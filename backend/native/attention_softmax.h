// Softmax over one tile of positions, and how tiles are combined.
#pragma once

#include "pair_tiles.h"

namespace {

constexpr float LOWEST = -__builtin_inff();

// 2^x for x ≤ 0 (relative error 3e-6; exact at 0); 0 below −126 and for NaN.
inline Vec exp2_below_0(Vec x) {
  constexpr float ROUNDING = 12582912.0f;  // 1.5 · 2^23: the low bits of a sum with it are the nearest integer
  Vec shifted = x + ROUNDING;
  Vec rest = x - (shifted - ROUNDING);
  Vec power = splat(9.58285e-3f);
  power = power * rest + 5.590642e-2f;
  power = power * rest + 2.4024099e-1f;
  power = power * rest + 6.9312419e-1f;
  power = power * rest + 1.0f;
  Bits scaled = (Bits)power + ((Bits)shifted << 23);
  return (Vec)(scaled & (Bits)(x >= -126.0f));
}

inline Vec greater(Vec a, Vec b) {
#if defined(MTP_AMX) || defined(MTP_AVX512)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// A column of vectors: the scores of LANES queries at the positions of a tile.
struct ScoreColumn {
  float* data;
  std::int64_t stride;
  float* at(std::int64_t position) const { return data + position * stride; }

  // Scores that a query does not see, from its limit on, become −∞.
  void hide(const std::int32_t* limits, std::int64_t begin, std::int64_t end) const {
    Ints limit;
    __builtin_memcpy(&limit, limits, sizeof limit);
    for (std::int64_t j = begin; j < end; ++j)
      store(at(j), limit > (std::int32_t)j ? load(at(j)) : splat(LOWEST));
  }

  Vec greatest(std::int64_t positions) const {  // a multiple of 4
    Vec most[4] = {splat(LOWEST), splat(LOWEST), splat(LOWEST), splat(LOWEST)};
    for (std::int64_t j = 0; j < positions; j += 4)
      for (int k = 0; k < 4; ++k) most[k] = greater(most[k], load(at(j + k)));
    return greater(greater(most[0], most[1]), greater(most[2], most[3]));
  }
};

// From scores [positions][stride], with 16 · groups queries as columns: weights 2^((score − greatest) · scale) in bfloat16
// (to the nearest, halves up); and for each query `greatest` and the sum of its weights before they are rounded. Query i
// sees the first limits[i] positions. The others weigh 0, as do those behind the last up to a multiple of 32.
inline void softmax_tile(float* scores, std::int64_t stride, std::int64_t positions, std::int64_t groups,
                         const std::int32_t* limits, float scale, Weights& weights, float* greatest,
                         float* sums) {
  constexpr int VECS = BLOCK / LANES;
  std::int64_t padded = round_up(positions, STEP);
  for (std::int64_t first = 0; first < groups * BLOCK; first += BLOCK) {
    std::int64_t seen_by_all = positions;
    for (int i = 0; i < BLOCK; ++i) seen_by_all = least(seen_by_all, limits[first + i] > 0 ? limits[first + i] : 0);
    Vec most[VECS], sum[VECS];
    for (int v = 0; v < VECS; ++v) {
      ScoreColumn column{scores + first + v * LANES, stride};
      column.hide(limits + first + v * LANES, seen_by_all, padded);
      most[v] = column.greatest(padded);
      sum[v] = Vec{};
    }
    for (std::int64_t step = 0; step < padded; step += STEP) {
      alignas(64) Pair rounded[STEP][BLOCK];
      for (int j = 0; j < STEP; ++j)
        for (int v = 0; v < VECS; ++v) {
          Vec weight = exp2_below_0((load(scores + (step + j) * stride + first + v * LANES) - most[v]) * scale);
          sum[v] = sum[v] + weight;
          Bits bits = (Bits)weight + 0x8000;
          __builtin_memcpy(&rounded[j][v * LANES], &bits, sizeof bits);
        }
      weights.put(first, step, rounded);
    }
    for (int v = 0; v < VECS; ++v) {
      store(greatest + first + v * LANES, most[v]);
      store(sums + first + v * LANES, sum[v]);
    }
  }
}

// Folds a tile's result into that of the tiles before it; both are laid out as partial results, with `width` values.
// Not inlined, so that it rounds alike wherever it is called.
__attribute__((noinline)) void fold(float* total, const float* tile, float scale, std::int64_t width) {
  float most = total[0] > tile[0] ? total[0] : tile[0];
  Vec factors{};
  factors[0] = (total[0] - most) * scale;
  factors[1] = (tile[0] - most) * scale;
  factors = exp2_below_0(factors);
  float before = factors[0], now = factors[1];
  total[0] = most;
  total[1] = total[1] * before + tile[1] * now;
  total += mtp::PARTIAL_HEADER, tile += mtp::PARTIAL_HEADER;
  for (std::int64_t i = 0; i < width; i += LANES) store(total + i, load(total + i) * before + load(tile + i) * now);
}

}  // namespace
