// Property: a replay reads the tables that its body would read now, after any change since they
// were recorded: results, gradients and errors are those of eager calls.
//
// A table is a tensor member that is no registered buffer. A case follows from its seed: how bodies
// use their table and a buffer, whether two regions share a table, and a sequence of steps with two
// row counts and evaluations, of two forwards before their backwards, and between any of them of
// changes of a table or buffer of one region or of both. TESSERA_TABLES_SEED=N runs one case and
// prints it, TESSERA_TABLES_FROM and TESSERA_TABLES_CASES others.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>
#include <iostream>
#include <random>

#include "dist/replayed.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::test::replay_tables_test {
namespace {

constexpr auto kWidth = Part::kWidth;
constexpr std::size_t kParts = 2;

enum class Use { kFactor, kAddend, kProduct, kOfSums, kView, kDetached, kRead, kUses };
constexpr std::array kUseNames{"factor", "addend",   "product", "of sums",
                               "view",   "detached", "read"};

/// Uses a table of at least kWidth rows in a body; the result has the dtype of `y`.
at::Tensor used(Use use, const at::Tensor& y, const at::Tensor& table) {
  const auto of_y = [&](const at::Tensor& x) { return x.to(y.scalar_type()); };
  switch (use) {
    case Use::kFactor:
      return y * of_y(table.select(0, 1));
    case Use::kAddend:
      return y + of_y(table.narrow(0, 2, 1));
    case Use::kProduct:
      return at::linear(y, of_y(table.narrow(0, 0, kWidth))) * 0.1;
    case Use::kOfSums:
      return y * of_y(table.sum(0)).tanh();
    case Use::kView:
      return y.sigmoid() * of_y(table.narrow(0, 1, 3).t().diagonal().mean());
    case Use::kDetached:
      return y * of_y(table.detach()[0]);
    default:  // past the dispatcher: only the values of a view are read by an operation
      return y * of_y(table.variable_data().select(0, 0));
  }
}

enum class Change {
  kReplaced,
  kByAnotherDtype,
  kByAnotherPart,  ///< of memory that somebody holds
  kByAHeldOne,     ///< which its region alone takes from a list, as the one before
  kShared,         ///< with the other region
  kInPlace,
  kSetData,
  kSetToAnotherPart,
  kTransposed,
  kResized,
  kBufferSet,
  kBufferInPlace,
  kBufferReplaced,  ///< the member alone: the module holds the old one
  kChanges
};
constexpr std::array kChangeNames{
    "replaced",   "by another dtype", "by another part",     "by a held one", "shared",
    "in place",   "set_data",         "set to another part", "transposed",    "resized",
    "buffer set", "buffer in place",  "buffer replaced"};

/// The tables of one of the twins.
class Tables {
 public:
  explicit Tables(Model& model) : model_(model) {
    for (std::size_t i = 0; i < kParts; ++i) {
      pools_[i] = table(i, 3 * kWidth);
      for (std::uint64_t j = 0; j < 3; ++j) held_[i].push_back(table(10 * i + j));
      part(i).kept = table(100 + i);
    }
  }
  void change(Change what, std::size_t i, std::uint64_t seed) {
    const at::NoGradGuard no_grad;
    Part& of = part(i);
    const auto another_part = [&] {
      return pools_[i].narrow(0, static_cast<std::int64_t>(seed % (2 * kWidth)), kWidth);
    };
    switch (what) {
      case Change::kReplaced:
        of.kept = table(seed);
        break;
      case Change::kByAnotherDtype:
        of.kept = table(seed).to(seed % 2 == 0 ? at::kBFloat16 : at::kFloat);
        break;
      case Change::kByAnotherPart:
        of.kept = another_part();
        break;
      case Change::kByAHeldOne:
        of.kept = held_[i][seed % held_[i].size()];
        break;
      case Change::kShared:
        of.kept = part(1 - i).kept;
        break;
      case Change::kInPlace:
        of.kept.mul_(0.5).add_(0.25);
        break;
      case Change::kSetData:
        of.kept.set_data(table(seed));
        break;
      case Change::kSetToAnotherPart:
        of.kept.set_data(another_part());
        break;
      case Change::kTransposed:
        if (of.kept.size(0) == of.kept.size(1)) of.kept.t_();
        break;
      case Change::kResized: {
        const auto rows = kWidth + static_cast<std::int64_t>(seed % 5);
        of.kept.resize_({rows, kWidth});
        of.kept.copy_(table(seed, rows));
        break;
      }
      case Change::kBufferSet:
        of.table.set_data(seeded(seed, {kWidth}));
        break;
      case Change::kBufferInPlace:
        of.table.add_(0.125);
        break;
      default:
        of.table = seeded(seed, {kWidth});
    }
  }

 private:
  static at::Tensor table(std::uint64_t seed, std::int64_t rows = kWidth) {
    return seeded(seed, {rows, kWidth});
  }
  Part& part(std::size_t i) { return *model_.parts[i]; }

  Model& model_;
  std::array<at::Tensor, kParts> pools_;
  std::array<std::vector<at::Tensor>, kParts> held_;
};

class Case {
 public:
  explicit Case(std::uint64_t seed) : seed_(seed), engine_(seed * 7919) {
    for (auto& use : uses_) use = static_cast<Use>(below(static_cast<std::size_t>(Use::kUses) - 1));
    if (one_in(8)) uses_[0] = Use::kRead;
    shares_ = one_in(2);
    text_ = concat("seed ", seed, ": ", kUseNames[static_cast<std::size_t>(uses_[0])], ", ",
                   kUseNames[static_cast<std::size_t>(uses_[1])], shares_ ? ", shared\n" : "\n");
  }

  void run(World& world) {
    at::set_num_threads(1);
    Twins twins(data_mesh(world), body());
    std::array<Tables, 2> tables{Tables(twins.of_eager()), Tables(twins.of_replayed())};
    if (shares_) change(tables, Change::kShared, 1);
    const std::size_t phases = 3 + below(3);
    for (std::size_t phase = 0; phase < phases; ++phase) {
      // Long enough that all is replayed at its end, or too short for that.
      const std::size_t events = one_in(3) ? 2 + below(4) : 8 + below(6);
      has_second_ = one_in(2);
      evaluates_ = one_in(2);
      for (std::size_t i = 0; i < events; ++i) event(twins);
      between(twins, tables);
    }
    event(twins);
    replayed_ = twins.calls().replayed;
    text_ += concat(replayed_, " calls replayed\n");
    for (const auto& why : reasons(twins.calls())) text_ += concat("eager: ", why, "\n");
  }
  const std::string& text() const { return text_; }
  std::int64_t replayed() const { return replayed_; }

 private:
  std::size_t below(std::size_t count) { return engine_() % count; }
  bool one_in(std::size_t count) { return below(count) == 0; }

  Model::Run body() const {
    return [uses = uses_](Model& model, const Several& inputs) {
      Several all{inputs[0] * model.before};
      for (std::size_t i = 0; i < kParts; ++i) {
        Part& part = *model.parts[i];
        all = part.region(all, [&part, use = uses[i]](const Several& in) {
          const at::Tensor y = used(use, part.layer(in[0]), part.kept);
          return Several{y / (y.detach().abs().max() + 1.0) + part.table * 0.1};
        });
      }
      return Several{all[0] * model.after};
    };
  }

  Several inputs() {
    const std::int64_t count = has_second_ && one_in(2) ? 5 : 4;
    text_ += count == 5 ? "b" : "a";
    return {rows(10000 * seed_ + ++drawn_, count)};
  }

  /// A step, or an evaluation.
  void event(Twins& twins) {
    SCOPED_TRACE(text_);
    if (evaluates_ && one_in(2)) {
      text_ += "e";
      const auto given = inputs();
      return twins.both([&](Sharded<Model>& handle) {
        const at::NoGradGuard no_grad;
        return Several{handle.forward(given)[0].clone()};
      });
    }
    twins.step({inputs()});
  }

  void change(std::array<Tables, 2>& tables, Change what, std::size_t part) {
    const auto seed = 1000 * seed_ + ++drawn_;
    text_ += concat("; ", kChangeNames[static_cast<std::size_t>(what)], " of ", part, "; ");
    for (auto& of : tables) of.change(what, part, seed);
  }
  Change any_change() {
    return static_cast<Change>(below(static_cast<std::size_t>(Change::kChanges)));
  }

  /// Changes between steps, or between two forwards of one.
  void between(Twins& twins, std::array<Tables, 2>& tables) {
    const auto what = any_change();
    const std::size_t part = below(kParts);
    // A tensor that one takes while the other releases it has as many holders as before.
    const bool both = what != Change::kByAHeldOne && one_in(3);
    const auto act = [&] {
      change(tables, what, part);
      if (both) change(tables, what, 1 - part);
    };
    // Autograd would differentiate through the new table.
    const bool sets =
        what == Change::kSetData || what == Change::kSetToAnotherPart || what == Change::kBufferSet;
    if (sets || !one_in(3)) return act();
    has_second_ = evaluates_ = false;
    event(twins);
    const auto before = twins.calls();
    event(twins);
    // A graph whose backward has not run yet holds what it has read: no change is detected then.
    if (twins.calls().recorded != before.recorded || twins.calls().eager != before.eager) {
      return act();
    }
    in_flight(twins, act);
  }

  void in_flight(Twins& twins, const std::function<void()>& act) {
    SCOPED_TRACE(text_);
    text_ += "(two forwards ";
    std::vector<at::Tensor> losses;
    const auto forward = [&] {
      const auto given = inputs();
      for (auto* handle : {&twins.eager, &twins.replayed}) {
        losses.push_back(squares(handle->forward(given)[0]));
      }
    };
    forward();
    act();
    forward();
    std::array<std::string, 2> errors;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      if (errors[i % 2].empty()) errors[i % 2] = thrown_by([&] { backward(losses[i]); });
    }
    text_ += errors[0].empty() ? ")" : " refused)";
    EXPECT_EQ(errors[0].empty(), errors[1].empty()) << errors[0] << "\n" << errors[1];
    if (errors[0].empty()) return twins.update();
    for (auto* handle : {&twins.eager, &twins.replayed}) handle->zero_grad();
  }

  std::uint64_t seed_, drawn_ = 0;
  std::mt19937_64 engine_;
  std::array<Use, kParts> uses_ = {};
  bool shares_ = false, has_second_ = false, evaluates_ = false;
  std::string text_;
  std::int64_t replayed_ = 0;
};

/// Calls that were replayed.
std::int64_t run_case(std::uint64_t seed, bool prints = false) {
  Case c(seed);
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const auto failures = test->result()->total_part_count();
  try {
    ranks(1).run([&](World& world) { c.run(world); });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  const bool is_well = test->result()->total_part_count() == failures;
  if (!is_well) std::cerr << "again with TESSERA_TABLES_SEED=" << seed << "\n";
  if (!is_well || prints) std::cerr << c.text();
  return c.replayed();
}

TEST(ReplayTables, AreReadAsTheirBodiesWouldReadThem) {
  if (const auto seed = environment_number("TESSERA_TABLES_SEED", 0); seed != 0) {
    run_case(seed, /*prints=*/true);
    return;
  }
  const auto from = environment_number("TESSERA_TABLES_FROM", 1);
  const auto cases = environment_number("TESSERA_TABLES_CASES", 60);
  std::int64_t replayed = 0;
  for (auto seed = from; seed < from + cases && !HasFailure(); ++seed) replayed += run_case(seed);
  if (HasFailure()) return;
  EXPECT_GT(replayed, static_cast<std::int64_t>(10 * cases)) << "little was replayed";
}

}  // namespace
}  // namespace tessera::test::replay_tables_test
