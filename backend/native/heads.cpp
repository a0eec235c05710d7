// One matrix for each head, with rows that follow each other along k: the heads' values in multi-head latent attention.
#include "kernels.h"
#include "product.h"

namespace mtp::MTP_LEVEL {

namespace {

std::int64_t blocks_of(const HeadLinear& job) { return (job.n + BLOCK_N - 1) / BLOCK_N; }

Weight rows_of(const HeadLinear& job, std::int64_t item) {
  std::int64_t head = item / blocks_of(job), first = item % blocks_of(job) * BLOCK_N;
  return {job.w + head * job.w_head_stride + first * job.n_stride, job.n_stride, nullptr, false};
}

void block_of_head(const HeadLinear& job, std::int64_t item, const Weight& next) {
  std::int64_t head = item / blocks_of(job), first = item % blocks_of(job) * BLOCK_N;
  Packed x{job.packed + head * packed_size(job.tokens, job.k), job.tokens, job.k};
  alignas(64) float out[BLOCK_M * BLOCK_N];
  std::int64_t n = least(BLOCK_N, job.n - first);
  Weight rows = rows_of(job, item);
  for (std::int64_t block = 0; block < x.blocks(); ++block) {
    product(rows, n, x, block, next, out);
    for (std::int64_t m = 0; m < least(BLOCK_M, job.tokens - block * BLOCK_M); ++m) {
      bf16* y = job.y + ((block * BLOCK_M + m) * job.heads + head) * job.n + first;
      for (std::int64_t i = 0; i < n; i += LANES)
        store_part(y + i, load(out + m * BLOCK_N + i), least(LANES, n - i));
    }
  }
}

}  // namespace

void head_along_pack(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t head = begin; head < end; ++head)
    for (std::int64_t group = 0; group < pack_items(job.tokens); ++group)
      pack_group(job.packed + head * packed_size(job.tokens, job.k), job.tokens, job.k, group,
                 [&](std::int64_t row) { return job.x + row * job.token_stride + head * job.head_stride; });
}

std::int64_t head_along_items(const HeadLinear& job) { return job.heads * blocks_of(job); }

void head_along(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  ProductSession session;
  session.prepare(Packed{nullptr, job.tokens, job.k});
  for (std::int64_t item = begin; item < end; ++item)
    block_of_head(job, item, item + 1 < end ? rows_of(job, item + 1) : Weight{});
}

}  // namespace mtp::MTP_LEVEL
