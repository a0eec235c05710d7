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
constexpr std::int8_t TWO = 2;  // of int8 weights, with scales of a half

int products(std::int64_t m, std::int64_t n, std::int64_t k) {
  auto x = filled(m * k, ONE), w = filled(n * k, ONE), bias = filled(n, ONE);
  auto packed = filled(mtp::packed_size(m, k), ONE);
  auto y = filled(m * n, 0.0f);
  auto twos = filled(n * k, TWO);
  auto halves = filled(n, 0.5f);
  int wrong = 0;
  for (mtp::Weight weight : {mtp::Weight{w.data(), k, nullptr, false}, {twos.data(), k, halves.data(), true}}) {
    mtp::Linear linear{x.data(), k, weight, bias.data(), y.data(), true, m, n, k, packed.data()};
    kernels::linear_pack(linear, 0, kernels::pack_items(m));
    kernels::linear(linear, 0, kernels::linear_items(linear));
    for (float value : y) wrong += value != float(k + 1);
  }
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
  kernels::head_pairs(head, 0, kernels::head_pairs_items(head));
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

int experts(std::int64_t tokens, std::int64_t hidden, std::int64_t width) {
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
  auto gate_up_twos = filled(NUM * 2 * width * hidden, TWO), down_twos = filled(NUM * width * hidden, TWO);
  auto gate_up_halves = filled(NUM * 2 * width, 0.5f), down_halves = filled(NUM * hidden, 0.5f);
  auto packed = filled(num_rows * mtp::packed_width(hidden), ONE);
  auto packed_inner = filled(num_rows * mtp::packed_width(width), ONE);
  auto results = filled(TOP * tokens * hidden, 0.0f);
  mtp::Experts job{x.data(), hidden, {gate_up.data(), hidden, nullptr, false},
                   {down.data(), width, nullptr, false}, weights.data(),
                   tokens, TOP, hidden, width, TOP, active.data(), starts.data(), first.data(), order.data(), place.data(),
                   packed.data(), inner.data(), packed_inner.data(), results.data(), y.data()};
  auto run = [&] {
    kernels::experts_pack(job, 0, TOP);
    kernels::experts_up(job, 0, kernels::experts_up_items(job));
    kernels::experts_pack_inner(job, 0, TOP);
    kernels::experts_down(job, 0, kernels::experts_down_items(job));
    kernels::experts_sum(job, 0, tokens);
  };
  run();
  auto expected = y;
  job.gate_up = {gate_up_twos.data(), hidden, gate_up_halves.data(), true};
  job.down = {down_twos.data(), width, down_halves.data(), true};
  run();
  return y != expected;
}

template <typename T>
int most_likely(std::int64_t rows, std::int64_t vocab, std::int64_t parts, T one) {
  auto logits = filled(rows * vocab, T(0));
  for (std::int64_t row = 0; row < rows; ++row) logits[row * vocab + (7 * row + vocab - 1) % vocab] = one;
  auto values = filled(rows * parts, 0.0f);
  auto tokens = filled(rows * parts, std::int64_t(0)), result = filled(rows, std::int64_t(0));
  mtp::MostLikely job{logits.data(), sizeof(T) == sizeof(float), rows, vocab, parts, values.data(), tokens.data(),
                      result.data()};
  kernels::most_likely(job, 0, rows * parts);
  kernels::most_likely_of_parts(job, 0, rows);
  int wrong = 0;
  for (std::int64_t row = 0; row < rows; ++row) wrong += result[row] != (7 * row + vocab - 1) % vocab;
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (std::int64_t m : {1, 2, 15, 17, 33})
    for (std::int64_t n : {1, 16, 31, 33})
      for (std::int64_t k : {1, 31, 64, 129}) wrong += products(m, n, k);
  for (std::int64_t width : {4, 30, 64, 70}) rows(5, 3, width);
  for (std::int64_t tokens : {1, 19, 40}) wrong += experts(tokens, 37, 21);
  for (std::int64_t vocab : {5, 64, 301})
    for (std::int64_t parts : {1, 3})
      wrong += most_likely(4, vocab, parts, ONE) + most_likely(4, vocab, parts, 1.0f);
  return wrong != 0;
}
