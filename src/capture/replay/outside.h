// Outside: what a recorded region reads in addition to its arguments, and whether it is unchanged.
//
// A replay reads memory, not tensors. So it would read old values after a buffer got other memory
// (load_checkpoint, set_data), or after a member was set to another tensor. Each call therefore
// checks first that every tensor that was read still exists and is the same part of the same
// memory; otherwise the region is recorded again.
//
// [Note: weak holds] Between calls a recording holds neither the tensors that it reads outside nor
// their memory: tapes and programs have weak references to both, and an entry holds the memory from
// forward to backward, as autograd does. So a tensor that is gone was released by its owner,
// however many regions, variants and models have recorded it. A member may also be set to another
// tensor while another owner keeps the old one (a second module with the same table, a list of
// tables). Then the old tensor has fewer holders than in the call before; the region's Holders
// report that to all of its variants, which are recorded again. That is superfluous where it was
// the other owner that released the tensor. Not detected: a tensor that is replaced while it gains
// another holder, as in a swap, or from a graph whose backward has not run yet.
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

/// Counts the holders of the tensors that the variants of a region have read.
class Holders {
 public:
  /// Counts again, at the beginning of each call and around recordings. `has_graphs`: graphs of
  /// recordings hold what they have read, so that a larger number is not taken over.
  void look(bool has_graphs);
  /// Returns how often look() found fewer holders of `tensor`, which it watches from the first such
  /// call on: another number than before means that the tensor has lost a holder in between.
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
  /// Collects what `program`, which was made of `tape`, reads outside, without the parameters of
  /// `modules` and with their buffers.
  Outside(const Program& program, const Tape& tape,
          const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

  /// Drops the tensors that the second recording, `tape`, did not read again: each belonged to one
  /// call alone. Buffers stay.
  void keep_read_again(const Tape& tape, Holders& holders);
  /// Why changes of some memory cannot be detected; empty where all can.
  std::string refused() const;
  /// Whether lies_as_before() holds for the buffers. It suffices while calls are still compared:
  /// the comparison finds every other change.
  bool has_buffers() const;
  /// Whether every tensor still exists and is the same part of the same memory.
  bool lies_as_before() const;
  /// lies_as_before(), and no tensor has lost a holder since it was last compared.
  bool is_there(Holders& holders) const;
  /// The versions of the tensors that the program's backward reads.
  std::vector<Version> versions_of_backward() const { return versions(/*of_backward=*/true); }
  /// The versions of all tensors that the program reads.
  std::vector<Version> versions() const { return versions(/*of_backward=*/false); }

 private:
  /// A buffer of the modules, or a tensor that operations have read. Parameters have other guards.
  struct Known {
    WeakTensor tensor;
    Value place;
    const c10::StorageImpl* memory = nullptr;  ///< never dereferenced
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

/// Whether none of the tensors was changed in place since.
bool are_unchanged(const std::vector<Version>& versions);

}  // namespace tessera::capture
