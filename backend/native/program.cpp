#include "program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>

namespace mtp {
namespace {

constexpr std::int64_t LARGE_BYTES = 1 << 17;      // what malloc has from the system by itself
constexpr std::int64_t TAKES_UNTIL_TRIM = 1 << 11;  // those of some passes of a network

thread_local Program* recording = nullptr;
thread_local const char* operation = "";

std::int64_t threads_for(const Phase& phase) {
  return std::clamp<std::int64_t>(phase.plan ? phase.plan() : phase.threads, 1, at::get_num_threads());
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Operation::Operation(const char* name) : outer_(operation), watch_(at::RecordScope::FUNCTION) {
  operation = name;
  if (watch_.isActive()) watch_.before(name);
}

Operation::~Operation() { operation = outer_; }

void perform(Phase phase) {
  std::int64_t threads = threads_for(phase);
  at::parallel_for(0, threads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t thread = begin; thread < end; ++thread) phase.work(thread, threads);
  });
  if (!recording) return;
  phase.operation = operation;
  recording->phases_.push_back(std::move(phase));
}

namespace {

std::int64_t bytes_of(at::IntArrayRef shape, at::ScalarType type) {
  std::int64_t bytes = std::int64_t(c10::elementSize(type));
  for (std::int64_t size : shape) bytes *= size;
  return bytes;
}

}  // namespace

Tensor Pool::take(at::IntArrayRef shape, at::ScalarType type) {
  std::int64_t bytes = bytes_of(shape, type);
  Buffer* chosen = nullptr;
  // None of more than twice the size: what a program keeps would take it from all others.
  for (Buffer& buffer : buffers_)
    if (buffer.free() && buffer.bytes.numel() >= bytes && buffer.bytes.numel() <= 2 * bytes &&
        (!chosen || buffer.bytes.numel() < chosen->bytes.numel()))
      chosen = &buffer;
  if (!chosen) {
    Tensor fresh = at::empty({std::max<std::int64_t>(bytes, 1)}, at::device(at::kCPU).dtype(at::kByte));
    chosen = &buffers_.emplace_back(Buffer{std::move(fresh), false});
  }
  chosen->taken = true;
  // As at::empty makes a tensor, without operations of torch, which take longer than small kernels.
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(chosen->bytes.storage()),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                           c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

void Pool::trim() {
  auto unused = [](const Buffer& buffer) { return buffer.free() && !buffer.taken; };
  buffers_.erase(std::remove_if(buffers_.begin(), buffers_.end(), unused), buffers_.end());
  for (Buffer& buffer : buffers_) buffer.taken = false;
}

std::int64_t Pool::num_bytes() const {
  std::int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.bytes.numel();
  return total;
}

Tensor new_tensor(at::IntArrayRef shape, at::ScalarType type) {
  if (recording) return recording->pool_->take(shape, type);
  if (bytes_of(shape, type) < LARGE_BYTES) return at::empty(shape, at::device(at::kCPU).dtype(type));
  thread_local Pool pool;
  thread_local std::int64_t until_trim = TAKES_UNTIL_TRIM;
  if (!--until_trim) {
    pool.trim();
    until_trim = TAKES_UNTIL_TRIM;
  }
  return pool.take(shape, type);
}

void Program::begin() {
  TORCH_CHECK(!recording, "a program is being recorded already");
  phases_.clear();
  recording = this;
}

void Program::end() { recording = nullptr; }

std::size_t Program::run_alone(double until) const {
  std::size_t done = 0;
  if (at::get_num_threads() != 2) return done;
  for (; done < phases_.size() && seconds_now() < until; ++done) {
    const Phase& phase = phases_[done];
    Operation operation(phase.operation);
    std::int64_t threads = threads_for(phase);
    for (std::int64_t thread = 0; thread < threads; ++thread) phase.work(thread, threads);
  }
  return done;
}

void Program::run(double alone_until) const {
  std::size_t first = run_alone(alone_until);
  if (first == phases_.size()) return;
  std::int64_t share = 0;
  std::exception_ptr failure;
  bool watched = at::hasCallbacks();
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    for (std::size_t index = first; index < phases_.size(); ++index) {
      const Phase& phase = phases_[index];
      std::optional<Operation> operation;
      if (watched && !thread) operation.emplace(phase.operation);
      std::int64_t threads = std::min(phase.threads, all);
      if (phase.plan) {
        if (!thread) {
          try {
            share = std::clamp<std::int64_t>(phase.plan(), 1, all);
          } catch (...) {
            failure = std::current_exception();
          }
        }
#pragma omp barrier
        if (failure) break;
        threads = share;
      }
      if (thread < threads) phase.work(thread, threads);
#pragma omp barrier
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace mtp
