// What the bindings share: they alone include torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace mtp {

inline void check(const at::Tensor& tensor, const char* name, at::ScalarType type, std::int64_t dims) {
  TORCH_CHECK(tensor.device().is_cpu(), name, ": on ", tensor.device(), "; allowed: cpu");
  TORCH_CHECK(tensor.scalar_type() == type, name, ": ", tensor.scalar_type(), "; allowed: ", type);
  TORCH_CHECK(tensor.dim() == dims, name, ": ", tensor.dim(), " dimensions; allowed: ", dims);
  TORCH_CHECK(dims == 0 || tensor.size(-1) <= 1 || tensor.stride(-1) == 1, name,
              ": elements of the last dimension lie apart; allowed: next to each other");
}

template <typename T = std::uint16_t>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

void bind_attention(pybind11::module_& module);

}  // namespace mtp
