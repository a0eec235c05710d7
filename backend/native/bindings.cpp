// The Python module mtp_backend._native, and its matrix products.
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "levels.h"
#include "tensors.h"

namespace mtp {
namespace {

namespace py = pybind11;

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool wide) {
  check(weight, "weight", at::kBFloat16, {-1, -1});
  check(x, "x", at::kBFloat16, {-1, weight.size(1)});
  Linear job{};
  job.m = x.size(0), job.n = weight.size(0), job.k = weight.size(1);
  if (bias) {
    check(*bias, "bias", at::kBFloat16, {job.n});
    job.bias = data(*bias);
  }
  Tensor y = new_tensor({job.m, job.n}, wide ? at::kFloat : at::kBFloat16);
  if (!y.numel()) return y;
  Tensor packed = new_tensor({packed_size(job.m, job.k)});
  job.x = data(x), job.x_stride = x.stride(0);
  job.w = data(weight), job.w_stride = weight.stride(0);
  job.y = y.data_ptr(), job.wide = wide, job.packed = data(packed);
  share_out(kernels().pack_items(job.m), job.m * job.k * 2, kernels().linear_pack, job);
  share_out(kernels().linear_items(job), (job.n + job.m) * job.k * 2, kernels().linear, job);
  return y;
}

Tensor wide_linear(const Tensor& x, const Tensor& weight) {
  check(weight, "weight", at::kFloat, {-1, -1}, true);
  check(x, "x", at::kBFloat16, {-1, weight.size(1)});
  Tensor y = new_tensor({x.size(0), weight.size(0)}, at::kFloat);
  if (!y.numel()) return y;
  WideLinear job{data(x), x.stride(0), data<float>(weight), data<float>(y), x.size(0), weight.size(0), x.size(1)};
  share_out(kernels().wide_linear_items(job), job.n * job.k * 4 * (1 + job.m / 8), kernels().wide_linear, job);
  return y;
}

Tensor head_linear(const Tensor& x, const Tensor& weight) {
  check(x, "x", at::kBFloat16, {-1, -1, -1});
  Tensor laid = weight.dim() == 3 && weight.stride(1) == 1 ? weight.transpose(1, 2) : weight;
  check(laid, "weight", at::kBFloat16, {x.size(1), -1, -1});
  TORCH_CHECK(weight.size(2) == x.size(2), "weight: rows of ", weight.size(2), "; allowed: ", x.size(2), " as of x");
  HeadLinear job{};
  job.x = data(x), job.token_stride = x.stride(0), job.head_stride = x.stride(1);
  job.w = data(weight), job.w_head_stride = weight.stride(0);
  job.n_stride = weight.stride(1), job.k_stride = weight.stride(2);
  job.tokens = x.size(0), job.heads = x.size(1), job.n = weight.size(1), job.k = weight.size(2);
  Tensor y = new_tensor({job.tokens, job.heads, job.n});
  if (!y.numel()) return y;
  job.y = data(y);
  Tensor packed;
  std::int64_t bytes = job.heads * job.n * job.k * 2 * (1 + job.tokens / 8);
  if (job.n_stride != 1) {
    packed = new_tensor({job.heads * packed_size(job.tokens, job.k)});
    job.packed = data(packed);
    share_out(job.heads, packed.numel() * 2, kernels().head_linear_pack, job);
  }
  share_out(kernels().head_linear_items(job), bytes, kernels().head_linear, job);
  return y;
}

std::tuple<Tensor, Tensor> select_experts(const Tensor& logits, const Tensor& bias, std::int64_t top_k,
                                          std::int64_t groups, std::int64_t top_groups, bool normalize, double scaling) {
  check(logits, "logits", at::kFloat, {-1, -1}, true);
  std::int64_t tokens = logits.size(0), experts = logits.size(1);
  check(bias, "bias", at::kFloat, {experts}, true);
  TORCH_CHECK(groups > 0 && experts % groups == 0 && (groups == 1 || experts / groups > 1), "num_groups: ", groups,
              "; allowed: parts of 2 or more of ", experts, " experts");
  TORCH_CHECK(0 < top_groups && top_groups <= groups, "top_groups: ", top_groups, "; allowed: 1 to ", groups);
  TORCH_CHECK(0 < top_k && top_k <= experts / groups * top_groups, "top_k: ", top_k, "; allowed: 1 to ",
              experts / groups * top_groups);
  Tensor ids = new_tensor({tokens, top_k}, at::kLong), weights = new_tensor({tokens, top_k}, at::kFloat);
  Tensor scratch = new_tensor({tokens, 3 * experts}, at::kFloat);
  Routing job{data<float>(logits), data<float>(bias), tokens,           experts,   top_k,       groups,
              top_groups,          normalize,         float(scaling), data<float>(scratch), data<std::int64_t>(ids),
              data<float>(weights)};
  share_out(tokens, tokens * experts * 16, kernels().route, job);
  return {ids, weights};
}

Tensor grouped_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
                       const Tensor& weights) {
  check(x, "x", at::kBFloat16, {-1, -1});
  check(down, "down", at::kBFloat16, {-1, x.size(1), -1}, true);
  std::int64_t num_experts = down.size(0), width = down.size(2), hidden = x.size(1), tokens = x.size(0);
  check(gate_up, "gate_up", at::kBFloat16, {num_experts, 2 * width, hidden}, true);
  check(ids, "ids", at::kLong, {tokens, -1}, true);
  std::int64_t top_k = ids.size(1), pairs = tokens * top_k;
  check(weights, "weights", at::kFloat, {tokens, top_k}, true);
  Tensor y = new_tensor({tokens, hidden});
  if (!y.numel()) return y;
  // Sorted by counting: the pairs of an expert stay in the order of tokens.
  std::vector<std::int64_t> starts(num_experts + 1), rows(num_experts), active, order(pairs), place(pairs);
  const std::int64_t* expert_of = data<std::int64_t>(ids);
  for (std::int64_t i = 0; i < pairs; ++i) {
    TORCH_CHECK(0 <= expert_of[i] && expert_of[i] < num_experts, "ids: ", expert_of[i], "; allowed: 0 to ",
                num_experts - 1);
    ++starts[expert_of[i] + 1];
  }
  std::int64_t num_rows = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    std::int64_t count = starts[expert + 1];
    if (count) active.push_back(expert);
    rows[expert] = num_rows, num_rows += packed_rows(count);
    starts[expert + 1] += starts[expert];
  }
  std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
  for (std::int64_t i = 0; i < pairs; ++i) place[i] = next[expert_of[i]]++, order[place[i]] = i;
  Tensor packed = new_tensor({num_rows * packed_width(hidden)}), inner = new_tensor({pairs * width});
  Tensor packed_inner = new_tensor({num_rows * packed_width(width)}), results = new_tensor({pairs, hidden}, at::kFloat);
  Experts job{data(x), x.stride(0), data(gate_up), data(down), data<float>(weights), tokens, top_k, hidden, width,
              std::int64_t(active.size()), active.data(), starts.data(), rows.data(), order.data(), place.data(),
              data(packed), data(inner), data(packed_inner), data<float>(results), data(y)};
  std::int64_t weight_bytes = job.num_active * width * hidden * 2;
  share_out(job.num_active, pairs * hidden * 2, kernels().experts_pack, job);
  share_out(kernels().experts_up_items(job), 2 * weight_bytes, kernels().experts_up, job);
  share_out(job.num_active, pairs * width * 2, kernels().experts_pack_inner, job);
  share_out(kernels().experts_down_items(job), weight_bytes, kernels().experts_down, job);
  share_out(tokens, pairs * hidden * 4, kernels().experts_sum, job);
  return y;
}

}  // namespace
}  // namespace mtp

PYBIND11_MODULE(_native, module) {
  using namespace mtp;
  module.doc() = "CPU kernels. Results do not depend on the number of threads, nor a row's on the rows beside it.";
  module.def("levels", &available_levels, "Instruction sets that this machine runs kernels for, best first.");
  module.def("level", [] { return kernels().level; }, "The one in use; the best unless `use_level` was called.");
  module.def(
      "use_level",
      [](const std::string& name) { TORCH_CHECK(use_level(name), "level: ", name, "; allowed: those of levels()"); },
      py::arg("level"), "Takes another one, for tests.");
  module.def("linear", &linear, py::arg("x"), py::arg("weight"), py::arg("bias") = py::none(), py::arg("wide") = false,
             "x [M, K] times weight [N, K] transposed plus bias [N], bfloat16 → [M, N], bfloat16 or if wide float32.");
  module.def("wide_linear", &wide_linear, "The same with a weight in float32, → float32.");
  module.def("head_linear", &head_linear, "x [T, N, K], weight [N, O, K] → [T, N, O]; weight dense along O or K.");
  module.def("select_experts", &select_experts, "As `Ops.select_experts`.");
  module.def("grouped_experts", &grouped_experts, "As `Ops.grouped_experts`.");
  bind_elementwise(module);
  bind_attention(module);
}
