// One region: its variants, each with the guards under which it was recorded. Private to
// regions.cpp and region_call.cpp. [Note: regions]
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "capture/replay/live_entry.h"
#include "capture/replay/outside.h"
#include "capture/replay/region_program.h"
#include "capture/replay/regions.h"
#include "capture/replay/tape.h"

namespace tessera::capture {

/// The properties that an argument must have.
struct InputLike {
  bool defined = false;
  bool requires_grad = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes, strides;
  static InputLike of(const at::Tensor& tensor);
  bool matches(const at::Tensor& tensor) const;
};

struct Guards {
  std::vector<InputLike> inputs;
  std::vector<bool> needs_gradient;  ///< of the owner's parameters
  std::vector<bool> training;        ///< of its modules
  bool grad_mode = false;
  bool keeps = false, takes = false;  ///< what keep() does, in a selective checkpoint around it
  at::ScalarType default_dtype = at::kFloat;
  int threads = 1;
  bool deterministic = false;
  std::array<bool, 3> attention = {};  ///< which kernels of it libtorch may choose
};

/// Hashes the values of each tensor.
std::vector<Hash128> hashes_of(const std::vector<at::Tensor>& tensors);

/// Calls that are recorded again and compared before one is replayed.
inline constexpr int kCompared = 2;

struct Variant {
  Guards guards;
  std::shared_ptr<const Tape>
      tape;  ///< null until it was recorded, and when nothing is compared any more
  std::shared_ptr<const Program> program;
  TapeEnds ends;                     ///< of the tape
  std::shared_ptr<Outside> outside;  ///< of the program
  std::vector<Hash128> data;         ///< the arguments that were recorded
  /// Whether a call with another value was compared, by argument. Until then only the recorded
  /// value is replayed: what the host has read of it is unknown.
  std::vector<bool> varied;
  /// Copies of those that had not varied when all was compared, which are compared faster.
  std::vector<at::Tensor> same;
  std::vector<InputLike> gradients;  ///< of the results, when it was recorded
  std::vector<bool> results_need_gradient;
  std::size_t results =
      0;  ///< without grad mode: the number of the body's results, which those that are kept follow
  bool is_recording = false;  ///< by a call whose backward is to come
  int compared = 0;
  std::string refused;         ///< why it stays eager; empty: it does not
  std::int64_t last_call = 0;  ///< of the region's
  std::vector<std::unique_ptr<LiveEntry>> free;

  void keep_same(const std::vector<at::Tensor>& arguments);
  bool is_compared() const { return refused.empty() && compared >= kCompared; }
  bool replays(const std::vector<at::Tensor>& arguments) const;
  /// Has it recorded again.
  void forget() {
    tape.reset();
    program.reset();
    outside.reset();
    same.clear();
    compared = 0;
    free.clear();
  }
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(const std::shared_ptr<torch::nn::Module>& owner, std::string name,
         std::shared_ptr<SharedByRegions> shared);

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const grad::RegionBody& body);
  bool is_of(const std::shared_ptr<torch::nn::Module>& owner) const {
    return owner_.lock() == owner;
  }

  const std::string& name() const { return name_; }
  SharedByRegions& shared() { return *shared_; }
  ReplayCalls& calls() { return shared_->calls; }
  /// Logs that it stays eager; of regions that do for the same reason only the first one.
  void say_once(const std::string& why);
  /// Takes an entry, which returns to the variant's free ones with its last reference.
  std::shared_ptr<LiveEntry> take_entry(const std::shared_ptr<Variant>& variant) const;
  /// Makes an entry to compare with, which is not kept: its block is free afterwards.
  std::shared_ptr<LiveEntry> entry_to_compare(const Variant& variant) const;
  /// Whether the tensor is memory of the owner's own parameters or buffers.
  bool owns(const at::Tensor& tensor) const;
  /// Whether weight gradients are deferred now.
  bool defers_weight_gradients() const;
  /// Whether kernels and modules are set as they were, in addition to arguments and parameters.
  bool is_set_as(const Guards& guards) const;
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const { return modules_; }
  Holders& holders() { return holders_; }

 private:
  /// Returns why this call is eager; empty: it need not be.
  std::string why_eager(const std::vector<at::Tensor>& inputs) const;
  /// Whether a module inside runs its forward through checkpoint() in its present mode, which makes
  /// the checkpoint part of the body. A checkpoint around the region is not.
  bool recomputes_inside() const;
  bool matches(const Guards& guards, const std::vector<at::Tensor>& inputs) const;
  std::shared_ptr<Variant> variant_of(const std::vector<at::Tensor>& inputs) const;
  /// Whether what its program reads in addition to its arguments is unchanged (Outside).
  bool is_outside_there(const Variant& variant);
  /// Whether there is room for one more variant, if need be that of one that is no longer called.
  bool has_room();
  Guards guards_of(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> eager(const std::string& why, const std::vector<at::Tensor>& inputs,
                                const grad::RegionBody& body);

  std::weak_ptr<torch::nn::Module> owner_;
  std::string name_;
  std::string unit_;  ///< in which its owner lies; "" = none
  std::shared_ptr<SharedByRegions> shared_;
  std::string never_;  ///< why no call is ever replayed
  std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<std::shared_ptr<Variant>> variants_;
  Holders holders_;  ///< of what the variants read outside
  std::int64_t calls_ = 0;
};

/// Makes one call of a variant that is recorded, compared or replayed, under grad mode.
std::vector<at::Tensor> call_with_gradients(const std::shared_ptr<Region>& region,
                                            const std::shared_ptr<Variant>& variant,
                                            const std::vector<at::Tensor>& inputs,
                                            const grad::RegionBody& body);
/// The same without grad mode: there is no backward.
std::vector<at::Tensor> call_without(Region& region, const std::shared_ptr<Variant>& variant,
                                     const std::vector<at::Tensor>& inputs,
                                     const grad::RegionBody& body);

}  // namespace tessera::capture
