#include "launch/abort_flag.h"

#include <algorithm>

#include "base/pass_local.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// At most so many missing ranks are asked: each costs the store a request, and many ranks ask at
// once.
constexpr int kWorksAsked = 16;

using KeptErrors = base::PassLocal<base::PassValue::kKeptErrors, int>;

}  // namespace

KeepsErrors::KeepsErrors() { ++KeptErrors::here(); }
KeepsErrors::~KeepsErrors() { --KeptErrors::here(); }
bool KeepsErrors::in_this_thread() { return KeptErrors::here() > 0; }

void Patience::raise(std::chrono::milliseconds longer, WorkOf work_of) {
  {
    const base::Lock lock(mutex_);
    work_of_ = std::move(work_of);
  }
  longer_ms_.store(longer.count(), std::memory_order_relaxed);
}

void Patience::lower() {
  longer_ms_.store(0, std::memory_order_relaxed);
  const base::Lock lock(mutex_);
  work_of_ = nullptr;
}

void Patience::expect_words_within(std::chrono::milliseconds time) {
  words_ms_.store(time.count(), std::memory_order_relaxed);
}

std::chrono::milliseconds Patience::words() const {
  return std::chrono::milliseconds(words_ms_.load(std::memory_order_relaxed));
}

std::chrono::milliseconds Patience::of(std::chrono::milliseconds usual) const {
  return std::max(usual, std::chrono::milliseconds(longer_ms_.load(std::memory_order_relaxed)));
}

std::string Patience::works_of(const std::vector<int>& ranks) const {
  WorkOf work_of;
  {
    const base::Lock lock(mutex_);
    work_of = work_of_;
  }
  std::string works;
  int asked = 0;
  for (const int rank : ranks) {
    if (++asked > kWorksAsked) break;
    const std::string work = work_of ? work_of(rank) : std::string();
    if (!work.empty()) works += concat("; rank ", rank, " was busy with: ", work);
  }
  if (works.empty()) return works;
  return concat(works,
                "; raise the init timeout (comm.init_timeout_seconds, WorldOptions::init_timeout, "
                "init_timeout= of tessera.init) where that takes longer");
}

void AbortFlag::raise(const std::string& what) const {
  // In a child the mutex may be held by a thread that exists only in the parent.
  if (is_in_child()) {
    throw Error(
        ErrorKind::kUsage,
        "the World was made in another process: found a call in a child of fork(), expected "
        "none; make a World there, or start the process by exec");
  }
  acknowledge();
  if (closed_.load(std::memory_order_relaxed)) throw Error(ErrorKind::kUsage, kClosed);
  throw LostRank(what.empty() ? why() : concat(what, ": ", why()));
}

void AbortFlag::when_interrupted(std::function<void()> abort) {
  const base::Lock lock(mutex_);
  when_interrupted_ = std::move(abort);
}

void AbortFlag::ask_interrupt() const {
  try {
    base::ask_interrupt();
  } catch (...) {
    tell_interrupted();
    throw;
  }
}

void AbortFlag::tell_interrupted() const {
  std::function<void()> abort;
  {
    const base::Lock lock(mutex_);
    abort = when_interrupted_;
  }
  const base::NoInterrupts until_told;
  if (abort) abort();
}

std::string Patience::why_missing(const std::vector<int>& ranks) const {
  const std::string works = works_of(ranks);
  return works.empty() ? "; it is stalled, or does not take part in this collective" : works;
}

}  // namespace tessera::comm
