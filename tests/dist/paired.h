// Toy stages whose forwards and backwards take turns, drawn from a seed, and lists of slots in
// which some forwards are paired with backwards, for tests of a step scope's pairs. A list is run
// as pairs and, by another model of the same weights, in turn.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <atomic>
#include <optional>
#include <random>
#include <stdexcept>

#include "comm/turns.h"
#include "dist/data_layout.h"
#include "grad/keep.h"
#include "nn/linear.h"
#include "parallel/transitions.h"
#include "support/plain.h"
#include "tessera/step_scope.h"

namespace tessera::test {

/// Where code of the toy comes by.
enum class FaultSite : std::uint8_t { kInUnit, kOutside, kNode, kRecomputed, kCount };

/// The sites that one rank has come by inside of pairs, and what happens at one of them.
class FaultSites {
 public:
  static constexpr auto kKinds = static_cast<std::size_t>(FaultSite::kCount);
  using Counts = std::array<int, kKinds>;

  void come_by(FaultSite site) {
    if (!comm::Turns::under_way()) return;
    auto& count = counts_.at(static_cast<std::size_t>(site));
    if (++count == at_ && site == what_) std::exchange(happens_, nullptr)();
  }
  /// Counts from here on. `happens` runs when the rank comes by `site` for the `at`th time.
  void restart(FaultSite site = FaultSite::kCount, int at = 0, std::function<void()> happens = {}) {
    counts_ = {};
    what_ = site;
    at_ = at;
    happens_ = std::move(happens);
  }
  const Counts& counts() const { return counts_; }
  std::atomic<int> alive = 0;  ///< graphs' nodes that hold a Witness

 private:
  Counts counts_{};
  FaultSite what_ = FaultSite::kCount;
  int at_ = 0;
  std::function<void()> happens_;
};

struct Witness : torch::CustomClassHolder {
  Witness(FaultSites& of, bool turns) : sites(&of), gives_turn(turns) { ++sites->alive; }
  ~Witness() override { --sites->alive; }
  FaultSites* sites;
  bool gives_turn;
};

/// The identity; takes a turn by itself where there is no other rank to exchange with.
struct Passage : torch::autograd::Function<Passage> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<Witness>& witness) {
    ctx->saved_data["witness"] = c10::IValue::make_capsule(witness);
    if (witness->gives_turn) comm::Turns::pass();
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto witness =
        c10::dynamic_intrusive_pointer_cast<Witness>(ctx->saved_data["witness"].toCapsule());
    witness->sites->come_by(FaultSite::kNode);
    if (witness->gives_turn) comm::Turns::pass();
    return {grads[0], at::Tensor()};
  }
};

/// The exchanges of a rank's toy: over which axis, and how.
struct Exchanges {
  parallel::Axis axis;
  std::shared_ptr<FaultSites> sites = std::make_shared<FaultSites>();
  bool reads_early = false;  ///< a fault: rows that have not arrived

  /// Exchange number `i`, of x [rows, width]: rows divide by the axis' size.
  at::Tensor move(at::Tensor x, std::uint64_t i) const {
    x = Passage::apply(x, c10::make_intrusive<Witness>(*sites, axis.alone()));
    constexpr auto kWhere = "toy";
    const parallel::Splits splits{
        std::vector<std::int64_t>(static_cast<std::size_t>(axis.size), x.size(0) / axis.size),
        std::vector<std::int64_t>(static_cast<std::size_t>(axis.size), x.size(0) / axis.size)};
    if (axis.alone()) return at::sin(x);
    if (reads_early) {
      parallel::RowsUnderWay rows(x.detach(), axis, splits, kWhere, parallel::Direction::kForward);
      const at::Tensor early = rows.arriving().clone();
      rows.finish();
      return x + early;
    }
    switch (i % 5) {
      case 0:
        return at::sin(parallel::all_to_all(x, axis, splits, kWhere));
      case 1: {
        auto rows = parallel::begin_all_to_all(x, axis, splits, kWhere, [] {});
        const at::Tensor meanwhile = at::tanh(x);
        return meanwhile + rows.finish();
      }
      case 2:
        return parallel::all_reduce(at::sin(x), axis, parallel::To::kReplicate, kWhere);
      case 3:  // backward alone
        return at::sin(parallel::copy(x, axis, kWhere));
      default:  // forward alone
        return x + parallel::exchange_sum(x.detach(), axis, std::nullopt, kWhere);
    }
  }
};

struct DrawnPiece {
  std::vector<std::uint64_t> exchanges;
  RecomputeMode mode = RecomputeMode::kNone;
  bool is_around = false;  ///< checkpoint(unit), not unit(checkpoint)
  bool uses_twice = false;
};

struct DrawnStages {
  std::vector<std::vector<int>> stages;  ///< of pieces, some in several stages
  std::vector<DrawnPiece> pieces;
  bool ties = false;                         ///< the root's scale is used by the last stage, too
  std::vector<std::uint64_t> before, after;  ///< exchanges outside of the model, of each stage
  std::int64_t width = 6;
  int count() const { return static_cast<int>(stages.size()); }
};

/// A unit with a weight whose gradient may be deferred, and a gain.
class PairedPiece : public torch::nn::Module {
 public:
  PairedPiece(std::uint64_t seed, std::int64_t width, DrawnPiece drawn,
              std::shared_ptr<const Exchanges> over)
      : drawn_(std::move(drawn)), over_(std::move(over)) {
    const at::NoGradGuard no_grad;
    linear = register_module("linear", std::make_shared<nn::Linear>(width, width, nn::Bias::kYes));
    linear->weight.set_data(seeded(seed, {width, width}));
    linear->bias.set_data(seeded(seed + 1, {width}));
    gain = register_parameter("gain", seeded(seed + 2, {width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) { return computed(in[0]); };
    return drawn_.is_around ? run({x}) : checkpoint(run, {x}, drawn_.mode);
  }
  std::shared_ptr<nn::Linear> linear;
  at::Tensor gain;
  std::function<void()> at_end;  ///< runs when its forward is computed

 private:
  at::Tensor computed(const at::Tensor& x) const {
    auto& sites = *over_->sites;
    const auto site = grad::is_recomputing() ? FaultSite::kRecomputed : FaultSite::kInUnit;
    sites.come_by(site);
    at::Tensor y = at::tanh(linear->forward(x)) * gain;
    for (const auto i : drawn_.exchanges) {
      y = over_->move(y.to(x.scalar_type()), i);
      sites.come_by(site);
    }
    if (drawn_.uses_twice) y = at::tanh(linear->forward(y.to(x.scalar_type()))) * gain;
    if (at_end) at_end();
    return x + y.to(x.scalar_type());
  }

  const DrawnPiece drawn_;
  const std::shared_ptr<const Exchanges> over_;
};

class PairedStages : public torch::nn::Module {
 public:
  PairedStages(const Mesh& mesh, const DrawnStages& drawn, const PrecisionPolicy& policy,
               const std::shared_ptr<const Exchanges>& over)
      : scale(register_parameter("scale", seeded(7, {drawn.width}) + 1.0)), drawn_(drawn) {
    for (std::size_t i = 0; i < drawn.pieces.size(); ++i) {
      pieces.push_back(
          std::make_shared<PairedPiece>(100 + 10 * i, drawn.width, drawn.pieces[i], over));
      handles.push_back(register_module(
          concat("piece", i),
          std::make_shared<Sharded<PairedPiece>>(fully_shard(pieces.back(), mesh, policy))));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return run(0, x); }
  at::Tensor run(int stage, const at::Tensor& x) {
    const bool scales = stage == 0 || (drawn_.ties && stage + 1 == drawn_.count());
    at::Tensor y = scales ? x * scale : x;
    for (const int i : drawn_.stages[static_cast<std::size_t>(stage)]) {
      const auto& piece = drawn_.pieces[static_cast<std::size_t>(i)];
      const auto& handle = handles[static_cast<std::size_t>(i)];
      y = piece.is_around ? checkpoint([handle](const auto& in) { return handle->forward(in[0]); },
                                       {y}, piece.mode)
                          : handle->forward(y);
    }
    return y;
  }
  at::Tensor scale;
  std::vector<std::shared_ptr<PairedPiece>> pieces;
  std::vector<std::shared_ptr<Sharded<PairedPiece>>> handles;

 private:
  const DrawnStages drawn_;
};

struct PairedModel {
  PairedModel(World& world, const DrawnStages& of, const PrecisionPolicy& policy = {},
              int among = 0)
      : drawn(of),
        exchanges(std::make_shared<Exchanges>(Exchanges{axis_among(world, among)})),
        module(std::make_shared<PairedStages>(data_mesh(world), drawn, policy, exchanges)),
        handle(fully_shard(module, data_mesh(world), policy)) {}

  /// The axis of `among` ranks, 0: of all.
  static parallel::Axis axis_among(World& world, int among) {
    const int size = among == 0 ? world.size() : among;
    return parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, world.size() / size, size, 1)),
                             axis::kExpert);
  }
  FaultSites& sites() const { return *exchanges->sites; }

  DrawnStages drawn;
  std::shared_ptr<Exchanges> exchanges;
  std::shared_ptr<PairedStages> module;
  Sharded<PairedStages> handle;
};

/// F, B (all of it), I (inputs only) or W (weights) of a stage and micro-batch.
struct PairedSlot {
  char kind;
  int stage;
  int micro_batch;
  std::optional<std::pair<int, int>> forward = std::nullopt;  ///< paired with this B or I
};

inline std::string to_string(const std::vector<PairedSlot>& slots) {
  std::string text;
  for (const auto& slot : slots) {
    if (slot.forward) text += concat("F", slot.forward->first, ".", slot.forward->second, "|");
    text += concat(slot.kind, slot.stage, ".", slot.micro_batch, " ");
  }
  return text;
}

/// Keeps micro-batches in order on each stage, and is random otherwise.
inline std::vector<PairedSlot> drawn_slots(std::mt19937_64& random, int stages, int micro_batches) {
  const auto count = static_cast<std::size_t>(stages);
  std::vector<int> forwards(count), backwards(count);  // done, in order
  std::vector<std::vector<int>> pending(count);
  std::vector<PairedSlot> slots;
  const auto take = [&](std::vector<PairedSlot> of) { return of[random() % of.size()]; };
  while (true) {
    std::vector<PairedSlot> begins, ends, weights;
    for (int stage = 0; stage < stages; ++stage) {
      const auto i = static_cast<std::size_t>(stage);
      if (forwards[i] < micro_batches && (stage == 0 || forwards[i] < forwards[i - 1])) {
        begins.push_back({'F', stage, forwards[i]});
      }
      const bool is_last = stage + 1 == stages;
      if (backwards[i] < forwards[i] && (is_last || backwards[i] < backwards[i + 1])) {
        ends.push_back({'I', stage, backwards[i]});
        if (pending[i].empty()) ends.push_back({'B', stage, backwards[i]});
      }
      if (!pending[i].empty()) weights.push_back({'W', stage, pending[i].front()});
    }
    if (begins.empty() && ends.empty() && weights.empty()) return slots;
    std::vector<PairedSlot> possible = begins;
    possible.insert(possible.end(), ends.begin(), ends.end());
    possible.insert(possible.end(), weights.begin(), weights.end());
    auto slot = take(possible);
    if (!begins.empty() && !ends.empty() && random() % 4 != 0) {
      const auto forward = take(begins);
      slot = take(ends);
      slot.forward = {forward.stage, forward.micro_batch};
    }
    if (slot.forward) ++forwards[static_cast<std::size_t>(slot.forward->first)];
    const auto i = static_cast<std::size_t>(slot.stage);
    if (slot.kind == 'F') ++forwards[i];
    if (slot.kind == 'B' || slot.kind == 'I') ++backwards[i];
    if (slot.kind == 'I') pending[i].push_back(slot.micro_batch);
    if (slot.kind == 'W') pending[i].erase(pending[i].begin());
    slots.push_back(slot);
  }
}

/// A step of a rank: the slots inside a scope, messages between stages replaced by detached
/// tensors. Results and gradients of inputs stay, by name.
class PairedStep {
 public:
  enum class How : std::uint8_t { kInTurn, kAsPairs };
  PairedStep(PairedModel& model, StepScope& scope, How how, int rank, int step)
      : model_(model), scope_(scope), how_(how), rank_(rank), step_(step) {}

  void run(const PairedSlot& slot) {
    if (slot.kind == 'W') return scope_.run_weight_gradients(slot.stage, slot.micro_batch);
    if (slot.kind == 'F') {
      scope_.begin_forward(slot.stage, slot.micro_batch);
      return forward(slot.stage, slot.micro_batch);
    }
    const auto how = slot.kind == 'B' ? Backward::kFull : Backward::kInputOnly;
    if (slot.forward && how_ == How::kAsPairs) {
      const auto [stage, micro_batch] = *slot.forward;
      return scope_.run_pair(
          {stage, micro_batch, [&] { forward(slot.forward->first, slot.forward->second); }},
          {slot.stage, slot.micro_batch, how, [&] { backward(slot.stage, slot.micro_batch); }});
    }
    if (slot.forward) {
      scope_.begin_forward(slot.forward->first, slot.forward->second);
      forward(slot.forward->first, slot.forward->second);
    }
    scope_.begin_backward(slot.stage, slot.micro_batch, how);
    backward(slot.stage, slot.micro_batch);
  }

  void forward(int stage, int micro_batch) {
    const auto key = std::pair(stage, micro_batch);
    const auto i = static_cast<std::size_t>(stage);
    at::Tensor x =
        stage == 0
            ? seeded(static_cast<std::uint64_t>(1000 + 100 * step_ + 10 * rank_ + micro_batch),
                     {4, model_.drawn.width})
            : out_.at({stage - 1, micro_batch}).detach();
    in_[key] = x.requires_grad_();
    sites().come_by(FaultSite::kOutside);
    x = moved(x, model_.drawn.before.at(i));
    at::Tensor y = model_.handle.call(&PairedStages::run, stage, x);
    y = moved(y, model_.drawn.after.at(i));
    sites().come_by(FaultSite::kOutside);
    out_[key] = stage + 1 == model_.drawn.count() ? squares(y) : y;
    results_[concat("result of ", stage, ".", micro_batch)] = out_[key].detach().clone();
  }

  void backward(int stage, int micro_batch) {
    const auto key = std::pair(stage, micro_batch);
    sites().come_by(FaultSite::kOutside);
    const at::Tensor y = std::exchange(out_.at(key), at::Tensor());
    if (stage + 1 == model_.drawn.count()) {
      torch::autograd::backward({y}, {});
    } else {
      torch::autograd::backward({y}, {in_.at({stage + 1, micro_batch}).grad()});
    }
    sites().come_by(FaultSite::kOutside);
    results_[concat("gradient of ", stage, ".", micro_batch)] = in_.at(key).grad().clone();
  }

  const Tensors& results() const { return results_; }

 private:
  FaultSites& sites() const { return model_.sites(); }
  at::Tensor moved(const at::Tensor& x, std::uint64_t exchanges) const {
    at::Tensor y = x;
    for (std::uint64_t i = 0; i < exchanges; ++i) y = model_.exchanges->move(y, i + exchanges);
    return y;
  }

  PairedModel& model_;
  StepScope& scope_;
  const How how_;
  const int rank_, step_;
  std::map<std::pair<int, int>, at::Tensor> in_, out_;
  Tensors results_;
};

/// Runs one step, with each stage resharded and reduced where it is over. Returns results and whole
/// gradients, which are cleared.
inline Tensors run_slots(World& world, PairedModel& model, const std::vector<PairedSlot>& slots,
                         PairedStep::How how, StepScopeOptions options, int step) {
  options.stages = model.drawn.count();
  Tensors found;
  {
    StepScope scope(model.handle, options);
    PairedStep runner(model, scope, how, world.rank(), step);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      runner.run(slots[i]);
      for (int stage = 0; stage < options.stages; ++stage) {
        const auto uses = [&](const PairedSlot& slot, std::string_view kinds) {
          const bool has_forward = slot.forward && slot.forward->first == stage;
          return (slot.stage == stage && kinds.find(slot.kind) != std::string_view::npos) ||
                 (has_forward && kinds.find('F') != std::string_view::npos);
        };
        const auto comes_again = [&](std::string_view kinds) {
          return std::any_of(slots.begin() + static_cast<std::ptrdiff_t>(i) + 1, slots.end(),
                             [&](const PairedSlot& later) { return uses(later, kinds); });
        };
        if (uses(slots[i], "FBI") && !comes_again("FBI")) scope.reshard(stage);
        if (uses(slots[i], "BW") && (options.sync_every_micro_batch || !comes_again("FBIW"))) {
          scope.reduce(stage);
        }
      }
    }
    scope.finish();
    found = runner.results();
  }
  for (const auto& [name, gradient] : whole_gradients(model.handle)) found[name] = gradient;
  model.handle.zero_grad();
  return found;
}

}  // namespace tessera::test
