// fully_shard: turns any torch::nn::Module into a sharded one, called through a handle.
//
// C++ has no module hooks, so what Python's FSDP2 does in hooks happens in Sharded<M>::forward. The
// handle is a module itself, with M's forward signature: it can be a child of another module, stand
// in a Sequential, and its parameters() are the shards that an optimizer steps. Inner units exist
// where the code calls such handles. Parameters of one unit may have different dtypes. Not a
// wrapper that copies M: M's own tensors show the unsharded parameters while the unit computes and
// throw at any other time. Source of the semantics: PyTorch FSDP2 `fully_shard`; the differences
// are in docs/. Next: optim.h, clip.h.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/forward_signature.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/precision.h"
#include "tessera/visit_tensors.h"

namespace tessera {

namespace comm {
class Group;
}  // namespace comm

namespace fsdp {
class Unit;
class Runtime;
class Crossed;
struct Entry;
struct FoundHandle;
struct Parameter;
}  // namespace fsdp

class ShardedBase;
class TrainableChanger;

struct ShardOptions {
  /// Canonical name of the module in the whole model ("model.layers.0"): put before its parameters'
  /// names.
  /// "" = from its place in the parent that is sharded later.
  std::string name;
  /// Give the unsharded parameters back after forward and gather them again in backward. none =
  /// true for units inside another one (set when the outer one is sharded), false for the
  /// outermost.
  std::optional<bool> reshard_after_forward;
  /// Buckets of inner units that are smaller than this (bytes of the unsharded compute dtype) move
  /// to the outermost unit and are gathered once a step.
  std::int64_t merge_below_bytes = 0;
  /// none = the number of data ranks, as FSDP2 averages.
  std::optional<double> divide_factor;
  /// Floating outputs of this unit are cast to it, wherever the unit stands; none = those of the
  /// outermost one to PrecisionPolicy::output_dtype, those of units inside stay as they come.
  std::optional<DType> output_dtype;
  /// Gradient bytes that may be under way before the issuer waits for the oldest reduction: enough
  /// for the wire to stay busy, little enough for buffers to be used again while they are warm. none
  /// = 32 MiB on the CPU; on a device those of two units.
  std::optional<std::int64_t> in_flight_bytes;
  /// Resolved beforehand for the whole model, looked up by canonical name; none = resolved here
  /// from the policy. Their placements are compared with what the modules declare.
  std::shared_ptr<const std::vector<GradContract>> contracts;
  /// The same for buffers; used with `contracts` only.
  std::shared_ptr<const std::vector<BufferContract>> buffer_contracts;
  /// The same for units, looked up by `name`; used with `contracts` only.
  std::shared_ptr<const std::vector<UnitContract>> unit_contracts;
  /// What modules that do not declare it themselves (DeclaresLayouts) do with parameters beyond the
  /// data axes, by path in the module; their tensors are the local ones.
  std::map<std::string, ParameterLayout> layouts = {};
  /// From a parameter's path in the module to its canonical name; none = `name` + "." + path.
  std::function<std::string(const std::string&)> canonical_name;
  /// Handles whose modules still stand plain in the tree, because the code reaches them in another
  /// way (grad/slot.h): each is met where its module is.
  std::vector<std::shared_ptr<ShardedBase>> inner;
  /// Tensors to leave alone: not sharded, gathered, reduced or moved. State dicts and checkpoints
  /// are without them, since ranks may have other values of them: the program that ignores
  /// them saves them (ShardedBase::ignored_names).
  std::vector<at::Tensor> ignored_parameters;
  /// Groups of paths in the module, each of places of one parameter whose tensors are different
  /// objects without values yet (no storage, or no elements), so that no memory says that they are
  /// one. Each place keeps its tensor; names, contract and values are those of the first path that
  /// the walk meets. Tensors that share memory are found without it. Errors of fully_shard:
  /// kContract for a path that is no parameter of this unit or stands twice, for shapes, dtypes,
  /// grad_dtypes or trainability that differ, and for values that the memory does not share.
  std::vector<std::vector<std::string>> tied = {};
  /// Paths in the module of buffers that state dicts and checkpoints leave out and no load asks for.
  /// A buffer that stands in several places is left out where all of them are named. Errors of
  /// fully_shard: kContract for a path that is no buffer of this unit. Source: register_buffer's
  /// persistent=False.
  std::vector<std::string> unstored_buffers = {};
};

/// One shard with what is needed to use it elsewhere. It may outlive its handle.
struct ShardView {
  const GradContract* contract = nullptr;
  at::Tensor shard;        ///< [end - begin], storage dtype; .grad() in the final dtype
  std::int64_t begin = 0;  ///< the shard is elements [begin, end) of the flattened local tensor
  std::int64_t end = 0;
  /// This rank's, on contract->layout.axes: with them the layout says which part of the whole
  /// parameter the local tensor is. Empty: it is the parameter.
  std::vector<int> coordinates = {};
  std::shared_ptr<const void> owner = {};  ///< what `contract` points into lives as long
  /// Among the parameters of the whole model, of which a stage of a pipeline has some; -1 where
  /// nobody has said (ShardOptions::contracts).
  std::int64_t place_in_model = -1;
};

/// One buffer: a tensor that a module registered as such, whole on every rank.
struct BufferView {
  const BufferContract* contract = nullptr;
  at::Tensor tensor;  ///< the module's own; in the contract's compute dtype once it is loaded
  /// Its values in the storage dtype. Where the cast narrowed them these are the ones that were
  /// loaded, until somebody writes to `tensor`; for reading.
  at::Tensor stored;
  std::shared_ptr<const void> owner = {};  ///< as ShardView
};

/// A gather that was started by hand. Forwards wait for theirs by themselves.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  /// Blocks until the parameters can be read. Idempotent. Errors: kComm.
  void wait();

 private:
  friend class ShardedBase;
  explicit UnshardHandle(std::shared_ptr<fsdp::Unit> unit) : unit_(std::move(unit)) {}
  std::shared_ptr<fsdp::Unit> unit_;
};

/// The part of a handle that does not depend on M.
class ShardedBase : public torch::nn::Module {
 public:
  ~ShardedBase() override;
  ShardedBase(ShardedBase&&) = default;
  ShardedBase& operator=(ShardedBase&&) = default;
  ShardedBase(const ShardedBase&) = delete;  ///< a sharded module is not copied
  ShardedBase& operator=(const ShardedBase&) = delete;

  /// True names ("layers.0.weight"), of this unit and of all units inside it.
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  /// True names of the modules' buffers, which every rank holds whole.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;
  /// Every parameter of this unit and of all inside, in the order of named_parameters(). Contracts,
  /// as in contract(), name what several units have by the one among them that was sharded first.
  std::vector<ShardView> shards() const;
  /// Every buffer of this unit and of all inside. A loader writes values in the storage dtype or in
  /// the compute dtype and then calls set_loaded().
  std::vector<BufferView> buffers() const;
  /// True names of what ShardOptions::ignored_parameters left alone in this unit and in those
  /// inside, parameters and buffers: no state dict and no checkpoint has them.
  std::vector<std::string> ignored_names() const;
  /// Returns what all ranks agreed on: parameters as shards(), buffers as buffers(), units as they
  /// stand.
  ModelContract contract() const;
  /// to_string of it.
  std::string contract_table() const;

  /// Calls `visit(name of the contract, whole parameter)` on every rank, storage dtype, one bucket in
  /// memory at a time; of parameters that lie cut over model axes one at a time, put together in
  /// their global shape. Collective.
  void visit_full_parameters(
      const std::function<void(const std::string&, const at::Tensor&)>& visit) const;
  /// The same for gradients as they stand on the shards, final dtype; zeros for trainable
  /// parameters without one. Frozen ones are left out.
  void visit_full_gradients(
      const std::function<void(const std::string&, const at::Tensor&)>& visit) const;
  /// The loader filled every shard and buffer: shards may be gathered, and buffers are cast to
  /// their compute dtype. Without a loader that happens in the first forward.
  void set_loaded() const;

  /// Where the model was sharded; mesh().world() is its World.
  const Mesh& mesh() const;
  int rank() const;  ///< in the World
  /// All ranks of the pipeline stage, for control messages from the rank's own thread; null for
  /// one.
  comm::Group* data_group() const;
  /// The ranks that have the other stages of a pipeline for the same rows, in the order of axis pp,
  /// as data_group(); null for one.
  comm::Group* stages_group() const;

  // Controls, to be set to the same on every rank at the same place: none of them communicates, a
  // difference is an error that names it at the next collective. `recurse`: units inside too. Those
  // that say so refuse (kUsage) while a recorded forward waits for its backward. Source: FSDP2's
  // FSDPModule.

  /// false: gradients stay unreduced in the slots until a backward with true (gradient
  /// accumulation); norms and steps in between are refused.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// false: HSDP's sum over replicas waits for a backward with true; norms and steps in between are
  /// refused. For the whole tree.
  void set_requires_replica_reduce(bool value);
  /// false: backwards start their reductions but wait for none and show no gradient; the next one
  /// with true does, for all. For the whole tree; steps and norms in between are refused.
  void set_is_last_backward(bool value);
  /// true: backwards leave the weight gradients of linear layers and of experts for
  /// run_weight_gradients(), and hold what these are formed of until then; units are reduced when
  /// nothing of theirs is owed. Bit for bit the gradients of one backward. Steps, norms and readers
  /// of gradients refuse (kContract) while some are owed. For the whole tree. Idle.
  void set_defer_weight_gradients(bool value);
  /// Forms what backwards have left, oldest first. Collective, in the same order on all ranks.
  void run_weight_gradients();
  /// As ShardOptions::reshard_after_forward, from the next forward on. Idle.
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// false: units that are unsharded after a backward stay so for the next forward, and for
  /// evaluation where they stay unsharded after forwards, too. Before they are used again they are
  /// compared with the shards (one byte a unit and rank on the wire) and gathered anew where any
  /// rank has changed them. Idle.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// false: a unit that gave its memory back after forward is not gathered for its backward, which
  /// reads no parameter (an embedding). One that does read throws. This unit only. Idle.
  void set_unshard_in_backward(bool value);
  /// While this unit computes forward, the parameters of `units` are gathered, in this order,
  /// instead of the agreed next unit's; {} = the agreed order again. Idle.
  void set_forward_prefetch(const std::vector<ShardedBase*>& units);
  /// The same in backward, for units whose backward comes after this one's; others are left out.
  /// Idle.
  void set_backward_prefetch(const std::vector<ShardedBase*>& units);
  /// As ShardOptions::divide_factor, for sums that begin from now on: there may be no gradient.
  /// Idle.
  void set_gradient_divide_factor(double factor, bool recurse = true);
  void unshard();  ///< gathers this unit now, and keeps it until a backward or reshard() gives it
                   ///< back. Collective.
  UnshardHandle unshard_async();  ///< the same without waiting. Collective, in the same order on
                                  ///< all ranks.
  void reshard();  ///< gives its memory back; on all ranks or on none, since the next forward
                   ///< gathers it again

  void train(bool on = true) override;
  void zero_grad(bool set_to_none = true) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  /// Refused (kUsage), also where a plain module holds the handle: a rank has a part of the model.
  /// state_dict.h has the way. torch::save of a handle itself does not compile.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;  ///< refused as save

  const std::shared_ptr<fsdp::Unit>& unit() const { return unit_; }
  const std::shared_ptr<torch::nn::Module>& held() const { return held_; }

 protected:
  ShardedBase(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
              const PrecisionPolicy& policy, const ShardOptions& options);

  /// Whether somebody replays regions of the model whose forward runs here.
  static bool replays();
  using RegionBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  /// body(inputs) as the region that is all of the module.
  std::vector<at::Tensor> run_region(const std::vector<at::Tensor>& inputs,
                                     const RegionBody& body) const;

  enum class CallKind : std::uint8_t {
    kForward,
    /// A forward that runs again inside a backward, by a checkpoint that is not tessera's own and
    /// puts what it saves in the places of what the first forward saved (torch.utils.checkpoint with
    /// use_reentrant=False). The unit is gathered where it is not, inputs and results are cast, and
    /// that is all: its backward, its gradients and its memory follow the first forward's record.
    kRecomputed,
  };

  /// One call of the module: enter() before it, leave() after it, neither when it throws. A front
  /// end in another language, whose exceptions are none of C++, says how else the module was left:
  /// by fail() or stop(). It derives from ShardedBase and publishes the class by a using-declaration.
  class Call {
   public:
    explicit Call(ShardedBase& handle, CallKind kind = CallKind::kForward);
    ~Call();
    /// The kind of a call that begins here, for a front end whose only checkpoints are torch's: it is
    /// kRecomputed inside of a backward, unless a tessera::checkpoint() runs again there.
    static CallKind kind_here();
    /// `inputs` and what they point to are read again in leave(). Errors: kUsage for a kRecomputed
    /// one that repeats no forward which the backward under way goes through, that comes in another
    /// order than in that forward, or whose first run was without grad mode (a reentrant
    /// checkpoint).
    void enter(const std::vector<at::Tensor*>& inputs);
    /// `wrappers[i]`: references to outputs[i] that the front end itself holds and gives up, beside
    /// the one in `outputs` (an object of the other language, of which nobody but the caller has a
    /// reference); `base_wrappers[i]`: the same for the tensor that outputs[i] is a view of. Those
    /// do not keep the caller from changing the result in place. Empty: none.
    void leave(const std::vector<at::Tensor*>& outputs,
               const std::vector<std::size_t>& wrappers = {},
               const std::vector<std::size_t>& base_wrappers = {});
    /// The module was left by an exception of the front end's language: as by one of C++, the step
    /// has failed on all ranks, and they are told `why`. After leave(), fail() or stop() nothing
    /// happens.
    void fail(const std::string& why) noexcept;
    /// A recomputation has what it needs and leaves the module early: no failure, and the call is
    /// closed. One that is no recomputation fails. After leave(), fail() or stop() nothing happens.
    void stop() noexcept;

   private:
    void close() noexcept;

    ShardedBase& handle_;
    std::shared_ptr<fsdp::Entry> entry_;
    const std::vector<at::Tensor*>* inputs_ = nullptr;
    std::shared_ptr<const fsdp::Crossed> crossed_;  // null: none is an alias
    std::shared_ptr<void> regions_;                 // null: those around it are the model's
    std::uint64_t generation_ = 0;
    CallKind kind_;
    bool entered_ = false;
    bool left_ = false;
    bool watched_ = false;  // by a DtypeWatch
    int exceptions_;
  };

 private:
  friend class TrainableChanger;
  struct Inner {
    std::string path;
    std::shared_ptr<ShardedBase> handle;
  };
  struct Own {
    std::string name;  // true, relative to this handle
    fsdp::Parameter* parameter;
  };
  void require_handles_between_steps(const std::vector<fsdp::FoundHandle>& handles);
  void adopt(const ShardOptions& options);
  void for_units(bool recurse, const std::function<void(ShardedBase&)>& act);
  void require_own_parameters(bool recurse);
  enum class Place : std::uint8_t { kOutermost, kInside };
  void resolve_unit(Place place);
  /// The contracts of the buffers of this handle and of those inside; what is frozen around them
  /// decides.
  void resolve_buffers();
  void set_runtime(const std::shared_ptr<fsdp::Runtime>& runtime);
  /// All parameters of this handle and those inside, with names relative to this handle.
  std::vector<Own> all() const;
  void visit_full(bool gradients,
                  const std::function<void(const std::string&, const at::Tensor&)>& visit) const;

  std::shared_ptr<torch::nn::Module> held_;
  std::shared_ptr<fsdp::Unit> unit_;
  std::shared_ptr<void> end_;  // tells the unit that this handle, wherever it was moved, is gone
  std::shared_ptr<fsdp::Runtime> runtime_;
  std::vector<Inner> inner_;
  std::vector<Own> own_;
  PrecisionPolicy policy_;
  std::function<std::string(const std::string&)> canonical_name_;
  std::optional<DType> asked_output_;
  std::vector<std::string> ignored_;  // true names, relative to this handle
  bool unit_is_given_ = false;        // its contract came with ShardOptions::unit_contracts
  bool asked_reshard_ = false;
  bool named_ = false;
  bool is_inside_ = false;  // a fully_shard around it has taken it in
};

namespace detail {

/// Whether a forward takes nothing but tensors, and gives one or several.
template <class R, class... Args>
inline constexpr bool kIsOfTensors = (std::is_same_v<R, at::Tensor> ||
                                      std::is_same_v<R, std::vector<at::Tensor>>) &&
                                     sizeof...(Args) > 0 &&
                                     (std::is_same_v<std::decay_t<Args>, at::Tensor> && ...);

template <class M, class Signature>
class ShardedForward;

template <class M, class R, class... Args>
class ShardedForward<M, R(Args...)> : public ShardedBase {
 public:
  R forward(Args... arguments) {
    const auto run = [this](Args... values) -> R {
      if constexpr (kIsOfTensors<R, Args...>) {
        if (ShardedBase::replays()) return as_region(std::index_sequence_for<Args...>(), values...);
      }
      return module_->forward(std::forward<Args>(values)...);
    };
    return as_one_call(Signature<R, Args...>{}, run, std::forward<Args>(arguments)...);
  }
  /// The same: handles are called as a ModuleHolder is.
  R operator()(Args... arguments) { return forward(std::forward<Args>(arguments)...); }

  /// Another method of the module, as a forward of the unit: `handle.call(&Vae::decode, latent)`.
  /// Parameters are gathered, inputs and outputs cast, the backward marked, exactly as for forward.
  /// Source: register_fsdp_forward_method.
  template <class R2, class C, class... P, class... A>
    requires std::is_base_of_v<C, M> && (sizeof...(P) == sizeof...(A))
  R2 call(R2 (C::*method)(P...), A&&... arguments) {
    const auto run = [&](P... values) -> R2 {
      return (module_.get()->*method)(std::forward<P>(values)...);
    };
    return as_one_call(Signature<R2, P...>{}, run, std::forward<A>(arguments)...);
  }
  template <class R2, class C, class... P, class... A>
    requires std::is_base_of_v<C, M> && (sizeof...(P) == sizeof...(A))
  R2 call(R2 (C::*method)(P...) const, A&&... arguments) {
    const auto run = [&](P... values) -> R2 {
      return (module_.get()->*method)(std::forward<P>(values)...);
    };
    return as_one_call(Signature<R2, P...>{}, run, std::forward<A>(arguments)...);
  }

  /// The module itself: its configuration may be read; calling it past the handle throws.
  const std::shared_ptr<M>& module() const { return module_; }

 protected:
  ShardedForward(std::shared_ptr<M> module, const Mesh& mesh, const PrecisionPolicy& policy,
                 const ShardOptions& options)
      : ShardedBase(module, mesh, policy, options), module_(std::move(module)) {}

 private:
  /// compile() of any module: a forward from tensors to tensors is a region. What it reads beside
  /// its arguments belongs to the module, or else changes from call to call unseen.
  template <std::size_t... I, class... Values>
  R as_region(std::index_sequence<I...>, const Values&... values) {
    auto results = ShardedBase::run_region(
        {values...},
        [module = module_](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
          return {module->forward(in[I]...)};
        });
    if constexpr (std::is_same_v<R, at::Tensor>) {
      return std::move(results.front());
    } else {
      return results;
    }
  }

  template <class R2, class... P>
  struct Signature {};

  template <class R2, class... P, class Run>
  R2 as_one_call(Signature<R2, P...>, const Run& run, std::type_identity_t<P>... arguments) {
    static_assert(
        (!(std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>) && ...),
        "a sharded forward cannot write to its arguments");
    std::tuple<std::decay_t<P>...> held(std::forward<P>(arguments)...);
    Call one_call(*this);
    std::vector<at::Tensor*> inputs;
    visit_tensors(held, [&](at::Tensor& tensor) { inputs.push_back(&tensor); });
    one_call.enter(inputs);
    const auto run_held = [&](auto&... values) -> R2 { return run(static_cast<P>(values)...); };
    if constexpr (std::is_void_v<R2>) {
      std::apply(run_held, held);
      one_call.leave({});
    } else {
      auto result = std::apply(run_held, held);
      std::vector<at::Tensor*> outputs;
      visit_tensors(result, [&](at::Tensor& tensor) { outputs.push_back(&tensor); });
      one_call.leave(outputs);
      return result;
    }
  }

  std::shared_ptr<M> module_;
};

}  // namespace detail

template <class M>
class Sharded : public detail::ShardedForward<M, typename ForwardSignature<M>::type> {
 public:
  Sharded(std::shared_ptr<M> module, const Mesh& mesh, const PrecisionPolicy& policy,
          const ShardOptions& options)
      : detail::ShardedForward<M, typename ForwardSignature<M>::type>(std::move(module), mesh,
                                                                      policy, options) {}
};

/// Shards every parameter under `module` that no inner handle owns yet over the mesh's dp_shard
/// axis (replicated over dp_replicate), as one unit; over other axes too where its layer declares a
/// gradient that they have to sum (placement.h). Collective: all ranks call it on the same
/// module, inner ones first. Values are taken from the module; parameters without storage stay
/// unset until they are loaded. Errors: kContract naming the parameter (dtypes, rules, ranks that
/// disagree), kUsage for gradients or forwards under way.
template <class M>
Sharded<M> fully_shard(std::shared_ptr<M> module, const Mesh& mesh,
                       const PrecisionPolicy& policy = {}, const ShardOptions& options = {}) {
  return Sharded<M>(std::move(module), mesh, policy, options);
}
/// The same of what TORCH_MODULE(Net) declares: `Net net; auto handle = fully_shard(net, mesh);`.
template <class M>
Sharded<M> fully_shard(const torch::nn::ModuleHolder<M>& module, const Mesh& mesh,
                       const PrecisionPolicy& policy = {}, const ShardOptions& options = {}) {
  return fully_shard(module.is_empty() ? std::shared_ptr<M>() : module.ptr(), mesh, policy,
                     options);
}

namespace detail {

template <class T>
inline constexpr bool kIsHandle = std::is_base_of_v<ShardedBase, T>;
template <class T>
inline constexpr bool kIsHandle<std::shared_ptr<T>> = std::is_base_of_v<ShardedBase, T>;
/// A handle, or a pointer to one.
template <class T>
concept Handle = kIsHandle<T>;
template <Handle>
inline constexpr bool kIsSavedWhole = false;

}  // namespace detail

/// torch::save and torch::load of a handle: they would write and read this rank's part alone.
template <detail::Handle H>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const H&) {
  static_assert(detail::kIsSavedWhole<H>,
                "torch::save: a sharded module holds this rank's part alone. Save the dict of "
                "tessera::state_dict(handle, tessera::StateDictKind::kFull), or a checkpoint: "
                "tessera::save_checkpoint(handle, optimizer, folder).");
  return archive;
}
template <detail::Handle H>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, H&) {
  static_assert(detail::kIsSavedWhole<H>,
                "torch::load: a sharded module holds this rank's part alone. Load a dict by "
                "tessera::load_state_dict(handle, entries), or a checkpoint: "
                "tessera::load_checkpoint(handle, optimizer, folder).");
  return archive;
}

}  // namespace tessera
