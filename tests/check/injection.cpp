#include "check/injection.h"

#include <ATen/ATen.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "fsdp/handle.h"
#include "tessera/world.h"

namespace tessera::mistakes {
namespace {

/// The state of an injection and of the threads that it is in.
struct State {
  Changes changes;
  std::atomic<int> acted = 0;
  std::atomic<bool> ended = false;

  void act() { ++acted; }
};

template <class Place>
using Hooked = std::optional<test_hooks::Set<Place>>;

/// The state of a rank's thread until its next run.
struct Here {
  std::shared_ptr<State> state = {};
  std::vector<std::function<void()>> after_sharding = {};
  const ShardedBase* model = nullptr;
  Changes::Accepted accepted = {};
  Hooked<decltype(test_hooks::transition_forward)> forward = {};
  Hooked<decltype(test_hooks::transition_backward)> backward = {};
  Hooked<decltype(test_hooks::rank_sum)> sum = {};
  Hooked<decltype(test_hooks::data_ranks_of_sum)> data_ranks = {};
  Hooked<decltype(test_hooks::stages_of_norm)> stages = {};
  Hooked<decltype(test_hooks::sum_of_norm)> norm = {};
};

thread_local std::optional<Here> here;

/// Whether this thread's rank runs with `state` in it.
bool is_here(const State& state) { return here && here->state.get() == &state && !state.ended; }

bool has_several_ranks(const Mesh& mesh) { return mesh.world()->size() > 1; }

/// On a thread that lives on the hook may outlive the injection: it does nothing then.
Instead::Way guarded(const std::shared_ptr<State>& state, const Instead::Way& way,
                     at::Tensor (parallel::Transition::*right)(const at::Tensor&) const) {
  return [=](const parallel::Transition& of, const at::Tensor& x) {
    if (state->ended) return (of.*right)(x);
    at::Tensor made = way(of, x);
    if (!made.defined()) return (of.*right)(x);
    state->act();
    return made;
  };
}

void set_transitions(const RankParts& rank) {
  const auto& state = here->state;
  if (!state->changes.transitions) return;
  const Instead instead = state->changes.transitions(rank);
  if (instead.forward) {
    here->forward.emplace(test_hooks::transition_forward,
                          guarded(state, instead.forward, &parallel::Transition::forward));
  }
  if (instead.backward) {
    here->backward.emplace(test_hooks::transition_backward,
                           guarded(state, instead.backward, &parallel::Transition::backward));
  }
}

void set_numbers(const RankParts& rank) {
  const auto& state = here->state;
  const Changes& changes = state->changes;
  if (changes.sums) {
    std::shared_ptr<golden::SumStandIn> sums = changes.sums(rank);
    here->sum.emplace(test_hooks::rank_sum,
                      [=](train::RankSum what, const golden::SumStandIn::Values& of_ranks) {
                        if (state->ended) return train::added_by_rank(of_ranks);
                        return sums->way(what, of_ranks);
                      });
  }
  if (changes.data_ranks) {
    here->data_ranks.emplace(
        test_hooks::data_ranks_of_sum,
        [=, way = changes.data_ranks(rank)](train::RankSum what, comm::Group* data) {
          return state->ended ? data : way(what, data);
        });
  }
  if (changes.stages_of_norm) {
    here->stages.emplace(test_hooks::stages_of_norm,
                         [=, way = changes.stages_of_norm(rank)](comm::Group* stages) {
                           return state->ended ? stages : way(stages);
                         });
  }
  if (changes.sum_of_norm) {
    here->norm.emplace(test_hooks::sum_of_norm,
                       [=, way = changes.sum_of_norm(rank)](double mine, comm::Group* replica) {
                         return state->ended ? sum_over(replica, mine) : way(mine, replica);
                       });
  }
  if (changes.accepted) here->accepted = changes.accepted(rank);
}

}  // namespace

bool is_in_unit(const std::string& name) {
  return here && here->model != nullptr &&
         fsdp::last_entered(*here->model).ends_with(" unit " + name);
}

double sum_over(comm::Group* group, double mine) {
  const auto sum = at::full({1}, mine, at::kDouble);
  if (group != nullptr) comm::all_reduce(*group, sum, "gradient norm");
  return sum.item<double>();
}

struct Injection::Hooks {
  explicit Hooks(Changes changes) : state(std::make_shared<State>(std::move(changes))) {
    parts.emplace(test_hooks::made_parts, [of = state](const Mesh& mesh, train::ModelParts& made) {
      here.reset();
      if (!has_several_ranks(mesh)) return;
      here.emplace().state = of;
      const RankParts rank{mesh, made, here->after_sharding, of->acted};
      if (of->changes.parts) of->changes.parts(rank);
      set_transitions(rank);
      set_numbers(rank);
    });
    model.emplace(test_hooks::made_parallel, [of = state](const Mesh& mesh, ShardedBase& made) {
      if (!is_here(*of)) return;
      here->model = &made;
      for (const auto& act : here->after_sharding) act();
      if (of->changes.model) of->changes.model(mesh, made, [of] { of->act(); });
    });
    set_those_of_all_threads();
  }

  void set_those_of_all_threads() {
    const Changes& changes = state->changes;
    if (changes.accepted) {
      accepted.emplace(test_hooks::after_accept,
                       [of = state](const GradContract& contract, const at::Tensor& slot) {
                         if (is_here(*of)) here->accepted(contract, slot);
                       });
    }
    if (changes.holds_back) {
      holds.emplace(test_hooks::hold_back,
                    [of = state](const comm::Group& group, const comm::Label& label) {
                      const bool holds_it = of->changes.holds_back(group, label);
                      if (holds_it) of->act();
                      return holds_it;
                    });
    }
    if (changes.sends_as) {
      sends.emplace(test_hooks::sent_tag, [of = state](const comm::P2PTag& tag) {
        const comm::P2PTag sent = of->changes.sends_as(tag);
        if (sent != tag) of->act();
        return sent;
      });
    }
    if (changes.micro_batch) {
      micro_batch.emplace(test_hooks::took_micro_batch,
                          [of = state](const Mesh& mesh, const train::MicroBatch& batch) {
                            if (is_here(*of) && of->changes.micro_batch(mesh, batch)) of->act();
                          });
    }
  }

  const std::shared_ptr<State> state;
  Hooked<decltype(test_hooks::made_parts)> parts;
  Hooked<decltype(test_hooks::made_parallel)> model;
  Hooked<decltype(test_hooks::after_accept)> accepted;
  Hooked<decltype(test_hooks::hold_back)> holds;
  Hooked<decltype(test_hooks::sent_tag)> sends;
  Hooked<decltype(test_hooks::took_micro_batch)> micro_batch;
};

Injection::Injection(Changes changes) : hooks_(std::make_unique<Hooks>(std::move(changes))) {}

Injection::~Injection() {
  hooks_->state->ended = true;
  here.reset();  // of a dry run, on this thread
}

int Injection::acted() const { return hooks_->state->acted; }

}  // namespace tessera::mistakes
