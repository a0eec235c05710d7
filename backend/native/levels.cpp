// Compiled for the oldest machine: decides which kernels may run.
#include "levels.h"

#include "kernels.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mtp {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

// CPUID leaf 7 tells of the unit, the system must give the process its registers (Linux 5.16).
bool has_amx() {
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return has_avx512() && (d & BF16) && (d & TILE) && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}
#endif

#define MTP_ENTRY(level, kernel, result, parameters) level::kernel,
#define MTP_TABLE(level) \
  Kernels { #level, MTP_ALL_KERNELS(MTP_ENTRY, level) }

std::vector<Kernels> find_levels() {
  std::vector<Kernels> found;
#if defined(MTP_HAS_AMX)
  if (has_amx()) found.push_back(MTP_TABLE(amx));
#endif
#if defined(MTP_HAS_AVX512)
  if (has_avx512()) found.push_back(MTP_TABLE(avx512));
#endif
#if defined(MTP_HAS_AVX2)
  if (has_avx2()) found.push_back(MTP_TABLE(avx2));
#endif
  found.push_back(MTP_TABLE(portable));
  return found;
}

const std::vector<Kernels>& tables() {
  static const std::vector<Kernels> found = find_levels();
  return found;
}

const Kernels*& current() {
  static const Kernels* table = &tables().front();
  return table;
}

}  // namespace

const Kernels& kernels() { return *current(); }

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (const Kernels& table : tables()) names.push_back(table.level);
  return names;
}

bool use_level(const std::string& name) {
  for (const Kernels& table : tables())
    if (name == table.level) {
      current() = &table;
      return true;
    }
  return false;
}

}  // namespace mtp
