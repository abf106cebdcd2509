// fully_shard: turns any torch::nn::Module into a sharded one, called through a handle.
//
// C++ has no module hooks, so Sharded<M>::forward does the work of FSDP2's hooks in Python. The
// handle is a module itself, with M's forward signature: it can be a child of another module or
// stand in a Sequential, and its parameters() are the shards that an optimizer steps. A model has
// inner units where its code calls inner handles. Parameters of one unit may have different dtypes.
// The handle does not copy M: M's own tensors show the unsharded parameters while the unit
// computes, and throw at any other time. Source: PyTorch FSDP2 `fully_shard`; docs/fsdp2.md has the
// differences. Next: optim.h, clip.h.
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

/// Options of fully_shard().
struct ShardOptions {
  /// Canonical name of the module in the whole model ("model.layers.0"), the prefix of its
  /// parameters' names. "" = from its place in the parent that is sharded later.
  std::string name;
  /// Whether the unit reshards after its forward and gathers again in backward. none = true for a
  /// unit inside another one (set when the outer one is sharded), false for the outermost.
  std::optional<bool> reshard_after_forward;
  /// Buckets of inner units below this size, in bytes of the unsharded compute dtype, move to the
  /// outermost unit and are gathered once a step.
  std::int64_t merge_below_bytes = 0;
  /// Divides the sum of gradients; none = the number of data ranks, which averages as FSDP2 does.
  std::optional<double> divide_factor;
  /// Floating outputs of this unit are cast to it. none = PrecisionPolicy::output_dtype for the
  /// outermost unit, and no cast for inner units.
  std::optional<DType> output_dtype;
  /// Bytes of gradients in flight before the unit waits for the oldest reduction: enough to keep
  /// the wire busy, few enough that buffers are used again while they are in cache. none = 32 MiB
  /// on the CPU, the bytes of two units on a device.
  std::optional<std::int64_t> in_flight_bytes;
  /// Contracts of the whole model, resolved before and looked up by canonical name. none = resolved
  /// here from the policy. Their placements are compared with the modules' declarations.
  std::shared_ptr<const std::vector<GradContract>> contracts;
  /// The same for buffers; used with `contracts` only.
  std::shared_ptr<const std::vector<BufferContract>> buffer_contracts;
  /// The same for units, looked up by `name`; used with `contracts` only.
  std::shared_ptr<const std::vector<UnitContract>> unit_contracts;
  /// Layouts beyond the data axes of parameters whose modules do not declare them
  /// (DeclaresLayouts), by path in the module. The modules hold the local tensors.
  std::map<std::string, ParameterLayout> layouts = {};
  /// Maps a parameter's path in the module to its canonical name; none = `name` + "." + path.
  std::function<std::string(const std::string&)> canonical_name;
  /// Handles whose modules are registered in the tree themselves, because the code reaches the
  /// handle in another way (grad/slot.h). Each handle takes the place of its module.
  std::vector<std::shared_ptr<ShardedBase>> inner;
  /// Tensors that are not sharded, gathered, reduced or moved. State dicts and checkpoints do not
  /// hold them, since their values may differ between ranks; the program saves them itself
  /// (ShardedBase::ignored_names()).
  std::vector<at::Tensor> ignored_parameters;
  /// Groups of paths in the module that name one tied parameter, for tensors without values yet (no
  /// storage, or no elements), which no shared memory shows to be one. Each place keeps its tensor;
  /// names, contract and values are those of the first path in the order of the modules. Tensors
  /// that share memory are found without this. Errors of fully_shard(): kContract for a path that
  /// is no parameter of this unit or is named twice, for shapes, dtypes, grad_dtypes or
  /// trainability that differ, and for values that are not in shared memory.
  std::vector<std::vector<std::string>> tied = {};
  /// Paths in the module of buffers that state dicts and checkpoints do not hold and no load
  /// expects. A buffer with several paths is left out where all of them are named. Errors of
  /// fully_shard(): kContract for a path that is no buffer of this unit. Source: register_buffer's
  /// persistent=False.
  std::vector<std::string> unstored_buffers = {};
};

/// One shard with its place in the parameter. It may outlive its handle.
struct ShardView {
  const GradContract* contract = nullptr;  ///< the parameter's contract
  at::Tensor shard;        ///< [end - begin], storage dtype; .grad() in the final dtype
  std::int64_t begin = 0;  ///< first element in the flattened local tensor
  std::int64_t end = 0;    ///< end of the elements in the flattened local tensor
  /// This rank's coordinates on contract->layout.axes; by the layout they give the part of the
  /// whole parameter that is the local tensor. Empty = the local tensor is the whole parameter.
  std::vector<int> coordinates = {};
  std::shared_ptr<const void> owner = {};  ///< keeps `contract` alive
  /// Index among the parameters of the whole model, of which a pipeline stage holds some; -1 where
  /// it is not known (ShardOptions::contracts).
  std::int64_t place_in_model = -1;
};

/// One buffer of a module, whole on every rank.
struct BufferView {
  const BufferContract* contract = nullptr;  ///< the buffer's contract
  at::Tensor tensor;  ///< the module's own tensor; in the compute dtype once it is loaded
  /// Its values in the storage dtype, for reading. Where the cast has narrowed them, these are the
  /// loaded values until the program writes to `tensor`.
  at::Tensor stored;
  std::shared_ptr<const void> owner = {};  ///< keeps `contract` alive
};

/// A gather that was started by hand. A forward waits for its gathers by itself.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  /// Waits until the parameters can be read. Idempotent. Errors: kComm.
  void wait();

 private:
  friend class ShardedBase;
  explicit UnshardHandle(std::shared_ptr<fsdp::Unit> unit) : unit_(std::move(unit)) {}
  std::shared_ptr<fsdp::Unit> unit_;
};

/// The part of a handle that does not depend on M.
///
/// Its set_ functions are set to the same value on every rank at the same place. They do not
/// communicate; a difference is an error at the next collective, which names it. With `recurse`
/// they apply to inner units too. Those marked "Idle" throw kUsage while a recorded forward waits
/// for its backward. Source: FSDP2's FSDPModule.
class ShardedBase : public torch::nn::Module {
 public:
  ~ShardedBase() override;
  ShardedBase(ShardedBase&&) = default;
  ShardedBase& operator=(ShardedBase&&) = default;
  ShardedBase(const ShardedBase&) = delete;  ///< a sharded module is not copied
  ShardedBase& operator=(const ShardedBase&) = delete;

  /// Returns the shards of this unit and of all inner units by their paths in the module
  /// ("layers.0.weight").
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  /// Returns the modules' buffers, which every rank holds whole, by their paths.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;
  /// Returns the shards of this unit and of all inner units, in the order of named_parameters(). A
  /// parameter that several units share is named by the unit that was sharded first, as in
  /// contract().
  std::vector<ShardView> shards() const;
  /// Returns the buffers of this unit and of all inner units. A loader writes values in the storage
  /// or in the compute dtype and then calls set_loaded().
  std::vector<BufferView> buffers() const;
  /// Returns the paths of the parameters and buffers of ShardOptions::ignored_parameters, in this
  /// unit and in inner units. No state dict and no checkpoint holds them.
  std::vector<std::string> ignored_names() const;
  /// Returns the contract that all ranks agreed on: parameters as shards(), buffers as buffers(),
  /// units in the order of the modules.
  ModelContract contract() const;
  /// Returns to_string(contract()).
  std::string contract_table() const;

  /// Calls `visit(name in the contract, whole parameter)` on every rank, in the global shape and
  /// the storage dtype. One bucket is in memory at a time; parameters that are sharded over model
  /// axes are assembled one by one. Collective.
  void visit_full_parameters(
      const std::function<void(const std::string&, const at::Tensor&)>& visit) const;
  /// The same for the gradients on the shards, in the final dtype; zeros for trainable parameters
  /// without one. Frozen parameters are left out.
  void visit_full_gradients(
      const std::function<void(const std::string&, const at::Tensor&)>& visit) const;
  /// Tells the handle that a loader has filled every shard and buffer. Buffers are cast to their
  /// compute dtype. Without a loader the first forward does this.
  void set_loaded() const;

  /// Returns the mesh on which the model was sharded; mesh().world() is its World.
  const Mesh& mesh() const;
  int rank() const;  ///< this rank in the World
  /// Returns all ranks of the pipeline stage, for control messages from the rank's thread; null
  /// for one rank.
  comm::Group* data_group() const;
  /// Returns the ranks with the other stages of a pipeline for the same rows, in the order of axis
  /// pp, for control messages; null for one rank.
  comm::Group* stages_group() const;

  /// Sets whether backwards reduce gradients. false = gradients stay unreduced until a backward
  /// with true (gradient accumulation); norms and steps in between are refused.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// Sets whether backwards sum over replicas (HSDP). false = the sum waits for a backward with
  /// true; norms and steps in between are refused. Applies to the whole tree.
  void set_requires_replica_reduce(bool value);
  /// Sets whether a backward ends the step. false = backwards start their reductions, but do not
  /// wait for them and show no gradient; the next backward with true waits for all. Norms and steps
  /// in between are refused. Applies to the whole tree.
  void set_is_last_backward(bool value);
  /// Sets whether backwards defer the weight gradients of linear layers and of experts to
  /// run_weight_gradients(), and keep their inputs until then. A unit is reduced once none of its
  /// weight gradients is pending. The gradients have the bits of one backward. Steps, norms and
  /// readers of gradients throw kContract while some are pending. Applies to the whole tree. Idle.
  void set_defer_weight_gradients(bool value);
  /// Forms the deferred weight gradients, oldest first. Collective, in the same order on all ranks.
  void run_weight_gradients();
  /// Sets ShardOptions::reshard_after_forward from the next forward on. Idle.
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// Sets whether units reshard after a backward. false = unsharded units stay so for the next
  /// forward, and for evaluation where they stay unsharded after forwards too. Before their next
  /// use ranks compare them with the shards (one byte for each unit and rank on the wire), and
  /// gather them again where a rank has changed its shard. Idle.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// Sets whether this unit is gathered for its backward. false = it is not, for a unit whose
  /// backward reads no parameter (an embedding); a backward that does read one throws. Idle.
  void set_unshard_in_backward(bool value);
  /// Sets the units that are gathered, in this order, while this unit computes its forward, in
  /// place of the next unit in the recorded order; {} = the recorded order. Idle.
  void set_forward_prefetch(const std::vector<ShardedBase*>& units);
  /// The same in backward, for units whose backward comes after this one's; others are ignored.
  /// Idle.
  void set_backward_prefetch(const std::vector<ShardedBase*>& units);
  /// Sets ShardOptions::divide_factor for sums that begin from now on; no gradient may exist. Idle.
  void set_gradient_divide_factor(double factor, bool recurse = true);
  /// Gathers this unit now, and keeps it until a backward or reshard(). Collective.
  void unshard();
  /// The same without waiting. Collective, in the same order on all ranks.
  UnshardHandle unshard_async();
  /// Frees this unit's gathered parameters. On all ranks or on none, since the next forward gathers
  /// them again.
  void reshard();

  /// Sets the training mode of the module and of all inner modules.
  void train(bool on = true) override;
  /// Clears the gradients on the shards, and those that are not reduced yet.
  void zero_grad(bool set_to_none = true) override;
  /// Refused (kUsage): the mesh decides devices, the policy dtypes.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  /// The same.
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  /// The same.
  void to(torch::Device device, bool non_blocking = false) override;
  /// Refused (kUsage): a sharded module is not copied.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  /// Refused (kUsage), also where a plain module holds the handle, since a rank has a part of the
  /// model; use state_dict.h. torch::save of a handle itself does not compile.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;  ///< refused as save()

  /// Returns the unit, for the library's own use.
  const std::shared_ptr<fsdp::Unit>& unit() const { return unit_; }
  /// Returns the module that the handle holds.
  const std::shared_ptr<torch::nn::Module>& held() const { return held_; }

 protected:
  ShardedBase(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
              const PrecisionPolicy& policy, const ShardOptions& options);

  /// Returns whether regions of the model whose forward runs on this thread are replayed.
  static bool replays();
  using RegionBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  /// Runs body(inputs) as a region that covers the whole module.
  std::vector<at::Tensor> run_region(const std::vector<at::Tensor>& inputs,
                                     const RegionBody& body) const;

  enum class CallKind : std::uint8_t {
    kForward,
    /// A forward that runs again inside a backward, by a foreign checkpoint that replaces the saved
    /// tensors of the first forward (torch.utils.checkpoint with use_reentrant=False). It gathers
    /// the unit if needed and casts inputs and results, and does nothing else: backward, gradients
    /// and memory follow the record of the first forward.
    kRecomputed,
  };

  /// One call of the module: enter() before it and leave() after it, but no leave() where it
  /// throws. A front end in another language, whose exceptions are not those of C++, calls fail()
  /// or stop() instead. It derives from ShardedBase and publishes this class by a
  /// using-declaration.
  class Call {
   public:
    explicit Call(ShardedBase& handle, CallKind kind = CallKind::kForward);
    ~Call();
    /// Returns the kind of a call that begins here, for a front end whose only checkpoints are
    /// torch's: kRecomputed inside of a backward, unless a tessera::checkpoint() runs again there.
    static CallKind kind_here();
    /// Begins the call. leave() reads `inputs` and their tensors again. Errors: kUsage for a
    /// kRecomputed call that repeats no forward of the running backward, that comes in another
    /// order than in that forward, or whose first run was without grad mode (a reentrant
    /// checkpoint).
    void enter(const std::vector<at::Tensor*>& inputs);
    /// Ends the call. `wrappers[i]` counts references to outputs[i] that the front end holds and
    /// drops, in addition to the one in `outputs` (an object of the other language that only the
    /// caller refers to). `base_wrappers[i]` counts them for the tensor that outputs[i] is a view
    /// of. These references do not prevent the caller from changing the result in place. Empty =
    /// none.
    void leave(const std::vector<at::Tensor*>& outputs,
               const std::vector<std::size_t>& wrappers = {},
               const std::vector<std::size_t>& base_wrappers = {});
    /// Ends the call after an exception of the front end's language: the step has failed on all
    /// ranks, with `why`, as after a C++ exception. Does nothing after leave(), fail() or stop().
    void fail(const std::string& why) noexcept;
    /// Ends a recomputation that leaves the module early without a failure; any other call fails.
    /// Does nothing after leave(), fail() or stop().
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
  /// Resolves the contracts of the buffers of this handle and of inner ones, by the frozen
  /// parameters around them.
  void resolve_buffers();
  void set_runtime(const std::shared_ptr<fsdp::Runtime>& runtime);
  /// Returns all parameters of this handle and of inner ones, with names relative to this handle.
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

/// Whether a forward takes only tensors, and returns one or several.
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
  /// Calls forward(), as a ModuleHolder does.
  R operator()(Args... arguments) { return forward(std::forward<Args>(arguments)...); }

  /// Calls another method of the module as a forward of the unit: `handle.call(&Vae::decode,
  /// latent)`. Parameters are gathered and inputs and outputs cast exactly as for forward. Source:
  /// register_fsdp_forward_method.
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

  /// Returns the module itself, to read its configuration; calling it without the handle throws.
  const std::shared_ptr<M>& module() const { return module_; }

 protected:
  ShardedForward(std::shared_ptr<M> module, const Mesh& mesh, const PrecisionPolicy& policy,
                 const ShardOptions& options)
      : ShardedBase(module, mesh, policy, options), module_(std::move(module)) {}

 private:
  /// Runs a forward from tensors to tensors as a region of compile(). All other tensors that it
  /// reads belong to the module; changes of any others would go unnoticed.
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

/// The handle of a module M, a module itself. `forward(...)` and `operator()(...)` have the
/// signature of M::forward. `call(&M::method, arguments...)` runs another method of M as a forward
/// of the unit: parameters are gathered and inputs and outputs cast as for forward. `module()`
/// returns M, to read its configuration; calling M without the handle throws.
template <class M>
class Sharded : public detail::ShardedForward<M, typename ForwardSignature<M>::type> {
 public:
  /// Shards `module`; fully_shard() is the short form.
  Sharded(std::shared_ptr<M> module, const Mesh& mesh, const PrecisionPolicy& policy,
          const ShardOptions& options)
      : detail::ShardedForward<M, typename ForwardSignature<M>::type>(std::move(module), mesh,
                                                                      policy, options) {}
};

/// Shards every parameter under `module` that no inner handle owns yet, as one unit, over the
/// mesh's dp_shard axis, and replicates it over dp_replicate. A parameter is also sharded over the
/// other axes on which its layer declares a gradient to be summed (placement.h). Values are the
/// module's own; parameters without storage stay unset until they are loaded. Collective: all ranks
/// call it on the same module, inner modules first. Errors: kContract naming the parameter (dtypes,
/// rules, ranks that disagree); kUsage for existing gradients and for a forward without its
/// backward.
template <class M>
Sharded<M> fully_shard(std::shared_ptr<M> module, const Mesh& mesh,
                       const PrecisionPolicy& policy = {}, const ShardOptions& options = {}) {
  return Sharded<M>(std::move(module), mesh, policy, options);
}
/// The same for a holder that TORCH_MODULE(Net) declares: `Net net; fully_shard(net, mesh);`.
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

/// Keeps torch::save of a handle from compiling: it would write this rank's part alone.
template <detail::Handle H>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const H&) {
  static_assert(detail::kIsSavedWhole<H>,
                "torch::save: a sharded module holds this rank's part alone. Save the dict of "
                "tessera::state_dict(handle, tessera::StateDictKind::kFull), or a checkpoint: "
                "tessera::save_checkpoint(handle, optimizer, folder).");
  return archive;
}
/// Keeps torch::load of a handle from compiling: it would read this rank's part alone.
template <detail::Handle H>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, H&) {
  static_assert(detail::kIsSavedWhole<H>,
                "torch::load: a sharded module holds this rank's part alone. Load a dict by "
                "tessera::load_state_dict(handle, entries), or a checkpoint: "
                "tessera::load_checkpoint(handle, optimizer, folder).");
  return archive;
}

}  // namespace tessera
