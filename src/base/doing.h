// What a rank is in the midst of, for whoever has to say why it failed and knows only its own part:
// a unit whose forward an exception leaves cannot know of the slot of a schedule that it ran in.
//
// It belongs to a thread, as a rank does. Nothing is put into words before somebody asks. Pure.
#pragma once

#include <functional>
#include <string>
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

}  // namespace tessera
