// How operations are performed: in phases, at once or again as parts of a recorded program.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace mtp {

using at::Tensor;

// A part of an operation, behind which its threads meet. It holds pointers into tensors, not the tensors.
struct Phase {
  // The threads that it is worth; or a function for one thread, called before the work, that tells it and prepares it.
  std::int64_t threads = 1;
  std::function<std::int64_t()> plan;
  std::function<void(std::int64_t thread, std::int64_t threads)> work;
  const char* operation = "";
};

// Does a phase, and keeps it if a program is being recorded.
void perform(Phase phase);

// While it lives, phases belong to an operation of this name, under which torch's profiler tells its time.
class Operation {
 public:
  explicit Operation(const char* name);
  ~Operation();
  Operation(const Operation&) = delete;

 private:
  const char* outer_;
  at::RecordFunction watch_;
};

// Memory of tensors that are made in turn: what one has left is there for the next.
class Pool {
 public:
  Tensor take(at::IntArrayRef shape, at::ScalarType type);
  // Gives back what no tensor has and none has taken since the last time.
  void trim();
  std::int64_t num_bytes() const;

 private:
  struct Buffer {
    Tensor bytes;
    bool taken;
    bool free() const { return bytes.storage().use_count() == 1; }
  };
  std::vector<Buffer> buffers_;
};

// The phases of all operations between `begin` and `end`, on the tensors that they had then. Tensors that operations
// make in between are of the pool; what reads them later must keep them.
class Program {
 public:
  explicit Program(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  void begin();
  void end();
  // Performs the phases in one parallel region, without torch but for its profiler. Of two threads one alone performs
  // those that begin before `alone_until`, in seconds of the monotonic clock, and leaves a processor to others.
  void run(double alone_until) const;

 private:
  friend void perform(Phase);
  friend Tensor new_tensor(at::IntArrayRef, at::ScalarType);
  std::size_t run_alone(double until) const;  // how many phases that were
  std::shared_ptr<Pool> pool_;
  std::vector<Phase> phases_;
};

// A tensor without values, of the program's pool while one is being recorded. Outside, large ones are of a pool of the
// thread: malloc would have each of them from the system, in new pages that the system fills with zeros.
Tensor new_tensor(at::IntArrayRef shape, at::ScalarType type);

inline Tensor new_tensor(at::IntArrayRef shape) { return new_tensor(shape, at::kBFloat16); }

}  // namespace mtp
