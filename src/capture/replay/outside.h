// Outside: what a recorded region reads beside its arguments, and whether that is there as it was.
//
// A replay reads memory and not tensors: a buffer that was given other memory meanwhile (a checkpoint
// that is loaded, set_data) would be read as it was before. So each call asks whether the buffers of the
// region's modules lie where they lay, and, of all else that is read, whether anybody but the recording
// holds it: what has come in its place is not known, but that something has. Then the region is recorded
// anew.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "capture/replay/region_program.h"

namespace tessera::capture {

class Outside {
 public:
  Outside() = default;
  /// Of a program that was made, by what `modules` hold now.
  Outside(const Program& program, const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

  bool buffers_are_there() const;
  /// `held_elsewhere`: how often the recording holds each memory beside the program.
  bool is_held(const Program& program, int held_elsewhere) const;
  /// Of the buffers: another one says that somebody wrote to one.
  std::vector<std::int64_t> versions() const;

 private:
  struct Buffer {
    at::Tensor tensor;
    const c10::StorageImpl* storage;
  };
  struct Memory {
    std::size_t number;
    std::int64_t own_uses;  ///< of the program itself
  };
  std::vector<Buffer> buffers_;
  std::vector<Memory> memories_;
};

}  // namespace tessera::capture
