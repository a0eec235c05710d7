// One matrix for each head, with rows that follow each other along n: the heads' keys in multi-head latent attention.
#include "kernels.h"
#if defined(MTP_AMX)
#include "pair_product_amx.h"
#else
#include "pair_product.h"
#endif

namespace mtp::MTP_LEVEL {

namespace {

constexpr std::int64_t WIDTH = 512, DEPTH = 128, TOKENS = 32;  // of n, of k and of the tokens, taken at a time

std::int64_t blocks_of(const HeadLinear& job) { return (job.n + WIDTH - 1) / WIDTH; }

struct Across {
  const HeadLinear& job;
  std::int64_t head, first, width;  // columns [first, first + width) of one head
  alignas(64) Pair pairs[DEPTH / 2 * WIDTH];
  alignas(64) bf16 rows[TOKENS * DEPTH], spare[2 * WIDTH];
  alignas(64) float sums[TOKENS * WIDTH];

  explicit Across(const HeadLinear& job) : job(job) {}

  void multiply(std::int64_t item) {
    head = item / blocks_of(job), first = item % blocks_of(job) * WIDTH, width = least(WIDTH, job.n - first);
    for (std::int64_t token = 0; token < job.tokens; token += TOKENS) {
      std::int64_t count = least(TOKENS, job.tokens - token);
      for (std::int64_t k = 0; k < job.k; k += DEPTH) {
        std::int64_t depth = least(DEPTH, job.k - k);
        PairTiles packed{pairs, round_up(depth, STEP) / STEP, round_up(width, BLOCK) / BLOCK};
        if (!token || job.k > DEPTH) pack(packed, k, depth);
        copy_rows(token, count, k, depth);
        RowTile tiles[TOKENS / BLOCK];
        for (std::int64_t at = 0; at < TOKENS / BLOCK; ++at) tiles[at] = {rows + at * BLOCK * DEPTH, DEPTH};
        ::multiply(tiles, count, packed, sums, WIDTH, k > 0);
      }
      for (std::int64_t m = 0; m < count; ++m)
        for (std::int64_t i = 0; i < width; i += LANES)
          store_part(job.y + ((token + m) * job.heads + head) * job.n + first + i, load(sums + m * WIDTH + i),
                     least(LANES, width - i));
    }
  }

  // Meanwhile the next head's rows are fetched: the machine does not see that they come next.
  void pack(const PairTiles& packed, std::int64_t k, std::int64_t depth) {
    const bf16* from[DEPTH];
    for (std::int64_t i = 0; i < depth; ++i)
      from[i] = job.w + head * job.w_head_stride + (k + i) * job.k_stride + first;
    pack_rows(packed, from, depth, width, spare, [&](std::int64_t row) {
      const bf16* next = from[0] + job.w_head_stride + row * job.k_stride;
      for (std::int64_t i = 0; i < width; i += 32) __builtin_prefetch(next + i, 0, 2);
    });
  }

  // Filled up with zeros, as tiles are.
  void copy_rows(std::int64_t token, std::int64_t count, std::int64_t k, std::int64_t depth) {
    for (std::int64_t m = 0; m < round_up(count, BLOCK); ++m) {
      std::int64_t given = m < count ? depth : 0;
      const bf16* from = job.x + (token + m) * job.token_stride + head * job.head_stride + k;
      if (given) __builtin_memcpy(rows + m * DEPTH, from, given * sizeof(bf16));
      __builtin_memset(rows + m * DEPTH + given, 0, (round_up(depth, STEP) - given) * sizeof(bf16));
    }
  }
};

}  // namespace

std::int64_t head_across_items(const HeadLinear& job) { return job.heads * blocks_of(job); }

void head_across(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  TileRegisters registers;
  Across across(job);
  for (std::int64_t item = begin; item < end; ++item) across.multiply(item);
}

}  // namespace mtp::MTP_LEVEL
