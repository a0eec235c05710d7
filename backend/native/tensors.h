// What the bindings share: checks of tensors by name.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace mtp {

using at::Tensor;

// Sizes of −1 may be any. The last dimension's elements must lie next to each other, all of them if `dense`.
inline void check(const Tensor& tensor, const char* name, at::ScalarType type, at::IntArrayRef shape,
                  bool dense = false) {
  TORCH_CHECK(tensor.device().is_cpu(), name, ": on ", tensor.device(), "; allowed: cpu");
  TORCH_CHECK(tensor.scalar_type() == type, name, ": ", tensor.scalar_type(), "; allowed: ", type);
  bool fits = tensor.dim() == static_cast<std::int64_t>(shape.size());
  for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || tensor.size(i) == shape[i];
  TORCH_CHECK(fits, name, ": shape ", tensor.sizes(), "; allowed: ", shape, " (-1: any)");
  TORCH_CHECK(!tensor.numel() || tensor.size(-1) == 1 || tensor.stride(-1) == 1, name,
              ": elements of the last dimension lie apart; allowed: next to each other");
  TORCH_CHECK(!dense || tensor.is_contiguous(), name, ": not contiguous; allowed: contiguous");
}

template <typename T = bf16>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace mtp
