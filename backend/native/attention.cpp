#include "attention_item.h"
#include "kernels.h"

namespace {

void write_output(const Attention& job, std::int64_t row, std::int64_t head, float* total) {
  for (std::int64_t j = 0; j < job.values.width; j += STEP) in_order(total + mtp::PARTIAL_HEADER + j);
  bf16* to = job.output + (row * job.heads + head) * job.values.width;
  for (std::int64_t j = 0; j < job.values.width; j += LANES) {
    Vec vec = load(total + mtp::PARTIAL_HEADER + j) / total[1];
    std::int64_t count = least(LANES, job.values.width - j);
    if (count == LANES)
      store(to + j, vec);
    else
      store_part(to + j, vec, count);
  }
}

}  // namespace

namespace mtp::MTP_LEVEL {

std::int64_t attention_memory(const Attention& job) { return AttentionMemory(job, nullptr).bytes; }

void attend(const Attention& job, const AttentionItem& item, bool fetched, const AttentionItem* next, float* partials,
            void* address) {
  AttentionMemory memory(job, address);
  TileRegisters registers;
  AttendItem attend(job, item, fetched, next, memory);
  if (item.partial >= 0) {
    for (std::int64_t i = 0; i < item.tiles; ++i)
      attend.attend(item.first_tile + i, partials + (item.partial + i) * ATTENTION_QUERIES * attend.stride);
    return;
  }
  attend.attend(item.first_tile, memory.total);
  for (std::int64_t i = 1; i < item.tiles; ++i) {
    attend.attend(item.first_tile + i, memory.tile);
    for (std::int64_t query = 0; query < item.queries; ++query)
      fold(memory.total + query * attend.stride, memory.tile + query * attend.stride, attend.scale,
           attend.stride - PARTIAL_HEADER);
  }
  for (std::int64_t i = 0; i < item.queries; ++i)
    write_output(job, attend.row(i), attend.head(i), memory.total + i * attend.stride);
}

void fold_partials(const Attention& job, const AttentionItem& item, std::int64_t query, float* partials) {
  std::int64_t stride = partial_size(job.values.width);
  float* total = partials + (item.partial * ATTENTION_QUERIES + query) * stride;
  for (std::int64_t i = 1; i < item.tiles; ++i)
    fold(total, total + i * ATTENTION_QUERIES * stride, powers_scale(job), stride - PARTIAL_HEADER);
  std::int64_t at = item.first_query + query;
  write_output(job, item.first_row + at / job.group(), item.kv_head * job.group() + at % job.group(), total);
}

}  // namespace mtp::MTP_LEVEL
