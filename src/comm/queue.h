// The issuing queue: one thread a World takes every sharding collective, in the order of
// submission. Collectives on a device are issued on the submitting thread, in the same order:
// issuing them waits for no rank, another thread has another current stream, and two threads that
// launch on two communicators may hang. Several threads of a rank may submit, one at a time; the
// callers make sure that all ranks submit in one order.
//
// Two collectives issued in different orders on two ranks exchange each other's data on Gloo
// without an error, so nothing else may start one on a sharding group: not the compute thread, not
// an autograd worker, not a completion callback. fsdp/agreed/order.h decides the order; the queue
// keeps it.
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
  /// Blocks until the collective was issued and is complete, on the calling thread. Rethrows errors
  /// of the queue, the collective and the interrupt check. Idempotent.
  void wait();
  bool valid() const { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

/// Threads: any, but for stop() and recover().
class IssueQueue {
 public:
  /// An error that the queue throws acknowledges `world_abort_flag`; null: it belongs to no World.
  explicit IssueQueue(std::shared_ptr<AbortFlag> world_abort_flag = nullptr);
  ~IssueQueue();  ///< stop()
  IssueQueue(const IssueQueue&) = delete;
  IssueQueue& operator=(const IssueQueue&) = delete;

  /// `ready` runs on the issuing thread directly before the batch is issued, on the group's stream
  /// (it fills a gather's own slice, for example); it may be empty. The group must outlive the
  /// returned handle's wait().
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

  /// Makes every later submit and wait throw `why` (as kComm), also the wait for a collective that
  /// had finished before. [Note: failure].
  void abort(const std::string& why);
  /// Drops what was never issued, and accepts collectives again.
  void recover();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
