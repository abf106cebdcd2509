#include "pipeline/runner.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/doing.h"
#include "base/interrupt.h"
#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "base/threads/exchange_times.h"
#include "base/trace.h"
#include "comm/group.h"
#include "comm/turns.h"
#include "launch/abort_flag.h"
#include "tessera/error.h"
#include "tessera/step_scope.h"

namespace tessera::pipeline {
namespace {

using torch::autograd::Edge;

static_assert(kMostCells <= comm::P2PExtent::kMostCells, "each has a number of its own in a tag");

/// A micro-batch in a stage, between its F and its B or I.
struct Flight {
  Tensors inputs;           ///< leaves; undefined where no gradient is asked for
  std::vector<Edge> edges;  ///< of outputs; without a node where the output needs no gradient
  Tensors results;          ///< of the last stage, with their graphs
};

/// Where the walk is, for the message of an error.
struct Place {
  const Step* step = nullptr;
  const Action* action = nullptr;     ///< that is being computed
  std::optional<HandOver> waits_for;  ///< that has not arrived
  std::optional<HandOver> sends;      ///< that is not through
};

/// Whether another owner may write to it: it may be a buffer that the stage fills again for the
/// next micro-batch, or a view of one. A result that autograd has saved is not written to.
bool may_be_refilled(const at::Tensor& tensor) {
  if (tensor.requires_grad()) {
    if (tensor.is_leaf()) return false;
    return tensor.use_count() > 1 || (tensor.is_view() && tensor._base().use_count() > 1);
  }
  // libtorch counts no owners of memory that it was only pointed to (from_blob).
  const bool is_counted = tensor.storage().data_ptr().get_context() != nullptr;
  return !is_counted || tensor.use_count() > 1 || tensor.storage().use_count() > 1;
}

/// Returns what a stage passes on, without its graph and with its present values: a message leaves
/// later, and on the turn of a V the next stage reads it later.
at::Tensor given_away(const at::Tensor& tensor) {
  return may_be_refilled(tensor) ? tensor.detach().clone() : tensor.detach();
}

std::int64_t bytes_of(const std::vector<BoundaryTensor>& tensors) {
  std::int64_t bytes = 0;
  for (const BoundaryTensor& tensor : tensors) {
    bytes += c10::multiply_integers(tensor.shape) *
             static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
  }
  return bytes;
}

class Walk {
 public:
  Walk(const ValidProgram& program, int rank, const std::vector<Stage*>& stages,
       const Borders& borders, Messages* messages, const Parameters& parameters)
      : program_(program),
        rank_(static_cast<std::size_t>(rank)),
        stages_(stages),
        borders_(borders),
        messages_(messages),
        scope_(parameters.scope),
        reduces_every_(parameters.reduce_every),
        overlaps_(parameters.overlap),
        trains_(program.passes() == Passes::kForwardAndBackward) {
    const auto& ids = program.schedule().rank_of;
    for (std::size_t stage = 0; stage < ids.size(); ++stage) {
      if (ids[stage] == rank) local_.emplace(static_cast<int>(stage), local_.size());
    }
    for (const Step& step : program.program().steps[rank_]) {
      const auto* transfer = std::get_if<Transfer>(&step);
      if (transfer != nullptr && transfer->end == Transfer::End::kReceive) {
        receives_.push_back(transfer->what);
      }
    }
    flights_.resize(stages.size() * micro_batches());
    if (local_.contains(last_stage())) results_.resize(micro_batches());
  }

  std::vector<Tensors> run() {
    for (const Step& step : program_.program().steps[rank_]) {
      place_.step = &step;
      std::visit([this](const auto& one) { take(one); }, step);
    }
    place_ = {};
    if (scope_ != nullptr) scope_->finish();
    if (messages_ != nullptr) {
      messages_->wait_for_sends(0, [this](const HandOver& what) { place_.sends = what; });
    }
    return std::move(results_);
  }

  /// "slot 3B1 (stage 3, micro-batch 1)" and what it waits for.
  std::string place() const {
    if (place_.sends) {
      return concat(place_.step == nullptr ? "at the end of the step" : "behind a slot",
                    ", sending ", to_string(*place_.sends));
    }
    if (place_.step == nullptr) return "at the end of the step";
    std::string text;
    if (const auto* slot = std::get_if<Slot>(place_.step)) {
      text = concat("slot ", to_string(*slot));
    } else {
      text = to_string(*place_.step);
    }
    if (place_.action != nullptr) {
      text += concat(" (stage ", place_.action->stage, ", micro-batch ", place_.action->micro_batch,
                     ")");
    }
    if (place_.waits_for) {
      text += concat(", which waits for the ", to_string(*place_.waits_for), " from rank ",
                     rank_of(place_.waits_for->from), " of the pipeline");
    }
    return text;
  }

 private:
  std::size_t micro_batches() const {
    return static_cast<std::size_t>(program_.schedule().micro_batches);
  }
  int last_stage() const { return program_.schedule().stages() - 1; }
  int rank_of(int stage) const {
    return program_.schedule().rank_of[static_cast<std::size_t>(stage)];
  }
  /// Returns the index of a stage among those of the rank.
  std::size_t local(int stage) const { return local_.find(stage)->second; }
  int in_scope(int stage) const { return static_cast<int>(local(stage)); }
  Flight& flight(const Action& action) {
    return flights_[local(action.stage) * micro_batches() +
                    static_cast<std::size_t>(action.micro_batch)];
  }
  /// Returns the declaration of what is handed over by this rank's end.
  const Boundary& border_of(const HandOver& what, int stage) const {
    const bool above = what.from == stage ? what.to() > stage : what.from > stage;
    return above ? borders_.after(local(stage), what.micro_batch)
                 : borders_.before(local(stage), what.micro_batch);
  }

  // Messages.

  void take(const Transfer& transfer) {
    const HandOver& what = transfer.what;
    if (transfer.end == Transfer::End::kReceive) {
      if (++listed_ > posted_) post_next(expected_next());
      return;
    }
    auto given = given_.extract(what);
    TESSERA_INVARIANT(!given.empty(), "nothing was made of the ", to_string(what));
    messages_->send(what, rank_of(what.to()), std::move(given.mapped()));
    if (!program_.may_wait_for_sends()) return;
    // Else the first rank runs through a whole batch, and keeps all that it has to send.
    const auto ranks = static_cast<std::size_t>(program_.schedule().ranks());
    messages_->wait_for_sends(ranks, [this](const HandOver& sent) { place_.sends = sent; });
    place_.sends.reset();
  }

  std::vector<BoundaryTensor> expected_next() const {
    const HandOver& what = receives_[posted_];
    return contents(border_of(what, what.to()), what.direction);
  }

  void post_next(const std::vector<BoundaryTensor>& expected) {
    const HandOver& what = receives_[posted_++];
    messages_->post(what, rank_of(what.from), expected);
  }

  /// Small receives are posted before the list asks for them: a send whose receive is known leaves
  /// at once, else its ends exchange two messages more, which takes longer than a short slot
  /// (P2P::gains_by_early_receives).
  void post_small_ones() {
    constexpr std::size_t kMost = 8;
    constexpr std::int64_t kSmall = 16 << 10;
    while (posted_ < receives_.size() && posted_ < arrived_ + kMost) {
      const auto expected = expected_next();
      if (bytes_of(expected) > kSmall) return;
      post_next(expected);
    }
  }

  /// Waits for what the action needs of another stage, and returns it.
  Tensors wait_for(const Action& action) {
    const auto what = needed_by(action, program_.schedule().stages());
    if (!what) return {};
    if (is_message(*what, program_.schedule())) {
      place_.action = &action;
      place_.waits_for = what;
      Tensors tensors = messages_->wait_for(*what);
      ++arrived_;
      // A frozen stage to which nothing comes back would run all of its slots, and keep all that it
      // has to send: what the schedule has it wait for comes after this.
      if (what->direction == Direction::kBackward && tensors.empty()) {
        place_.sends = HandOver{Direction::kForward, action.stage, action.micro_batch};
        messages_->wait_for_send(*place_.sends);
        place_.sends.reset();
      }
      place_.waits_for.reset();
      return tensors;
    }
    auto given = given_.extract(*what);
    TESSERA_INVARIANT(!given.empty(), "nothing was handed over of the ", to_string(*what));
    return std::move(given.mapped());
  }

  void give(const Action& action, Tensors tensors) {
    const auto what = given_by(action, program_.schedule().stages());
    if (!what) return;
    if (is_message(*what, program_.schedule())) {
      for (at::Tensor& tensor : tensors) tensor = tensor.contiguous();
    }
    given_.emplace(*what, std::move(tensors));
  }

  // Parameters.

  void take(const Residency& residency) {
    if (scope_ == nullptr) return;
    switch (residency.move) {
      case Residency::Move::kUnshard:
        return;  // the stage's first forward gathers
      case Residency::Move::kReshard:
        return scope_->reshard(in_scope(residency.stage));
      case Residency::Move::kReduce:
        if (!reduces_every_) scope_->reduce(in_scope(residency.stage));
        return;
    }
  }

  // Slots.

  void take(const Slot& slot) {
    if (messages_ != nullptr && messages_->gain_by_early_receives()) post_small_ones();
    // All that it needs is here before its time begins: a trace shows computing and waits apart.
    Tensors first = wait_for(slot.action);
    Tensors second = slot.paired ? wait_for(*slot.paired) : Tensors{};
    if (messages_ != nullptr) messages_->let_go();
    Trace* const trace = current_trace();
    const auto begin = trace != nullptr ? trace->now() : TraceClock::time_point();
    const auto exchanged = base::exchange_times();
    if (slot.paired) {
      side_by_side(slot.action, std::move(first), *slot.paired, std::move(second));
    } else {
      compute(slot.action, std::move(first));
    }
    if (trace == nullptr) return;
    TraceSpan span{TraceRow::kSlots, to_string(slot), begin, trace->now(), {}};
    const auto of_slot = base::exchange_times() - exchanged;
    if (of_slot.in_flight > 0) span.arguments.emplace_back("hidden_ms", of_slot.hidden());
    trace->add(std::move(span));
  }

  /// Runs a pair: all inputs of both have arrived, and all outputs are sent when the slot ends.
  void side_by_side(const Action& forward, Tensors inputs, const Action& backward,
                    Tensors gradients) {
    if (scope_ == nullptr || !overlaps_) {
      // The backward first: it lets go of its activations before the forward keeps its own.
      compute(backward, std::move(gradients));
      compute(forward, std::move(inputs));
      return;
    }
    auto& flight = take_off(forward, inputs);
    // Roots may need numbers of other ranks, for which no pass waits on its own stack.
    place_.action = &backward;
    auto begins = roots_of(backward, gradients);
    place_.action = nullptr;
    gradients.clear();
    scope_->run_pair({in_scope(forward.stage), forward.micro_batch,
                      [&] { computing(forward, [&] { run_forward(forward, flight, inputs); }); }},
                     {in_scope(backward.stage), backward.micro_batch, mode_of(backward), [&] {
                        computing(backward, [&] { run_backward(backward, std::move(begins)); });
                      }});
    end(backward);
  }

  void compute(const Action& action, Tensors needed) {
    computing(action, [&] { run(action, std::move(needed)); });
    end(action);
  }

  /// `run` computes the action, on a stack of its own in a pair: an error that leaves it is the
  /// action's.
  template <class Run>
  void computing(const Action& action, const Run& run) {
    const auto* const looked_at = test_hooks::computing.get();
    if (looked_at != nullptr) (*looked_at)(&action);
    place_.action = &action;
    try {
      run();
    } catch (const comm::Turns::Ended&) {
      throw;
    } catch (const std::exception&) {
      if (!std::exchange(has_failed_, true)) place_.action = &action;
      throw;
    }
    if (!has_failed_) place_.action = nullptr;
    if (looked_at != nullptr) (*looked_at)(nullptr);
  }

  void run(const Action& action, Tensors needed) {
    switch (action.kind) {
      case ActionKind::kForward: {
        auto& flight = take_off(action, needed);
        if (scope_ != nullptr) scope_->begin_forward(in_scope(action.stage), action.micro_batch);
        run_forward(action, flight, needed);
        break;
      }
      case ActionKind::kInputGradient:
      case ActionKind::kBackward: {
        auto begins = roots_of(action, needed);
        if (scope_ != nullptr) {
          scope_->begin_backward(in_scope(action.stage), action.micro_batch, mode_of(action));
        }
        run_backward(action, std::move(begins));
        break;
      }
      case ActionKind::kWeightGradient:
        if (scope_ != nullptr) {
          scope_->run_weight_gradients(in_scope(action.stage), action.micro_batch);
        }
        break;
    }
  }

  void end(const Action& action) {
    const bool ends_weights =
        action.kind == ActionKind::kWeightGradient || action.kind == ActionKind::kBackward;
    if (!reduces_every_ || scope_ == nullptr || !ends_weights) return;
    place_.action = &action;
    scope_->reduce(in_scope(action.stage));
    place_.action = nullptr;
  }

  static tessera::Backward mode_of(const Action& action) {
    return action.kind == ActionKind::kBackward ? tessera::Backward::kFull
                                                : tessera::Backward::kInputOnly;
  }

  /// The inputs become leaves.
  Flight& take_off(const Action& action, Tensors& inputs) {
    const auto& before = borders_.before(local(action.stage), action.micro_batch);
    Flight& flight = this->flight(action);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool is_leaf = trains_ && before.activations[i].has_gradient;
      if (is_leaf) inputs[i].set_requires_grad(true);
      if (trains_) flight.inputs.push_back(is_leaf ? inputs[i] : at::Tensor());
    }
    return flight;
  }

  void run_forward(const Action& action, Flight& flight, Tensors& inputs) {
    const at::AutoGradMode grad_mode(trains_);
    Stage& stage = *stages_[local(action.stage)];
    Tensors outputs = stage.forward(action.micro_batch, inputs);
    if (action.stage == last_stage()) {
      auto& results = results_[static_cast<std::size_t>(action.micro_batch)];
      for (const auto& output : outputs) {
        results.push_back(output.defined() ? given_away(output) : output);
      }
      if (trains_) flight.results = std::move(outputs);
      return;
    }
    leave(action, flight, std::move(outputs));
  }

  /// Sends outputs without their graph to the stage after; keeps the graph's edges.
  void leave(const Action& action, Flight& flight, Tensors outputs) {
    const auto& after = borders_.after(local(action.stage), action.micro_batch).activations;
    require_as_declared(outputs, after, "output");
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (trains_ && after[i].has_gradient) {
        flight.edges.push_back(
            outputs[i].requires_grad() ? torch::autograd::impl::gradient_edge(outputs[i]) : Edge());
      }
      TESSERA_CHECK(!trains_ || after[i].has_gradient || !outputs[i].requires_grad(),
                    ErrorKind::kContract, "output ", i,
                    ": found a tensor that requires grad, expected none: no gradient of it travels "
                    "back; declare has_gradient, or return its detach()");
      outputs[i] = given_away(outputs[i]);
    }
    give(action, std::move(outputs));
  }

  /// Where a backward begins, and with what.
  struct Begins {
    torch::autograd::edge_list edges;
    Tensors gradients;
    Tensors inputs;  ///< leaves of the forward
  };

  Begins roots_of(const Action& action, const Tensors& arrived) {
    Stage& stage = *stages_[local(action.stage)];
    Flight flight = std::exchange(this->flight(action), {});
    const std::size_t gradients = flight.edges.size();
    Tensors back(arrived.begin() + static_cast<std::ptrdiff_t>(gradients), arrived.end());

    Begins begins;
    begins.inputs = std::move(flight.inputs);
    for (std::size_t i = 0; i < gradients; ++i) {
      if (!flight.edges[i].is_valid()) continue;
      begins.edges.push_back(std::move(flight.edges[i]));
      begins.gradients.push_back(arrived[i]);
    }
    const at::AutoGradMode grad_mode(true);  // they may be computed here
    const auto roots = stage.roots(action.micro_batch, flight.results, back);
    add_roots(roots, begins.edges, begins.gradients);
    return begins;
  }

  void run_backward(const Action& action, Begins begins) {
    // Where all is frozen up to here there is none. The scope is told all the same: other ranks of
    // the stage may have some.
    if (!begins.edges.empty()) {
      torch::autograd::Engine::get_default_engine().execute(
          begins.edges, begins.gradients, /*keep_graph=*/false, /*create_graph=*/false,
          /*accumulate_grad=*/true);
      // In a pair the graph's nodes are freed, and the forward continues.
      begins.edges.clear();
      begins.gradients.clear();
    }
    if (action.stage > 0) give(action, gradients_of(action, begins.inputs));
  }

  static void add_roots(const Stage::Roots& roots, torch::autograd::edge_list& edges,
                        Tensors& begins) {
    TESSERA_CHECK(roots.tensors.size() == roots.gradients.size(), ErrorKind::kUsage,
                  "roots of a stage: found ", roots.tensors.size(), " tensors and ",
                  roots.gradients.size(), " gradients, expected one for each");
    for (std::size_t i = 0; i < roots.tensors.size(); ++i) {
      if (!roots.tensors[i].requires_grad()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(roots.tensors[i]));
      begins.push_back(roots.gradients[i]);
    }
  }

  /// Returns the gradients for the stage before.
  Tensors gradients_of(const Action& action, const Tensors& inputs) {
    const auto& before = borders_.before(local(action.stage), action.micro_batch);
    Tensors tensors;
    for (const at::Tensor& input : inputs) {
      if (!input.defined()) continue;
      auto gradient = std::exchange(input.mutable_grad(), {});
      tensors.push_back(gradient.defined() ? std::move(gradient) : at::zeros_like(input.detach()));
    }
    if (!before.back.empty()) {
      auto back = stages_[local(action.stage)]->back(action.micro_batch);
      require_as_declared(back, before.back, "value back");
      for (auto& value : back) tensors.push_back(given_away(value));
    }
    require_as_declared(tensors, contents(before, Direction::kBackward), "gradient of input");
    return tensors;
  }

  const ValidProgram& program_;
  const std::size_t rank_;
  const std::vector<Stage*>& stages_;
  const Borders& borders_;
  Messages* const messages_;
  StepScope* const scope_;
  const bool reduces_every_;
  const bool overlaps_;
  const bool trains_;
  std::map<int, std::size_t> local_;
  std::vector<Flight> flights_;
  std::map<HandOver, Tensors> given_;  ///< made here, not yet sent or taken
  std::vector<HandOver> receives_;     ///< in the order of the list
  std::size_t listed_ = 0;             ///< of these that the list has asked for
  std::size_t posted_ = 0;
  std::size_t arrived_ = 0;
  std::vector<Tensors> results_;
  bool has_failed_ = false;  ///< an action: `place_` is its place
  Place place_;
};

/// All ways that messages of any rank take.
std::set<comm::P2PRoute> routes_of(const ValidProgram& program) {
  const auto& rank_of = program.schedule().rank_of;
  std::set<comm::P2PRoute> routes;
  for (const auto& steps : program.program().steps) {
    for (const Step& step : steps) {
      const auto* transfer = std::get_if<Transfer>(&step);
      if (transfer == nullptr) continue;
      const HandOver& what = transfer->what;
      const int from = rank_of[static_cast<std::size_t>(what.from)];
      const int to = rank_of[static_cast<std::size_t>(what.to())];
      routes.insert(comm::P2PRoute{from, to, p2p_direction(what.direction)});
    }
  }
  return routes;
}

}  // namespace

Ties ties_of(const Mesh& mesh) {
  Ties ties{mesh.world(), {}, {}, mesh.world()->device()};
  const auto ranks = mesh.ranks_of({axis::kPipeline});
  if (ranks.size() == 1) return ties;
  ties.group = mesh.world()->group(ranks, "pipeline control");
  ties.p2p = comm::p2p_of(*mesh.world(), ranks);
  return ties;
}

Runner::Runner(Ties ties) : ties_(std::move(ties)) {
  TESSERA_INVARIANT((ties_.p2p == nullptr) == (ties_.group == nullptr),
                    "p2p and group have the same ranks");
}

std::vector<Tensors> Runner::run(const ValidProgram& program, const std::vector<Stage*>& stages,
                                 const Parameters& parameters) {
  const auto& schedule = program.schedule();
  const int ranks = ties_.p2p != nullptr ? ties_.p2p->size() : 1;
  TESSERA_CHECK(schedule.ranks() == ranks, ErrorKind::kConfig, "pipeline schedule: found ",
                schedule.ranks(), " ranks, expected the ", ranks, " of the pipeline");
  auto ids = schedule.stages_of(rank());
  TESSERA_CHECK(stages.size() == ids.size(), ErrorKind::kUsage, "pipeline: found ", stages.size(),
                " stages on rank ", rank(), " of the pipeline, expected the ", ids.size(),
                " of the schedule");
  std::string place = "before its first slot";
  try {
    if (ties_.p2p != nullptr && ties_.p2p->matches_by_order() &&
        !in_order_.contains(program.hash())) {
      program.require_messages_in_order();
      in_order_.insert(program.hash());
    }
    require_few_cells(schedule.stages(), schedule.micro_batches, ErrorKind::kUsage, "pipeline");
    const Borders borders(schedule, ids, stages);
    const auto step = agreement_.renew(ties_.group.get(), program, borders,
                                       ties_.p2p != nullptr ? ties_.p2p->next_step() : 0);
    std::optional<Messages> messages;
    if (ties_.p2p != nullptr) {
      // A tag is used once: also where a failure has left some ranks a step behind.
      ties_.p2p->begin_step(step, {schedule.stages(), schedule.micro_batches});
      if (!connected_.contains(program.hash())) {
        ties_.p2p->connect(routes_of(program));
        connected_.insert(program.hash());
      }
      messages.emplace(*ties_.p2p, step, ties_.device);
    }
    Walk walk(program, rank(), stages, borders, messages ? &*messages : nullptr, parameters);
    const DoingHere doing([&walk] { return walk.place(); });
    try {
      return walk.run();
    } catch (const std::exception&) {
      place = walk.place();
      throw;
    }
  } catch (const std::exception& error) {
    fail(error, place);
  }
}

/// The others learn of it where they wait.
void Runner::fail(const std::exception& error, const std::string& place) {
  if (base::handles_interrupt()) throw;  // they know
  const auto* known = dynamic_cast<const Error*>(&error);
  const std::string text =
      concat("pipeline, rank ", ties_.world->rank(), ", ", place, ": ", one_line(error.what()));
  if (ties_.world->size() > 1) ties_.world->abort(text);
  // Who only notices what began on another rank is not taken for the culprit.
  if (dynamic_cast<const comm::LostRank*>(&error) != nullptr) throw comm::LostRank(text);
  if (known != nullptr) throw Error(known->kind(), text);
  // libtorch's error stays inside: it tells that memory has run out.
  std::throw_with_nested(Error(ErrorKind::kUsage, text));
}

}  // namespace tessera::pipeline
