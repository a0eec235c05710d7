// Attention's part of the Python module.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "attention_plan.h"
#include "bindings.h"
#include "tensors.h"

namespace mtp {
namespace {

// Fewer multiply-adds than this for each thread are not worth waking one.
constexpr std::int64_t WORK_FOR_A_THREAD = 1 << 18;

// Memory that is kept from call to call; for each thread that calls.
template <int USE>
char* scratch(std::int64_t bytes) {
  thread_local Tensor memory;
  constexpr std::int64_t LINE = 64;
  if (!memory.defined() || memory.numel() < bytes + LINE) memory = at::empty({bytes + LINE}, at::kByte);
  auto address = reinterpret_cast<std::uintptr_t>(memory.data_ptr());
  return reinterpret_cast<char*>((address + LINE - 1) / LINE * LINE);
}

// One call of the attention. Its lengths and tables are read when it is performed.
struct AttentionWork {
  Attention job;
  std::int64_t sequences;
  const std::int64_t *query_ends, *kv_lens;
  AttentionPlan plan;
  std::int64_t threads, bytes;
  char* memory;
  float* partials;
  std::atomic<std::int64_t> next;

  std::int64_t prepare() {
    threads = at::get_num_threads();
    plan = plan_attention(job, sequences, query_ends, kv_lens, threads);
    threads = std::clamp<std::int64_t>(plan.work / WORK_FOR_A_THREAD, 1, threads);
    bytes = kernels().attention_memory(job);
    memory = scratch<0>(bytes * threads);
    std::int64_t partial_bytes = plan.partials * ATTENTION_QUERIES * partial_size(job.values.width) * sizeof(float);
    partials = reinterpret_cast<float*>(scratch<1>(partial_bytes));
    next = 0;
    return threads;
  }

  // An item that no thread has taken yet, or null.
  const AttentionItem* take() {
    std::size_t item = next++;
    return item < plan.items.size() ? &plan.items[item] : nullptr;
  }

  // A thread takes the next item when it is done with another; before that while each other thread finds one too, so that
  // its keys can come meanwhile.
  void attend(std::int64_t thread) {
    bool fetched = false;
    for (const AttentionItem *item = take(), *then; item; item = then ? then : take()) {
      then = next + threads <= std::int64_t(plan.items.size()) ? take() : nullptr;
      bool fetches = then && item->fetches() && then->fetches();
      kernels().attend(job, *item, fetched, fetches ? then : nullptr, partials, memory + thread * bytes);
      fetched = fetches;
    }
  }

  std::int64_t prepare_fold() {
    next = 0;
    return plan.folded.empty() ? 1 : threads;
  }

  void fold() {
    std::int64_t items = std::int64_t(plan.folded.size()) * ATTENTION_QUERIES;
    for (std::int64_t at; (at = next++) < items;) {
      const AttentionItem& item = plan.folded[at / ATTENTION_QUERIES];
      if (at % ATTENTION_QUERIES < item.queries) kernels().fold_partials(job, item, at % ATTENTION_QUERIES, partials);
    }
  }
};

Attention::Queries queries_of(const Tensor& query, const char* name) {
  check(query, name, at::kBFloat16, {-1, -1, -1});
  return {data(query), query.stride(0), query.stride(1), query.size(2)};
}

Attention::Cache cache_of(const Tensor& cache, const char* name) {
  check(cache, name, at::kBFloat16, {-1, -1, -1, -1}, true);
  return {data(cache), cache.stride(1), cache.stride(2), cache.size(3)};
}

// Every position that is to be read has a block of the cache.
void check_layout(std::int64_t tokens, const Tensor& lengths, const Tensor& tables, const Tensor& cache) {
  check(tables, "block_tables", at::kLong, {-1, -1});
  check(lengths, "lengths", at::kLong, {2, -1}, true);
  std::int64_t sequences = lengths.size(1), blocks = cache.size(0), size = cache.size(1), end = 0;
  const std::int64_t *query_ends = data<std::int64_t>(lengths), *kv_lens = query_ends + sequences;
  TORCH_CHECK(tables.size(0) >= sequences, "block_tables: ", tables.size(0), " rows; allowed: ", sequences, " or more");
  for (std::int64_t i = 0; i < sequences; ++i) {
    TORCH_CHECK(query_ends[i] >= end, "query_ends: ", query_ends[i], " after ", end, "; allowed: that or more");
    TORCH_CHECK(kv_lens[i] >= query_ends[i] - end && kv_lens[i] <= tables.size(1) * size, "kv_lens: ", kv_lens[i],
                "; allowed: ", query_ends[i] - end, " … ", tables.size(1) * size);
    end = query_ends[i];
    const std::int64_t* table = data<std::int64_t>(tables) + i * tables.stride(0);
    for (std::int64_t block = 0; block < (kv_lens[i] + size - 1) / size; ++block)
      TORCH_CHECK(table[block] >= 0 && table[block] < blocks, "block_tables: ", table[block], "; allowed: 0 … ",
                  blocks - 1);
  }
  TORCH_CHECK(end == tokens, "query_ends: ", end, " at the end; allowed: ", tokens, ", the number of tokens");
}

Tensor attention(Attention& job, const Tensor& query, const Tensor& values, const Tensor& lengths,
                 const Tensor& block_tables, double scale) {
  std::int64_t tokens = query.size(0);
  job.heads = query.size(1), job.kv_heads = values.size(2), job.scale = float(scale);
  TORCH_CHECK(job.kv_heads > 0 && job.heads % job.kv_heads == 0, "heads: ", job.heads, "; allowed: a multiple of ",
              job.kv_heads, ", those of the cache");
  check_layout(tokens, lengths, block_tables, values);
  job.block_tables = data<std::int64_t>(block_tables), job.table_stride = block_tables.stride(0);
  job.block_size = values.size(1);
  Tensor output = new_tensor({tokens, job.heads, values.size(3)});
  job.output = data(output);
  auto work = std::make_shared<AttentionWork>();
  work->job = job, work->sequences = lengths.size(1);
  work->query_ends = data<std::int64_t>(lengths), work->kv_lens = work->query_ends + work->sequences;
  perform({1, [work] { return work->prepare(); }, [work](std::int64_t thread, std::int64_t) { work->attend(thread); }});
  perform({1, [work] { return work->prepare_fold(); }, [work](std::int64_t, std::int64_t) { work->fold(); }});
  return output;
}

Tensor mla_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latent, const Tensor& rope,
                     const Tensor& lengths, const Tensor& block_tables,
                     const std::optional<Tensor>& selection, double scale) {
  Operation operation("mtp::mla_attention");
  Attention job{};
  job.parts = 2;
  job.queries[0] = queries_of(q_latent, "q_latent"), job.queries[1] = queries_of(q_rope, "q_rope");
  job.keys[0] = job.values = cache_of(latent, "latent"), job.keys[1] = cache_of(rope, "rope");
  std::int64_t tokens = q_latent.size(0);
  check(latent, "latent", at::kBFloat16, {-1, -1, 1, q_latent.size(2)});
  check(rope, "rope", at::kBFloat16, {latent.size(0), latent.size(1), 1, -1});
  check(q_rope, "q_rope", at::kBFloat16, {tokens, q_latent.size(1), rope.size(3)});
  if (selection) {
    check(*selection, "selection", at::kInt, {tokens, -1}, true);
    job.selection = data<std::int32_t>(*selection), job.top_k = selection->size(1);
  }
  return attention(job, q_latent, latent, lengths, block_tables, scale);
}

Tensor gqa_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
                     const Tensor& block_tables, double scale) {
  Operation operation("mtp::gqa_attention");
  Attention job{};
  job.parts = 1;
  job.queries[0] = queries_of(query, "query");
  job.keys[0] = cache_of(key, "key"), job.values = cache_of(value, "value");
  check(value, "value", at::kBFloat16, key.sizes());
  check(query, "query", at::kBFloat16, {-1, -1, key.size(3)});
  return attention(job, query, value, lengths, block_tables, scale);
}

}  // namespace

void bind_attention(pybind11::module_& module) {
  using pybind11::arg;
  module.def("mla_attention", &mla_attention, arg("q_latent"), arg("q_rope"), arg("latent"), arg("rope"),
             arg("lengths"), arg("block_tables"), arg("selection"), arg("scale"),
             "`Ops.mla_attention` in bfloat16, with the parts of the layout that it needs.");
  module.def("gqa_attention", &gqa_attention, arg("query"), arg("key"), arg("value"), arg("lengths"),
             arg("block_tables"), arg("scale"),
             "`Ops.gqa_attention` in bfloat16, with the parts of the layout that it needs.");
}

}  // namespace mtp
