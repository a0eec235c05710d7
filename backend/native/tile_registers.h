// The instructions of AMX, with tile registers by number so that templates can name them. The compiler's own do not say that
// they read memory, and so it may leave out what was written there before.
#pragma once

namespace {

// `config`: the 64 bytes that shape the registers.
inline void tile_config(const void* config) { asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory"); }
inline void tile_release() { asm volatile("tilerelease"); }

template <int TILE>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void tile_load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int SUM, int LEFT, int RIGHT>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

}  // namespace
