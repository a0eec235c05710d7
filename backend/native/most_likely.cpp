// The most likely token of rows of logits: of equal ones the first, and a NaN before all others, as torch's maximum.
#include "kernels.h"
#include "simd.h"

namespace mtp::MTP_LEVEL {

namespace {

constexpr std::int64_t STRETCH = 16 * LANES;

bool greater(float a, float b) { return a > b || (a != a && b == b); }

float at(const float* x) { return *x; }
float at(const bf16* x) { return to_float(*x); }

// The greatest of up to STRETCH elements, NaN if one of them is.
template <typename T>
float greatest(const T* x, std::int64_t count) {
  Vec most = splat(-__builtin_inff());
  Ints unordered{};
  std::int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    Vec vec = load(x + i);
    most = vec > most ? vec : most;
    unordered |= vec != vec;
  }
  float best = -__builtin_inff();
  for (int lane = 0; lane < LANES; ++lane) {
    if (unordered[lane]) return __builtin_nanf("");
    if (most[lane] > best) best = most[lane];
  }
  for (; i < count; ++i)
    if (greater(at(x + i), best)) best = at(x + i);
  return best;
}

template <typename T>
void search(const T* x, std::int64_t begin, std::int64_t end, float& value, std::int64_t& token) {
  value = -__builtin_inff(), token = begin;
  std::int64_t found = begin;
  for (std::int64_t first = begin; first < end; first += STRETCH) {
    float own = greatest(x + first, least(STRETCH, end - first));
    if (greater(own, value)) value = own, found = first;
  }
  for (token = found; token < end; ++token) {
    float own = at(x + token);
    if (own == value || (own != own && value != value)) return;
  }
}

}  // namespace

// One item: a part of a row.
void most_likely(const MostLikely& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t item = begin; item < end; ++item) {
    std::int64_t row = item / job.parts, part = item % job.parts;
    std::int64_t first = job.vocab * part / job.parts, last = job.vocab * (part + 1) / job.parts;
    if (job.wide)
      search(static_cast<const float*>(job.logits) + row * job.vocab, first, last, job.values[item], job.tokens[item]);
    else
      search(static_cast<const bf16*>(job.logits) + row * job.vocab, first, last, job.values[item], job.tokens[item]);
  }
}

// One item: a row.
void most_likely_of_parts(const MostLikely& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    std::int64_t best = row * job.parts;
    for (std::int64_t item = best + 1; item < (row + 1) * job.parts; ++item)
      if (greater(job.values[item], job.values[best])) best = item;
    job.result[row] = job.tokens[best];
  }
}

}  // namespace mtp::MTP_LEVEL
