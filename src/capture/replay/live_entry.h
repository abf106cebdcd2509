// LiveEntry: one forward of a program whose backward may follow, with all its tensors made.
//
// Every value of the program is a tensor that is made once; only the address of its memory changes
// from call to call, and is set. So a replay makes no tensor and no view except what it hands out,
// and takes memory once: its block, and a scratch block while it runs. Threads: one at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capture/replay/blocks.h"
#include "capture/replay/region_program.h"

namespace tessera::capture {

/// Called after the operation of each step, and where a raw gradient is left.
using StepSeen = std::function<void(std::size_t step)>;

class LiveEntry {
 public:
  /// `unit` is the one in which the region lies.
  LiveEntry(std::shared_ptr<const Program> program, std::shared_ptr<Blocks> blocks,
            std::string unit);
  LiveEntry(const LiveEntry&) = delete;
  LiveEntry& operator=(const LiveEntry&) = delete;

  /// Returns the results, fresh. Sizes, strides and dtypes of `inputs` are the program's and are
  /// not checked.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const StepSeen& seen = {});
  enum class Gradients : std::uint8_t {
    kAccepted,  ///< by their sinks
    kLeft,      ///< for no sink: a comparison
  };
  /// Returns the gradients of the inputs, fresh. To be called after forward(), and repeatedly where
  /// backward writes to nothing that forward left. Deferred weight gradients hold `lease`, this
  /// entry, until they are formed: until then it runs no other forward.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients,
                                   Gradients of_parameters, const StepSeen& seen = {},
                                   const std::shared_ptr<const LiveEntry>& lease = {});
  /// Releases the tensors that were given in and handed out, the memory from outside, and the
  /// block.
  void release();

  const Program& program() const { return *program_; }
  const at::Tensor& value(ValueId id) const { return values_[static_cast<std::size_t>(id)]; }

 private:
  void point(MemoryId memory, void* data);
  /// Sets where memories of that place lie from here on.
  void use(MemoryPlace place, char* block, char*& last);
  Block scratch() const;
  void find_outside();
  void give(const std::vector<ValueId>& values, const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> hand_out(const std::vector<HandedValue>& handed);
  std::vector<at::Tensor> handed(const std::vector<HandedValue>& handed,
                                 const std::vector<at::Tensor>& fresh,
                                 const std::vector<at::Tensor>& given) const;
  c10::Stack stack_of(const ProgramCall& call) const;
  void run(std::size_t begin, std::size_t end, Gradients of_parameters, const StepSeen& seen);
  void run_call(std::size_t step, Gradients of_parameters);
  bool run_into_slot(const ProgramCall& call, std::size_t step);
  void defer(const ProgramCall& call, grad::WeightGradStore& store) const;
  void accept(const TapeGradient& gradient) const;

  std::shared_ptr<const Program> program_;
  std::shared_ptr<Blocks> blocks_;
  std::string unit_;
  std::optional<Block> block_;
  char *last_block_ = nullptr, *last_scratch_ = nullptr;  // where memories point to
  std::vector<c10::Storage> storages_;                    // by memory
  std::vector<at::Tensor> values_;
  std::vector<std::size_t> outside_;            // which of the values are from outside
  std::vector<c10::Stack> stacks_;              // by step
  std::vector<std::vector<at::Tensor>> made_;   // by step: where results lie
  std::vector<std::vector<at::Tensor>> given_;  // what a kernel is given for them
  std::vector<c10::Storage> held_;              // given by others, or handed out and read again
  std::vector<bool> accepted_;                  // by step: its gradient is in its slot or deferred
  std::shared_ptr<const LiveEntry> lease_;      // while it runs backward
  c10::Stack stack_;
};

}  // namespace tessera::capture
