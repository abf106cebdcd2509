// Replays read the present values: a recorded input that was changed or replaced, or never was a
// result, is noticed, recorded again or refused.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include "dist/replayed.h"

namespace tessera::test::replay_stale_test {
namespace {

constexpr int kRecordings = 3;
constexpr int kSteps = 8;

Several one_input(int step) { return {rows(1000 + static_cast<std::uint64_t>(step))}; }

Model::Run layer_times(const std::function<at::Tensor(Part&)>& factor) {
  return around([factor](Part& part, const Several& in) {
    return Several{part.layer(in[0]) * factor(part)};
  });
}

void step_and(Twins& twins, int step, const std::function<void(Model&)>& change = {}) {
  SCOPED_TRACE(concat("step ", step));
  if (change) {
    for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) change(*model);
  }
  twins.step({one_input(step)});
}

// ------------------------------------------------------------------------- memory from outside

// As load_checkpoint() and torch::load give it. Naive: the memory that was recorded.
TEST_ON_RANKS(ReplayStale, BuffersMayGetOtherMemory, 2) {
  Twins twins(data_mesh(world), layer_times([](Part& part) { return part.table; }));
  for (int step = 0; step < 3 * kSteps; ++step) {
    step_and(twins, step, [&](Model& model) {
      if (step != kSteps && step != 2 * kSteps) return;
      model.parts[0]->table.set_data(seeded(static_cast<std::uint64_t>(step), {Part::kWidth}));
    });
  }
  EXPECT_EQ(twins.calls().recorded, 3 * kRecordings);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// A member that is no registered buffer: the old one has no holder any more.
TEST_ON_RANKS(ReplayStale, TensorsMayBeReplaced, 1) {
  Twins twins(data_mesh(world), layer_times([](Part& part) { return part.table * part.kept; }));
  for (int step = 0; step < 3 * kSteps; ++step) {
    step_and(twins, step, [&](Model& model) {
      Part& part = *model.parts[0];
      if (step == 0) part.kept = seeded(3, {Part::kWidth});
      if (step == kSteps) part.kept = seeded(4, {Part::kWidth});
      if (step == 2 * kSteps) part.kept = seeded(5, {Part::kWidth});
    });
  }
  EXPECT_EQ(twins.calls().recorded, 3 * kRecordings);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// Naive: its memory is the same, but it is another part of it.
TEST_ON_RANKS(ReplayStale, BuffersAndTensorsMayBecomeOtherPartsOfTheirMemory, 1) {
  Twins twins(data_mesh(world), layer_times([](Part& part) { return part.table * part.kept; }));
  const auto row = seeded(3, {8 * Part::kWidth});
  const Several pools{row, row.clone(), row.clone(), row.clone()};
  for (int step = 0; step < 4 * kSteps; ++step) {
    step_and(twins, step, [&](Model& model) {
      if (step % kSteps != 0) return;
      Part& part = *model.parts[0];
      const std::size_t twin = &model == &twins.of_eager() ? 0 : 2;
      const std::int64_t at = step / kSteps;
      part.table.set_data(pools[twin].narrow(0, at, Part::kWidth));
      part.kept = pools[twin + 1].narrow(0, at, Part::kWidth);
    });
  }
  EXPECT_EQ(twins.calls().recorded, 4 * kRecordings);
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
}

// Changes of such a member could not be detected.
TEST_ON_RANKS(ReplayStale, TensorsThatEachCallMakesOfAMemberAreRefused, 1) {
  Twins twins(data_mesh(world), layer_times([](Part& part) { return part.kept.variable_data(); }));
  for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) {
    model->parts[0]->kept = seeded(3, {Part::kWidth});
  }
  for (int step = 0; step < kSteps; ++step) step_and(twins, step);
  EXPECT_THAT(reasons(twins.calls()), ElementsAre(Says("reads by another tensor")));
}

// Naive: each recording takes references of other recordings for an owner, and none detects that
// the owner has released the tensor.
TEST(ReplayStale, TensorsThatSeveralRecordingsReadMayBeReplaced) {
  struct Life {
    const char* name;
    bool evaluates = false, has_other_rows = false, is_shared = false, replaces_both = true;
  };
  for (const Life& life :
       {Life{.name = "evaluations", .evaluates = true},
        Life{.name = "two row counts", .has_other_rows = true},
        Life{.name = "two regions", .is_shared = true},
        Life{.name = "two regions, of one of them", .is_shared = true, .replaces_both = false},
        Life{.name = "all", .evaluates = true, .has_other_rows = true, .is_shared = true}}) {
    SCOPED_TRACE(life.name);
    ranks(1).run([&](World& world) {
      Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
        Several all{inputs[0] * model.before};
        for (const auto& part : model.parts) {
          all = part->region(all, [&part = *part](const Several& in) {
            return Several{part.layer(in[0]) * part.kept};
          });
        }
        return Several{all[0] * model.after};
      });
      for (int step = 0; step < 3 * kSteps; ++step) {
        SCOPED_TRACE(concat("step ", step));
        for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) {
          if (step % kSteps != 0) continue;
          const auto seed = static_cast<std::uint64_t>(step);
          auto &first = model->parts[0]->kept, &second = model->parts[1]->kept;
          first = seeded(seed, {Part::kWidth});
          if (step == 0 || life.replaces_both) {
            second = life.is_shared ? first : seeded(seed + 1, {Part::kWidth});
          }
        }
        const Several given{
            rows(static_cast<std::uint64_t>(step), life.has_other_rows && step % 2 == 1 ? 2 : 3)};
        if (life.evaluates) {
          twins.both([&](Sharded<Model>& handle) {
            const at::NoGradGuard no_grad;
            return Several{handle.forward(given)[0].clone()};
          });
        }
        twins.step({given});
      }
      EXPECT_THAT(reasons(twins.calls()), IsEmpty());
      EXPECT_GT(twins.calls().replayed, 3 * (kSteps / 2 - kRecordings));
    });
  }
}

// Naive: the present values, where autograd reports that they were changed.
TEST(ReplayStale, TensorsThatBackwardReadsMayNotBeChangedInBetween) {
  for (const bool is_read : {true, false}) {
    for (const bool is_buffer : {true, false}) {
      SCOPED_TRACE(concat(is_read ? "read, " : "not read, ", is_buffer ? "a buffer" : "a member"));
      ranks(1).run([&](World& world) {
        Twins twins(data_mesh(world), around([&](Part& part, const Several& in) {
                      const auto& table = is_buffer ? part.table : part.kept;
                      const auto y = part.layer(in[0]);
                      return Several{is_read ? y * table : y + table};
                    }));
        for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) {
          model->parts[0]->kept = seeded(3, {Part::kWidth});
        }
        for (int step = 0; step < kSteps; ++step) step_and(twins, step);
        std::vector<std::string> errors;
        for (auto* handle : {&twins.eager, &twins.replayed}) {
          const auto loss = squares(handle->forward(one_input(kSteps))[0]);
          {
            const at::NoGradGuard no_grad;
            Part& part = *handle->module()->parts[0];
            (is_buffer ? part.table : part.kept).add_(1.0);
          }
          errors.push_back(thrown_by([&] { backward(loss); }));
        }
        for (const auto& error : errors) EXPECT_EQ(error.empty(), !is_read) << error;
        if (is_read) {
          EXPECT_THAT(errors.back(), Says("a tensor from outside that its backward reads"));
        }
      });
    }
  }
}

// --------------------------------------------------------------------------- what a body leaves

TEST(ReplayStale, TensorsThatABodyLeavesBehindAreRefused) {
  const auto body = [](Part& part, const Several& in) {
    const auto y = part.layer(in[0]);
    part.kept = y.detach() * 2.0;
    return Several{y.tanh()};
  };
  for (const bool keeps_graph : {false, true}) {
    ranks(1).run([&](World& world) {
      Twins twins(data_mesh(world), around(body));
      twins.steps(kSteps, [&](Sharded<Model>& handle, int step) {
        const auto loss = squares(handle.forward(one_input(step))[0]);
        torch::autograd::backward({loss}, {}, keeps_graph);
        return Several{handle.module()->parts[0]->kept};
      });
      EXPECT_THAT(reasons(twins.calls()),
                  ElementsAre("a tensor that outlives the call and is no result"));
    });
  }
}

TEST_ON_RANKS(ReplayStale, TensorsLeftBehindWithoutGradientsAreRefused, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                part.kept = part.layer(in[0]).exp();
                return Several{part.kept.sin()};
              }));
  const at::NoGradGuard no_grad;
  for (int step = 0; step < kSteps; ++step) {
    twins.both([&](Sharded<Model>& handle) {
      auto left = handle.forward(one_input(step));
      left.push_back(handle.module()->parts[0]->kept);
      return left;
    });
  }
  EXPECT_THAT(reasons(twins.calls()),
              ElementsAre("a tensor that outlives the call and is no result"));
}

// A loss that a body keeps in a member. Naive: its gradient ends at the region's arguments,
// silently.
TEST_ON_RANKS(ReplayStale, BackwardThroughATensorLeftBehindIsAnError, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                part.kept = part.layer(in[0]).pow(2).mean();
                return Several{part.layer(in[0])};
              }));
  auto& handle = twins.replayed;
  backward(squares(handle.forward(one_input(0))[0]) + handle.module()->parts[0]->kept);
  handle.zero_grad();
  const auto results = handle.forward(one_input(1));
  const auto error =
      thrown_by([&] { backward(squares(results[0]) + handle.module()->parts[0]->kept); });
  EXPECT_THAT(error, Says("a tensor that a region's body has left behind",
                          "return the tensor as one of them"));
}

TEST_ON_RANKS(ReplayStale, HooksInsideAreRefused, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const auto y = part.layer(in[0]);
                if (y.requires_grad()) {
                  y.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
                }
                return Several{y.tanh()};
              }));
  for (int step = 0; step < kSteps; ++step) step_and(twins, step);
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("a hook on a tensor inside"));
}

// ----------------------------------------------------------------- between forward and backward

// Each backward defers its products, which read the entry that both use. Naive: those of the first
// are formed from what the second wrote.
TEST_ON_RANKS(ReplayStale, AKeptGraphGoesBackTwiceWhileGradientsArePutOff, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{part.layer(in[0]).tanh()};
              }));
  twins.steps(kSteps, [&](Sharded<Model>& handle, int step) {
    handle.set_defer_weight_gradients(true);
    const auto y = handle.forward(one_input(step))[0];
    torch::autograd::backward({squares(y)}, {}, /*retain_graph=*/true);
    torch::autograd::backward({(y * y * y).sum()}, {});
    handle.run_weight_gradients();
    return Several{};
  });
  EXPECT_THAT(reasons(twins.calls()),
              ElementsAre("weight gradients of the backward before are pending"));
  EXPECT_GT(twins.calls().replayed, 0);
}

// The body would run again of other values: an argument that its recorded backward does not read, a
// buffer, training mode.
TEST(ReplayStale, ABodyThatRunsAgainFindsWhatItsForwardFound) {
  const std::vector<std::function<void(Model&, const at::Tensor& argument)>> changes{
      [](Model&, const at::Tensor& argument) { argument.mul_(2.0); },
      [](Model& model, const at::Tensor&) { model.parts[0]->table.add_(1.0); },
      [](Model& model, const at::Tensor&) { model.eval(); }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(concat("change ", i));
    ranks(1).run([&](World& world) {
      const auto run = [](Model& model, const Several& inputs) {
        Part& part = *model.parts[0];
        return part.region({inputs[0]}, [&part](const Several& in) {
          return Several{(in[0] + part.bias + part.table).sigmoid()};
        });
      };
      Twins twins(data_mesh(world), run);
      for (int step = 0; step < kSteps; ++step) step_and(twins, step);
      auto& handle = twins.replayed;
      const auto replayed = twins.calls().replayed;
      const at::Tensor argument = one_input(20)[0];
      const auto y = handle.forward({argument})[0];
      EXPECT_GT(twins.calls().replayed, replayed);
      {
        const at::NoGradGuard no_grad;
        changes[i](*handle.module(), argument);
      }
      // These strides differ from the recorded ones.
      const auto error = thrown_by([&] { backward(y.sum()); });
      EXPECT_THAT(error, Says("was changed in place since its forward",
                              "a backward that is not the recorded one"));
    });
  }
}

TEST_ON_RANKS(ReplayStale, BackwardUnderAutocastIsThatOfEagerCalls, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{at::linear(in[0], part.weight, part.bias).tanh()};
              }));
  twins.steps(2 * kSteps, [&](Sharded<Model>& handle, int step) {
    const auto loss = squares(handle.forward(one_input(step))[0]);
    at::autocast::set_autocast_enabled(at::kCPU, step % 3 == 2);
    backward(loss);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    return Several{};
  });
  EXPECT_THAT(reasons(twins.calls()), ElementsAre(Says("another backward than forward")));
  EXPECT_GT(twins.calls().replayed, 4);
}

// ------------------------------------------------------------------------------------- guards

// Other settings are another variant, recorded and replayed by itself.
TEST(ReplayStale, ThreadsAlgorithmsModesAndDtypesAreGuards) {
  struct Setting {
    const char* name;
    std::function<void(Model&, bool)> set;
  };
  const std::vector<Setting> settings{
      {"threads", [](Model&, bool other) { at::set_num_threads(other ? 2 : 1); }},
      {"training", [](Model& model, bool other) { model.train(!other); }},
      {"deterministic",
       [](Model&, bool other) {
         at::globalContext().setDeterministicAlgorithms(other, /*warn_only=*/true);
       }},
      {"default dtype", [](Model&, bool other) {
         c10::set_default_dtype(c10::scalarTypeToTypeMeta(other ? at::kDouble : at::kFloat));
       }}};
  for (const auto& setting : settings) {
    SCOPED_TRACE(setting.name);
    ranks(1).run([&](World& world) {
      Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                    const auto y = part.layer(in[0]) * (part.is_training() ? 1.0 : 3.0);
                    return Several{y + at::ones({1}) / 3.0};
                  }));
      for (int step = 0; step < 4 * kSteps; ++step) {
        const bool other = step % 2 == 1;
        for (Model* model : {&twins.of_eager(), &twins.of_replayed()}) setting.set(*model, other);
        step_and(twins, step);
        setting.set(twins.of_eager(), false);
        setting.set(twins.of_replayed(), false);
      }
      EXPECT_EQ(twins.calls().recorded, 2 * kRecordings);
      EXPECT_EQ(twins.calls().replayed, 4 * kSteps - 2 * (1 + kRecordings));
    });
  }
}

// A validation's sizes come once, then others. Naive: four unused variants, and eager calls.
TEST_ON_RANKS(ReplayStale, AVariantThatIsNotCalledAnyMoreMakesRoom, 1) {
  Twins twins(data_mesh(world), layer_times([](Part& part) { return part.table; }));
  int step = 0;
  const auto steps = [&](std::int64_t size, int count) {
    for (int i = 0; i < count; ++i) twins.step({{rows(static_cast<std::uint64_t>(step++), size)}});
  };
  for (const int size : {2, 3, 4, 5}) steps(size, 5);
  steps(6, 5);
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("more than four variants"));
  EXPECT_EQ(twins.calls().eager.at("more than four variants"), 5);
  steps(5, 64);
  const auto before = twins.calls().replayed;
  steps(6, 6);
  EXPECT_EQ(twins.calls().eager.at("more than four variants"), 5);
  EXPECT_EQ(twins.calls().replayed - before, 6 - 1 - kRecordings);
}

// ------------------------------------------------------------------------------------ comparing

// One batch again and again, as in a warm-up: what the body reads through a pointer is the same.
// Naive: two comparisons that prove nothing.
TEST_ON_RANKS(ReplayStale, OtherDataIsComparedBeforeItIsReplayed, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const auto* first = static_cast<const float*>(in[1].const_data_ptr());
                return Several{part.layer(in[0]) * static_cast<double>(*first)};
              }));
  const auto with = [](int step, float number) {
    auto inputs = one_input(step);
    inputs.push_back(at::full({1}, number));
    return inputs;
  };
  for (int step = 0; step < kSteps; ++step) twins.step({with(1, 2.0F)});
  EXPECT_EQ(twins.calls().replayed, kSteps - 1 - kRecordings) << "one batch is replayed";
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    twins.step({with(2 + step, 3.0F + static_cast<float>(step))});
  }
  EXPECT_THAT(reasons(twins.calls()),
              ElementsAre("aten::mul.Scalar: found other arguments than before"));
}

TEST_ON_RANKS(ReplayStale, ResultsThatChangePlacesAreFound, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const auto y = part.layer(in[0]);
                Several both{y.sin(), y.cos()};
                if (part.bodies == 3) std::swap(both[0], both[1]);
                return both;
              }));
  const at::NoGradGuard no_grad;
  for (int step = 0; step < kSteps; ++step) {
    twins.both([&](Sharded<Model>& handle) {
      // Eager calls run every body: the third one's alone is swapped there.
      return handle.forward(one_input(step));
    });
  }
  EXPECT_THAT(reasons(twins.calls()), ElementsAre("found other results than before"));
}

TEST_ON_RANKS(ReplayStale, MemoryThatAnOperationResizesIsRefused, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const at::Tensor all = at::empty({0});
                const at::Tensor fixed = in[0].detach();
                at::Tensor out = all;
                at::cat_out(out, {fixed, fixed}, 1);
                return Several{part.layer(in[0]) * out.slice(1, 0, Part::kWidth)};
              }));
  for (int step = 0; step < kSteps; ++step) step_and(twins, step);
  EXPECT_THAT(reasons(twins.calls()),
              ElementsAre(Says("memory that becomes larger or smaller, by aten::cat")));
}

// The same sizes and strides, but each element is to be read with the other sign.
TEST_ON_RANKS(ReplayStale, ArgumentsThatAreReadNegatedAreNotTakenForOthers, 1) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    const auto x = at::complex(inputs[0], inputs[0]);
    const auto given = model.calls % 2 == 0 ? at::imag(x.conj()) : at::imag(x);
    return part.region({given}, [&part](const Several& in) { return Several{part.layer(in[0])}; });
  });
  for (int step = 0; step < 3 * kSteps; ++step) step_and(twins, step);
  EXPECT_THAT(reasons(twins.calls()),
              ElementsAre("an argument that is read negated or conjugated"));
  EXPECT_GT(twins.calls().replayed, 0);
}

// Two results of one memory: a change of one is seen of the other, as views are seen.
TEST_ON_RANKS(ReplayStale, ResultsOfOneMemoryHaveOneVersion, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const auto y = part.layer(in[0]).tanh();
                return Several{y, y.view({-1})};
              }));
  for (int step = 0; step < kSteps; ++step) step_and(twins, step);
  const at::NoGradGuard no_grad;
  for (int call = 0; call < 6; ++call) {
    const auto results = twins.replayed.forward(one_input(20 + call));
    const auto before = results[1]._version();
    results[1].add_(1.0);
    EXPECT_EQ(results[1]._version(), before + 1);
  }
}

// The weight is gone in backward, where a comparison would run forward again.
TEST_ON_RANKS(ReplayStale, WithoutWeightsInBackwardRegionsStayEager, 2) {
  Twins twins(data_mesh(world), [](Model& model, const Several& inputs) {
    Part& part = *model.parts[0];
    return part.region({inputs[0]}, [&part](const Several& in) {
      return Several{(in[0] + part.bias).tanh() + part.norm};
    });
  });
  for (auto* handle : {&twins.eager, &twins.replayed}) handle->set_unshard_in_backward(false);
  for (int step = 0; step < kSteps; ++step) step_and(twins, step);
  EXPECT_THAT(reasons(twins.calls()), ElementsAre(Says("set_unshard_in_backward(false)")));
}

}  // namespace
}  // namespace tessera::test::replay_stale_test
