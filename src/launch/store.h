// Store: the small shared dictionary by which ranks find each other and report failures.
//
// A thin layer over c10d's stores: TCP between processes, a map between threads, or the store of a
// program. Waiting is by polling, so that a wait can end when the World is aborted, and a server
// that has stopped without closing its connections is found by a limit on every call
// (bounded_calls.h). A step needs it only where two ranks send to each other for the first time
// ([Note: connections]); the failure watch uses it all the time. Next: failure_watch.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "launch/abort_flag.h"
#include "launch/arrivals.h"
#include "launch/bounded_calls.h"
#include "launch/launch_environment.h"

namespace tessera::comm {

/// Threads: any; calls through one Store take turns (give a thread that polls a separate
/// connection). Errors of every call: LostRank when the server has gone, or does not answer in
/// time.
class Store {
 public:
  /// Makes the store of ranks that are threads. `timeout`: as connect()'s, in for_group().
  static std::shared_ptr<Store> in_memory(
      std::chrono::milliseconds timeout = std::chrono::seconds(300));
  /// Joins the store that the launch names; rank 0 serves it unless the launcher does, on loopback
  /// where that is its address. Once joined it must answer each call within `answers_within`.
  /// Errors: kComm when the address cannot be had (port in use) or reached within `timeout`.
  static std::shared_ptr<Store> connect(const LaunchEnvironment& launch,
                                        std::chrono::milliseconds timeout,
                                        std::chrono::milliseconds answers_within);

  /// "rank 0 at 127.0.0.1:29500": the server, for messages.
  const std::string& server() const { return server_; }
  /// The rank with which it ends; none: it lives as long as this process, or as the launcher.
  std::optional<int> server_rank() const { return server_rank_; }

  /// Uses the store of the program, which may be shared with others: keys are under a prefix that
  /// counts the Worlds over it, and calls go over a separate connection where the store can clone()
  /// itself. A store that cannot is shared: it takes the calls of several threads in turn, and none
  /// of ours waits in it. Errors: LostRank when it gives no answer within `timeout`; what the
  /// store, or the interrupt check, throws.
  static std::shared_ptr<Store> over(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                     int ranks, std::chrono::milliseconds timeout,
                                     std::chrono::milliseconds answers_within);

  /// The same store over a separate connection, where it can have one, whose calls have so much
  /// more time.
  std::shared_ptr<Store> second_connection(std::chrono::milliseconds longer) const;

  void set(const std::string& key, const std::string& value);
  std::optional<std::string> find(const std::string& key);
  /// Returns values by key.
  std::vector<std::optional<std::string>> find_all(const std::vector<std::string>& keys);
  /// Returns the values of keys that all exist: two requests.
  std::vector<std::string> get_all(const std::vector<std::string>& keys);
  /// Sets the key where it is missing; returns its value then.
  std::string set_if_absent(const std::string& key, const std::string& value);

  /// Notes that the one at index `self` of `members` ranks has come to `key`; may be called
  /// repeatedly. The last one to come tells all, so that a wait requests one key, for any number of
  /// members.
  void arrive(const std::string& key, int self, int members);
  /// Returns the indices of those who have not come; a bounded number of requests.
  Missing missing(const std::string& key, int members);
  /// Compares the numbers of ranks, before ranks meet: a rank that was started with another number
  /// than the first one that wrote its own would meet others, or none. Errors: kUsage naming both.
  void require_size(int rank, int size);
  /// The number that the first one wrote.
  int required_size();
  /// Arrives, and returns once all of `members` have. Errors: kComm naming the ranks that did not
  /// come within `timeout`; LostRank as soon as `abort_flag` is marked.
  void meet(const std::string& key, int self, const std::vector<int>& members,
            std::chrono::milliseconds timeout, const AbortFlag& abort_flag);

  /// The store for process groups, with `prefix` in front of their keys. A wait for which libtorch
  /// names no time lasts the `timeout` with which this store was joined. Several groups may be
  /// opened at once: their waits delay no other call. They end when `abort_flag` is marked, or has
  /// been since this call: a thread that outlives a recovery must have a store from before it.
  /// `waits` is told the key for which a wait lasts, and "" when it is over.
  c10::intrusive_ptr<c10d::Store> for_group(
      const std::string& prefix, std::shared_ptr<const AbortFlag> abort_flag,
      std::function<void(const std::string& key)> waits = nullptr) const;

  /// The flag that tells its World when a call is interrupted. Set it before the first call.
  void set_abort_flag(std::shared_ptr<const AbortFlag> abort_flag) {
    abort_flag_ = std::move(abort_flag);
  }

 private:
  class Questions;

  Store(c10::intrusive_ptr<c10d::Store> store, std::string server,
        std::chrono::milliseconds timeout, std::chrono::milliseconds answers_within, int ranks);
  bool is_set(const std::string& key);
  /// Runs `operation` on the c10d store; any exception of it becomes LostRank.
  template <class Operation>
  auto call(const std::string& what, Operation operation) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string server_;
  std::optional<int> server_rank_;
  std::chrono::milliseconds timeout_;  ///< of waits for which a process group names none
  std::chrono::milliseconds answers_within_;
  int ranks_;  ///< the number that share it, which limits how often each may ask
  std::unique_ptr<BoundedCalls> calls_;  ///< none: calls never hang
  std::shared_ptr<const AbortFlag> abort_flag_;
};

}  // namespace tessera::comm
