// How attention over a ragged batch is cut into items.
#pragma once

#include <vector>

#include "attention.h"

namespace mtp {

struct AttentionPlan {
  std::vector<AttentionItem> items;   // to attend, in any order
  std::vector<AttentionItem> folded;  // whose partial results are to be folded then, with all their tiles
  std::int64_t partials = 0;          // tiles of partial results
  std::int64_t work = 0;              // multiply-adds
};

// For sequences of cumulative query lengths and lengths of cached keys. Throws std::invalid_argument if a row selects
// nothing.
AttentionPlan plan_attention(const Attention& job, std::int64_t sequences, const std::int64_t* query_ends,
                             const std::int64_t* kv_lens, std::int64_t threads);

}  // namespace mtp
