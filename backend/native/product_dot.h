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

constexpr int ROWS_W = 4;                      // rows of w that are multiplied at a time
constexpr std::int64_t DEPTH = 1 << 10;        // elements of K: some rows of so many stay in the first cache
constexpr std::int64_t AHEAD_BYTES = 1 << 14;  // how far ahead memory is fetched, at least

// Cache lines that ROWS_W rows of w have in a step of one product.
template <typename T>
constexpr int STEP_LINES = ROWS_W * PACK * sizeof(T) / 64;

template <int N>
struct Count {
  static constexpr int value = N;
};

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

// A part of K of some rows of w, and what is fetched while it is multiplied.
template <typename T>
struct Part {
  const T* w;
  std::int64_t stride, k;
  bool first, last;    // of the parts of these rows
  const T* next;       // what is multiplied after it
  const char* behind;  // what is to come from memory
};

// Adds to the sums of N rows of w and M packed rows, which are in `acc` between the parts; behind the last one they are
// written to out[m][n]. Fetches LINES cache lines in every step: of NEAR rows of what comes next into the first cache, and
// if BEHIND of what is behind that into the second.
template <int N, int M, int LINES, int NEAR, bool BEHIND, typename T>
inline void product_tile(const Part<T>& part, const bf16* x, std::int64_t x_stride, Vec* acc_between, float* out) {
  Vec acc[M][N];  // all loops over it are unrolled: it is in registers
#pragma GCC unroll 16
  for (int i = 0; i < M * N; ++i) acc[i / N][i % N] = Vec{};
  if (!part.first)
#pragma GCC unroll 16
    for (int i = 0; i < M * N; ++i) acc[i / N][i % N] = acc_between[i];
  const T* w = part.w;
  const char* behind = part.behind;
  std::int64_t at = 0;
  auto step = [&](auto load) {
    Pack weights[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) weights[n] = load(w + n * part.stride + at);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Pack row = load(x + m * x_stride + at);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], weights[n], row);
    }
  };
  auto steps = [&](std::int64_t end, const T* near) {
    for (const char* next = reinterpret_cast<const char*>(near); at + PACK <= end; at += PACK) {
      for (int line = 0; line < LINES; ++line, behind += 64, next += 64) {
        if (BEHIND) __builtin_prefetch(behind, 0, 2);
        prefetch(next);
      }
      step([](auto from) { return load_pack(from); });
    }
  };
  for (int n = 0; n < NEAR; ++n) steps((n + 1) * part.k / NEAR, part.next + n * part.stride);
  if constexpr (!NEAR) steps(part.k, part.next);
  if (at < part.k) step([&](auto from) { return load_pack(from, part.k - at); });
  if (part.last) return store_sums(acc, out);
#pragma GCC unroll 16
  for (int i = 0; i < M * N; ++i) acc_between[i] = acc[i / N][i % N];
}

// The products of N rows of w with all packed rows, some at a time. The first `carriers` of them fetch. Inlined, since a
// call between two rows of w, while nothing is fetched, took 5 % of the time of a step.
template <int N, int LINES, typename T>
__attribute__((always_inline)) inline void product_columns(const T* w, std::int64_t w_stride, const bf16* x,
                                                           std::int64_t x_stride, std::int64_t k, std::int64_t rows,
                                                           std::int64_t carriers, float* out) {
  constexpr int NEAR = ROWS_W * LINES / STEP_LINES<T>;
  Vec acc[BLOCK_M * N];
  std::int64_t own = N * w_stride * std::int64_t(sizeof(T));
  const char* behind = reinterpret_cast<const char*>(w) + (own > AHEAD_BYTES ? own : AHEAD_BYTES);
  std::int64_t begin = 0;
  do {
    std::int64_t depth = least(DEPTH, k - begin);
    bool last = begin + depth == k;
    Part<T> part{w + begin, w_stride, depth, begin == 0, last, last ? w + N * w_stride : w + begin + depth, behind};
    for (std::int64_t m = 0, carrier = 0; m < rows; ++carrier) {
      auto multiply = [&](auto rows_at_a_time) {
        constexpr int M = decltype(rows_at_a_time)::value;
        if (carrier < carriers) {
          product_tile<N, M, LINES, NEAR, true>(part, x + m * x_stride + begin, x_stride, acc + m * N, out + m * BLOCK_N);
          part.behind += depth / PACK * LINES * 64, part.next += NEAR * w_stride;
        } else {
          product_tile<N, M, 0, 0, false>(part, x + m * x_stride + begin, x_stride, acc + m * N, out + m * BLOCK_N);
        }
        m += M;
      };
      if (rows - m >= 4)
        multiply(Count<4>{});
      else if (rows - m >= 2)
        multiply(Count<2>{});
      else
        multiply(Count<1>{});
    }
    behind = part.behind;
    begin += depth;
  } while (begin < k);
}

// Of one or two packed rows: nothing but reading w takes time.
template <int M, typename T>
inline std::int64_t few_rows(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* x, std::int64_t x_stride,
                             std::int64_t k, float* out) {
  std::int64_t i = 0;
  for (; i + ROWS_W <= n; i += ROWS_W) {
    const T *own = w + i * w_stride, *next = own + ROWS_W * w_stride;
    Part<T> whole{own, w_stride, k, true, true, next, nullptr};
    product_tile<ROWS_W, M, STEP_LINES<T>, 1, false>(whole, x, x_stride, nullptr, out + i);
  }
  return i;
}

// out[m][n] for `n` ≤ BLOCK_N rows of w, without scales, and `rows` ≤ BLOCK_M packed rows, the first block of which
// fetches.
//
// From memory they are fetched in the order in which they lie, evenly over the products with ROWS_W rows of w. In other
// orders, or beside many packed rows straight into the first cache, the processor's own prefetcher does not follow, and the
// few reads that a core has under way bring 11 to 13 GB/s in place of 30 (Zen 4). Rows that do not follow each other are
// fetched in part.
template <typename T>
inline void unscaled(const T* w, std::int64_t w_stride, std::int64_t n, const bf16* packed, std::int64_t rows,
                     std::int64_t k, const Fetch& fetch, float* out) {
  constexpr int LINES = STEP_LINES<T>;
  std::int64_t width = mtp::packed_width(k), i = 0;
  auto columns = [&](auto lines) {
    constexpr int GIVEN = decltype(lines)::value;
    std::int64_t carriers = fetch.block == 0 ? LINES / GIVEN : 0;
    for (; i + ROWS_W <= n; i += ROWS_W)
      product_columns<ROWS_W, GIVEN>(w + i * w_stride, w_stride, packed, width, k, rows, carriers, out + i);
  };
  if (rows == 1)
    i = few_rows<1>(w, w_stride, n, packed, width, k, out);
  else if (rows == 2)
    i = few_rows<2>(w, w_stride, n, packed, width, k, out);
  else if (rows == 4)
    columns(Count<LINES>{});
  else if (rows <= 12)
    columns(Count<(LINES + 1) / 2>{});
  else
    columns(Count<(LINES + 3) / 4>{});
  for (; i < n; ++i) product_columns<1, 0>(w + i * w_stride, w_stride, packed, width, k, rows, 0, out + i);
}

struct ProductSession {
  void prepare(const Packed&) {}  // nothing to set up
};

}  // namespace
