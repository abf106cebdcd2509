// Optimizers over the shards of a handle: AdamW and SGD with PyTorch's formulas, element by element
// on the ranges that this rank owns, and Muon, which takes matrices whole.
//
// They hold what they step: one may outlive its handle. torch::optim's work on handle.parameters()
// too; these refuse to step while a backward is owed, skip parameters that no rank used, and decide
// decay by name, since a shard has lost its dims. Next: clip.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/muon.h"
#include "tessera/optimizer_rule.h"
#include "tessera/shard.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace tessera {

namespace fsdp {
struct OptimizerItem;
}  // namespace fsdp

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< decoupled, on every trainable parameter but those of `no_decay`
  std::vector<std::string> no_decay{};  ///< patterns as PrecisionRule::match
  std::vector<OptimizerRule> rules{};   ///< over no_decay; Errors: those of its fields
};

struct SgdOptions {
  double lr = 1e-2;
  double momentum = 0.0;
  double weight_decay = 0.0;  ///< added to the gradient, as PyTorch's SGD
  std::vector<std::string> no_decay{};
  std::vector<OptimizerRule> rules{};
};

/// A tensor that an optimizer keeps of each parameter: laid out as its shard, in the contract's
/// `state` dtype, zeros at first. Checkpoints have it whole, for any layout, as
/// optim/NAME/PARAMETER.
struct KeptTensor {
  enum class Begins {
    kWithTheFirstUpdate,  ///< what was updated has it
    kLater,               ///< what was updated may lack it: it begins as the next gradient
  };
  std::string name;  ///< as PyTorch calls it: "exp_avg"
  Begins begins = Begins::kWithTheFirstUpdate;
};

/// What an optimizer keeps of one parameter, for a checkpoint.
struct OptimizerState {
  struct Kept {
    std::string name;   ///< as PyTorch calls it: "exp_avg"
    at::Tensor values;  ///< over the elements of the shard; the optimizer's own tensor
  };
  ShardView view;
  std::int64_t steps = 0;  ///< updates so far, the same on every rank
  std::vector<Kept> kept;  ///< empty before the first update
};

class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  /// Updates every shard that has a gradient. Not collective, but for Muon's, which all ranks of the
  /// stage call. Errors: kUsage while a recorded
  /// forward waits for its backward or a micro-batch to be reduced, or after a set_trainable() that
  /// did not name this optimizer; kContract for a gradient whose dtype is neither the shard's nor
  /// float32 for a 16-bit shard (PrecisionPolicy::final_dtype).
  void step();
  /// Errors: kUsage below 0, infinite or NaN.
  void set_lr(double lr);
  double lr() const;
  /// For PyTorch's schedulers: torch::optim::StepLR scheduler(*optimizer, 10). One group without
  /// parameters, whose learning rate is this one's; step() is this one's, zero_grad() does nothing
  /// (use the handle's), save() and load() have nothing (state() has). After an add_param_group()
  /// or a parameter that was put into the group every step() is refused: kUsage. Lives as long as
  /// this.
  operator torch::optim::Optimizer&();  // NOLINT(google-explicit-constructor): reads as there

  /// "AdamW", "SGD", "Muon".
  virtual std::string name() const = 0;
  /// What it may keep of a parameter, beside a master.
  virtual std::vector<KeptTensor> states() const = 0;
  /// What it keeps of this one: some of states(), all of it unless said otherwise.
  virtual std::vector<KeptTensor> states_of(const GradContract&) const { return states(); }
  /// Every name that OptimizerState::Kept may have.
  std::vector<std::string> kept_names() const;
  /// What it keeps of such a parameter once that is updated, a master included, by name.
  std::map<std::string, DType> kept_dtypes(const GradContract& contract) const;
  /// Of every trainable parameter, in the model's order. Whole, by name: state_dict.h.
  std::vector<OptimizerState> state() const;
  /// As far as AdamW's powers of beta go in float32, and far beyond every run.
  static constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;
  /// Goes on as after `steps` updates of a parameter. Errors: kUsage for an unknown name or a
  /// number of steps that no run takes.
  void set_steps(std::string_view parameter, std::int64_t steps);
  /// What it keeps of a parameter, made where there is nothing yet, for the caller to fill with
  /// what belongs to the shard's values as they are now. Errors: the same.
  std::vector<OptimizerState::Kept> make_kept(std::string_view parameter);
  /// Begins anew with a parameter, as before its first update. Errors: the same.
  void forget(std::string_view parameter);

 protected:
  /// Errors: kContract for a pattern that matches nothing, kConfig for numbers of a rule.
  Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay,
            const std::vector<OptimizerRule>& rules);
  /// Every item has its state and a gradient.
  virtual void update(const std::vector<fsdp::OptimizerItem*>& items) = 0;
  class Inside;  // fsdp/optim/optimizer_inside.h
  const std::unique_ptr<Inside> inside_;

 private:
  friend class TrainableChanger;
};

/// Everything is formed in float32, in float64 for float64 shards. A shard in 16 bits is stepped
/// with what its contract's Master keeps beside it, so that updates below a 16-bit step add up,
/// where torch.optim on such a parameter loses them; with Master::kNone it is stepped as
/// torch.optim does, moments and all in its own dtype. A shard that somebody else has written since
/// its last step goes on from the values that were written: of bfloat16 ones the bits beside them
/// are dropped. State, bytes an element of the shard: 8 in float32, 10 in bfloat16 (moments and
/// remainder), 12 in float16 (moments and copy), 16 in float64, 4 for 16 bits without a master.
std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options);
/// PyTorch's formulas, with masters as make_adamw. Momentum has the dtype in which the shard is
/// stepped.
std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options);

/// Matrices as torch.optim.Muon of torch 2.13 steps them (momentum, Newton-Schulz, decoupled decay),
/// iterated in float32; all else as make_adamw, with masters for both. Matrices are the trainable
/// parameters of two dims, and each [rows, columns] of those with three, but for MuonOptions::adamw.
/// Each is formed whole, of all that dp_shard and tp cut, on one rank, by one all-to-all a step there
/// and one back (matrix_exchange.h), and is stepped with the bits of one rank, in float32 whatever the
/// numbers of threads are. Bytes a rank sends: at most 4 an element that it holds and, for others,
/// 4 an element that it orthogonalizes. State: 4 bytes an element of a matrix, what make_adamw keeps of
/// the rest. step() is collective. Errors: kUsage for numbers out of range; kContract for a pattern
/// that matches nothing.
std::unique_ptr<Optimizer> make_muon(const ShardedBase& model, const MuonOptions& options);

}  // namespace tessera
