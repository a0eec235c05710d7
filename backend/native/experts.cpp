// The routed experts: each one's tokens are packed together, and every product of an expert is shared out by blocks of
// its rows, so that one token alone keeps all threads busy.
#include "kernels.h"
#include "product.h"

namespace mtp::MTP_LEVEL {

namespace {

Packed packed_rows_of(const Experts& job, std::int64_t expert, bf16* packed, std::int64_t k) {
  return {packed + job.rows[expert] * packed_width(k), job.starts[expert + 1] - job.starts[expert], k};
}

template <typename Row>
void pack_expert(const Experts& job, std::int64_t expert, bf16* packed, std::int64_t k, Row row) {
  std::int64_t first = job.starts[expert], count = job.starts[expert + 1] - first;
  for (std::int64_t group = 0; group < pack_items(count); ++group)
    pack_group(packed + job.rows[expert] * packed_width(k), count, k, group,
               [&](std::int64_t i) { return row(first + i); });
}

std::int64_t blocks_of(std::int64_t n) { return (n + BLOCK_N - 1) / BLOCK_N; }

// One item: rows [first, first + n) of an active expert's projection, which has `rows`.
struct ExpertBlock {
  std::int64_t expert, first, n;
  ExpertBlock(const Experts& job, std::int64_t item, std::int64_t rows)
      : expert(job.active[item / blocks_of(rows)]), first(item % blocks_of(rows) * BLOCK_N),
        n(least(BLOCK_N, rows - first)) {}
};

Weight gate_rows_of(const Experts& job, const ExpertBlock& block) {
  return job.gate_up.from(2 * block.expert * job.width + block.first);
}
Weight down_rows_of(const Experts& job, const ExpertBlock& block) {
  return job.down.from(block.expert * job.hidden + block.first);
}

}  // namespace

void experts_pack(const Experts& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i)
    pack_expert(job, job.active[i], job.packed, job.hidden,
                [&](std::int64_t pair) { return job.x + job.order[pair] / job.top_k * job.x_stride; });
}

void experts_pack_inner(const Experts& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i)
    pack_expert(job, job.active[i], job.packed_inner, job.width,
                [&](std::int64_t pair) { return job.inner + pair * job.width; });
}

std::int64_t experts_up_items(const Experts& job) { return job.num_active * blocks_of(job.width); }

void experts_up(const Experts& job, std::int64_t begin, std::int64_t end) {
  alignas(64) float gate[BLOCK_M * BLOCK_N], up[BLOCK_M * BLOCK_N];
  WideRows wide_gate, wide_up;
  ProductSession session;
  for (std::int64_t item = begin; item < end; ++item) {
    ExpertBlock own(job, item, job.width);
    auto [expert, first, n] = own;
    Weight gate_rows = gate_rows_of(job, own), up_rows = gate_rows.from(job.width), next_gate{}, next_up{};
    if (item + 1 < end)
      next_gate = gate_rows_of(job, {job, item + 1, job.width}), next_up = next_gate.from(job.width);
    Packed x = packed_rows_of(job, expert, job.packed, job.hidden);
    gate_rows = wide_gate.of(gate_rows, n, x), up_rows = wide_up.of(up_rows, n, x);
    session.prepare(x);
    for (std::int64_t block = 0; block < x.blocks(); ++block) {
      product(gate_rows, n, x, block, next_gate, gate);
      product(up_rows, n, x, block, next_up, up);
      for (std::int64_t m = 0; m < least(BLOCK_M, x.m - block * BLOCK_M); ++m)
        for (std::int64_t i = 0; i < n; i += LANES)
          store_part(job.inner + (job.starts[expert] + block * BLOCK_M + m) * job.width + first + i,
                     swiglu(load(gate + m * BLOCK_N + i), load(up + m * BLOCK_N + i)), least(LANES, n - i));
    }
  }
}

std::int64_t experts_down_items(const Experts& job) { return job.num_active * blocks_of(job.hidden); }

void experts_down(const Experts& job, std::int64_t begin, std::int64_t end) {
  alignas(64) float out[BLOCK_M * BLOCK_N];
  WideRows wide_rows;
  ProductSession session;
  for (std::int64_t item = begin; item < end; ++item) {
    ExpertBlock own(job, item, job.hidden);
    auto [expert, first, n] = own;
    Weight rows = down_rows_of(job, own), next{};
    if (item + 1 < end) next = down_rows_of(job, {job, item + 1, job.hidden});
    Packed x = packed_rows_of(job, expert, job.packed_inner, job.width);
    rows = wide_rows.of(rows, n, x);
    session.prepare(x);
    for (std::int64_t block = 0; block < x.blocks(); ++block) {
      product(rows, n, x, block, next, out);
      for (std::int64_t m = 0; m < least(BLOCK_M, x.m - block * BLOCK_M); ++m)
        __builtin_memcpy(job.results + (job.starts[expert] + block * BLOCK_M + m) * job.hidden + first,
                         out + m * BLOCK_N, n * sizeof(float));
    }
  }
}

// A token's experts are added in the order of its ids.
void experts_sum(const Experts& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t token = begin; token < end; ++token)
    for (std::int64_t at = 0; at < job.hidden; at += LANES) {
      std::int64_t count = least(LANES, job.hidden - at);
      Vec total{};
      for (std::int64_t pair = token * job.top_k; pair < (token + 1) * job.top_k; ++pair) {
        const float* result = job.results + job.place[pair] * job.hidden + at;
        total += job.weights[pair] * load_part(result, count);
      }
      store_part(job.y + token * job.hidden + at, total, count);
    }
}

}  // namespace mtp::MTP_LEVEL
