// What the bindings share: checks of tensors by name, and sharing kernels out over torch's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "kernels.h"
#include "program.h"

namespace mtp {

// Fewer bytes than this for each thread are not worth waking one.
constexpr std::int64_t BYTES_FOR_A_THREAD = 1 << 14;

// Runs kernel(job, begin, end) over [0, items) on as many threads as `bytes` of memory traffic are worth.
template <typename Job>
void share_out(std::int64_t items, std::int64_t bytes, void (*kernel)(const Job&, std::int64_t, std::int64_t),
               const Job& job) {
  std::int64_t worth = std::clamp<std::int64_t>(bytes / BYTES_FOR_A_THREAD, 1, std::max<std::int64_t>(items, 1));
  perform({worth, nullptr, [items, kernel, job](std::int64_t thread, std::int64_t threads) {
             kernel(job, items * thread / threads, items * (thread + 1) / threads);
           }});
}

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

// [tokens, heads, width] as kernels take it.
inline Rows rows_of(const Tensor& x) {
  return {data(x), x.stride(0), x.stride(1), x.size(0), x.size(1), x.size(2)};
}

}  // namespace mtp
