// Names the work of a rank for the code that reports a failure and knows only its own part: a unit
// whose forward an exception leaves does not know the slot of a schedule that it ran in.
//
// It belongs to a pass (pass_local.h). No text is made before it is asked for. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/pass_local.h"

namespace tessera {

/// While it lives, `words` describes what the rank's pass is doing. The innermost one counts.
class DoingHere {
 public:
  explicit DoingHere(std::function<std::string()> words)
      : words_(std::move(words)), before_(std::exchange(Here::here(), this)) {}
  ~DoingHere() { Here::here() = before_; }
  DoingHere(const DoingHere&) = delete;
  DoingHere& operator=(const DoingHere&) = delete;

  /// Returns ", in " and the description; "" where there is none.
  static std::string as_text() {
    const DoingHere* const here = Here::here();
    return here == nullptr ? std::string() : ", in " + here->words_();
  }

 private:
  using Here = base::PassLocal<base::PassValue::kDoing, const DoingHere*>;

  const std::function<std::string()> words_;
  const DoingHere* const before_;
};

/// The unit, the stage and the micro-batch whose forward or backward this pass is in, for
/// collectives of a module, which do not know them. The thread owns the names, since models may end
/// before their threads.
class UnitHere {
 public:
  static constexpr int kNoStage = -1;

  static void enter(std::string_view unit) {
    const auto known = names_.find(unit);
    Name::here() = &*(known != names_.end() ? known : names_.emplace(unit).first);
  }
  /// Called by a step scope, which leaves them when it ends: labels of activations have both.
  static void enter(int stage, std::uint32_t micro_batch) {
    StageFromOne::here() = stage + 1;
    MicroBatch::here() = micro_batch;
  }
  static void leave_step() { enter(kNoStage, 0); }
  /// Returns the unit's name; "" for none.
  static std::string_view unit() {
    const std::string* const name = Name::here();
    return name != nullptr ? std::string_view(*name) : std::string_view();
  }
  /// Returns the stage, counted among those of this rank; kNoStage outside of step scopes.
  static int stage() { return StageFromOne::here() - 1; }
  static std::uint32_t micro_batch() { return MicroBatch::here(); }

 private:
  using Name = base::PassLocal<base::PassValue::kUnit, const std::string*>;
  using StageFromOne = base::PassLocal<base::PassValue::kStage, int>;  // 0: none
  using MicroBatch = base::PassLocal<base::PassValue::kMicroBatch, std::uint32_t>;

  static inline thread_local std::set<std::string, std::less<>> names_;
};

}  // namespace tessera
