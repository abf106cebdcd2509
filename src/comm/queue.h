// The issuing queue: one thread a World takes every sharding collective, in the order of
// submission. Those on a device go out on the submitting thread, in the same order: issuing them
// waits for nobody, another thread has another current stream, and two threads that launch on two
// communicators may hang. Several threads of a rank may submit: one after the other is taken, and
// that all ranks have one order is for them to see to.
//
// Two collectives issued in different orders on two ranks exchange each other's data on Gloo
// without an error, so nothing else may start one on a sharding group: not the compute thread, not
// an autograd worker, not a completion callback. What the order is, is decided above
// (fsdp/agreed/order.h); here it is kept.
#pragma once

#include <functional>
#include <memory>

#include "comm/group.h"

namespace tessera::comm {

class AbortFlag;

/// A collective that was submitted, perhaps not yet issued. Copyable handle; empty = nothing to
/// wait for.
class Pending {
 public:
  struct State;
  Pending() = default;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Blocks until the collective was issued and is complete, on the calling thread. Rethrows what
  /// went wrong in the queue or in the collective, and what the interrupt check throws. Idempotent.
  void wait();
  bool valid() const { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

/// Threads: any, but for stop() and recover().
class IssueQueue {
 public:
  /// `world_abort_flag` is acknowledged by what the queue throws; null: of no World.
  explicit IssueQueue(std::shared_ptr<AbortFlag> world_abort_flag = nullptr);
  ~IssueQueue();  ///< stop()
  IssueQueue(const IssueQueue&) = delete;
  IssueQueue& operator=(const IssueQueue&) = delete;

  /// `ready` runs on the issuing thread right before the batch goes out, on the group's stream
  /// (fills a gather's own slice, for example); it may be empty. The group must outlive the returned
  /// handle's wait().
  Pending submit(Group& group, Batch batch, std::function<void()> ready = {});

  /// Blocks until everything submitted so far was issued (not completed).
  void drain();

  /// Issues what is left unless aborted, then ends the issuing thread; nothing can be submitted
  /// after it. Idempotent.
  void stop();
  /// stop(), after which submit() throws kUsage: the World is closed.
  void close();
  /// In a child of fork() submit() throws kUsage.
  void belong_to_this_process();

  /// After this every submit and every wait throws `why` (as kComm), the wait for a collective that
  /// was finished before as well. [Note: failure].
  void abort(const std::string& why);
  /// Drops what was never issued and accepts again.
  void recover();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
