// The ranks that run a Program, and what they know of each other.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "property/program_twin.h"
#include "support/ranks.h"

namespace tessera::test {

inline Ranks program_ranks(int count, ThreadBackend backend) {
  return ranks(count, backend, std::chrono::seconds(8));
}

/// The knowledge of a run's ranks about each other.
class ProgramBoard {
 public:
  explicit ProgramBoard(int ranks)
      : meeting(ranks),
        twins(static_cast<std::size_t>(ranks)),
        narrow_twins(static_cast<std::size_t>(ranks)),
        errors(static_cast<std::size_t>(ranks)) {}

  void find(const std::string& what) {
    const std::lock_guard lock(mutex_);
    findings_.push_back(what);
    failed = true;
  }
  std::string findings() const {
    std::string all;
    for (const auto& one : findings_) all += one + "\n";
    return all;
  }

  struct Caught {
    std::string what;
    bool by_name = false;  ///< a tessera::Error
  };
  RankBarrier meeting;
  std::atomic<bool> failed = false;
  using Twins = std::vector<std::shared_ptr<ProgramTwin>>;
  Twins twins;         ///< outlive a rank that has failed
  Twins narrow_twins;  ///< in bf16, where the sharded model computes in it
  std::vector<Caught> errors;

 private:
  std::mutex mutex_;
  std::vector<std::string> findings_;
};

/// Ends a rank's run; the board says why.
class ProgramFailed : public std::runtime_error {
 public:
  ProgramFailed() : std::runtime_error("the program has failed") {}
};

}  // namespace tessera::test
