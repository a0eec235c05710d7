// Vector primitives of one instruction set. A kernel source is compiled once for each set; MTP_<SET> says for which.
//
// Everything here is in an anonymous namespace: the linker must never take an AVX-512 copy of a function for a machine
// that has none. For the same reason kernel sources include no other library headers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(MTP_AMX) || defined(MTP_AVX512) || defined(MTP_AVX2)
#include <immintrin.h>
#endif

namespace {

using bf16 = std::uint16_t;  // the upper half of a float

#if defined(MTP_AMX) || defined(MTP_AVX512)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;  // without AVX2 the compiler makes two narrower vectors of one
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Vec splat(float value) { return Vec{} + value; }

inline Vec load(const float* from) {
  Vec vec;
  __builtin_memcpy(&vec, from, sizeof vec);
  return vec;
}

inline void store(float* to, Vec vec) { __builtin_memcpy(to, &vec, sizeof vec); }

inline Vec load(const bf16* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
}

// To the nearest value, ties to even; NaN stays NaN.
#if defined(MTP_AMX) || defined(MTP_AVX512)
inline void store(bf16* to, Vec vec) {  // what is below the least normal number becomes 0
  __m256bh halves = _mm512_cvtneps_pbh((__m512)vec);
  __builtin_memcpy(to, &halves, sizeof halves);
}
#else
inline void store(bf16* to, Vec vec) {
  Bits bits = (Bits)vec;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits quiet = (bits >> 16) | 0x40;
  Bits is_nan = (Bits)(vec != vec);
  Halves halves = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}
#endif

// The first `count` ≤ LANES elements; the others are 0, and are not stored.
template <typename T>
inline Vec load_part(const T* from, std::int64_t count) {
  if (count == LANES) return load(from);
  T values[LANES] = {};
  __builtin_memcpy(values, from, count * sizeof(T));
  return load(values);
}

template <typename T>
inline void store_part(T* to, Vec vec, std::int64_t count) {
  if (count == LANES) return store(to, vec);
  T values[LANES];
  store(values, vec);
  __builtin_memcpy(to, values, count * sizeof(T));
}

inline float to_float(bf16 value) {
  std::uint32_t bits = std::uint32_t(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

inline bf16 to_bf16(float value) {
  bf16 lanes[LANES];
  store(lanes, splat(value));
  return lanes[0];
}

// To bfloat16 and back.
inline Vec rounded(Vec vec) {
  bf16 halves[LANES];
  store(halves, vec);
  return load(halves);
}

// e^x to about 2e-7; at least e^-87, at most e^88 (Cody and Waite's reduction, Taylor's polynomial).
inline Vec exp(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  constexpr float ROUND = 12582912.0f;  // 1.5 · 2^23: adding it leaves an integer
  Vec n = (x * 1.44269504f + ROUND) - ROUND;
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec series = splat(1.0f / 5040) * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r * r + r + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return series * (Vec)exponent;
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

inline Vec swiglu(Vec gate, Vec up) { return gate * sigmoid(gate) * up; }

// Always in the same order: halves are added until one lane is left.
inline float sum(Vec vec) {
  float lanes[LANES];
  store(lanes, vec);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Lane i is sum(vecs[i]), to the bit: in each step two vectors become one, of halves that were added.
inline Vec sums(const Vec* vecs) {
#if defined(MTP_AMX) || defined(MTP_AVX512)
  __m512 quads[4];
  for (int q = 0; q < 4; ++q) {
    __m512 pairs[2];
    for (int p = 0; p < 2; ++p) {
      __m512 a = (__m512)vecs[q + 8 * p], b = (__m512)vecs[q + 8 * p + 4];
      pairs[p] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quads[q] = _mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88), _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd));
  }
  for (int q = 0; q < 4; q += 2)
    quads[q] = _mm512_add_ps(_mm512_shuffle_ps(quads[q], quads[q + 1], 0x44), _mm512_shuffle_ps(quads[q], quads[q + 1], 0xee));
  return (Vec)_mm512_add_ps(_mm512_shuffle_ps(quads[0], quads[2], 0x88), _mm512_shuffle_ps(quads[0], quads[2], 0xdd));
#elif defined(MTP_AVX2)
  __m256 pairs[4];
  for (int p = 0; p < 4; ++p) {
    __m256 a = (__m256)vecs[p], b = (__m256)vecs[p + 4];
    pairs[p] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  for (int p = 0; p < 4; p += 2)
    pairs[p] = _mm256_add_ps(_mm256_shuffle_ps(pairs[p], pairs[p + 1], 0x44), _mm256_shuffle_ps(pairs[p], pairs[p + 1], 0xee));
  return (Vec)_mm256_add_ps(_mm256_shuffle_ps(pairs[0], pairs[2], 0x88), _mm256_shuffle_ps(pairs[0], pairs[2], 0xdd));
#else
  Vec result;
  for (int i = 0; i < LANES; ++i) result[i] = sum(vecs[i]);
  return result;
#endif
}

// Two vectors' worth of bfloat16, and the sum of products of two of them added to `acc`. Which lane an element falls
// into depends on its place alone.
constexpr int PACK = 2 * LANES;

#if defined(MTP_AMX) || defined(MTP_AVX512)
typedef __m512bh Pack;
inline Pack load_pack(const bf16* from) { return (Pack)_mm512_loadu_si512(from); }
inline Pack load_pack(const bf16* from, std::int64_t count) {
  return (Pack)_mm512_maskz_loadu_epi16(__mmask32((1ull << count) - 1), from);
}
inline Pack load_pack(const std::int8_t* from) {
  __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from + 1)));
  return _mm512_cvtne2ps_pbh(second, first);
}
inline Vec dot(Vec acc, Pack a, Pack b) { return (Vec)_mm512_dpbf16_ps((__m512)acc, a, b); }
#else
typedef Bits Pack;
inline Pack load_pack(const bf16* from) {
  Pack pack;
  __builtin_memcpy(&pack, from, sizeof pack);
  return pack;
}
inline Pack load_pack(const bf16* from, std::int64_t count) {
  Pack pack{};
  __builtin_memcpy(&pack, from, count * sizeof(bf16));
  return pack;
}
inline Pack load_pack(const std::int8_t* from) {
  Halves pairs;
  __builtin_memcpy(&pairs, from, sizeof pairs);
  Bits wide = __builtin_convertvector(pairs, Bits);
  Vec first = __builtin_convertvector((Ints)(wide << 24) >> 24, Vec);
  Vec second = __builtin_convertvector((Ints)(wide << 16) >> 24, Vec);
  return (Bits)first >> 16 | (Bits)second;  // few digits: the lower halves are 0
}
inline Vec dot(Vec acc, Pack a, Pack b) {  // the compiler contracts to fused multiply-add where there is one
  acc = acc + (Vec)(a << 16) * (Vec)(b << 16);
  return acc + (Vec)(a & 0xffff0000u) * (Vec)(b & 0xffff0000u);
}
#endif

inline Pack load_pack(const std::int8_t* from, std::int64_t count) {
  std::int8_t values[PACK] = {};
  __builtin_memcpy(values, from, count);
  return load_pack(values);
}

inline void store_pack(bf16* to, Pack pack) { __builtin_memcpy(to, &pack, sizeof pack); }

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace
