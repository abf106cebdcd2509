// Turns: the order of two passes on one thread, the state that each keeps, and how errors end both.
#include "comm/turns.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "base/doing.h"
#include "base/interrupt.h"
#include "base/pass_local.h"
#include "base/random.h"
#include "base/threads/backward_pass.h"
#include "base/threads/shapes_only.h"
#include "comm/group.h"
#include "support/test.h"
#include "tessera/wide_scope.h"

namespace tessera::comm::turns_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- order ---

/// A side of a program: it notes a piece, passes, notes the next one, and so on; with an error in
/// place of one piece, if it has one.
struct DrawnSide {
  char name;
  int passes;
  std::optional<int> fails_at;  // the piece

  int pieces() const { return passes + 1; }
  std::string piece(int i) const { return name + std::to_string(i); }
};

/// The results of a side's function.
struct Found {
  std::vector<std::string> pieces;
  std::vector<char> ended;  // sides that Ended left
  int alive = 0;            // objects of their stacks
};

std::function<void()> body(const DrawnSide& side, Found& found) {
  return [&side, &found] {
    struct Alive {
      explicit Alive(int& of) : count(++of) {}
      ~Alive() { --count; }
      int& count;
    };
    try {
      const Alive outer(found.alive);
      for (int i = 0; i < side.pieces(); ++i) {
        const Alive inner(found.alive);
        if (side.fails_at == i) throw std::runtime_error(side.piece(i) + " fails");
        found.pieces.push_back(side.piece(i));
        if (i < side.passes) Turns::pass();
      }
    } catch (const Turns::Ended&) {
      found.ended.push_back(side.name);
      throw;
    }
  };
}

/// Pieces in the order of turns: one of each in turn, then the rest of the longer one.
std::vector<std::pair<const DrawnSide*, int>> in_order(const DrawnSide& first,
                                                       const DrawnSide& second) {
  std::vector<std::pair<const DrawnSide*, int>> order;
  for (int i = 0; i < std::max(first.pieces(), second.pieces()); ++i) {
    if (i < first.pieces()) order.emplace_back(&first, i);
    if (i < second.pieces()) order.emplace_back(&second, i);
  }
  return order;
}

/// Runs the program and compares with in_order() up to the first piece that fails.
void expect_in_turn(Turns& turns, const DrawnSide& first, const DrawnSide& second) {
  SCOPED_TRACE(::testing::Message() << first.passes << " and " << second.passes << " passes");
  std::vector<std::string> expected;
  std::string error;
  std::vector<char> ended;
  std::map<char, int> begun;
  for (const auto& [side, i] : in_order(first, second)) {
    begun[side->name] = i + 1;
    if (side->fails_at == i) {
      error = side->piece(i) + " fails";
      const DrawnSide& other = side == &first ? second : first;
      // It stands in a pass(), if it has begun and has not come to its end.
      const int done = begun[other.name];
      if (done > 0 && done < other.pieces()) ended.push_back(other.name);
      break;
    }
    expected.push_back(side->piece(i));
  }

  Found found;
  Turns::Counts counts;
  const std::string thrown =
      thrown_by([&] { counts = turns.run(body(first, found), body(second, found)); });
  EXPECT_EQ(thrown, error);
  EXPECT_EQ(found.pieces, expected);
  EXPECT_EQ(found.ended, ended);
  EXPECT_EQ(found.alive, 0);
  EXPECT_FALSE(Turns::under_way());
  if (error.empty()) {
    EXPECT_EQ(counts, (Turns::Counts{first.passes, second.passes}));
  }
}

TEST(Turns, OrderFollowsFromCountsAloneAlsoWhenOneEndsEarly) {
  Turns turns;
  for (int first = 0; first < 10; ++first) {
    for (int second = 0; second < 10; ++second) {
      expect_in_turn(turns, {'f', first, {}}, {'s', second, {}});
    }
  }
}

TEST(Turns, FirstErrorOfDrawnProgramsComesOutAndBothStacksUnwind) {
  Turns turns;
  std::mt19937 random(45);
  const auto below = [&](int end) {
    return static_cast<int>(random() % static_cast<unsigned>(end));
  };
  const auto drawn = [&](char name) {
    DrawnSide side{name, below(10), {}};
    if (below(2) == 0) side.fails_at = below(side.pieces());
    return side;
  };
  for (int i = 0; i < 300; ++i) {
    const DrawnSide first = drawn('f'), second = drawn('s');
    expect_in_turn(turns, first, second);
  }
}

TEST(Turns, PassOutsideOfARunDoesNothing) {
  Turns::pass();
  EXPECT_FALSE(Turns::under_way());
  int on_other_thread = 0;
  Turns turns;
  const auto counts = turns.run(
      [&] {
        EXPECT_TRUE(Turns::under_way());
        std::thread([&] {
          Turns::pass();
          on_other_thread += Turns::under_way() ? 1 : 2;
        }).join();
      },
      [&] { EXPECT_EQ(on_other_thread, 2); });
  EXPECT_EQ(counts, (Turns::Counts{0, 0}));
}

TEST(Turns, ASideThatSwallowsEndedIsEndedAgain) {
  Turns turns;
  int swallowed = 0;
  const auto stubborn = [&] {
    for (int i = 0; i < 4; ++i) {
      try {
        Turns::pass();
      } catch (const std::exception&) {
        ++swallowed;
      }
    }
  };
  const auto fails = [] { throw std::runtime_error("the cause"); };
  EXPECT_EQ(thrown_by([&] { turns.run(stubborn, fails); }), "the cause");
  EXPECT_EQ(swallowed, 4);
}

TEST(Turns, ADestructorThatEndedRunsMayPass) {
  struct Passes {
    ~Passes() { Turns::pass(); }
  };
  Turns turns;
  const auto unwinds = [] {
    const Passes last;
    Turns::pass();
  };
  EXPECT_EQ(thrown_by([&] { turns.run(unwinds, [] { throw std::runtime_error("the cause"); }); }),
            "the cause");
}

TEST(Turns, AnErrorThatOneSideHandlesIsItsOwn) {
  Turns turns;
  const auto handles = [] {
    for (int i = 0; i < 3; ++i) {
      try {
        Turns::pass();
        throw std::runtime_error("handled");
      } catch (const std::runtime_error&) {
      }
      Turns::pass();
    }
  };
  EXPECT_EQ(turns.run(handles, handles), (Turns::Counts{6, 6}));
}

TEST(Turns, RefusesATurnInsideOfAHandlerOrOfWhatMustBeOnePiece) {
  Turns turns;
  const auto nothing = [] {};
  const auto in_handler = [] {
    try {
      throw std::runtime_error("handled");
    } catch (const std::runtime_error&) {
      Turns::pass();
    }
  };
  EXPECT_REFUSED(kInternal, turns.run(in_handler, nothing), "turn while an error is handled");
  EXPECT_REFUSED(kInternal, turns.run(nothing, in_handler), "turn while an error is handled");
  const auto in_one_piece = [] {
    const base::NoTurns why("a recording");
    Turns::pass();
  };
  EXPECT_REFUSED(kInternal, turns.run(in_one_piece, nothing), "turn inside of a recording");
  EXPECT_REFUSED(kInternal, turns.run([&] { turns.run(nothing, nothing); }, nothing),
                 "a run inside of a run");
}

TEST(Turns, AHandlerMayRunThem) {
  Turns turns;
  try {
    throw std::runtime_error("handled");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(turns.run([] { Turns::pass(); }, [] { Turns::pass(); }), (Turns::Counts{1, 1}));
  }
}

TEST(Turns, TheSecondStackIsDeep) {
  const std::function<int(int)> deep = [&deep](int depth) {
    std::array<volatile char, 1024> frame{};
    frame[0] = 1;
    return depth == 0 ? frame[0] : deep(depth - 1) + frame[1];
  };
  Turns turns;
  int result = 0;
  turns.run([] {}, [&] { result = deep(2000); });
  EXPECT_EQ(result, 1);
}

// --- what each pass has for itself ---

/// A scope of a call: how to open it, and whether code sees it open.
struct OfACall {
  const char* name;
  std::function<std::shared_ptr<void>()> open;
  std::function<bool()> is_open;

  friend std::ostream& operator<<(std::ostream& out, const OfACall& one) { return out << one.name; }
};

template <class Scope, class... Args>
std::function<std::shared_ptr<void>()> opens(Args... args) {
  return [=] { return std::static_pointer_cast<void>(std::make_shared<Scope>(args...)); };
}

/// Sets a value of the thread while it lives.
template <class T>
struct Set {
  Set(T (*exchange)(T), T value) : exchange_(exchange), before(exchange(value)) {}
  ~Set() { exchange_(before); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;

  T (*exchange_)(T);
  T before;
};

bool exchange_cache(bool enabled) {
  const bool before = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(enabled);
  return before;
}
at::ScalarType exchange_dtype(at::ScalarType dtype) {
  const auto before = at::autocast::get_autocast_dtype(at::kCPU);
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
  return before;
}
bool exchange_autocast(bool enabled) {
  const bool before = at::autocast::is_autocast_enabled(at::kCPU);
  at::autocast::set_autocast_enabled(at::kCPU, enabled);
  return before;
}
c10::WarningHandler* exchange_warnings(c10::WarningHandler* handler) {
  auto* const before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(handler);
  return before;
}
c10::WarningHandler& other_handler() {
  static c10::WarningHandler handler;
  return handler;
}
/// Saved-tensor hooks of C++ cannot be pushed without Python; that they are refused is in the same
/// state.
struct NoSavedTensorHooks {
  NoSavedTensorHooks() { at::SavedTensorDefaultHooks::disable("none here"); }
  ~NoSavedTensorHooks() { at::SavedTensorDefaultHooks::enable(); }
};

const std::array kOfACall{
    OfACall{"grad mode", opens<at::NoGradGuard>(), [] { return !at::GradMode::is_enabled(); }},
    OfACall{"inference mode", opens<c10::InferenceMode>(), c10::InferenceMode::is_enabled},
    OfACall{"dispatch keys", opens<c10::impl::ExcludeDispatchKeyGuard>(c10::DispatchKey::Batched),
            [] { return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Batched); }},
    OfACall{"saved-tensor hooks", opens<NoSavedTensorHooks>(),
            [] { return !at::SavedTensorDefaultHooks::is_enabled(); }},
    OfACall{"autocast", opens<Set<bool>>(&exchange_autocast, true),
            [] { return at::autocast::is_autocast_enabled(at::kCPU); }},
    OfACall{"autocast's dtype", opens<Set<at::ScalarType>>(&exchange_dtype, at::kHalf),
            [] { return at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf; }},
    OfACall{"autocast's cache", opens<Set<bool>>(&exchange_cache, false),
            [] { return !at::autocast::is_autocast_cache_enabled(); }},
    OfACall{"warning handler",
            opens<Set<c10::WarningHandler*>>(&exchange_warnings, &other_handler()),
            [] { return c10::WarningUtils::get_warning_handler() == &other_handler(); }},
    OfACall{"WideScope", opens<WideScope>(), WideScope::is_open},
    OfACall{"SampleScope", opens<SampleScope>(SamplePlace{}),
            [] { return sample_place().has_value(); }},
    OfACall{"DoingHere", opens<DoingHere>([] { return std::string("a slot"); }),
            [] { return DoingHere::as_text() == ", in a slot"; }},
    OfACall{"NoInterrupts", opens<base::NoInterrupts>(), base::NoInterrupts::in_this_thread},
    OfACall{"ShapesOnly", opens<base::ShapesOnly>(), base::shapes_only},
};

class TurnsScopes : public ::testing::TestWithParam<OfACall> {};

TEST_P(TurnsScopes, AreOfThePassThatOpensThem) {
  const OfACall& scope = GetParam();
  Turns turns;
  // Open across turns of the other, each: a scope ends while the other's is open.
  const auto opens_and_passes = [&] {
    for (int i = 0; i < 2; ++i) {
      EXPECT_FALSE(scope.is_open());
      Turns::pass();
      EXPECT_FALSE(scope.is_open());
      auto open = scope.open();
      EXPECT_TRUE(scope.is_open());
      Turns::pass();
      EXPECT_TRUE(scope.is_open());
    }
  };
  const auto never_opens = [&] {
    for (int i = 0; i < 6; ++i) {
      EXPECT_FALSE(scope.is_open());
      Turns::pass();
    }
  };
  turns.run(opens_and_passes, never_opens);
  turns.run(never_opens, opens_and_passes);
  turns.run(opens_and_passes, opens_and_passes);
  turns.run([&] { Turns::pass(); }, opens_and_passes);
  EXPECT_FALSE(scope.is_open());
}

TEST_P(TurnsScopes, AroundTheRunHoldForBothPasses) {
  const OfACall& scope = GetParam();
  Turns turns;
  {
    const auto open = scope.open();
    const auto sees_it = [&] {
      EXPECT_TRUE(scope.is_open());
      Turns::pass();
      EXPECT_TRUE(scope.is_open());
    };
    turns.run(sees_it, sees_it);
  }
  EXPECT_FALSE(scope.is_open());
}

TEST_P(TurnsScopes, EndWithAnErrorOfTheOtherPass) {
  const OfACall& scope = GetParam();
  Turns turns;
  const auto open_for_ever = [&] {
    const auto open = scope.open();
    for (;;) Turns::pass();
  };
  const auto fails = [] {
    Turns::pass();
    throw std::runtime_error("the cause");
  };
  EXPECT_EQ(thrown_by([&] { turns.run(open_for_ever, fails); }), "the cause");
  EXPECT_FALSE(scope.is_open());
  EXPECT_EQ(thrown_by([&] { turns.run(fails, open_for_ever); }), "the cause");
  EXPECT_FALSE(scope.is_open());
}

INSTANTIATE_TEST_SUITE_P(Each, TurnsScopes, ::testing::ValuesIn(kOfACall), [](const auto& param) {
  std::string name = param.param.name;
  std::erase_if(name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
  return name;
});

TEST(PassLocal, ValuesOfDrawnProgramsAreOfTheirPass) {
  using Value = base::PassLocal<base::PassValue::kTest, std::uint64_t>;
  Turns turns;
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    const std::uint64_t given = random();
    Value::here() = given;
    const auto writes = [&](std::uint64_t mine, std::size_t pass) {
      return [&random, given, mine, pass] {
        EXPECT_EQ(Value::here(), given);
        for (auto turn = random() % 10; turn > 0; --turn) {
          Value::here() = mine + turn;
          Turns::pass();
          EXPECT_EQ(Value::here(), mine + turn);
          EXPECT_EQ(base::pass_here(), pass);
        }
        Value::here() = mine;
      };
    };
    turns.run(writes(given + 100, 0), writes(given + 200, 1));
    EXPECT_EQ(Value::here(), given + 100);  // the first pass is the caller's
    EXPECT_EQ(base::pass_here(), 0U);
  }
  Value::here() = 0;
}

TEST(PassLocal, EachPassIsInItsOwnUnitStageAndMicroBatch) {
  Turns turns;
  const auto in_unit = [](std::string name, int stage, std::uint32_t micro_batch) {
    return [name = std::move(name), stage, micro_batch] {
      for (int layer = 0; layer < 3; ++layer) {
        const std::string unit = concat(name, layer);
        UnitHere::enter(unit);
        UnitHere::enter(stage, micro_batch);
        Turns::pass();
        EXPECT_EQ(UnitHere::unit(), unit);
        EXPECT_EQ(UnitHere::stage(), stage);
        EXPECT_EQ(UnitHere::micro_batch(), micro_batch);
      }
      UnitHere::enter(std::string_view());
      UnitHere::leave_step();
    };
  };
  turns.run(in_unit("a.layers.", 0, 5), in_unit("b.layers.", 1, 3));
  EXPECT_EQ(UnitHere::unit(), "");
}

// --- a backward that alternates with a forward ---

/// Stands for an exchange: it passes in both directions.
struct Exchange : torch::autograd::Function<Exchange> {
  static at::Tensor forward(AutogradContext* /*ctx*/, const at::Tensor& x) {
    Turns::pass();
    return x.clone();
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) {
    EXPECT_TRUE(base::in_backward_pass());
    Turns::pass();
    EXPECT_TRUE(base::in_backward_pass());
    return {grads[0].clone()};
  }
};

struct Model {
  explicit Model(int layers, unsigned seed) {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    for (int i = 0; i < layers; ++i) {
      weights.push_back(at::randn({16, 16}, generator).set_requires_grad(true));
    }
    for (int i = 0; i < 2; ++i) batches.push_back(at::randn({8, 16}, generator));
  }
  at::Tensor loss(int batch) const {
    at::Tensor x = batches[static_cast<std::size_t>(batch)];
    for (const auto& weight : weights) x = at::tanh(Exchange::apply(x.matmul(weight))) + x;
    return x.pow(2).mean();
  }
  std::vector<at::Tensor> results(const at::Tensor& loss) const {
    std::vector<at::Tensor> all{loss.detach()};
    for (const auto& weight : weights) all.push_back(weight.grad());
    return all;
  }
  std::vector<at::Tensor> weights, batches;
};

TEST(TurnsOfAutograd, ABackwardThatAlternatesWithAForwardGivesTheBitsOfInTurn) {
  for (const int layers : {1, 4}) {
    const Model in_turn(layers, 3), paired(layers, 3);
    const at::Tensor one = in_turn.loss(0);
    one.backward();
    const at::Tensor two = in_turn.loss(1);
    two.backward();

    const at::Tensor first = paired.loss(0);
    at::Tensor second;
    Turns turns;
    const auto forward = [&] {
      EXPECT_FALSE(base::in_backward_pass());
      second = paired.loss(1);
      EXPECT_FALSE(base::in_backward_pass());
      Label label;
      note_pass(label);
      EXPECT_EQ(label.pass, Label().pass);
    };
    EXPECT_EQ(turns.run(forward, [&] { first.backward(); }), (Turns::Counts{layers, layers}));
    second.backward();

    const auto expected = in_turn.results(two), found = paired.results(second);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i]));
  }
}

TEST(TurnsOfAutograd, AnErrorInsideOfABackwardLeavesTheNextOneWhole) {
  const Model model(3, 5), expected(3, 5);
  Turns turns;
  for (int turn = 0; turn < 4; ++turn) {
    const at::Tensor loss = model.loss(0);
    const auto fails = [&] {
      for (int i = 0; i < turn; ++i) Turns::pass();
      throw std::runtime_error("the cause");
    };
    EXPECT_EQ(thrown_by([&] { turns.run([&] { loss.backward(); }, fails); }), "the cause");
    EXPECT_FALSE(base::in_backward_pass());
    for (const auto& weight : model.weights) weight.mutable_grad().reset();
  }
  model.loss(1).backward();
  expected.loss(1).backward();
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i].grad(), expected.weights[i].grad()));
  }
}

TEST(TurnsOfAutograd, TwoBackwardsAtOnceAreRefused) {
  const Model model(6, 5), other(2, 6);
  Turns turns;
  for (const bool forward_is_first : {true, false}) {
    const at::Tensor loss = model.loss(0);
    const auto backward = [&] { loss.backward(); };
    const auto forward = [&] {
      const at::Tensor x = other.loss(0);
      x.backward();  // its exchanges pass
    };
    EXPECT_REFUSED(kUsage,
                   forward_is_first ? turns.run(forward, backward) : turns.run(backward, forward),
                   "backward in both of two passes");
    EXPECT_FALSE(base::in_backward_pass());
  }
}

TEST(TurnsOfAutograd, ABackwardWithoutATurnRunsInsideOfAForward) {
  const Model model(3, 5), expected(3, 5);
  expected.loss(0).backward();
  const at::Tensor loss = model.loss(0);
  const at::Tensor x = at::full({4}, 3.0).set_requires_grad(true);
  Turns turns;
  const auto forward = [&] {
    Turns::pass();
    EXPECT_FALSE(base::in_backward_pass());
    x.pow(2).sum().backward();
    Turns::pass();
    x.pow(2).sum().backward();
  };
  turns.run([&] { loss.backward(); }, forward);
  EXPECT_TRUE(at::equal(x.grad(), at::full({4}, 12.0)));
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i].grad(), expected.weights[i].grad()));
  }
}

}  // namespace
}  // namespace tessera::comm::turns_test
