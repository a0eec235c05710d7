// noaux_tc routing. Of equal scores the lower expert or group comes first.
#include "kernels.h"
#include "simd.h"

namespace {

constexpr float NEVER = -__builtin_inff(), TAKEN = __builtin_nanf("");

// Place of the greatest value in [begin, end); NaN is the least.
std::int64_t best(const float* values, std::int64_t begin, std::int64_t end) {
  std::int64_t found = begin;
  for (std::int64_t i = begin + 1; i < end; ++i)
    if (values[i] > values[found] || (values[found] != values[found] && values[i] == values[i])) found = i;
  return found;
}

// The sum of a group's two best.
float two_best(const float* values, std::int64_t begin, std::int64_t end) {
  std::int64_t first = best(values, begin, end), second = begin + (first == begin);
  for (std::int64_t i = begin; i < end; ++i)
    if (i != first && values[i] > values[second]) second = i;
  return values[first] + values[second];
}

}  // namespace

namespace mtp::MTP_LEVEL {

void route(const Routing& job, std::int64_t begin, std::int64_t end) {
  std::int64_t size = job.experts / job.groups;
  for (std::int64_t token = begin; token < end; ++token) {
    float* scores = job.scratch + token * 3 * job.experts;
    float *choice = scores + job.experts, *group_scores = choice + job.experts;
    const float* logits = job.logits + token * job.experts;
    for (std::int64_t at = 0; at < job.experts; at += LANES) {
      std::int64_t count = least(LANES, job.experts - at);
      store_part(scores + at, sigmoid(load_part(logits + at, count)), count);
    }
    for (std::int64_t i = 0; i < job.experts; ++i) choice[i] = scores[i] + job.bias[i];
    if (job.top_groups < job.groups) {
      for (std::int64_t group = 0; group < job.groups; ++group)
        group_scores[group] = two_best(choice, group * size, (group + 1) * size);
      for (std::int64_t group = 0; group < job.groups; ++group) {
        std::int64_t before = 0;  // groups that come before it
        for (std::int64_t other = 0; other < job.groups; ++other)
          before += group_scores[other] > group_scores[group] ||
                    (group_scores[other] == group_scores[group] && other < group);
        if (before >= job.top_groups)
          for (std::int64_t i = group * size; i < (group + 1) * size; ++i) choice[i] = NEVER;
      }
    }
    std::int64_t* ids = job.ids + token * job.top_k;
    float* weights = job.weights + token * job.top_k;
    float total = 1e-20f;
    for (std::int64_t i = 0; i < job.top_k; ++i) {
      ids[i] = best(choice, 0, job.experts);
      weights[i] = scores[ids[i]];
      total += weights[i];
      choice[ids[i]] = TAKEN;
    }
    for (std::int64_t i = 0; i < job.top_k; ++i)
      weights[i] = (job.normalize ? weights[i] / total : weights[i]) * job.scaling;
  }
}

}  // namespace mtp::MTP_LEVEL
