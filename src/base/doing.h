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

/// The unit and the micro-batch whose forward or backward this thread is in: the collectives of a
/// module know nothing of either. A copy of the name, as models end before their threads do.
class UnitHere {
 public:
  static void enter(std::string_view unit) { unit_ = unit; }
  static void enter(std::uint32_t micro_batch) { micro_batch_ = micro_batch; }
  static const std::string& unit() { return unit_; }  ///< "": none
  static std::uint32_t micro_batch() { return micro_batch_; }

 private:
  static inline thread_local std::string unit_;
  static inline constinit thread_local std::uint32_t micro_batch_ = 0;
};

}  // namespace tessera
