// A forward that alternates with a backward on devices (comm/turns.h): what each pass computes is
// launched while an exchange of the other is in flight, the events between streams are needed, and
// the host reads how many rows go where without waiting for what the other pass has launched
// meanwhile.
//
// The class of bug: a read, or a product, that is ordered after all work on the one compute stream;
// memory of an exchange that the other pass takes while it travels. Over ranks that are threads,
// and over the stand-in for NCCL.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <atomic>
#include <set>

#include "base/doing.h"
#include "base/test_hooks.h"
#include "base/threads/backward_pass.h"
#include "comm/turns.h"
#include "moe/experts.h"
#include "nn/mlp.h"
#include "parallel/collectives.h"
#include "sim/nccl/stand_in.h"
#include "sim/ranks.h"
#include "sim/simulator.h"
#include "sim/streams.h"
#include "sim/training_places.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::sim::pairs_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::Turns;
using Tensors = std::vector<at::Tensor>;

constexpr int kRanks = 2;

const std::vector<Where>& places() {
  static const std::vector<Where> all{
      {kRanks, "sim"},
      {kRanks, "sim:0", /*side=*/true},
      {kRanks, "sim", false, /*late=*/true},
      {kRanks, "sim", false, false, ThreadBackend::kNccl},
      {kRanks, "sim", true, false, ThreadBackend::kNccl},
  };
  return all;
}

std::string shown_place(const Where& where) {
  return shown(where) + (where.backend == ThreadBackend::kNccl ? ", over NCCL" : "");
}

parallel::Axis experts_of(World& world) {
  auto axis =
      parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, world.size(), 1)), axis::kExpert);
  axis.gives_turn = true;
  return axis;
}

// Only layers of experts: one micro-batch forward while another one runs backward.

constexpr std::int64_t kExperts = 4, kHidden = 8, kInner = 12, kTokens = 10;
constexpr int kLayers = 2;

struct Layers {
  explicit Layers(World& world, at::ScalarType dtype_of_all)
      : axis(experts_of(world)), dtype(dtype_of_all), rank(world.rank()), device(world.device()) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::int64_t own = kExperts / axis.size;
      weights.push_back({leaf({own, 2 * kInner, kHidden}), leaf({own, kHidden, kInner})});
    }
  }

  at::Tensor leaf(at::IntArrayRef sizes) {
    const auto seed = static_cast<std::uint64_t>(100 * rank + ++drawn_leaves);
    return (drawn(seed, sizes) * 0.3).to(dtype).to(device).requires_grad_(true);
  }

  at::Tensor forward(at::Tensor x, int micro_batch) const {
    for (const auto& each : weights) {
      const at::Tensor first = (at::arange(kTokens, at::kLong) + micro_batch).remainder(3);
      const at::Tensor indices = at::stack({first, first + 1}, 1).to(device);
      const at::Tensor factors = at::full({kTokens, 2}, 0.5, x.options());
      x = moe::experts(x, {indices, factors, {}}, each,
                       {nn::swiglu_halves, moe::Score::kAfterExperts, axis, "experts"});
    }
    return x;
  }

  Tensors results(const Tensors& leaves) const {
    Tensors all = leaves;
    for (const auto& each : weights) {
      all.push_back(each.gate_up.grad());
      all.push_back(each.down.grad());
    }
    for (at::Tensor& each : all) each = each.detach().cpu();
    return all;
  }

  const parallel::Axis axis;
  const at::ScalarType dtype;
  const int rank;
  const at::Device device;
  int drawn_leaves = 0;
  std::vector<moe::ExpertWeights> weights;
};

/// The results of this rank, on the host. `around` runs the two passes.
using Around =
    std::function<void(World&, const std::function<void()>&, const std::function<void()>&)>;

Tensors two_passes(World& world, at::ScalarType dtype, const Around& around) {
  at::set_num_threads(1);
  Layers layers(world, dtype);
  const at::Tensor first = layers.leaf({kTokens, kHidden}),
                   second = layers.leaf({kTokens, kHidden});
  const at::Tensor before = layers.forward(first, 0);
  const at::Tensor grad = at::ones_like(before);
  at::Tensor now;
  around(world, [&] { now = layers.forward(second, 1); }, [&] { before.backward(grad); });
  now.backward(grad);
  return layers.results({now, first.grad(), second.grad()});
}

void in_turn(World& /*world*/, const std::function<void()>& forward,
             const std::function<void()>& backward) {
  forward();
  backward();
}
void paired(World& world, const std::function<void()>& forward,
            const std::function<void()>& backward) {
  Turns(world.device()).run(forward, backward);
}

using OfRanks = std::vector<Tensors>;

OfRanks run_passes(const Where& where, at::ScalarType dtype, const Around& around) {
  OfRanks found(kRanks);
  on_ranks(where, [&](World& world) {
    found[static_cast<std::size_t>(world.rank())] = two_passes(world, dtype, around);
  });
  settle();
  EXPECT_THAT(take_races(), IsEmpty()) << shown_place(where);
  EXPECT_THAT(take_nccl_findings(), IsEmpty()) << shown_place(where);
  return found;
}

TEST(PairsOnDevices, HaveTheBitsOfPassesInTurn) {
  for (const Where& where : places()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const OfRanks found = run_passes(where, dtype, paired);
      const OfRanks expected = run_passes(where, dtype, in_turn);
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        ASSERT_EQ(found[at].size(), expected[at].size());
        for (std::size_t i = 0; i < found[at].size(); ++i) {
          expect_same_bits(found[at][i], expected[at][i],
                           concat(shown_place(where), ", rank ", rank, ", result ", i));
        }
      }
    }
  }
}

/// The first race on any rank; empty where there is none.
std::string race_of_pair(const Where& where) {
  try {
    on_ranks(where, [&](World& world) {
      try {
        two_passes(world, at::kFloat, paired);
      } catch (...) {
        break_open("sim: another rank has failed");  // what waits for this rank resumes
        throw;
      }
    });
  } catch (const std::exception&) {
    // of a rank that has the race, or whose peer had it
  }
  settle();
  const std::vector<std::string> races = take_races();
  take_nccl_findings();
  return races.empty() ? "" : races.front();
}

// Left out inside of the pair alone.
TEST(PairsOnDevices, EachEventBetweenTheirStreamsIsNeeded) {
  for (const Where& where : places()) {
    ASSERT_EQ(race_of_pair(where), "") << shown_place(where);
    for (const EventSite site : {EventSite::kIssue, EventSite::kWorkEnd}) {
      for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
        const test_hooks::Set without(test_hooks::leaves_out_event,
                                      [=](EventSite which, EventEnd half) {
                                        return which == site && half == end && Turns::under_way();
                                      });
        EXPECT_NE(race_of_pair(where), "") << shown_place(where) << ", without "
                                           << comm::to_string(site) << " " << static_cast<int>(end);
      }
    }
  }
}

// Naive: the host waits for the products and the exchange that the other pass has launched in its
// turn, so that each layer drains the device.
TEST(PairsOnDevices, AReadOfCountsWaitsForNothingOfTheOtherPass) {
  for (const Where& where : places()) {
    if (where.late) continue;  // its values are delivered behind all of the group's stream
    test::RankBarrier meeting(kRanks);
    on_ranks(
        where,
        [&](World& world) {
          test::RankBarrier::Seat seat(meeting);
          const parallel::Axis axis = experts_of(world);
          const at::TensorOptions there(world.device());
          const at::Tensor counts =
              at::full({kRanks, 3}, world.rank() + 5, there.dtype(at::kLong)).add_(1);
          const at::Tensor own = at::arange(4, there.dtype(at::kInt)).mul(2);
          const parallel::Splits one_each{{1, 1}, {1, 1}};
          Tensors read;
          std::optional<HeldStream> held;
          Turns(world.device())
              .run(
                  [&] {
                    read = parallel::exchange_rows_to_host({own, at::Tensor()}, counts, axis,
                                                           one_each, "experts counts");
                    EXPECT_TRUE(held.has_value()) << "the other pass had no turn";
                    held.reset();
                  },
                  [&] {
                    seat.wait();  // all ranks have issued their counts
                    held.emplace(comm::Stream::current(world.device()).get());
                    const at::Tensor rows = at::ones({kRanks, 2}, there).mul_(3);
                    parallel::exchange_rows(rows, axis, one_each, "experts dispatch");
                  });
          ASSERT_EQ(read.size(), 3U);
          EXPECT_TRUE(read[0].equal(at::arange(4, at::kInt).mul(2)));
          EXPECT_FALSE(read[1].defined());
          for (int rank = 0; rank < kRanks; ++rank) {
            EXPECT_EQ(read[2][rank].sum().item<std::int64_t>(), 3 * (rank + 6));
          }
        },
        std::chrono::seconds(5));
    settle();
    EXPECT_THAT(take_races(), IsEmpty()) << shown_place(where);
    EXPECT_THAT(take_nccl_findings(), IsEmpty()) << shown_place(where);
  }
}

// Whole runs.

/// An exchange of a pair: how many products each pass has launched while it was under way.
struct Filled {
  std::string where;
  std::int64_t own = 0, of_other = 0;
};

/// The launches of a rank's thread in pairs, while it lives.
class PairLog {
 public:
  PairLog() {
    of_thread() = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          if (of_thread() != nullptr) of_thread()->see(function.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE, at::RecordScope::FUNCTION}));
  }
  ~PairLog() {
    at::removeCallback(handle_);
    of_thread() = nullptr;
  }
  PairLog(const PairLog&) = delete;
  PairLog& operator=(const PairLog&) = delete;

  /// The thread's; null where it has none.
  static PairLog*& of_thread() {
    static thread_local PairLog* log = nullptr;
    return log;
  }

  void issued(const std::string& where) {
    if (!Turns::under_way()) return;
    // Another pair may begin with nothing seen in between.
    const Place place{UnitHere::stage(), UnitHere::micro_batch()};
    if (places_[side()] && places_[side()] != place) end_pair();
    places_[side()] = place;
    auto& mine = open_[side()];
    EXPECT_FALSE(mine) << where << ": " << mine->filled.where << " is still under way";
    mine = Open{{where}, /*is_being_issued=*/true};
  }
  /// By pair, in the order in which they ended.
  std::vector<std::vector<Filled>> take() {
    end_pair();
    return std::exchange(pairs_, {});
  }

 private:
  using Place = std::pair<int, std::uint32_t>;
  struct Open {
    Filled filled;
    bool is_being_issued;
  };

  static std::size_t side() { return base::in_backward_pass() ? 1 : 0; }

  void see(std::string_view name) {
    if (!Turns::under_way()) return end_pair();
    auto& mine = open_[side()];
    auto& others = open_[1 - side()];
    if (name == "tessera::wait") {
      // The first one is the issue's own.
      if (!mine || std::exchange(mine->is_being_issued, false)) return;
      now_.push_back(std::exchange(mine, std::nullopt)->filled);
      return;
    }
    static const std::set<std::string_view> products{
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_backward"};
    if (!products.contains(name)) return;
    if (mine) ++mine->filled.own;
    if (others) ++others->filled.of_other;
  }
  void end_pair() {
    EXPECT_FALSE(open_[0] || open_[1]);
    places_[0] = places_[1] = std::nullopt;
    if (!now_.empty()) pairs_.push_back(std::exchange(now_, {}));
  }

  at::CallbackHandle handle_{};
  std::optional<Open> open_[2];
  std::optional<Place> places_[2];
  std::vector<Filled> now_;
  std::vector<std::vector<Filled>> pairs_;
};

struct Found {
  std::vector<double> losses, norms;
  test::Tensors weights;
  std::vector<std::vector<Filled>> pairs;  ///< of the last rank
};

Found found_in(const test::Place& where, int pp, const train::Config& config,
               const TemporaryFolder& folder) {
  Found found;
  const test_hooks::Set issues(test_hooks::exchange_delay, [](const std::string& at) {
    if (auto* log = PairLog::of_thread()) log->issued(at);
    return std::chrono::microseconds(0);
  });
  const auto run = train_in(where, {2 * pp, 1}, config, folder, [&](World& world) {
    const auto log = std::make_shared<PairLog>();
    train::TrainingHooks hooks;
    hooks.after_step = [&, log, rank = world.rank()](const train::StepMetrics& metrics,
                                                     const ShardedBase& model) {
      auto pairs = log->take();
      if (metrics.step < config.training.steps) return;
      auto weights = test::whole_parameters(model);
      if (rank == 2 * pp - 1) found.pairs = std::move(pairs);
      if (rank == 0) found.weights = std::move(weights);
    };
    return hooks;
  });
  found.losses = run.losses;
  found.norms = run.norms;
  EXPECT_THAT(take_nccl_findings(), IsEmpty());
  return found;
}

struct Pairs {
  const char* schedule;
  int pp;
  DType dtype;
  test::Place where;
};

void expect_filled(const std::vector<std::vector<Filled>>& pairs, const std::string& what) {
  int as_many_layers = 0;
  for (const auto& pair : pairs) {
    const auto backward = std::ranges::count_if(
        pair, [](const Filled& each) { return each.where.ends_with("backward"); });
    // A layer has three exchanges forward and two backward. Who has more layers ends alone.
    const bool alike = backward > 0 && 5 * backward == 2 * std::ssize(pair);
    as_many_layers += alike ? 1 : 0;
    for (std::size_t i = 0; i < pair.size(); ++i) {
      const Filled& each = pair[i];
      // Experts' weight gradients are formed under the way back of their rows on purpose.
      if (!each.where.ends_with("dispatch backward")) EXPECT_EQ(each.own, 0) << what << each.where;
      if (alike && i > 0 && i + 1 < pair.size()) {
        EXPECT_GT(each.of_other, 0) << what << i << " of " << pair.size() << ": " << each.where;
      }
    }
  }
  EXPECT_GT(as_many_layers, 0) << what;
}

// Each exchange but the first and the last of a pair has a product of the other pass under it.
TEST(PairsOnDevices, RunsHaveTheBitsOfPassesInTurnAndFillTheirExchanges) {
  for (const Pairs& pairs :
       {Pairs{"Paired1F1B", 1, DType::kFloat32, {"sim"}},
        Pairs{"DualPipeV", 2, DType::kBFloat16, {"sim:0", true}},
        Pairs{"Paired1F1B", 1, DType::kBFloat16, {.device = "sim", .nccl = true}},
        Pairs{"DualPipeV", 2, DType::kFloat32, {.device = "sim", .side = true, .nccl = true}}}) {
    const TemporaryFolder folder;
    auto config = experts_run(folder, /*layers=*/4 * pairs.pp);
    config.training.steps = 3;  // the first one is recorded, and runs its pairs in turn
    config.training.local_batch_size = 1;
    config.training.max_norm = 0.05;
    config.precision.param_dtype.dtype = pairs.dtype;
    config.parallelism.expert_parallel_degree = 2;
    config.parallelism.pipeline_parallel_degree = pairs.pp;
    config.pipeline.schedule = pairs.schedule;
    if (pairs.pp > 1) config.pipeline.split = {0, 2, 4, 6};
    const auto what = concat(pairs.schedule, " on ", shown(pairs.where, {2 * pairs.pp, 1}),
                             pairs.where.nccl ? " over NCCL: " : ": ");
    const Found paired = found_in(pairs.where, pairs.pp, config, folder);
    config.pipeline.overlap = pipeline::Overlap::kOff;
    const Found turns = found_in(pairs.where, pairs.pp, config, folder);
    EXPECT_EQ(paired.losses, turns.losses) << what;
    EXPECT_EQ(paired.norms, turns.norms) << what;
    ASSERT_EQ(paired.weights.size(), turns.weights.size());
    for (const auto& [name, weight] : paired.weights) {
      expect_same_bits(weight.cpu(), turns.weights.at(name).cpu(), what + name);
    }
    EXPECT_THAT(turns.pairs, IsEmpty());
    expect_filled(paired.pairs, what);
  }
}

}  // namespace
}  // namespace tessera::sim::pairs_test
