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

constexpr int ROWS_W = 4;  // rows of w that are multiplied at a time

template <int N>
struct Count {
  static constexpr int value = N;
};

// What a product fetches in every step of K: lines of the next rows of w, or of those behind them.
template <int N>
struct Next {
  static constexpr int LINES = N;
  static constexpr bool NEAR = true;
};
template <int N>
struct Behind {
  static constexpr int LINES = N;
  static constexpr bool NEAR = false;
};
using Nothing = Behind<0>;

// out[m][n] = sum(acc[m][n]).
template <int N, int M>
inline void store_sums(const Vec (&acc)[M][N], float* out) {
  constexpr int TOGETHER = LANES / N < M ? LANES / N : M;  // packed rows whose sums go into one vector
#pragma GCC unroll 8
  for (int first = 0; first < M; first += TOGETHER) {
    Vec vecs[LANES] = {};
#pragma GCC unroll 16
    for (int i = 0; i < TOGETHER * N; ++i) vecs[i] = acc[first + i / N][i % N];
    float results[LANES];
    store(results, sums(vecs));
#pragma GCC unroll 8
    for (int m = 0; m < TOGETHER; ++m) __builtin_memcpy(out + (first + m) * BLOCK_N, results + m * N, N * sizeof(float));
  }
}

// out[m][n] of N rows of w and M packed rows. Fetches `Ahead::LINES` cache lines in every step.
template <int N, int M, typename Ahead, typename T>
inline void product_tile(const T* w, std::int64_t w_stride, const bf16* x, std::int64_t x_stride, std::int64_t k,
                         const char* ahead, float* out) {
  constexpr int CACHE = Ahead::NEAR ? 3 : 2;  // the first, or the second
  Vec acc[M][N] = {};  // all loops over it are unrolled: it is in registers
  std::int64_t at = 0;
  auto step = [&](auto load) {
    Pack weights[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) weights[n] = load(w + n * w_stride + at);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Pack row = load(x + m * x_stride + at);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], weights[n], row);
    }
  };
  for (; at + PACK <= k; at += PACK) {
    for (int line = 0; line < Ahead::LINES; ++line, ahead += 64) __builtin_prefetch(ahead, 0, CACHE);
    step([](auto from) { return load_pack(from); });
  }
  if (at < k) step([&](auto from) { return load_pack(from, k - at); });
  store_sums(acc, out);
}

// The products of N rows of w with all packed rows, some at a time. The first `carriers` of them fetch rows of w that
// follow: the next ones if `Ahead::NEAR`, else those behind.
template <int N, typename Ahead, typename T>
inline void product_columns(const T* w, std::int64_t w_stride, const bf16* x, std::int64_t x_stride, std::int64_t k,
                            std::int64_t rows, std::int64_t carriers, float* out) {
  const char* ahead = reinterpret_cast<const char*>(w + (Ahead::NEAR ? N : 2 * N) * w_stride);
  for (std::int64_t m = 0; m < rows; --carriers, ahead += k / PACK * Ahead::LINES * 64) {
    auto multiply = [&](auto rows_at_a_time) {
      constexpr int M = decltype(rows_at_a_time)::value;
      if (carriers > 0)
        product_tile<N, M, Ahead>(w, w_stride, x + m * x_stride, x_stride, k, ahead, out + m * BLOCK_N);
      else
        product_tile<N, M, Nothing>(w, w_stride, x + m * x_stride, x_stride, k, ahead, out + m * BLOCK_N);
      m += M;
    };
    if (rows - m >= 4)
      multiply(Count<4>{});
    else if (rows - m >= 2)
      multiply(Count<2>{});
    else
      multiply(Count<1>{});
  }
}

// out[m][n] for `n` ≤ BLOCK_N rows of w, without scales, and `rows` ≤ BLOCK_M packed rows. `first`: of the products with
// these rows of w, the one that fetches the next ones.
//
// Memory is fetched in the order in which it lies, evenly over the products with ROWS_W rows of w. In other orders, and
// into the first cache beside many packed rows, the processor's own prefetcher does not follow, and the few reads that a
// core has under way bring 11 to 13 GB/s in place of 30 (Zen 4). Rows that do not follow each other are fetched in part.
template <typename T>
inline void unscaled(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* packed, std::int64_t rows,
                     std::int64_t k, bool first, float* out) {
  constexpr int LINES = ROWS_W * PACK * sizeof(T) / 64;  // of ROWS_W rows, in a step of one product
  std::int64_t width = mtp::packed_width(k), i = 0;
  std::int64_t tiles = rows / 4 + (rows % 4 + 1) / 2;
  auto columns = [&](auto ahead) {
    using Given = decltype(ahead);
    std::int64_t carriers = first ? LINES / Given::LINES : 0;
    for (; i + ROWS_W <= n; i += ROWS_W)
      product_columns<ROWS_W, Given>(w + i * w_stride, w_stride, packed, width, k, rows, carriers, out + i);
  };
  if (tiles == 1)
    columns(Next<LINES>{});
  else if (tiles < 4)
    columns(Behind<(LINES + 1) / 2>{});
  else
    columns(Behind<(LINES + 3) / 4>{});
  for (; i < n; ++i) product_columns<1, Nothing>(w + i * w_stride, w_stride, packed, width, k, rows, 0, out + i);
}

struct ProductSession {
  void prepare(const Packed&) {}  // nothing to set up
};

}  // namespace
