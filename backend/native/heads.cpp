// One matrix for each head: the products that the absorbed form of multi-head latent attention needs.
#include "kernels.h"
#include "product.h"

namespace mtp::MTP_LEVEL {

namespace {

constexpr int VECS = 2;  // vectors of output elements that a pass along k fills
constexpr std::int64_t WIDTH = VECS * LANES;

std::int64_t blocks_of(const HeadLinear& job) {
  std::int64_t block = job.n_stride == 1 ? WIDTH : BLOCK_N;
  return (job.n + block - 1) / block;
}

// Elements of vector v when `count` are left.
std::int64_t part(std::int64_t count, std::int64_t v) {
  std::int64_t rest = count - v * LANES;
  return rest < 0 ? 0 : least(LANES, rest);
}

// Rows of w along n: sums along k in float32, one multiplication after the other.
template <int M>
inline void across(const HeadLinear& job, const bf16* w, const bf16* x, bf16* y, std::int64_t count) {
  Vec acc[M][VECS] = {};
  for (std::int64_t k = 0; k < job.k; ++k) {
    Vec weights[VECS];
    for (int v = 0; v < VECS; ++v) {
      const bf16* from = w + k * job.k_stride + v * LANES;
      weights[v] = load_part(from, part(count, v));
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < VECS; ++v) acc[m][v] += to_float(x[m * job.token_stride + k]) * weights[v];
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < VECS; ++v)
      store_part(y + m * job.heads * job.n + v * LANES, acc[m][v], part(count, v));
}

void along(const HeadLinear& job, std::int64_t head, std::int64_t first) {
  Packed x{job.packed + head * packed_size(job.tokens, job.k), job.tokens, job.k};
  alignas(64) float out[BLOCK_M * BLOCK_N];
  std::int64_t n = least(BLOCK_N, job.n - first);
  for (std::int64_t block = 0; block < x.blocks(); ++block) {
    product(job.w + head * job.w_head_stride + first * job.n_stride, job.n_stride, n, x, block, out);
    for (std::int64_t m = 0; m < least(BLOCK_M, job.tokens - block * BLOCK_M); ++m) {
      bf16* y = job.y + ((block * BLOCK_M + m) * job.heads + head) * job.n + first;
      for (std::int64_t i = 0; i < n; i += LANES)
        store_part(y + i, load(out + m * BLOCK_N + i), least(LANES, n - i));
    }
  }
}

}  // namespace

void head_linear_pack(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t head = begin; head < end; ++head)
    for (std::int64_t group = 0; group < pack_items(job.tokens); ++group)
      pack_group(job.packed + head * packed_size(job.tokens, job.k), job.tokens, job.k, group,
                 [&](std::int64_t row) { return job.x + row * job.token_stride + head * job.head_stride; });
}

std::int64_t head_linear_items(const HeadLinear& job) { return job.heads * blocks_of(job); }

void head_linear(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  ProductSession session(Packed{nullptr, job.tokens, job.k});
  for (std::int64_t item = begin; item < end; ++item) {
    std::int64_t head = item / blocks_of(job), block = item % blocks_of(job);
    if (job.n_stride != 1) {
      along(job, head, block * BLOCK_N);
      continue;
    }
    std::int64_t first = block * WIDTH, count = least(WIDTH, job.n - first), token = 0;
    const bf16 *w = job.w + head * job.w_head_stride + first, *x = job.x + head * job.head_stride;
    bf16* y = job.y + head * job.n + first;
    std::int64_t y_stride = job.heads * job.n;
    for (; token + 8 <= job.tokens; token += 8)
      across<8>(job, w, x + token * job.token_stride, y + token * y_stride, count);
    for (; token + 2 <= job.tokens; token += 2)
      across<2>(job, w, x + token * job.token_stride, y + token * y_stride, count);
    for (; token < job.tokens; ++token)
      across<1>(job, w, x + token * job.token_stride, y + token * y_stride, count);
  }
}

}  // namespace mtp::MTP_LEVEL
