// Bindings of norms, rotation, SwiGLU, the cache, and the choice of a token.
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "bindings.h"
#include "tensors.h"

namespace mtp {
namespace {

void check_angles(const Tensor& cos, const Tensor& sin, std::int64_t tokens, std::int64_t width) {
  check(cos, "cos", at::kFloat, {tokens, -1}, true);
  check(sin, "sin", at::kFloat, {tokens, cos.size(1)}, true);
  TORCH_CHECK(2 * cos.size(1) <= width, "cos: ", cos.size(1), " angles; allowed: up to half of ", width, " elements");
}

void check_slots(const Tensor& slots, std::int64_t tokens, std::int64_t allowed) {
  check(slots, "slots", at::kLong, {tokens}, true);
  const std::int64_t* slot = data<std::int64_t>(slots);
  for (std::int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(0 <= slot[i] && slot[i] < allowed, "slots: ", slot[i], "; allowed: 0 to ", allowed - 1);
}

// x is [T, width] or [T, heads, width].
Rows norm_rows(const Tensor& x, const Tensor& weight) {
  bool heads = x.dim() == 3;
  if (heads)
    check(x, "x", at::kBFloat16, {-1, -1, -1});
  else
    check(x, "x", at::kBFloat16, {-1, -1});
  check(weight, "weight", at::kBFloat16, {x.size(-1)});
  return heads ? rows_of(x) : Rows{data(x), x.stride(0), 0, x.size(0), 1, x.size(1)};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Operation operation("mtp::rms_norm");
  RmsNorm job{};
  job.x = norm_rows(x, weight);
  Tensor y = new_tensor(x.sizes());
  job.weight = data(weight), job.eps = float(eps), job.y = data(y);
  share_out(job.x.tokens * job.x.heads, y.numel() * 8, kernels().rms_norm, job);
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Operation operation("mtp::add_rms_norm");
  RmsNorm job{};
  job.x = norm_rows(x, weight);
  check(residual, "residual", at::kBFloat16, x.sizes(), true);
  Tensor y = new_tensor(x.sizes()), sum = new_tensor(x.sizes());
  job.residual = data(residual), job.sum = data(sum);
  job.weight = data(weight), job.eps = float(eps), job.y = data(y);
  share_out(job.x.tokens * job.x.heads, y.numel() * 8, kernels().rms_norm, job);
  return {y, sum};
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  Operation operation("mtp::rotary");
  check(x, "x", at::kBFloat16, {-1, -1, -1});
  check_angles(cos, sin, x.size(0), x.size(2));
  Tensor y = new_tensor(x.sizes());
  Rotary job{rows_of(x), data<float>(cos), data<float>(sin), cos.size(1), interleaved, data(y)};
  share_out(job.x.tokens, y.numel() * 8, kernels().rotary, job);
  return y;
}

void write_cache(const Tensor& cache, const Tensor& slots, const Tensor& values) {
  Operation operation("mtp::write_cache");
  check(values, "values", at::kBFloat16, {-1, -1, -1});
  check(cache, "cache", at::kBFloat16, {-1, -1, values.size(1), values.size(2)}, true);
  check_slots(slots, values.size(0), cache.size(0) * cache.size(1));
  WriteCache job{rows_of(values), data<std::int64_t>(slots), data(cache)};
  share_out(job.values.tokens, values.numel() * 4, kernels().write_cache, job);
}

void write_latent(const Tensor& x, const Tensor& weight, double eps, const Tensor& cos, const Tensor& sin,
                  bool interleaved, const Tensor& slots, const Tensor& latent, const Tensor& rope) {
  Operation operation("mtp::write_latent");
  check(latent, "latent", at::kBFloat16, {-1, -1, 1, -1}, true);
  check(rope, "rope", at::kBFloat16, {latent.size(0), latent.size(1), 1, -1}, true);
  std::int64_t width = latent.size(3);
  check(x, "x", at::kBFloat16, {-1, width + rope.size(3)});
  check(weight, "weight", at::kBFloat16, {width});
  check_angles(cos, sin, x.size(0), rope.size(3));
  TORCH_CHECK(2 * cos.size(1) == rope.size(3), "cos: ", cos.size(1), " angles; allowed: half of rope's width");
  check_slots(slots, x.size(0), latent.size(0) * latent.size(1));
  LatentCache job{data(x), x.stride(0), x.size(0), width, cos.size(1), data(weight), float(eps), data<float>(cos),
                  data<float>(sin), interleaved, data<std::int64_t>(slots), data(latent), data(rope)};
  share_out(job.tokens, x.numel() * 8, kernels().write_latent, job);
}

Tensor swiglu(const Tensor& x) {
  Operation operation("mtp::swiglu");
  check(x, "x", at::kBFloat16, {-1, -1});
  TORCH_CHECK(x.size(1) % 2 == 0, "x: rows of ", x.size(1), " elements; allowed: an even number");
  Tensor y = new_tensor({x.size(0), x.size(1) / 2});
  Swiglu job{data(x), x.stride(0), x.size(0), y.size(1), data(y)};
  share_out(job.rows, x.numel() * 8, kernels().swiglu_rows, job);
  return y;
}

// table[indices] for rows of any type.
Tensor rows(const Tensor& table, const Tensor& indices) {
  Operation operation("mtp::rows");
  check(table, "table", table.scalar_type(), {-1, -1});
  check(indices, "indices", at::kLong, {-1}, true);
  Tensor y = new_tensor({indices.size(0), table.size(1)}, table.scalar_type());
  const std::int64_t* index = data<std::int64_t>(indices);
  const char* from = data<char>(table);
  char* to = data<char>(y);
  std::int64_t count = indices.size(0), allowed = table.size(0);
  std::int64_t element = std::int64_t(table.element_size()), bytes = table.size(1) * element;
  std::int64_t stride = table.stride(0) * element;
  auto check_indices = [=] {
    for (std::int64_t i = 0; i < count; ++i)
      TORCH_CHECK(0 <= index[i] && index[i] < allowed, "indices: ", index[i], "; allowed: 0 to ", allowed - 1);
    return std::int64_t(1);
  };
  perform({1, check_indices, [=](std::int64_t, std::int64_t) {
             for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, from + index[i] * stride, bytes);
           }});
  return y;
}

Tensor add(const Tensor& x, const Tensor& other) {
  Operation operation("mtp::add");
  check(x, "x", at::kBFloat16, {-1, -1}, true);
  check(other, "other", at::kBFloat16, x.sizes(), true);
  Tensor y = new_tensor(x.sizes());
  Add job{data(x), data(other), x.size(1), data(y)};
  share_out(x.size(0), y.numel() * 6, kernels().add_rows, job);
  return y;
}

// Rows [T, A] and [T, B] side by side.
Tensor join(const Tensor& first, const Tensor& second) {
  Operation operation("mtp::join");
  check(first, "first", at::kBFloat16, {-1, -1}, true);
  check(second, "second", at::kBFloat16, {first.size(0), -1}, true);
  std::int64_t a = first.size(1), b = second.size(1), count = first.size(0);
  Tensor y = new_tensor({count, a + b});
  const bf16 *left = data(first), *right = data(second);
  bf16* to = data(y);
  perform({1, nullptr, [=](std::int64_t, std::int64_t) {
             for (std::int64_t i = 0; i < count; ++i) {
               std::memcpy(to + i * (a + b), left + i * a, a * sizeof(bf16));
               std::memcpy(to + i * (a + b) + a, right + i * b, b * sizeof(bf16));
             }
           }});
  return y;
}

Tensor most_likely(const Tensor& logits) {
  Operation operation("mtp::most_likely");
  bool wide = logits.scalar_type() == at::kFloat;
  check(logits, "logits", wide ? at::kFloat : at::kBFloat16, {-1, -1}, true);
  TORCH_CHECK(logits.size(1), "logits: rows of 0 elements; allowed: 1 or more");
  constexpr std::int64_t PARTS = 8;  // of a row, which may be the only one
  std::int64_t rows = logits.size(0), parts = std::min(PARTS, logits.size(1));
  Tensor values = new_tensor({rows, parts}, at::kFloat), tokens = new_tensor({rows, parts}, at::kLong);
  Tensor result = new_tensor({rows}, at::kLong);
  MostLikely job{logits.data_ptr(), wide, rows, logits.size(1), parts, data<float>(values),
                 data<std::int64_t>(tokens), data<std::int64_t>(result)};
  share_out(rows * parts, logits.numel() * std::int64_t(logits.element_size()), kernels().most_likely, job);
  share_out(rows, 1, kernels().most_likely_of_parts, job);
  return result;
}

}  // namespace

void bind_elementwise(pybind11::module_& module) {
  module.def("rms_norm", &rms_norm, "As `Ops.rms_norm`, for rows [T, width] or [T, heads, width].");
  module.def("add_rms_norm", &add_rms_norm, "As `Ops.add_rms_norm`.");
  module.def("rotary", &rotary, "As `Ops.rotary`.");
  module.def("write_cache", &write_cache, "As `Ops.write_cache`.");
  module.def("write_latent", &write_latent, "As `Ops.write_latent`.");
  module.def("rows", &rows, "As `Ops.rows`.");
  module.def("add", &add, "As `Ops.add`, for rows [T, width].");
  module.def("join", &join, "As `Ops.join`.");
  module.def("most_likely", &most_likely, "As `Ops.most_likely`, for logits in bfloat16 or float32.");
  module.def("swiglu", &swiglu, "As `Ops.swiglu`, for rows [T, 2 · width].");
}

}  // namespace mtp
