// What a rank is in the midst of, for whoever has to say why it failed and knows only its own part:
// a unit whose forward an exception leaves cannot know of the slot of a schedule that it ran in.
//
// It belongs to a thread, as a rank does. Nothing is put into words before somebody asks. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// While it lives, the thread's rank is doing what `words` says. The innermost one counts.
class DoingHere {
 public:
  explicit DoingHere(std::function<std::string()> words)
      : words_(std::move(words)), before_(std::exchange(current_, this)) {}
  ~DoingHere() { current_ = before_; }
  DoingHere(const DoingHere&) = delete;
  DoingHere& operator=(const DoingHere&) = delete;

  /// ", in WORDS"; "" where nothing is said.
  static std::string in_words() {
    return current_ == nullptr ? std::string() : ", in " + current_->words_();
  }

 private:
  static inline constinit thread_local const DoingHere* current_ = nullptr;

  const std::function<std::string()> words_;
  const DoingHere* const before_;
};

/// The unit, the stage and the micro-batch whose forward or backward this thread is in: the
/// collectives of a module know nothing of them. A copy of the name, as models end before their
/// threads do.
class UnitHere {
 public:
  static constexpr int kNoStage = -1;

  static void enter(std::string_view unit) { unit_ = unit; }
  /// By a step scope, which leaves them when it is over: labels of activations have both.
  static void enter(int stage, std::uint32_t micro_batch) {
    stage_ = stage;
    micro_batch_ = micro_batch;
  }
  static void leave_step() { enter(kNoStage, 0); }
  static const std::string& unit() { return unit_; }  ///< "": none
  static int stage() { return stage_; }               ///< of this rank; kNoStage: in no step scope
  static std::uint32_t micro_batch() { return micro_batch_; }

 private:
  static inline thread_local std::string unit_;
  static inline constinit thread_local int stage_ = kNoStage;
  static inline constinit thread_local std::uint32_t micro_batch_ = 0;
};

}  // namespace tessera
