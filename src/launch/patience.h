// Patience: how long the waits of a World last, and what other ranks say they do meanwhile.
//
// Before the first step ranks have unequal work: one hashes data, another verifies the larger file.
// That says nothing about a collective, so it waits longer there, and whoever gives up says what
// the others were busy with. A rank that is lost is another matter: the failure watch finds it as
// fast as ever. Next: poison.h, which everything that waits has; World::begin_start_up().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace tessera::comm {

/// Threads: any.
class Patience {
 public:
  /// What a rank has said that it does; "" where it has said nothing, or waits as well.
  using WorkOf = std::function<std::string(int rank)>;

  /// From now on no wait ends before `longer`.
  void raise(std::chrono::milliseconds longer, WorkOf work_of);
  void lower();
  bool raised() const { return longer_ms_.load(std::memory_order_relaxed) > 0; }

  /// How long others' words of what has failed may be on their way: 1 s unless said otherwise.
  /// [Note: watch times]
  void expect_words_within(std::chrono::milliseconds time);
  std::chrono::milliseconds words() const;

  /// Of a wait that begins now, whose timeout is `usual` in a step.
  std::chrono::milliseconds of(std::chrono::milliseconds usual) const;
  /// "; rank 0 was busy with: hashing the data; ...": what `ranks` (of the world) have said, and
  /// what to do about it; "" where they have said nothing.
  std::string works_of(const std::vector<int>& ranks) const;
  /// The end of an error about ranks that did not come to a collective: that, or what else may be
  /// the matter.
  std::string why_missing(const std::vector<int>& ranks) const;

 private:
  std::atomic<std::int64_t> longer_ms_{0};
  std::atomic<std::int64_t> words_ms_{1000};
  mutable base::Mutex mutex_;
  WorkOf work_of_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::comm
