// Outside: what a recorded region reads beside its arguments, and whether that is there as it was.
//
// A replay reads memory and not tensors: a buffer that was given other memory meanwhile (a checkpoint
// that is loaded, set_data), or a member in whose place another tensor was put, would be read as it was
// before. So each call asks, before it replays, what became of the tensors that were read: whether each
// is still there, and the same part of the same memory. Else the region is recorded anew.
//
// [Note: weak holds] Between calls nothing that was recorded holds what is outside, neither tensors nor
// their memory: tapes and programs know both by weak references, and entries hold the memory from
// forward to backward, as autograd does. So a tensor that is gone was given up by its owner, however
// many regions, variants and models have recorded it, and nobody has to count who did. A member may be
// given another tensor while somebody else keeps the old one: another module with the same table, a
// list of tables. Then fewer hold it than in the call before, which a region's book tells all of its
// variants; they are recorded anew, for nothing where the other one has given it up. Not seen: a
// tensor that is replaced while somebody else comes to hold it, as by a swap, or as by a graph whose
// backward is to come.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capture/replay/region_program.h"
#include "capture/replay/tape.h"

namespace tessera::capture {

/// Counts the changes in place of one tensor, also where the tensor itself is gone.
using Version = std::pair<c10::VariableVersion, std::uint32_t>;

/// How many hold the tensors that a region has read, in whichever variant.
class Holders {
 public:
  /// At the beginning of each call, and when what was recorded has ended. `has_graphs`: what is being
  /// recorded holds what it has read, so that more tell nothing.
  void look(bool has_graphs);
  /// Of that tensor, which is looked at from here on: another one than before where fewer came to hold
  /// it in between.
  int times_fewer(const WeakTensor& tensor);

 private:
  struct Entry {
    WeakTensor tensor;
    std::size_t holders = 0;  ///< at the last look; 0: none yet
    int times_fewer = 0;
  };
  std::vector<Entry> entries_;
};

class Outside {
 public:
  /// Of a program that was made of `tape`, by the parameters and buffers that `modules` have now.
  Outside(const Program& program, const Tape& tape,
          const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

  /// The region was recorded again. What it did not read again was a tensor of one call alone.
  void keep_read_again(const Tape& tape, Holders& holders);
  /// Why what became of some memory could not be told; empty: it can be.
  std::string refused() const;
  /// Whether the buffers lie where they lay: of other tensors comparing tells.
  bool has_buffers() const;
  /// Whether all lies where it lay.
  bool lies_as_before() const;
  /// And is held by no fewer than before.
  bool is_there(Holders& holders) const;
  /// Of what the program's backward reads.
  std::vector<Version> versions_of_backward() const { return versions(/*of_backward=*/true); }
  /// Of all that is read.
  std::vector<Version> versions() const { return versions(/*of_backward=*/false); }

 private:
  /// A buffer of the modules, or a tensor that operations have read. Their parameters have guards of
  /// their own.
  struct Known {
    WeakTensor tensor;
    Value place;
    const c10::StorageImpl* memory = nullptr;  ///< compared alone
    bool requires_grad = false;
    bool is_buffer = false;
    bool is_of_backward = false;
    int times_fewer = 0;  ///< when it was last compared
    bool lies_as_before() const;
    const c10::TensorImpl* name() const { return tensor._unsafe_get_target(); }
  };

  Known* find(const at::Tensor& tensor);
  std::vector<Version> versions(bool of_backward) const;

  std::vector<Known> known_;
  std::vector<WeakStorage> memories_;
  std::vector<bool> is_of_parameters_;  ///< by memory
};

/// Whether nobody has changed one of them in place since.
bool are_unchanged(const std::vector<Version>& versions);

}  // namespace tessera::capture
