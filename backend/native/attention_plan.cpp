#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mtp {
namespace {

constexpr std::int64_t LEAST_QUERIES = 16;  // of an item that is split: as many as are multiplied at a time

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Positions that a row selects; they are padded with −1 at the end.
std::int64_t count_selected(const Attention& job, std::int64_t row) {
  const std::int32_t* begin = job.selection + row * job.top_k;
  std::int64_t count = std::partition_point(begin, begin + job.top_k, [](auto at) { return at >= 0; }) - begin;
  if (!count)
    throw std::invalid_argument("selection: row " + std::to_string(row) + " selects nothing; allowed: 1 or more");
  return count;
}

// Adds the items of `rows` consecutive rows of a sequence, each of `most` queries at most.
void add_rows(AttentionPlan& plan, const Attention& job, AttentionItem item, std::int64_t rows, std::int64_t most) {
  std::int64_t queries = rows * job.group();
  for (item.kv_head = 0; item.kv_head < job.kv_heads; ++item.kv_head)
    for (item.first_query = 0; item.first_query < queries; item.first_query += most) {
      item.queries = std::min(most, queries - item.first_query);
      item.tiles = divide_up(item.selected < 0 ? item.length(job.group()) : item.selected, ATTENTION_TILE);
      plan.items.push_back(item);
    }
}

// Items longer than half of a thread's share are cut into at most two parts for each thread.
void split_long_items(AttentionPlan& plan, std::int64_t threads) {
  std::int64_t tiles = 0;
  for (const AttentionItem& item : plan.items) tiles += item.tiles;
  std::vector<AttentionItem> items;
  for (AttentionItem item : plan.items) {
    if (item.tiles == 1 || item.tiles * 2 * threads <= tiles) {
      items.push_back(item);
      continue;
    }
    item.partial = plan.partials;
    plan.partials += item.tiles;
    plan.folded.push_back(item);
    std::int64_t end = item.first_tile + item.tiles, most = divide_up(item.tiles, 2 * threads);
    for (AttentionItem part = item; part.first_tile < end; part.first_tile += part.tiles, part.partial += part.tiles) {
      part.tiles = std::min(most, end - part.first_tile);
      items.push_back(part);
    }
  }
  plan.items = std::move(items);
}

// The items with all their tiles, each of `most` queries at most.
AttentionPlan plan_items(const Attention& job, std::int64_t sequences, const std::int64_t* query_ends,
                         const std::int64_t* kv_lens, std::int64_t most) {
  AttentionPlan plan;
  std::int64_t row = 0;
  for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
    std::int64_t end = query_ends[sequence], shift = kv_lens[sequence] - end;
    while (row < end) {
      AttentionItem item{};
      item.sequence = sequence, item.first_row = row, item.first_position = row + shift;
      item.selected = item.partial = -1;
      std::int64_t rows = job.selection ? 0 : end - row;
      // Rows that select all that they may see go together.
      while (job.selection && row + rows < end && count_selected(job, row + rows) == row + rows + shift + 1) ++rows;
      if (!rows) item.selected = count_selected(job, row), rows = 1;
      add_rows(plan, job, item, rows, most);
      row += rows;
    }
  }
  std::int64_t width = job.values.width;
  for (int part = 0; part < job.parts; ++part) width += job.keys[part].width;
  for (const AttentionItem& item : plan.items) plan.work += item.queries * item.tiles * ATTENTION_TILE * width;
  return plan;
}

}  // namespace

AttentionPlan plan_attention(const Attention& job, std::int64_t sequences, const std::int64_t* query_ends,
                             const std::int64_t* kv_lens, std::int64_t threads) {
  std::int64_t most = ATTENTION_QUERIES, queries = 0;
  AttentionPlan plan = plan_items(job, sequences, query_ends, kv_lens, most);
  // Of short sequences a tile of all queries may be more than a thread's share.
  for (const AttentionItem& item : plan.items) queries += item.queries * item.tiles;
  while (most > LEAST_QUERIES && most * threads > queries) most /= 2;
  if (most < ATTENTION_QUERIES) plan = plan_items(job, sequences, query_ends, kv_lens, most);
  if (threads > 1) split_long_items(plan, threads);
  return plan;
}

}  // namespace mtp
