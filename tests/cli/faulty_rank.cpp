// A training whose ranks go wrong where fault.txt says: what hang_report_test.cpp runs.
//
//   faulty_rank NPROC, in a folder with run.toml, fault.txt: RANK KIND PLACE STEP DRAW
//   KIND: kill | stop | compute | skip | twice | swap; list: prints what each place issues in STEP
//   PLACE: forward | backward | reduction | tp | experts | message | optimizer | control
//
// In step STEP (from 1) of those collectives or messages of PLACE that the step before had, the one
// that DRAW draws: RANK kills or stops itself, or computes for ever, before it is issued; or leaves
// it out, issues it twice, or the one after it first. truth.txt says what it was.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/doing.h"
#include "base/log.h"
#include "base/test_hooks.h"
#include "comm/batch.h"
#include "comm/failure_report.h"
#include "comm/group.h"
#include "comm/p2p.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/trainer.h"

namespace {

using tessera::concat;
using tessera::World;
namespace comm = tessera::comm;
namespace train = tessera::train;

struct Fault {
  int rank = 0;
  std::string kind, place;
  std::int64_t step = 0;
  std::size_t draw = 0;
};

Fault read_fault() {
  Fault fault;
  std::ifstream in("fault.txt");
  in >> fault.rank >> fault.kind >> fault.place >> fault.step >> fault.draw;
  if (!in) throw std::runtime_error("fault.txt cannot be read");
  return fault;
}

std::string place_of(const std::string& group, const comm::Label& label) {
  const bool backward = label.pass == comm::Pass::kBackward;
  if (label.unit.find("norm of") != std::string::npos ||
      label.unit.find("gradient norm") != std::string::npos) {
    return "optimizer";
  }
  if (group.starts_with("gather")) return backward ? "backward" : "forward";
  if (group.starts_with("reduce") || group.starts_with("replicas")) return "reduction";
  if (group.starts_with("transitions on tp")) return "tp";
  if (group.starts_with("transitions")) return "experts";
  return "control";
}

class Faulty {
 public:
  explicit Faulty(const Fault& fault) : fault_(fault) {}

  void step_is_done() {
    const std::lock_guard lock(mutex_);
    ++done_;
    if (done_ + 2 == fault_.step) before_.clear();
    seen_ = 0;
  }

  std::vector<comm::Batch> instead(const comm::Group& group, const comm::Batch& batch) {
    const comm::Label& label = batch.label;
    comm::Entry entry;
    comm::describe(batch, 0, entry);
    const bool here = place_of(group.name(), label) == fault_.place;
    note(group, batch, here);
    if (!here || !is_drawn()) return {batch};
    const auto words = entry.words();
    if (fault_.kind == "swap") {
      auto next = next_of(group.name(), words);
      tell(words.op, words.unit, label.micro_batch);
      if (!next.empty()) next.push_back(batch);  // else nothing comes after it: it is left out
      return next;
    }
    tell(words.op, words.unit, label.micro_batch);
    if (fault_.kind == "skip") return {};
    if (fault_.kind == "twice") return {batch, batch};
    go_wrong();
    return {batch};
  }

  bool posts(const comm::P2PTag& tag, bool sends) {
    if (fault_.kind == "list" || !sends || fault_.place != "message") return true;
    {
      const std::lock_guard lock(mutex_);
      if (done_ + 2 == fault_.step) ++places_;
    }
    if (!is_drawn()) return true;
    tell("send", concat("stage ", tag.stage), static_cast<std::uint32_t>(tag.micro_batch));
    if (fault_.kind == "skip") return false;
    go_wrong();
    return true;
  }

 private:
  /// Notes what the step before the fault's issues.
  void note(const comm::Group& group, const comm::Batch& batch, bool here) {
    const std::lock_guard lock(mutex_);
    if (done_ + 2 != fault_.step) return;
    if (fault_.kind == "list") {
      comm::Entry entry;
      comm::describe(batch, 0, entry);
      const auto words = entry.words();
      std::cout << concat(place_of(group.name(), batch.label), " | ", group.name(), " | ", words.op,
                          " | ", words.unit, " | ", words.micro_batch, "\n");
    }
    if (here) ++places_;
    before_[group.name()].push_back(
        comm::cloned(batch, [](const at::Tensor& of, comm::Values) { return of.clone(); }));
  }

  bool is_drawn() {
    const std::lock_guard lock(mutex_);
    if (done_ + 1 != fault_.step || places_ == 0 || fault_.kind == "list") return false;
    return seen_++ == fault_.draw % places_;
  }

  /// On this group, the first one after `words` that is another, if only in the next step.
  std::vector<comm::Batch> next_of(const std::string& group, const comm::IssueWords& words) {
    const std::lock_guard lock(mutex_);
    bool found = false;
    for (int step = 0; step < 2; ++step) {
      for (const comm::Batch& batch : before_[group]) {
        comm::Entry entry;
        comm::describe(batch, 0, entry);
        if (found && entry.words() != words) return {batch};
        found = found || entry.words() == words;
      }
    }
    return {};
  }

  void tell(const std::string& op, const std::string& unit, std::uint32_t micro_batch) const {
    std::ofstream("truth.txt.new") << op << "\n" << unit << "\n" << micro_batch << "\n";
    std::rename("truth.txt.new", "truth.txt");
  }

  void go_wrong() const {
    if (fault_.kind == "kill") ::raise(SIGKILL);
    if (fault_.kind == "stop") ::raise(SIGSTOP);
    for (;;) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }

  const Fault fault_;
  std::mutex mutex_;
  std::int64_t done_ = 0;   // steps
  std::size_t places_ = 0;  // in the step before
  std::size_t seen_ = 0;    // in this one
  std::map<std::string, std::vector<comm::Batch>> before_;
};

void run(World& world, const train::Config& config) {
  const Fault fault = read_fault();
  Faulty faulty(fault);
  tessera::log::init({.rank = world.rank(),
                      .world_size = world.size(),
                      .file = concat("run/logs/rank_", world.rank(), ".log")});
  std::optional<tessera::test_hooks::Set<decltype(tessera::test_hooks::issues_instead)>> issues;
  std::optional<tessera::test_hooks::Set<decltype(tessera::test_hooks::posts_message)>> posts;
  if (world.rank() == fault.rank) {
    issues.emplace(tessera::test_hooks::issues_instead,
                   [&](const comm::Group& group, const comm::Batch& batch) {
                     return faulty.instead(group, batch);
                   });
    posts.emplace(tessera::test_hooks::posts_message,
                  [&](const comm::P2PTag& tag, bool sends) { return faulty.posts(tag, sends); });
  }
  world.begin_start_up();
  train::TrainingHooks hooks;
  hooks.on_first_step = [&](std::int64_t) { world.end_start_up(); };
  hooks.after_step = [&](const train::StepMetrics&, const tessera::ShardedBase&) {
    faulty.step_is_done();
  };
  hooks.on_failure = [&](const std::exception& error) { comm::report_failure(world, error, 1); };
  train::run_training(train::resolved_for_run(config, "run"), world, hooks);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const train::Config config = train::load_config("run.toml");
  train::validate(config, train::Verb::kTrain);
  tessera::WorldOptions options;
  options.timeout = std::chrono::seconds(config.comm.timeout_seconds);
  return tessera::launch(std::atoi(argv[1]), [&](World& world) { run(world, config); }, options);
}
