// Attention over a paged KV cache: what the kernels are asked to do.
#pragma once

#include <cstdint>

namespace mtp {

using bf16 = std::uint16_t;

// Softmax of (Σ over the parts of query · key) · scale, times the values. MLA has two parts, the latent and the rotated
// key, and the latent is the value too; grouped-query attention has one. Strides are in elements.
struct Attention {
  struct Queries {  // [tokens, heads, width]
    const bf16* data;
    std::int64_t row_stride, head_stride, width;
  };
  struct Cache {  // [slots, KV heads, width]
    const bf16* data;
    std::int64_t slot_stride, head_stride, width;
  };
  int parts;
  Queries queries[2];
  Cache keys[2];
  Cache values;
  std::int64_t heads, kv_heads;
  float scale;
  const std::int64_t* block_tables;  // [sequences, table_stride]
  std::int64_t table_stride, block_size;
  const std::int32_t* selection;  // [tokens, top_k], or null
  std::int64_t top_k;
  bf16* output;  // [tokens, heads, width of the values]

  std::int64_t group() const { return heads / kv_heads; }
};

// Positions are taken in tiles of so many, counted from position 0 (of the selected ones, if a row has a selection).
// Each tile's result is made for itself and folded into that of the tiles before it. So the borders of the arithmetic
// are the same whatever else is in the batch and however the work is shared out.
constexpr std::int64_t ATTENTION_TILE = 256;
constexpr std::int64_t ATTENTION_QUERIES = 64;  // of an item, at most

// A tile's result for a query: the greatest score, the sum of the weights, and from HEADER on the weighted values, whose
// order is the level's own.
constexpr std::int64_t PARTIAL_HEADER = 16;
constexpr std::int64_t partial_size(std::int64_t width) { return PARTIAL_HEADER + (width + 31) / 32 * 32; }

// Some queries of one KV head and one sequence, and some tiles. Query i is row `first_row` + i / group of the batch,
// head i % group of the KV head.
struct AttentionItem {
  std::int64_t sequence, kv_head;
  std::int64_t first_row, first_position;  // of query 0
  std::int64_t first_query, queries;
  std::int64_t selected;  // the positions that its one row selects; −1: all up to a row's own
  std::int64_t first_tile, tiles;
  // −1: all tiles are here, and the output is written. Else where the results of its tiles are to be found among
  // the partial results, in tiles of ATTENTION_QUERIES · partial_size elements.
  std::int64_t partial;

  // Positions that its last query sees, without a selection.
  std::int64_t length(std::int64_t group) const { return first_position + (first_query + queries - 1) / group + 1; }
  // Many queries take longer to multiply than anything to read.
  bool few_queries() const { return queries <= 32; }
  // Whether its keys are fetched while something else is multiplied, and others' while it is: rows that are selected lie
  // apart.
  bool fetches() const { return few_queries() && selected < 0; }
};

}  // namespace mtp
