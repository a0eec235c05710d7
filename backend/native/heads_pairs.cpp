// One matrix for each head, packed as pairs of elements of k: with rows that follow each other along n, the heads' keys in
// multi-head latent attention; and those of `head_along` for many tokens, which are packed in no time beside the products.
#include "kernels.h"
#if defined(MTP_AMX)
#include "pair_product_amx.h"
#else
#include "pair_product.h"
#endif

namespace mtp::MTP_LEVEL {

namespace {

constexpr std::int64_t PACKED = 1 << 16;  // elements of a matrix that are packed at a time
constexpr std::int64_t WIDTH = 512;       // columns of them, at most
constexpr std::int64_t TOKENS = 32, GROUPS = 4;  // of a product
constexpr std::int64_t PART = 512;        // tokens that are multiplied with what is packed once

// How an operation is cut into items: a part of the tokens with a part of a head's columns.
struct HeadParts {
  std::int64_t depth, width, blocks, heads, tokens;
  explicit HeadParts(const HeadLinear& job)
      : depth(round_up(job.k, STEP)), width(least(WIDTH, PACKED / depth / STEP * STEP)),
        blocks((job.n + width - 1) / width), heads(job.heads), tokens((job.tokens + PART - 1) / PART) {}
  std::int64_t items() const { return tokens * heads * blocks; }
};

struct HeadPairs {
  const HeadLinear& job;
  const HeadParts& parts;
  std::int64_t head, first, width;  // columns [first, first + width) of one head
  alignas(64) Pair pairs[PACKED / 2];
  alignas(64) bf16 rows[TOKENS * HeadLinear::MOST_K], spare[2 * WIDTH];
  alignas(64) float sums[TOKENS * GROUPS * BLOCK];

  HeadPairs(const HeadLinear& job, const HeadParts& parts) : job(job), parts(parts) {}

  void multiply(std::int64_t item) {
    first = item % parts.blocks * parts.width, width = least(parts.width, job.n - first);
    head = item / parts.blocks % parts.heads;
    PairTiles packed{pairs, parts.depth / STEP, round_up(width, BLOCK) / BLOCK};
    pack(packed);
    std::int64_t token = item / parts.blocks / parts.heads * PART, behind = least(token + PART, job.tokens);
    for (; token < behind; token += TOKENS) {
      std::int64_t count = least(TOKENS, behind - token);
      copy_rows(token, count);
      RowTile tiles[TOKENS / BLOCK];
      for (std::int64_t at = 0; at < TOKENS / BLOCK; ++at) tiles[at] = {rows + at * BLOCK * parts.depth, parts.depth};
      RowsAhead nothing;
      for (std::int64_t group = 0; group < packed.groups; group += GROUPS) {
        ::multiply(tiles, count, packed.columns(group, GROUPS), sums, GROUPS * BLOCK, false, nothing);
        write(token, count, group * BLOCK);
      }
    }
  }

  // Where n lies together, the next head's rows are fetched meanwhile: the machine does not see that they come next.
  void pack(const PairTiles& packed) {
    const bf16* matrix = job.w + head * job.w_head_stride + first * job.n_stride;
    if (job.n_stride != 1) {
      pack_columns(packed, width, job.k, [&](std::int64_t column) { return matrix + column * job.n_stride; });
      return;
    }
    const bf16* from[HeadLinear::MOST_K];
    for (std::int64_t i = 0; i < job.k; ++i) from[i] = matrix + i * job.k_stride;
    pack_rows(packed, from, job.k, width, spare, [&](std::int64_t row) {
      const bf16* next = matrix + job.w_head_stride + row * job.k_stride;
      for (std::int64_t i = 0; i < width; i += 32) __builtin_prefetch(next + i, 0, 2);
    });
  }

  // Filled up with zeros, as tiles are.
  void copy_rows(std::int64_t token, std::int64_t count) {
    for (std::int64_t m = 0; m < round_up(count, BLOCK); ++m) {
      std::int64_t given = m < count ? job.k : 0;
      const bf16* from = job.x + (token + m) * job.token_stride + head * job.head_stride;
      if (given) __builtin_memcpy(rows + m * parts.depth, from, given * sizeof(bf16));
      __builtin_memset(rows + m * parts.depth + given, 0, (parts.depth - given) * sizeof(bf16));
    }
  }

  void write(std::int64_t token, std::int64_t count, std::int64_t column) {
    std::int64_t columns = least(GROUPS * BLOCK, width - column);
    for (std::int64_t m = 0; m < count; ++m) {
      bf16* y = job.y + ((token + m) * job.heads + head) * job.n + first + column;
      for (std::int64_t i = 0; i < columns; i += LANES)
        store_part(y + i, load(sums + m * GROUPS * BLOCK + i), least(LANES, columns - i));
    }
  }
};

}  // namespace

// Without AMX the products of `head_along` are summed in another order, which must not depend on the number of tokens.
bool head_takes_pairs(const HeadLinear& job) {
#if defined(MTP_AMX)
  if (job.tokens > TOKENS) return true;
#endif
  return job.n_stride == 1;
}

std::int64_t head_pairs_items(const HeadLinear& job) { return HeadParts(job).items(); }

void head_pairs(const HeadLinear& job, std::int64_t begin, std::int64_t end) {
  TileRegisters registers;
  HeadParts parts(job);
  HeadPairs pairs(job, parts);
  for (std::int64_t item = begin; item < end; ++item) pairs.multiply(item);
}

}  // namespace mtp::MTP_LEVEL
