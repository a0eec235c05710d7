#include "kernels.h"
#include "product.h"

namespace mtp::MTP_LEVEL {

std::int64_t pack_items(std::int64_t m) { return (m + GROUP - 1) / GROUP; }

void linear_pack(const Linear& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t group = begin; group < end; ++group)
    pack_group(job.packed, job.m, job.k, group, [&](std::int64_t row) { return job.x + row * job.x_stride; });
}

namespace {

constexpr std::int64_t NEAR_BYTES = 1 << 20;  // of packed rows: half of a second cache

// One item: BLOCK_N rows of w with a part of the rows of x, which stays in the second cache for the next rows of w.
struct LinearParts {
  Packed x;
  std::int64_t columns, blocks;  // blocks of w; of x in a part
  explicit LinearParts(const Linear& job)
      : x{job.packed, job.m, job.k}, columns((job.n + BLOCK_N - 1) / BLOCK_N),
        blocks(1 + NEAR_BYTES / (BLOCK_M * mtp::packed_width(job.k) * std::int64_t(sizeof(bf16)))) {}
  std::int64_t items() const { return columns * ((x.blocks() + blocks - 1) / blocks); }
};

void write_linear(const Linear& job, const float* out, std::int64_t row, std::int64_t first, const float* bias) {
  std::int64_t n = least(BLOCK_N, job.n - first);
  for (std::int64_t m = 0; m < least(BLOCK_M, job.m - row); ++m) {
    std::int64_t at = (row + m) * job.n + first;
    for (std::int64_t i = 0; i < n; i += LANES) {
      Vec vec = load(out + m * BLOCK_N + i) + load(bias + i);
      std::int64_t count = least(LANES, n - i);
      if (job.wide)
        store_part(static_cast<float*>(job.y) + at + i, vec, count);
      else
        store_part(static_cast<bf16*>(job.y) + at + i, vec, count);
    }
  }
}

}  // namespace

std::int64_t linear_items(const Linear& job) { return LinearParts(job).items(); }

void linear(const Linear& job, std::int64_t begin, std::int64_t end) {
  LinearParts parts(job);
  ProductSession session;
  session.prepare(parts.x);
  WideRows wide_rows;
  alignas(64) float out[BLOCK_M * BLOCK_N];
  for (std::int64_t item = begin; item < end; ++item) {
    std::int64_t first = item % parts.columns * BLOCK_N, n = least(BLOCK_N, job.n - first);
    Weight rows = wide_rows.of(job.w.from(first), n, parts.x), next{};
    if (item + 1 < end) next = job.w.from((item + 1) % parts.columns * BLOCK_N);
    float bias[BLOCK_N] = {};
    if (job.bias)
      for (std::int64_t i = 0; i < n; ++i) bias[i] = to_float(job.bias[first + i]);
    std::int64_t block = item / parts.columns * parts.blocks, behind = least(block + parts.blocks, parts.x.blocks());
    for (; block < behind; ++block) {
      product(rows, n, parts.x, block, next, out);
      write_linear(job, out, block * BLOCK_M, first, bias);
    }
  }
}

namespace {
constexpr std::int64_t WIDE_N = 4;

template <int N>
inline void wide_row(const WideLinear& job, const float* w, const bf16* x, float* y) {
  Vec acc[N] = {};
  std::int64_t at = 0;
  for (; at + LANES <= job.k; at += LANES) {
    Vec row = load(x + at);
    for (int n = 0; n < N; ++n) acc[n] += row * load(w + n * job.k + at);
  }
  if (at < job.k) {
    Vec row = load_part(x + at, job.k - at);
    for (int n = 0; n < N; ++n) acc[n] += row * load_part(w + n * job.k + at, job.k - at);
  }
  for (int n = 0; n < N; ++n) y[n] = sum(acc[n]);
}
}  // namespace

// One item: WIDE_N rows of w with all rows of x.
std::int64_t wide_linear_items(const WideLinear& job) { return (job.n + WIDE_N - 1) / WIDE_N; }

void wide_linear(const WideLinear& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t first = begin * WIDE_N; first < least(end * WIDE_N, job.n); first += WIDE_N)
    for (std::int64_t m = 0; m < job.m; ++m) {
      const bf16* x = job.x + m * job.x_stride;
      const float* w = job.w + first * job.k;
      float* y = job.y + m * job.n + first;
      if (first + WIDE_N <= job.n)
        wide_row<WIDE_N>(job, w, x, y);
      else
        for (std::int64_t n = 0; n < job.n - first; ++n) wide_row<1>(job, w + n * job.k, x, y + n);
    }
}

}  // namespace mtp::MTP_LEVEL
