#include "comm/process_world.h"

#include <algorithm>
#include <exception>
#include <string_view>

#include "base/interrupt.h"
#include "base/text/printable.h"
#include "comm/device.h"
#include "comm/failure_report.h"
#include "comm/queue.h"
#include "launch/bounded_calls.h"
#include "launch/failure_record.h"
#include "launch/hang/hang_finder.h"
#include "launch/rank_board.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// The keys under which ranks meet as they join and as they leave, and under which rank 0, which
// serves the store, waits until all have left.
constexpr const char* kJoin = "join";
constexpr const char* kLeave = "leave";
constexpr const char* kLeft = "left";
// A rank that is done waits for the others, but not for one that shows no sign of life for this
// long.
constexpr std::chrono::seconds kLeavePatience{30};

// A stopped rank 0 takes the store with it: collectives that wait for it and calls of the store end
// after the same timeout. The watch's own calls get this much more time, so that a rank that waits
// in a collective says in which, before the watch says only that the store is gone.
constexpr std::chrono::seconds kBoardFirst{1};

constexpr std::chrono::milliseconds kUndoPatience{1000};

std::optional<FailureRecord> decoded(const std::optional<std::string>& bytes) {
  return bytes ? decode_failure(*bytes) : std::nullopt;
}

}  // namespace

ProcessWorld::ProcessWorld(const LaunchEnvironment& launch, const WorldOptions& options,
                           std::shared_ptr<Store> store)
    : World(launch.rank, launch.world_size, launch.local_rank, options),
      launch_(launch),
      options_(options),
      exceptions_before_(std::uncaught_exceptions()),
      backend_(backend_named(options.backend, device().type())),
      everyone_(all_ranks(launch.world_size)) {
  state_->abort_flag->belong_to_this_process();
  queue_->belong_to_this_process();
  state_->abort_flag->when_interrupted([this] { abort(kInterrupted); });
  connections_ = backend_.open(launch);
  if (!backend_.carries(at::kCPU)) messages_ = backend_named("auto", at::kCPU).open(launch);
  store_ = store ? std::move(store) : Store::connect(launch, options.init_timeout, options.timeout);
  store_->set_abort_flag(state_->abort_flag);
  state_->store = store_;
  state_->board->set_store_rank(store_->server_rank());
  state_->init_timeout = options.init_timeout;
  WatchOptions watch = watch_options(rank_, size_);
  times_.poll = watch.poll;
  state_->abort_flag->patience.expect_words_within(times_.words());
  watch.blocked_after = options.blocked_after;
  // A user who raises the timeout to debug a rank must not be cut off here.
  watch.silent_after = std::max(watch.silent_after, options.timeout / 20);
  if (ends_by_call()) watch.grace = options.grace_period;
  // The watch starts before the ranks meet: a rank that was refused by then says so by the failure
  // key.
  watch_ = std::make_unique<FailureWatch>(store_->second_connection(kBoardFirst), state_->board,
                                          watch, watch_actions());
  require_size();
  tell_device_kind(
      *store_, concat(c10::DeviceTypeName(device().type(), true), " by ", backend_.name), rank_);
  store_->meet(kJoin, rank_, everyone_, options.init_timeout, *state_->abort_flag);
  state_->board->watch(everyone_);
  // All ranks find it, and the rank that serves the store has to stay for the others: they leave as
  // ranks that have joined.
  const std::string differ = differing_device_kinds(*store_);
  if (differ.empty()) return;
  const Error refusal(ErrorKind::kUsage, differ);
  if (!ends_by_call()) report_failure(*this, refusal, kRefusedCode);
  leave_together();
  end();
  throw refusal;
}

void ProcessWorld::require_size() {
  try {
    store_->require_size(rank_, size_);
  } catch (const Error& refusal) {
    // Otherwise the others know, or the caller reports it.
    if (refusal.kind() != ErrorKind::kUsage || !ends_by_call()) throw;
    watch_->stop();  // its reaction to the announcement here would end this process
    announce_failure(
        {FailureClass::kPrimary, monotonic_ns(), rank_, kRefusedCode, one_line(refusal.what())});
    // No rank arrives: the others count other ranks.
    if (store_->server_rank() == rank_) leave_after_abort(state_->abort_flag->patience.words());
    end();
    throw;
  }
}

FailureWatch::Actions ProcessWorld::watch_actions() {
  FailureWatch::Actions actions;
  actions.failed = [this](const std::string& bytes) {
    const FailureRecord cause = decode_failure(bytes).value_or(noticed(bytes));
    if (ends_by_call()) {
      return lose(concat("stopped because of ", to_string(cause)),
                  [this, cause] { leave_after(*this, cause); });
    }
    // Another rank has only noticed what began here: this rank's error, which is still
    // propagating, says more, and ends the process meanwhile.
    if (cause.what == FailureClass::kNoticed && aborter_ == Aborter::kSelf) {
      std::this_thread::sleep_for(state_->abort_flag->patience.words());
    }
    leave_after(*this, cause);
  };
  actions.lost = [this](const std::string& why) {
    const auto leave = [this, why] { report_failure(*this, LostRank(why), 1); };
    if (!ends_by_call()) leave();
    lose(why, leave);
    announce_failure(noticed(why));
  };
  actions.grace_is_over = [this] {
    if (end_process_) end_process_();
  };
  actions.disagree = [this](const std::string& why, int epoch) { abort_all(why, epoch); };
  actions.aborted = [this](const Abort& abort, int epoch) {
    abort_here(abort.why, epoch, abort.is_disagreement ? Aborter::kDisagreement : Aborter::kOther);
    publish_board(epoch);  // and not that of an epoch after a recovery
  };
  actions.acknowledged = [this] { return state_->abort_flag->acknowledged(); };
  actions.unacknowledged = [this](const std::string& why, int epoch) {
    if (epoch != epoch_) return;  // it has recovered in the meantime
    report_failure(*this, Error(ErrorKind::kComm, why), 1);
  };
  return actions;
}

void ProcessWorld::lose(const std::string& why, std::function<void()> end_process) {
  end_process_ = std::move(end_process);
  lost_.mark(why);
  // A recovery that began earlier may have ended by now: its result no longer counts.
  for (int epoch = -1; epoch != epoch_;) {
    epoch = epoch_;
    abort_here(why, epoch, Aborter::kOther);
  }
}

ProcessWorld::~ProcessWorld() {
  if (state_->abort_flag->is_in_child()) {
    leave_to_parent();
    return;
  }
  const base::NoInterrupts until_it_has_left;
  if (!leaves_.exchange(true)) {
    const bool thrown = std::uncaught_exceptions() > exceptions_before_;
    const bool failed = aborted() || thrown;
    if (failed) {
      watch_->stop();  // its reaction to the announcement here would end this process
      if (!aborted()) announce_failure(noticed("left by an exception"));
      abort_here("left by an exception", epoch_, Aborter::kSelf);
    }
    stop_queue();
    if (!failed) leave_together();
    if (failed && !thrown) leave_after_abort(patience_for_others());
  }
  end();
}

void ProcessWorld::close() {
  if (state_->abort_flag->is_in_child() || leaves_.exchange(true)) return;
  const bool failed = aborted();
  try {
    if (failed) {
      stop_queue();
      leave_after_abort(patience_for_others());
    } else {
      queue_->close();  // a thread that still computes is refused, and uses no closed group
      drops_held_groups_ = true;
      leave_together();
    }
  } catch (...) {
    end();
    throw;
  }
  end();
  if (!failed) lost_.check();  // the last call that can throw it
}

void ProcessWorld::close_failed(const std::string& why) {
  if (state_->abort_flag->is_in_child() || leaves_.exchange(true)) return;
  const base::NoInterrupts until_it_has_left;
  const std::string text = one_line(why);
  watch_->stop();  // its reaction to the announcement here would end this process
  announce_failure({FailureClass::kPrimary, monotonic_ns(), rank_, 1, text});
  abort_here(text, epoch_, Aborter::kSelf);
  stop_queue();
  leave_after_abort(state_->abort_flag->patience.words());
  end();
}

/// A lost rank says no more and is not waited for; the live ones have had time to read its message.
std::chrono::milliseconds ProcessWorld::patience_for_others() const {
  return lost_.is_set() ? state_->abort_flag->patience.words() : times_.leaving();
}

void ProcessWorld::end() noexcept {
  watch_->stop();
  state_->start_up_log.reset();
  queue_->close();
  state_->abort_flag->when_interrupted({});
  state_->abort_flag->close();
  closed_ = true;
}

void ProcessWorld::leave_to_parent() noexcept {
  // Their destructors would join threads that do not exist here, and remove sockets from the
  // parent's epoll.
  static_cast<void>(watch_.release());
  static_cast<void>(connections_.release());
  static_cast<void>(messages_.release());
  static_cast<void>(queue_.release());
  static_cast<void>(state_.release());
  static_cast<void>(new std::shared_ptr<Store>(store_));
}

bool ProcessWorld::missing_are_alive(const std::string& key, std::map<int, std::string>& beats) {
  // Each waiting rank checks a few ranks; all are also in the ring of the watches.
  for (const int rank : neighbours(store_->missing(key, size_).members, rank_)) {
    const std::string beat = store_->find(store_key::pulse(rank)).value_or("");
    if (std::exchange(beats[rank], beat) == beat) return false;
  }
  return true;
}

void ProcessWorld::wait_for_the_last(const std::string& key) {
  std::map<int, std::string> beats;
  for (;;) {
    try {
      return store_->meet(key, rank_, everyone_, kLeavePatience, *state_->abort_flag);
    } catch (const LostRank&) {
      if (aborted() || !missing_are_alive(key, beats)) throw;
    }
  }
}

void ProcessWorld::leave_together() {
  // A connection that closes while a peer still reads from it looks like a lost rank, and so does
  // the store when rank 0 removes it.
  try {
    if (ends_by_call()) state_->board->set_leaving();
    meet_on_board(*state_->board, [&] { wait_for_the_last(kLeave); });
    watch_->stop();
    // The program's units and groups may live longer, and hold the connections.
    if (drops_held_groups_) connections_->reset(epoch_);
    if (drops_held_groups_ && messages_) messages_->reset(epoch_);
    connections_->close();
    if (messages_) messages_->close();
    decltype(state_->made) groups;  // destroyed without the lock
    {
      const base::Lock lock(state_->mutex);
      groups.swap(state_->made);
    }
    groups.clear();
    if (rank_ == 0) {
      store_->meet(kLeft, rank_, everyone_, kLeavePatience, *state_->abort_flag);
    } else {
      store_->arrive(kLeft, rank_, size_);
    }
  } catch (const Error&) {
    // A missing rank has failed and reports that itself. Rank 0 may wait in leave_after_abort().
    if (ends_by_call() && rank_ != 0) leave_after_abort({});
  }
}

/// Keeps the store until the other ranks, which have caught their errors too, are about to leave:
/// without it they would end as after the loss of a rank.
void ProcessWorld::leave_after_abort(std::chrono::milliseconds patience) {
  try {
    if (rank_ == 0 && !launch_.agent_store) {
      const AbortFlag never;  // this World's own flag is set
      store_->meet(kLeft, rank_, everyone_, patience, never);
    } else {
      in_time([store = store_, rank = rank_, size = size_] {
        store->arrive(kLeft, rank, size);
        return std::string();
      });
    }
  } catch (const Error&) {
    // A missing rank has failed and reports that itself.
  }
}

std::shared_ptr<Group> ProcessWorld::make_group(const std::vector<int>& ranks,
                                                const std::string& name, const at::Device& where) {
  Connections& connections = messages_ && where.is_cpu() ? *messages_ : *connections_;
  return connections.make_group({name, ranks, rank_, where, options_, store_, state_->abort_flag,
                                 state_->board, times_.heartbeats()});
}

void ProcessWorld::abort_here(const std::string& why, int epoch, Aborter by) {
  const base::Lock lock(epoch_mutex_);
  if (epoch != epoch_) return;  // it has recovered in the meantime
  if (aborter_ == Aborter::kNone) aborter_ = by;
  state_->board->freeze();
  state_->abort_flag->mark(why);
  queue_->abort(why);
  state_->board->abort_all();
}

void ProcessWorld::abort_epoch(std::uint64_t of, const std::string& why) {
  if (closed_ || state_->abort_flag->is_in_child()) return;
  const std::string suspicion = state_->abort_flag->suspicion();
  const bool said = why.find(suspicion) != std::string::npos;
  const std::string text =
      of_rank(rank_, said ? one_line(why) : concat(one_line(why), ": ", one_line(suspicion)));
  const int epoch = static_cast<int>(of);  // recoveries and epochs have the same numbers
  abort_here(one_line(why), epoch, Aborter::kSelf);
  if (epoch != epoch_) return;        // it is over: this rank tells no other
  state_->abort_flag->acknowledge();  // the caller throws
  in_time([store = store_, text, epoch] {
    return store->set_if_absent(store_key::abort(epoch), text);
  });
}

/// Announces the disagreement first: once this rank has thrown, its program may recover.
void ProcessWorld::abort_all(const std::string& disagreement, int epoch) {
  if (epoch != epoch_) return;  // it has recovered in the meantime
  in_time([store = store_, disagreement, epoch] {
    return store->set_if_absent(store_key::abort(epoch), encode({disagreement, true}));
  });
  abort_here(disagreement, epoch, Aborter::kDisagreement);
  publish_board();
}

void ProcessWorld::recover() {
  state_->abort_flag->require_not_over();
  const base::NoInterrupts until_it_is_whole;
  if (lost_.is_set()) state_->abort_flag->acknowledge();
  lost_.check();
  connections_->require_recovery();
  if (!aborted()) abort(kRecovers);
  state_->abort_flag->acknowledge();
  const int next = epoch_ + 1;
  queue_->drain();
  // The meeting is on the board, so a rank that is lost meanwhile is noticed as in any other wait.
  meet_on_board(*state_->board, [&] {
    // This World's own abort flag is set.
    store_->meet(concat("recover/", next), rank_, everyone_, options_.timeout, lost_);
  });
  store_is_silent_ = false;  // it has just answered
  const base::Lock lock(epoch_mutex_);
  lost_.check();
  epoch_ = next;
  watch_->set_epoch(next);
  connections_->reset(next);
  if (messages_) messages_->reset(next);
  queue_->recover();
  ++recoveries_;
  aborter_ = Aborter::kNone;
  state_->abort_flag->clear();
}

void ProcessWorld::when_refused(std::function<void()> undo) {
  const base::Lock lock(undo_mutex_);
  undo_ = std::move(undo);
}

void ProcessWorld::refused() noexcept {
  try {
    std::function<void()> undo;
    {
      const base::Lock lock(undo_mutex_);
      undo.swap(undo_);
    }
    if (!undo) return;
    const auto call = [undo = std::move(undo)] {
      undo();
      return true;
    };
    BoundedCalls().run(call, kUndoPatience);
  } catch (...) {
    // The rank leaves all the same, with the error that it has announced.
  }
}

void ProcessWorld::stay_for_readers() const noexcept {
  const bool serves_store = rank_ == 0 && !launch_.agent_store;
  if (!serves_store) return;
  const auto words = state_->abort_flag->patience.words();
  std::this_thread::sleep_for(words);
  // A rank that has noticed the loss reads boards until then, after it has said so.
  const auto end = std::chrono::steady_clock::now() + words;
  try {
    while (published_epoch_ == epoch_ && std::chrono::steady_clock::now() < end &&
           !store_->find(store_key::boards_read(epoch_))) {
      std::this_thread::sleep_for(times_.poll);
    }
  } catch (const std::exception&) {
    // Without a store no rank can read.
  }
}

void ProcessWorld::publish_board() noexcept { publish_board(epoch_); }

void ProcessWorld::publish_board(int epoch) noexcept {
  for (int published = published_epoch_;;) {
    if (published >= epoch) return;
    if (published_epoch_.compare_exchange_weak(published, epoch)) break;
  }
  in_time([store = store_, board = state_->board, rank = rank_, most = items_for(size_), epoch] {
    store->set(store_key::board(epoch, rank), encode(board->board(rank, most)));
    return std::string();
  });
}

namespace {

/// The store in the form that collect_boards() reads.
class BoardStore final : public WatchedStore {
 public:
  explicit BoardStore(Store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::vector<std::optional<std::string>> find(const std::vector<std::string>& keys) override {
    return store_.find_all(keys);
  }

 private:
  Store& store_;
};

}  // namespace

std::optional<Boards> ProcessWorld::boards_in_time(std::function<Boards()> collect,
                                                   std::chrono::milliseconds time) const {
  if (store_is_silent_) return std::nullopt;
  try {
    return BoundedCalls().run(std::move(collect), time);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string ProcessWorld::hang_report() noexcept {
  try {
    const int epoch = epoch_;
    published_epoch_ = epoch;
    Boards boards{size_, rank_, {state_->board->board(rank_, items_for(size_))}, {}, {}};
    const auto time = state_->abort_flag->patience.words();
    const auto collect = [store = store_, epoch, size = size_, own = boards.boards.front(), time,
                          pause = times_.poll / 4] {
      BoardStore of(*store);
      Boards all = collect_boards(of, epoch, size, own, time, pause);
      store->set(store_key::boards_read(epoch), "here");
      return all;
    };
    if (auto all = boards_in_time(collect, time + times_.telling())) {
      boards = *std::move(all);
    } else if (const auto server = store_->server_rank()) {
      // The server has left with its rank: only a rank that waits for it has something to report.
      if (*server != rank_) boards.silent.push_back(*server);
      HangReport report = find_hang(boards);
      std::erase_if(report.roots, [](const HangRoot& root) {
        return root.cause != HangCause::kGone || root.waited_for_by == 0;
      });
      return report.roots.empty() ? std::string() : to_string(report);
    }
    return to_string(find_hang(boards));
  } catch (const std::exception&) {
    return {};
  }
}

std::optional<std::string> ProcessWorld::in_time(std::function<std::string()> call) noexcept {
  if (store_is_silent_) return std::nullopt;
  // The store may have gone with rank 0, and that must not delay the error itself.
  try {
    auto answer = BoundedCalls().run(std::move(call), times_.telling());
    if (!answer) store_is_silent_ = true;
    return answer;
  } catch (...) {
    return std::nullopt;
  }
}

FailureRecord ProcessWorld::noticed(const std::string& why) const {
  return {FailureClass::kNoticed, monotonic_ns(), rank_, 1, why};
}

std::optional<FailureRecord> ProcessWorld::announce_failure(const FailureRecord& failure) noexcept {
  return decoded(in_time([store = store_, bytes = encode(failure)] {
    return store->set_if_absent(store_key::kFailure, bytes);
  }));
}

std::optional<FailureRecord> ProcessWorld::known_failure() noexcept {
  return decoded(in_time([store = store_] {
    return store->find(store_key::kFailure).value_or(std::string());  // no failure encodes to ""
  }));
}

bool ProcessWorld::is_disagreement(const std::exception& error) const {
  return aborter_ == Aborter::kDisagreement &&
         std::string_view(error.what()).find(state_->abort_flag->why()) != std::string_view::npos;
}

std::optional<FailureRecord> ProcessWorld::failure_behind() noexcept {
  const auto end = std::chrono::steady_clock::now() + state_->abort_flag->patience.words();
  for (;;) {
    const auto known = known_failure();
    if (known || aborter_ != Aborter::kOther || store_is_silent_) return known;
    if (std::chrono::steady_clock::now() >= end) return known;
    std::this_thread::sleep_for(times_.poll);
  }
}

}  // namespace tessera::comm
