// The Python module mtp_backend._native: checks tensors, takes memory and shares kernels out over torch's threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "kernels.h"
#include "levels.h"

namespace {

using at::Tensor;
namespace py = pybind11;

// Fewer bytes than this for each thread are not worth waking one.
constexpr std::int64_t BYTES_FOR_A_THREAD = 1 << 16;

// Runs kernel(begin, end) over [0, items) on as many threads as `bytes` of memory traffic are worth.
template <typename Kernel>
void share_out(std::int64_t items, std::int64_t bytes, const Kernel& kernel) {
  std::int64_t threads = std::clamp<std::int64_t>(bytes / BYTES_FOR_A_THREAD, 1, at::get_num_threads());
  at::parallel_for(0, items, (items + threads - 1) / threads, kernel);
}

void check(const Tensor& tensor, const char* name, at::ScalarType type, std::int64_t dims) {
  TORCH_CHECK(tensor.device().is_cpu(), name, ": on ", tensor.device(), "; allowed: cpu");
  TORCH_CHECK(tensor.scalar_type() == type, name, ": ", tensor.scalar_type(), "; allowed: ", type);
  TORCH_CHECK(tensor.dim() == dims, name, ": ", tensor.dim(), " dimensions; allowed: ", dims);
  TORCH_CHECK(dims == 0 || tensor.size(-1) <= 1 || tensor.stride(-1) == 1, name,
              ": elements of the last dimension lie apart; allowed: next to each other");
}

template <typename T = mtp::bf16>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool wide) {
  check(x, "x", at::kBFloat16, 2);
  check(weight, "weight", at::kBFloat16, 2);
  mtp::Linear job{};
  job.m = x.size(0), job.n = weight.size(0), job.k = weight.size(1);
  TORCH_CHECK(x.size(1) == job.k, "x: rows of ", x.size(1), " elements; allowed: ", job.k, ", as weight has");
  if (bias) {
    check(*bias, "bias", at::kBFloat16, 1);
    TORCH_CHECK(bias->size(0) == job.n, "bias: ", bias->size(0), " elements; allowed: ", job.n, ", as weight has rows");
    job.bias = data(*bias);
  }
  Tensor y = at::empty({job.m, job.n}, x.options().dtype(wide ? at::kFloat : at::kBFloat16));
  if (!y.numel()) return y;
  Tensor packed = at::empty({mtp::packed_size(job.m, job.k)}, x.options());
  job.x = data(x), job.x_stride = x.stride(0);
  job.w = data(weight), job.w_stride = weight.stride(0);
  job.y = y.data_ptr(), job.wide = wide, job.packed = data(packed);
  const mtp::Kernels& kernels = mtp::kernels();
  share_out(kernels.pack_items(job.m), job.m * job.k * 2,
            [&](std::int64_t begin, std::int64_t end) { kernels.linear_pack(job, begin, end); });
  share_out(kernels.linear_items(job), (job.n + job.m) * job.k * 2,
            [&](std::int64_t begin, std::int64_t end) { kernels.linear(job, begin, end); });
  return y;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "CPU kernels. Results do not depend on the number of threads, nor a row's on the rows beside it.";
  module.def("levels", &mtp::available_levels, "Instruction sets that this machine runs kernels for, best first.");
  module.def("level", [] { return mtp::kernels().level; }, "The one in use; the best unless `use_level` was called.");
  module.def(
      "use_level",
      [](const std::string& name) { TORCH_CHECK(mtp::use_level(name), "level: ", name, "; allowed: those of levels()"); },
      py::arg("level"), "Takes another one, for tests.");
  module.def("linear", &linear, py::arg("x"), py::arg("weight"), py::arg("bias") = py::none(), py::arg("wide") = false,
             "x [M, K] times weight [N, K] transposed plus bias [N], bfloat16 → [M, N], bfloat16 or if wide float32.");
  mtp::bind_attention(module);
}
