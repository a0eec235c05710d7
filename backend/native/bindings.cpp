// The Python module mtp_backend._native, and its matrix products.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "levels.h"
#include "tensors.h"

namespace mtp {
namespace {

namespace py = pybind11;

// The rows of a matrix, or of several [N, rows, K] that are dense; int8 if there is a scale for each.
Weight weight_of(const Tensor& weight, const char* name, const std::optional<Tensor>& scale, const char* scale_name,
                 at::IntArrayRef shape) {
  check(weight, name, scale ? at::kChar : at::kBFloat16, shape, shape.size() == 3);
  if (scale) check(*scale, scale_name, at::kFloat, weight.sizes().slice(0, shape.size() - 1), true);
  return {weight.data_ptr(), weight.stride(-2), scale ? data<float>(*scale) : nullptr, scale.has_value()};
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool wide,
              const std::optional<Tensor>& scale) {
  Operation operation(scale ? "mtp::linear_int8" : "mtp::linear");
  Linear job{};
  job.w = weight_of(weight, "weight", scale, "scale", {-1, -1});
  check(x, "x", at::kBFloat16, {-1, weight.size(1)});
  job.m = x.size(0), job.n = weight.size(0), job.k = weight.size(1);
  if (bias) {
    check(*bias, "bias", at::kBFloat16, {job.n});
    job.bias = data(*bias);
  }
  Tensor y = new_tensor({job.m, job.n}, wide ? at::kFloat : at::kBFloat16);
  if (!y.numel()) return y;
  Tensor packed = new_tensor({packed_size(job.m, job.k)});
  job.x = data(x), job.x_stride = x.stride(0);
  job.y = y.data_ptr(), job.wide = wide, job.packed = data(packed);
  share_out(kernels().pack_items(job.m), job.m * job.k * 2, kernels().linear_pack, job);
  share_out(kernels().linear_items(job), job.n * job.k * job.w.element_size() + job.m * job.k * 2,
            kernels().linear, job);
  return y;
}

Tensor wide_linear(const Tensor& x, const Tensor& weight) {
  Operation operation("mtp::wide_linear");
  check(weight, "weight", at::kFloat, {-1, -1}, true);
  check(x, "x", at::kBFloat16, {-1, weight.size(1)});
  Tensor y = new_tensor({x.size(0), weight.size(0)}, at::kFloat);
  if (!y.numel()) return y;
  WideLinear job{data(x), x.stride(0), data<float>(weight), data<float>(y), x.size(0), weight.size(0), x.size(1)};
  share_out(kernels().wide_linear_items(job), job.n * job.k * 4 * (1 + job.m / 8), kernels().wide_linear, job);
  return y;
}

Tensor head_linear(const Tensor& x, const Tensor& weight) {
  Operation operation("mtp::head_linear");
  check(x, "x", at::kBFloat16, {-1, -1, -1});
  Tensor laid = weight.dim() == 3 && weight.stride(1) == 1 ? weight.transpose(1, 2) : weight;
  check(laid, "weight", at::kBFloat16, {x.size(1), -1, -1});
  TORCH_CHECK(weight.size(2) == x.size(2), "weight: rows of ", weight.size(2), "; allowed: ", x.size(2), " as of x");
  TORCH_CHECK(x.size(2) <= HeadLinear::MOST_K, "x: rows of ", x.size(2), "; allowed: up to ", HeadLinear::MOST_K);
  HeadLinear job{};
  job.x = data(x), job.token_stride = x.stride(0), job.head_stride = x.stride(1);
  job.w = data(weight), job.w_head_stride = weight.stride(0);
  job.n_stride = weight.stride(1), job.k_stride = weight.stride(2);
  job.tokens = x.size(0), job.heads = x.size(1), job.n = weight.size(1), job.k = weight.size(2);
  Tensor y = new_tensor({job.tokens, job.heads, job.n});
  if (!y.numel()) return y;
  job.y = data(y);
  std::int64_t bytes = job.heads * job.n * job.k * 2 * (1 + job.tokens / 8);
  if (kernels().head_takes_pairs(job)) {
    share_out(kernels().head_pairs_items(job), bytes, kernels().head_pairs, job);
    return y;
  }
  Tensor packed = new_tensor({job.heads * packed_size(job.tokens, job.k)});
  job.packed = data(packed);
  share_out(job.heads, packed.numel() * 2, kernels().head_along_pack, job);
  share_out(kernels().head_along_items(job), bytes, kernels().head_along, job);
  return y;
}

std::tuple<Tensor, Tensor> select_experts(const Tensor& logits, const Tensor& bias, std::int64_t top_k,
                                          std::int64_t groups, std::int64_t top_groups, bool normalize, double scaling) {
  Operation operation("mtp::select_experts");
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

// One call of the routed experts. Which expert has which tokens is found out when it is performed.
struct ExpertsWork {
  Experts job;
  const std::int64_t* ids;
  std::int64_t num_experts, pairs;
  std::vector<std::int64_t> starts, rows, active, order, place;

  // Sorts by counting: the pairs of an expert stay in the order of tokens.
  void sort() {
    starts.assign(num_experts + 1, 0), rows.resize(num_experts), order.resize(pairs), place.resize(pairs);
    active.clear();
    for (std::int64_t i = 0; i < pairs; ++i) {
      TORCH_CHECK(0 <= ids[i] && ids[i] < num_experts, "ids: ", ids[i], "; allowed: 0 to ", num_experts - 1);
      ++starts[ids[i] + 1];
    }
    std::int64_t num_rows = 0;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      std::int64_t count = starts[expert + 1];
      if (count) active.push_back(expert);
      rows[expert] = num_rows, num_rows += packed_rows(count);
      starts[expert + 1] += starts[expert];
    }
    std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
    for (std::int64_t i = 0; i < pairs; ++i) place[i] = next[ids[i]]++, order[place[i]] = i;
    job.num_active = std::int64_t(active.size()), job.active = active.data(), job.starts = starts.data();
    job.rows = rows.data(), job.order = order.data(), job.place = place.data();
  }

  std::int64_t weight_bytes() const { return job.num_active * job.width * job.hidden * job.down.element_size(); }
};

// A phase of the experts: `count` tells its items and `bytes` its memory traffic once the pairs are sorted.
template <typename Count, typename Bytes>
void share_out_experts(std::shared_ptr<ExpertsWork> work, Count count, Bytes bytes,
                       void (*kernel)(const Experts&, std::int64_t, std::int64_t), bool first = false) {
  auto plan = [=] {
    if (first) work->sort();
    return std::min(std::max<std::int64_t>(bytes(*work) / BYTES_FOR_A_THREAD, 1), count(work->job));
  };
  perform({1, plan, [=](std::int64_t thread, std::int64_t threads) {
             std::int64_t items = count(work->job);
             kernel(work->job, items * thread / threads, items * (thread + 1) / threads);
           }});
}

Tensor grouped_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
                       const Tensor& weights, const std::optional<Tensor>& gate_up_scale,
                       const std::optional<Tensor>& down_scale) {
  Operation operation(down_scale ? "mtp::grouped_experts_int8" : "mtp::grouped_experts");
  TORCH_CHECK(gate_up_scale.has_value() == down_scale.has_value(), "down_scale: ", down_scale ? "a tensor" : "none",
              "; allowed: as gate_up_scale");
  check(x, "x", at::kBFloat16, {-1, -1});
  Weight down_rows = weight_of(down, "down", down_scale, "down_scale", {-1, x.size(1), -1});
  std::int64_t num_experts = down.size(0), width = down.size(2), hidden = x.size(1), tokens = x.size(0);
  Weight gate_up_rows =
      weight_of(gate_up, "gate_up", gate_up_scale, "gate_up_scale", {num_experts, 2 * width, hidden});
  check(ids, "ids", at::kLong, {tokens, -1}, true);
  std::int64_t top_k = ids.size(1), pairs = tokens * top_k;
  check(weights, "weights", at::kFloat, {tokens, top_k}, true);
  Tensor y = new_tensor({tokens, hidden});
  if (!y.numel()) return y;
  // 17 rows and more of one expert are filled up, by 15 at most.
  std::int64_t num_rows = pairs + 15 * std::min(num_experts, pairs / 17);
  Tensor packed = new_tensor({num_rows * packed_width(hidden)}), inner = new_tensor({pairs * width});
  Tensor packed_inner = new_tensor({num_rows * packed_width(width)}), results = new_tensor({pairs, hidden}, at::kFloat);
  auto work = std::make_shared<ExpertsWork>();
  Experts& job = work->job;
  job.x = data(x), job.x_stride = x.stride(0), job.gate_up = gate_up_rows, job.down = down_rows;
  job.weights = data<float>(weights), job.tokens = tokens, job.top_k = top_k, job.hidden = hidden, job.width = width;
  job.packed = data(packed), job.inner = data(inner), job.packed_inner = data(packed_inner);
  job.results = data<float>(results), job.y = data(y);
  work->ids = data<std::int64_t>(ids), work->num_experts = num_experts, work->pairs = pairs;
  auto active = [](const Experts& all) { return all.num_active; };
  const Kernels& use = kernels();
  share_out_experts(work, active, [=](const ExpertsWork&) { return pairs * hidden * 2; }, use.experts_pack, true);
  share_out_experts(work, use.experts_up_items, [](const ExpertsWork& all) { return 2 * all.weight_bytes(); },
                    use.experts_up);
  share_out_experts(work, active, [=](const ExpertsWork&) { return pairs * width * 2; }, use.experts_pack_inner);
  share_out_experts(work, use.experts_down_items, [](const ExpertsWork& all) { return all.weight_bytes(); },
                    use.experts_down);
  share_out_experts(work, [](const Experts& all) { return all.tokens; },
                    [=](const ExpertsWork&) { return pairs * hidden * 4; }, use.experts_sum);
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
             py::arg("scale") = py::none(),
             "x [M, K] times weight [N, K] transposed plus bias [N], bfloat16 → [M, N], bfloat16 or if wide float32. "
             "With a scale, float32 [N], the weight is int8.");
  module.def("wide_linear", &wide_linear, "The same with a weight in float32, → float32.");
  module.def("head_linear", &head_linear, "x [T, N, K], weight [N, O, K] → [T, N, O]; weight dense along O or K.");
  module.def("select_experts", &select_experts, "As `Ops.select_experts`.");
  module.def("grouped_experts", &grouped_experts, py::arg("x"), py::arg("gate_up"), py::arg("down"), py::arg("ids"),
             py::arg("weights"), py::arg("gate_up_scale") = py::none(), py::arg("down_scale") = py::none(),
             "As `Ops.grouped_experts`, with scales as `Int8Ops.grouped_experts`.");
  using Calls = py::call_guard<py::gil_scoped_release>;
  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool", "Memory of programs that run one at a time.")
      .def(py::init<>())
      .def_property_readonly("num_bytes", &Pool::num_bytes);
  module.def(
      "borrowed",
      [](const Tensor& tensor) {
        return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
      },
      "A tensor in the same memory that does not keep it: in a pool it may be taken again.");
  py::class_<Program>(module, "Program", "Operations that are performed again on the tensors that they had.")
      .def(py::init<std::shared_ptr<Pool>>(), py::arg("pool"))
      .def("begin", &Program::begin, "From now on this thread's operations are recorded, as they are performed.")
      .def("end", &Program::end, "Ends that.")
      .def("run", &Program::run, py::arg("alone_until"), Calls(),
           "Performs them all again; nothing they read or write may have been freed. Until a time of time.monotonic(), one "
           "of two threads leaves its processor to others.");
  bind_elementwise(module);
  bind_attention(module);
}
