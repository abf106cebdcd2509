// Optimizers over the shards of a handle: AdamW and SGD with PyTorch's formulas, element by element
// on the ranges that this rank owns, and Muon, which steps whole matrices.
//
// An optimizer keeps its shards alive and may outlive the handle. Optimizers of torch::optim work
// on handle.parameters() too. Those of this header refuse to step while a backward is pending, skip
// parameters that no rank used, and decide weight decay by name, since a shard is flat. Next:
// clip.h.
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

/// Options of make_adamw().
struct AdamWOptions {
  double lr = 1e-3;           ///< learning rate
  double beta1 = 0.9;         ///< decay of the first moment
  double beta2 = 0.95;        ///< decay of the second moment
  double eps = 1e-8;          ///< added to the root of the second moment
  double weight_decay = 0.1;  ///< decoupled; for all trainable parameters except `no_decay`
  std::vector<std::string> no_decay{};  ///< patterns as PrecisionRule::match
  std::vector<OptimizerRule> rules{};   ///< override no_decay
};

/// Options of make_sgd().
struct SgdOptions {
  double lr = 1e-2;                     ///< learning rate
  double momentum = 0.0;                ///< 0 = none
  double weight_decay = 0.0;            ///< added to the gradient, as PyTorch's SGD
  std::vector<std::string> no_decay{};  ///< patterns as PrecisionRule::match
  std::vector<OptimizerRule> rules{};   ///< override no_decay
};

/// A state tensor that an optimizer keeps for each parameter: laid out as the shard, in the
/// contract's `state` dtype, zero at first. Checkpoints have it whole, for any layout, as
/// optim/NAME/PARAMETER.
struct KeptTensor {
  /// When the tensor comes into being.
  enum class Begins {
    kWithTheFirstUpdate,  ///< every updated parameter has it
    kLater,               ///< an updated parameter may lack it; it begins as the next gradient
  };
  std::string name;                             ///< PyTorch's name: "exp_avg"
  Begins begins = Begins::kWithTheFirstUpdate;  ///< when it comes into being
};

/// The optimizer state of one parameter's shard, for a checkpoint.
struct OptimizerState {
  /// One state tensor.
  struct Kept {
    std::string name;   ///< PyTorch's name: "exp_avg"
    at::Tensor values;  ///< [numel of the shard]; the optimizer's own tensor
  };
  ShardView view;          ///< the shard
  std::int64_t steps = 0;  ///< updates so far, the same on every rank
  std::vector<Kept> kept;  ///< empty before the first update
};

/// An optimizer over the shards that this rank owns; make_adamw(), make_sgd() and make_muon() make
/// one.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  /// Updates every shard that has a gradient. Only Muon's is collective, among the ranks of the
  /// pipeline stage. Errors: kUsage while a recorded forward waits for its backward or a
  /// micro-batch waits to be reduced, and after a set_trainable() that did not name this optimizer;
  /// kContract for a gradient whose dtype is neither the shard's nor float32 for a 16-bit shard
  /// (PrecisionPolicy::final_dtype).
  void step();
  /// Sets the learning rate. Errors: kUsage for a value that is below 0, infinite or NaN.
  void set_lr(double lr);
  /// Returns the learning rate.
  double lr() const;
  /// Presents this optimizer to PyTorch's schedulers: torch::optim::StepLR scheduler(*optimizer,
  /// 10). It has one group without parameters, whose learning rate is that of this optimizer.
  /// step() steps this optimizer. zero_grad() does nothing; use the handle's. save() and load()
  /// hold nothing; use state(). After add_param_group(), or after a parameter was put into the
  /// group, step() throws kUsage. The reference lives as long as this optimizer.
  operator torch::optim::Optimizer&();  // NOLINT(google-explicit-constructor): reads as there

  /// Returns "AdamW", "SGD" or "Muon".
  virtual std::string name() const = 0;
  /// Returns the state tensors that a parameter may have, without a master.
  virtual std::vector<KeptTensor> states() const = 0;
  /// Returns the state tensors that a parameter with this contract has: by default all of states().
  virtual std::vector<KeptTensor> states_of(const GradContract&) const { return states(); }
  /// Returns every name that OptimizerState::Kept may have.
  std::vector<std::string> kept_names() const;
  /// Returns the dtypes of the state tensors, including a master, that a parameter with this
  /// contract has after its first update, by name.
  std::map<std::string, DType> kept_dtypes(const GradContract& contract) const;
  /// Returns the state of every trainable parameter's shard, in the model's order. state_dict.h has
  /// it whole, by name.
  std::vector<OptimizerState> state() const;
  /// The bound of a parameter's number of updates: AdamW's powers of beta need no more in float32.
  static constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;
  /// Sets the number of updates of a parameter. Errors: kUsage for an unknown name, and for a
  /// number below 0 or above kMostSteps.
  void set_steps(std::string_view parameter, std::int64_t steps);
  /// Returns the state tensors of a parameter, allocated where there are none yet, for the caller
  /// to fill; they belong to the shard's values as they are now. Errors: kUsage for an unknown
  /// name.
  std::vector<OptimizerState::Kept> make_kept(std::string_view parameter);
  /// Drops the state of a parameter, as before its first update. Errors: kUsage for an unknown
  /// name.
  void forget(std::string_view parameter);

 protected:
  /// Takes the trainable shards of `model`. Errors: kContract for a pattern that matches nothing,
  /// kConfig for numbers of a rule.
  Optimizer(const ShardedBase& model, double lr, const std::vector<std::string>& no_decay,
            const std::vector<OptimizerRule>& rules);
  /// Updates items, each of which has its state and a gradient.
  virtual void update(const std::vector<fsdp::OptimizerItem*>& items) = 0;
  class Inside;  // fsdp/optim/optimizer_inside.h
  const std::unique_ptr<Inside> inside_;

 private:
  friend class TrainableChanger;
};

/// Makes AdamW. It computes in float32, and in float64 for float64 shards. A 16-bit shard is
/// stepped with its contract's Master, so that updates below a 16-bit step add up, which
/// torch.optim loses; with Master::kNone it is stepped as in torch.optim, with moments in its own
/// dtype. Where the program has written a shard since its last step, the next one starts from the
/// written values; for a bfloat16 shard the remainder is dropped. State, in bytes for each element
/// of the shard: 8 for float32, 10 for bfloat16 (moments and remainder), 12 for float16 (moments
/// and copy), 16 for float64, 4 for 16 bits without a master. Errors: kContract for a pattern that
/// matches nothing; kConfig for numbers of a rule; kUsage for numbers out of range.
std::unique_ptr<Optimizer> make_adamw(const ShardedBase& model, const AdamWOptions& options);
/// Makes SGD with PyTorch's formulas, with masters as make_adamw(). Momentum has the dtype in which
/// the shard is stepped. Errors: as make_adamw().
std::unique_ptr<Optimizer> make_sgd(const ShardedBase& model, const SgdOptions& options);

/// Makes Muon. It steps matrices as torch.optim.Muon of torch 2.13 (momentum, Newton-Schulz,
/// decoupled decay), iterated in float32, and all other parameters as make_adamw(), with masters
/// for both. Matrices are the trainable parameters of two dims, and each [rows, columns] of those
/// with three, except MuonOptions::adamw. One all-to-all a step brings the parts that dp_shard and
/// tp shard to one rank for each matrix, and one brings the results back (matrix_exchange.h). The
/// result has the bits of one rank, in float32 for any number of threads. step() is collective.
/// Bytes that a rank sends: at most 4 for each element that it holds, and 4 for each element of
/// others that it orthogonalizes. State: 4 bytes for each element of a matrix; as make_adamw() for
/// the rest. Errors: kUsage for numbers out of range; kContract for a pattern that matches nothing.
std::unique_ptr<Optimizer> make_muon(const ShardedBase& model, const MuonOptions& options);

}  // namespace tessera
