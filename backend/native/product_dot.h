// Products by vectors along K. Packed rows follow each other, filled up with zeros to a multiple of 32.
#pragma once

namespace {

// Copies the rows of one group, row i from `row(i)` (null: zeros).
template <typename Row>
inline void pack_group(bf16* packed, std::int64_t m, std::int64_t k, std::int64_t group, Row row) {
  std::int64_t width = mtp::packed_width(k), end = least((group + 1) * GROUP, mtp::packed_rows(m));
  for (std::int64_t i = group * GROUP; i < end; ++i) {
    bf16* to = packed + i * width;
    const bf16* from = i < m ? row(i) : nullptr;
    std::int64_t given = from ? k : 0;
    if (given) __builtin_memcpy(to, from, given * sizeof(bf16));
    __builtin_memset(to + given, 0, (width - given) * sizeof(bf16));
  }
}

template <int N, int M, typename T>
inline void product_tile(bool first, const T* w, std::int64_t w_stride, const bf16* x, std::int64_t x_stride, std::int64_t k,
                         float* out) {
  Vec acc[M][N] = {};
  std::int64_t at = 0;
  for (; at + PACK <= k; at += PACK) {
    Pack weights[N];
    for (int n = 0; n < N; ++n) {
      weights[n] = load_pack(w + n * w_stride + at);
      if (first) prefetch(w + (N + n) * w_stride + at);
    }
    for (int m = 0; m < M; ++m) {
      Pack row = load_pack(x + m * x_stride + at);
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], weights[n], row);
    }
  }
  if (at < k)
    for (int n = 0; n < N; ++n) {
      Pack weights = load_pack(w + n * w_stride + at, k - at);
      for (int m = 0; m < M; ++m) acc[m][n] = dot(acc[m][n], weights, load_pack(x + m * x_stride + at));
    }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) out[m * BLOCK_N + n] = sum(acc[m][n]);
}

template <int N, typename T>
inline void product_columns(const T* w, std::int64_t w_stride, const bf16* x, std::int64_t x_stride, std::int64_t k,
                            std::int64_t rows, bool first, float* out) {
  std::int64_t m = 0;
  for (; m + 4 <= rows; m += 4) product_tile<N, 4>(first && m == 0, w, w_stride, x + m * x_stride, x_stride, k, out + m * BLOCK_N);
  for (; m + 2 <= rows; m += 2) product_tile<N, 2>(first && m == 0, w, w_stride, x + m * x_stride, x_stride, k, out + m * BLOCK_N);
  for (; m < rows; ++m) product_tile<N, 1>(first && m == 0, w, w_stride, x + m * x_stride, x_stride, k, out + m * BLOCK_N);
}

// out[m][n] for `n` ≤ BLOCK_N rows of w, without scales, and `rows` ≤ BLOCK_M packed rows. `first`: of the products with
// these rows of w, the one that fetches the next ones.
template <typename T>
inline void unscaled(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* packed, std::int64_t rows,
                     std::int64_t k, bool first, float* out) {
  std::int64_t width = mtp::packed_width(k), i = 0;
  for (; i + 4 <= n; i += 4) product_columns<4>(w + i * w_stride, w_stride, packed, width, k, rows, first, out + i);
  for (; i < n; ++i) product_columns<1>(w + i * w_stride, w_stride, packed, width, k, rows, first, out + i);
}

struct ProductSession {
  void prepare(const Packed&) {}  // nothing to set up
};

}  // namespace
