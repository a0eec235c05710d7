// Norms, rotation, SwiGLU and the cache: computed in float32, rounded where the plain-torch operations round.
#include "kernels.h"
#include "simd.h"

namespace {

const bf16* row_of(const mtp::Rows& rows, std::int64_t row) {
  return rows.data + row / rows.heads * rows.token_stride + row % rows.heads * rows.head_stride;
}

// f(at, count) for stretches of a row, the last of them perhaps shorter than a vector.
template <typename F>
inline void stretches(std::int64_t width, F f) {
  for (std::int64_t at = 0; at < width; at += LANES) f(at, least(LANES, width - at));
}

void norm_row(const bf16* x, const bf16* weight, float eps, bf16* y, std::int64_t width) {
  Vec squares{};
  stretches(width, [&](std::int64_t at, std::int64_t count) {
    Vec vec = load_part(x + at, count);
    squares += vec * vec;
  });
  float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps);
  stretches(width, [&](std::int64_t at, std::int64_t count) {
    store_part(y + at, load_part(weight + at, count) * rounded(load_part(x + at, count) * scale), count);
  });
}

void rotate_row(const bf16* x, const float* cos, const float* sin, std::int64_t half, bool interleaved, bf16* y) {
  if (!interleaved) {
    stretches(half, [&](std::int64_t at, std::int64_t count) {
      Vec first = load_part(x + at, count), second = load_part(x + half + at, count);
      Vec c = load_part(cos + at, count), s = load_part(sin + at, count);
      store_part(y + at, first * c - second * s, count);
      store_part(y + half + at, second * c + first * s, count);
    });
    return;
  }
  stretches(2 * half, [&](std::int64_t at, std::int64_t count) {
    float given[LANES], turned[LANES] = {};
    store(given, load_part(x + at, count));
    for (std::int64_t i = 0; i < count; i += 2) {
      float c = cos[(at + i) / 2], s = sin[(at + i) / 2];
      turned[i] = given[i] * c - given[i + 1] * s;
      turned[i + 1] = given[i + 1] * c + given[i] * s;
    }
    store_part(y + at, load(turned), count);
  });
}

void copy(bf16* to, const bf16* from, std::int64_t count) { __builtin_memcpy(to, from, count * sizeof(bf16)); }

}  // namespace

namespace mtp::MTP_LEVEL {

void rms_norm(const RmsNorm& job, std::int64_t begin, std::int64_t end) {
  std::int64_t width = job.x.width;
  for (std::int64_t row = begin; row < end; ++row) {
    const bf16* x = row_of(job.x, row);
    if (job.residual) {
      bf16* sum = job.sum + row * width;
      stretches(width, [&](std::int64_t at, std::int64_t count) {
        store_part(sum + at, load_part(x + at, count) + load_part(job.residual + row * width + at, count), count);
      });
      x = sum;
    }
    norm_row(x, job.weight, job.eps, job.y + row * width, width);
  }
}

void rotary(const Rotary& job, std::int64_t begin, std::int64_t end) {
  std::int64_t width = job.x.width, turned = 2 * job.half;
  for (std::int64_t row = begin * job.x.heads; row < end * job.x.heads; ++row) {
    const bf16* x = row_of(job.x, row);
    bf16* y = job.y + row * width;
    std::int64_t angles = row / job.x.heads * job.half;
    rotate_row(x, job.cos + angles, job.sin + angles, job.half, job.interleaved, y);
    copy(y + turned, x + turned, width - turned);
  }
}

void write_cache(const WriteCache& job, std::int64_t begin, std::int64_t end) {
  std::int64_t width = job.values.width, heads = job.values.heads;
  for (std::int64_t row = begin * heads; row < end * heads; ++row)
    copy(job.cache + (job.slots[row / heads] * heads + row % heads) * width, row_of(job.values, row), width);
}

void write_latent(const LatentCache& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t token = begin; token < end; ++token) {
    const bf16* x = job.x + token * job.x_stride;
    std::int64_t slot = job.slots[token];
    norm_row(x, job.weight, job.eps, job.latent + slot * job.latent_width, job.latent_width);
    rotate_row(x + job.latent_width, job.cos + token * job.half, job.sin + token * job.half, job.half, job.interleaved,
               job.rope + slot * 2 * job.half);
  }
}

void add_rows(const Add& job, std::int64_t begin, std::int64_t end) {
  stretches((end - begin) * job.width, [&](std::int64_t at, std::int64_t count) {
    at += begin * job.width;
    store_part(job.y + at, load_part(job.x + at, count) + load_part(job.other + at, count), count);
  });
}

void swiglu_rows(const Swiglu& job, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const bf16 *gate = job.x + row * job.x_stride, *up = gate + job.width;
    stretches(job.width, [&](std::int64_t at, std::int64_t count) {
      store_part(job.y + row * job.width + at, swiglu(load_part(gate + at, count), load_part(up + at, count)), count);
    });
  }
}

}  // namespace mtp::MTP_LEVEL
