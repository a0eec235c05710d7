// Runs every kernel of one level over odd sizes, in memory of exactly the size that it is given, for the sanitizers to
// watch. Prints nothing and returns 0 if all is well.
#include <vector>

#include "kernels.h"

namespace kernels = mtp::MTP_LEVEL;
using mtp::bf16;

namespace {

template <typename T>
std::vector<T> filled(std::int64_t size, T value) {
  return std::vector<T>(static_cast<std::size_t>(size), value);
}

constexpr bf16 ONE = 0x3f80;

int products(std::int64_t m, std::int64_t n, std::int64_t k) {
  auto x = filled(m * k, ONE), w = filled(n * k, ONE), bias = filled(n, ONE);
  auto packed = filled(mtp::packed_size(m, k), ONE);
  auto y = filled(m * n, 0.0f);
  mtp::Linear linear{x.data(), k, w.data(), k, bias.data(), y.data(), true, m, n, k, packed.data()};
  kernels::linear_pack(linear, 0, kernels::pack_items(m));
  kernels::linear(linear, 0, kernels::linear_items(linear));
  int wrong = 0;
  for (float value : y) wrong += value != float(k + 1);
  auto wide = filled(n * k, 1.0f);
  mtp::WideLinear router{x.data(), k, wide.data(), y.data(), m, n, k};
  kernels::wide_linear(router, 0, kernels::wide_linear_items(router));
  for (float value : y) wrong += value != float(k);
  auto rounded = filled(m * n, bf16(0));
  mtp::HeadLinear head{x.data(), k, k, w.data(), n * k, k, 1, rounded.data(), m, 1, n, k, packed.data()};
  kernels::head_along_pack(head, 0, 1);
  kernels::head_along(head, 0, kernels::head_along_items(head));
  auto across = rounded;
  head.n_stride = 1, head.k_stride = n, head.y = across.data();
  kernels::head_across(head, 0, kernels::head_across_items(head));
  return wrong + (across != rounded);
}

void rows(std::int64_t tokens, std::int64_t heads, std::int64_t width) {
  auto x = filled(tokens * heads * width, ONE), y = x, sum = x, weight = filled(width, ONE);
  mtp::Rows all{x.data(), heads * width, width, tokens, heads, width};
  kernels::rms_norm({all, x.data(), sum.data(), weight.data(), 1e-6f, y.data()}, 0, tokens * heads);
  auto angles = filled(tokens * (width / 2), 0.5f);
  for (bool interleaved : {false, true})
    kernels::rotary({all, angles.data(), angles.data(), width / 2, interleaved, y.data()}, 0, tokens);
  auto slots = filled(tokens, std::int64_t(0));
  for (std::int64_t i = 0; i < tokens; ++i) slots[i] = tokens - 1 - i;
  kernels::write_cache({all, slots.data(), y.data()}, 0, tokens);
  std::int64_t half = width / 4, latent = width - 2 * half;
  auto first = filled(tokens * latent, ONE), second = filled(tokens * 2 * half, ONE);
  kernels::write_latent({x.data(), heads * width, tokens, latent, half, weight.data(), 1e-6f, angles.data(), angles.data(),
                         true, slots.data(), first.data(), second.data()}, 0, tokens);
  auto gated = filled(tokens * (width / 2), ONE);
  kernels::swiglu_rows({x.data(), heads * width, tokens, width / 2, gated.data()}, 0, tokens);
}

void experts(std::int64_t tokens, std::int64_t hidden, std::int64_t width) {
  constexpr std::int64_t NUM = 8, TOP = 3;
  auto logits = filled(tokens * NUM, 0.0f), bias = filled(NUM, 0.0f), scratch = filled(3 * tokens * NUM, 0.0f);
  auto ids = filled(tokens * TOP, std::int64_t(0));
  auto weights = filled(tokens * TOP, 0.0f);
  kernels::route({logits.data(), bias.data(), tokens, NUM, TOP, 4, 2, true, 1.0f, scratch.data(), ids.data(), weights.data()},
                 0, tokens);
  std::vector<std::int64_t> active{0, 1, 2}, starts(NUM + 1, TOP * tokens), first(NUM), order, place(TOP * tokens);
  std::int64_t num_rows = 0;
  for (std::int64_t expert = 0; expert < TOP; ++expert) {
    starts[expert] = expert * tokens, first[expert] = num_rows, num_rows += mtp::packed_rows(tokens);
    for (std::int64_t token = 0; token < tokens; ++token) {
      place[token * TOP + expert] = std::int64_t(order.size());
      order.push_back(token * TOP + expert);
    }
  }
  auto x = filled(tokens * hidden, ONE), y = x, inner = filled(TOP * tokens * width, ONE);
  auto gate_up = filled(NUM * 2 * width * hidden, ONE), down = filled(NUM * width * hidden, ONE);
  auto packed = filled(num_rows * mtp::packed_width(hidden), ONE);
  auto packed_inner = filled(num_rows * mtp::packed_width(width), ONE);
  auto results = filled(TOP * tokens * hidden, 0.0f);
  mtp::Experts job{x.data(), hidden, gate_up.data(), down.data(), weights.data(), tokens, TOP, hidden, width, TOP,
                   active.data(), starts.data(), first.data(), order.data(), place.data(), packed.data(), inner.data(),
                   packed_inner.data(), results.data(), y.data()};
  kernels::experts_pack(job, 0, TOP);
  kernels::experts_up(job, 0, kernels::experts_up_items(job));
  kernels::experts_pack_inner(job, 0, TOP);
  kernels::experts_down(job, 0, kernels::experts_down_items(job));
  kernels::experts_sum(job, 0, tokens);
}

}  // namespace

int main() {
  int wrong = 0;
  for (std::int64_t m : {1, 2, 15, 17, 33})
    for (std::int64_t n : {1, 16, 31, 33})
      for (std::int64_t k : {1, 31, 64, 129}) wrong += products(m, n, k);
  for (std::int64_t width : {4, 30, 64, 70}) rows(5, 3, width);
  for (std::int64_t tokens : {1, 19}) experts(tokens, 37, 21);
  return wrong != 0;
}
