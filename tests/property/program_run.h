// Runs a Program on real ranks together with its unsharded twin, and says what is wrong with it.
//
// Every rank follows the rules by itself; ranks meet only where their twins' gradients are read,
// where something is refused or has failed, and after every operation where the program asks for
// it: a rank may be ahead as in a user's loop. A rank that waits in vain is told by the World's
// timeout, which is short here.
#pragma once

#include "property/program_board.h"
#include "property/program_rules.h"
#include "property/program_sharded.h"
#include "property/program_text.h"

namespace tessera::test {

class ProgramRun {
 public:
  ProgramRun(const Program& program, World& world, ProgramBoard& board)
      : program_(program),
        world_(world),
        board_(board),
        seat_(board.meeting),
        rules_(program),
        rank_(static_cast<std::size_t>(world.rank())) {}

  void run() {
    try {
      run_all();
    } catch (const std::exception& error) {
      world_.abort(error.what());  // no rank waits for what this rank no longer does
      throw;
    }
  }

 private:
  void run_all() {
    try {
      make_twins();
      sharded_.emplace(program_, world_);
    } catch (const std::exception& error) {
      end(concat("fully_shard: ", error.what()));
    }
    for (place_ = 0; place_ < program_.ops.size(); ++place_) {
      const auto& op = program_.ops[place_];
      const auto expected = rules_.expect(op);
      if (expected == Expect::kNothing) continue;
      const bool throws = op.act == Act::kThrowInForward || op.act == Act::kThrowInBackward;
      if (expected == Expect::kRefused || throws) {
        be_refused(op, throws);
      } else {
        run(op);
      }
      rules_.done(op, expected);
      if (program_.lockstep) meet();
    }
    meet();
  }

  void make_twins() {
    const OnTheHost there;
    twin_ = board_.twins[rank_] = std::make_shared<ProgramTwin>(program_, world_.rank());
    if (program_.policy == ProgramPolicy::kNarrowCompute)
      narrow_ = board_.narrow_twins[rank_] =
          std::make_shared<ProgramTwin>(program_, world_.rank(), at::kFloat, at::kBFloat16);
  }

  std::string where() const {
    return concat("operation ", place_, " (", detail::describe_op(program_, program_.ops[place_]),
                  "), rank ", rank_);
  }
  [[noreturn]] void end(const std::string& finding) {
    board_.find(finding);
    throw ProgramFailed();
  }
  void meet() {
    seat_.wait();
    if (board_.failed) throw ProgramFailed();
  }

  // --- what runs ---

  void run(const Op& op) {
    try {
      attempt(op);
    } catch (const ProgramFailed&) {
      throw;
    } catch (const std::exception& error) {
      end(concat(where(), ": found the error \"", error.what(), "\", expected it to run"));
    }
  }

  void attempt(const Op& op) {
    switch (op.act) {
      case Act::kForward:
        return compare_all(sharded_->forward(op), of_twins([&](ProgramTwin& twin) {
                             return twin.forward(op, rules_.node_of(op));
                           }));
      case Act::kEvaluate: {
        const auto found = sharded_->evaluate(op);
        const at::NoGradGuard no_grad;
        return compare_all(found, of_twins([&](ProgramTwin& twin) {
                             return twin.forward(op, rules_.node_of(op));
                           }));
      }
      case Act::kInputGradient:
        return compare_scaled("gradient of the input", sharded_->gradient_of_input(op),
                              of_twins([&](ProgramTwin& twin) {
                                return std::vector{twin.gradient_of_input(op)};
                              }).at(0),
                              tolerance());
      case Act::kBackward:
        sharded_->run(op);
        twins_do([&](ProgramTwin& twin) { twin.backward(op); });
        return compare_inputs();
      case Act::kRead:
        return read();
      case Act::kNorm:
        return norm();
      case Act::kStep:
        return step(op);
      case Act::kSetTrainable:
        forget_results();
        sharded_->run(op);
        return twins_do([&](ProgramTwin& twin) {
          twin.set_trainable(static_cast<std::size_t>(op.parameter), op.on);
        });
      case Act::kForget:
        twins_do([&](ProgramTwin& twin) { twin.forget(op.result); });
        break;
      case Act::kScaleResult:
        twins_do([&](ProgramTwin& twin) { twin.scale(op.result); });
        break;
      case Act::kZeroGrad:
        twins_do([&](ProgramTwin& twin) { twin.zero_grad(op.on, sharded_->shown()); });
        break;
      case Act::kHalveGradients:
        twins_do([](ProgramTwin& twin) { twin.halve_gradients(); });
        break;
      case Act::kDivideFactor:
        twin_->set_divide(op.factor);
        break;
      default:
        break;
    }
    sharded_->run(op);
  }

  void forget_results() {
    sharded_->forget_results();
    twins_do([](ProgramTwin& twin) { twin.forget_results(); });
  }
  void twins_do(const std::function<void(ProgramTwin&)>& act) {
    const OnTheHost there;
    act(*twin_);
    if (narrow_) act(*narrow_);
  }
  /// Both compute; what is compared is of the dtype that the sharded model computes in.
  std::vector<at::Tensor> of_twins(
      const std::function<std::vector<at::Tensor>(ProgramTwin&)>& compute) {
    const OnTheHost there;
    auto of_wide = compute(*twin_);
    return narrow_ ? compute(*narrow_) : of_wide;
  }

  // --- what is compared ---

  /// The tolerance for values of size 1: sums of a few hundred addends. In bf16 only gradients are
  /// added in another order than unsharded.
  double tolerance() const {
    if (program_.doubles) return 1e-9;
    return narrow_ ? 0.1 : 5e-5;
  }
  double result_tolerance() const { return narrow_ ? 0 : tolerance(); }
  double gradient_tolerance() const {
    return program_.policy == ProgramPolicy::kNarrowWire ? 0.02 : tolerance();
  }
  void compare(const std::string& what, const at::Tensor& found, const at::Tensor& expected,
               double bound) {
    if (found.sizes() != expected.sizes())
      end(concat(where(), ": ", what, ": found sizes ", found.sizes(), ", expected ",
                 expected.sizes()));
    const auto error =
        (found.detach().cpu().to(at::kDouble) - expected.detach().cpu()).abs().max().item<double>();
    if (error <= bound) return;
    end(concat(where(), ": ", what, ": found values up to ", error, " off, expected at most ",
               bound, "; largest expected ", expected.detach().abs().max().item<double>()));
  }
  void compare_scaled(const std::string& what, const at::Tensor& found, const at::Tensor& expected,
                      double relative) {
    compare(what, found, expected,
            relative * std::max(1.0, expected.detach().abs().max().item<double>()));
  }
  void compare_all(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
    if (found.size() != expected.size())
      end(concat(where(), ": found ", found.size(), " results, expected ", expected.size()));
    for (std::size_t i = 0; i < found.size(); ++i)
      compare_scaled(concat("result ", i), found[i], expected[i], result_tolerance());
  }
  void compare_inputs() {
    for (const auto& [number, result] : sharded_->results()) {
      if (!result.leaf.defined()) continue;
      const auto& twin = narrow_ ? *narrow_ : *twin_;
      const auto& expected = twin.results().at(number).leaf.grad();
      if (result.leaf.grad().defined() != expected.defined())
        end(concat(where(), ": found ", expected.defined() ? "no " : "a ",
                   "gradient of the input of r", number, ", expected the other"));
      if (expected.defined())
        compare_scaled(concat("gradient of the input of r", number), result.leaf.grad(), expected,
                       tolerance());
    }
  }

  /// By parameter; undefined where no rank has one.
  std::vector<at::Tensor> averages() const {
    std::vector<at::Tensor> all(program_.parameters.size());
    for (const auto& twin : narrow_ ? board_.narrow_twins : board_.twins) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!twin->parameter(i).grad().defined()) continue;
        const auto grad = twin->parameter(i).grad().to(at::kDouble);
        all[i] = all[i].defined() ? all[i] + grad : grad;
      }
    }
    for (auto& one : all) {
      if (one.defined()) one = one / twin_->divide();
    }
    return all;
  }
  double magnitude(std::size_t i) const {
    double of_one = 0, of_all = 0;
    for (const auto& twin : board_.twins) {
      of_one = std::max(of_one, twin->magnitude(i));
      for (std::size_t j = 0; j < program_.parameters.size(); ++j)
        of_all = std::max(of_all, twin->magnitude(j));
    }
    return std::max({of_one, 0.01 * of_all, 1e-3}) *
           std::max(1.0, program_.ranks / twin_->divide());
  }
  static std::size_t parameter_of(const std::string& name) {
    return std::stoul(name.substr(name.rfind('p') + 1));
  }

  void read() {
    const auto found = whole_gradients(sharded_->handle());
    meet();
    const auto expected = averages();
    std::size_t trained = 0;
    for (std::size_t i = 0; i < expected.size(); ++i)
      trained += program_.has(i) && rules_.trains(i) ? 1 : 0;
    if (found.size() != trained)
      end(concat(where(), ": found gradients of ", found.size(), " parameters, expected ",
                 trained));
    for (const auto& [name, value] : found) {
      const auto i = parameter_of(name);
      compare("gradient of " + name, value,
              expected[i].defined() ? expected[i] : at::zeros_like(value, at::kDouble),
              gradient_tolerance() * magnitude(i));
    }
    for (const auto& view : sharded_->handle().shards()) {
      const auto& wanted = expected[parameter_of(view.contract->name)];
      if (view.contract->trainable && view.shard.grad().defined() != wanted.defined())
        end(concat(where(), ": gradient of ", view.contract->name, ": found ",
                   wanted.defined() ? "none" : "one", ", expected the other"));
    }
    meet();
  }

  void norm() {
    const double found = gradient_norm(sharded_->handle());
    meet();
    double squares = 0, bound = 1e-12;
    const auto expected = averages();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i].defined()) squares += expected[i].pow(2).sum().item<double>();
      bound += 2 * gradient_tolerance() * magnitude(i);
    }
    if (!(std::abs(found - std::sqrt(squares)) <= bound))
      end(concat(where(), ": found a norm of ", found, ", expected ", std::sqrt(squares)));
    meet();
  }

  /// The momentum sums gradients, and what each of them is off by with it: also of those that were
  /// a hundred times as large, and that zero_grad() has forgotten since.
  double next_momentum_error(std::size_t i) {
    auto& error = momentum_errors_[i];
    error = kProgramMomentum * error + gradient_tolerance() * magnitude(i);
    return error;
  }
  void step(const Op& op) {
    meet();
    const auto gradients = averages();
    std::vector<double> bounds;
    for (std::size_t i = 0; i < gradients.size(); ++i)
      bounds.push_back(gradients[i].defined() ? kProgramLr * next_momentum_error(i) : 0);
    meet();
    twin_->step(gradients);
    sharded_->run(op);
    for (const auto& [name, value] : whole_parameters(sharded_->handle())) {
      const auto i = parameter_of(name);
      const auto& wanted = twin_->parameter(i);
      const auto exact = tolerance() < 1e-3 ? tolerance() : 1e-4;
      compare("value of " + name, value, wanted,
              bounds[i] + exact * std::max(1.0, wanted.detach().abs().max().item<double>()));
      twins_do([&](ProgramTwin& twin) { twin.follow(i, value.cpu()); });
    }
    meet();
  }

  // --- what is refused, or fails ---

  /// On all ranks, by an Error that says what; the rest of the program finds nothing lost.
  void be_refused(const Op& op, bool throws) {
    meet();  // a failure would end what another rank is still at
    auto& caught = board_.errors[rank_];
    caught = {};
    try {
      attempt_refused(op);
    } catch (const Error& error) {
      caught = {error.what(), true};
    } catch (const std::exception& error) {
      caught = {error.what(), false};
    }
    seat_.wait();
    if (board_.failed) throw ProgramFailed();
    const bool here = throws && (op.rank < 0 || op.rank == world_.rank());
    const bool by_user = caught.what.find("the user's") != std::string::npos;
    if (caught.what.empty()) end(concat(where(), ": found no error, expected one", others()));
    if (throws ? here && op.rank >= 0 && !by_user : !caught.by_name)
      end(concat(where(), ": found the error \"", caught.what, "\", expected ",
                 throws ? "the user's" : "one of the library"));
    meet();
    if (!is_lasting(op)) return;
    forget_results();
    meet();
    try {
      if (world_.size() > 1) world_.recover();
    } catch (const std::exception& error) {
      end(concat(where(), ": recover: ", error.what()));
    }
    meet();
    twins_do([](ProgramTwin& twin) { twin.fail(); });
  }
  void attempt_refused(const Op& op) {
    switch (op.act) {
      case Act::kInputGradient:
        sharded_->gradient_of_input(op);
        return;
      case Act::kRead:
        whole_gradients(sharded_->handle());
        return;
      case Act::kNorm:
        gradient_norm(sharded_->handle());
        return;
      case Act::kHalveGradients:
        sharded_->run(op);
        return backward(program_loss(sharded_->forward(op)));
      default:
        sharded_->run(op);
    }
  }
  std::string others() const {
    std::string all;
    for (std::size_t i = 0; i < board_.errors.size(); ++i) {
      if (!board_.errors[i].what.empty()) all += concat("; rank ", i, ": ", board_.errors[i].what);
    }
    return all;
  }
  /// It leaves a forward or a backward.
  static bool is_lasting(const Op& op) {
    switch (op.act) {
      case Act::kBackward:
      case Act::kThrowInForward:
      case Act::kThrowInBackward:
      case Act::kChangeArgument:
      case Act::kChangeHeldResult:
      case Act::kInputGradient:
      case Act::kHalveGradients:
        return true;
      default:
        return false;
    }
  }

  const Program& program_;
  World& world_;
  ProgramBoard& board_;
  RankBarrier::Seat seat_;
  ProgramRules rules_;
  std::size_t rank_;
  std::size_t place_ = 0;
  std::optional<ProgramSharded> sharded_;
  std::shared_ptr<ProgramTwin> twin_;
  std::shared_ptr<ProgramTwin> narrow_;  ///< null where the sharded model does not compute in bf16
  std::vector<double> momentum_errors_ = std::vector<double>(program_.parameters.size());
};

/// Returns what is wrong with it; "" for nothing.
inline std::string failure_of(const Program& program) {
  ProgramBoard board(program.ranks);
  try {
    program_ranks(program.ranks, program.backend).run([&](World& world) {
      at::set_num_threads(1);  // products of four columns gain nothing, and threads that wait spin
      ProgramRun(program, world, board).run();
    });
  } catch (const ProgramFailed&) {
  } catch (const std::exception& error) {
    board.find(concat("outside of any operation: ", error.what()));
  }
  for (const auto& race : found_by_devices()()) board.find(race);
  return board.findings();
}

}  // namespace tessera::test
