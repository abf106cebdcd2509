#include "launch/store.h"

#include <c10/util/Logging.h>
#include <sys/resource.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/environment.h"
#include "base/interrupt.h"
#include "base/text/printable.h"
#include "launch/hosts.h"
#include "launch/peer_watch.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

// c10d throws an error at its timeout. Ours follows after this margin, where c10d throws none.
constexpr std::chrono::milliseconds kStoreMargin{1000};

// The prefix of all keys of a World over a program's store, and of the count of such Worlds.
constexpr const char* kOverStore = "tessera";

// The key under which the first rank writes the number of ranks.
constexpr const char* kSize = "number of ranks";

// The longest interval between two requests for the last one of a meeting: all that wait ask one
// server.
constexpr std::chrono::microseconds kLongestPause{5000};
constexpr std::chrono::microseconds kPauseForEach{200};

/// libtorch warns with a stack trace for every connection that closes; our own errors name the
/// rank. While a process joins, c10d also prints as an error what it throws: no process answers,
/// which our error says with the rank. Other errors of libtorch are shown before and after that.
class JoinsSilently {
 public:
  JoinsSilently() {
    if (asked_for_) return;
    FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, static_cast<int>(c10::GLOG_FATAL));
  }
  ~JoinsSilently() {
    if (asked_for_) return;
    FLAGS_caffe2_log_level = std::max(before_, static_cast<int>(c10::GLOG_ERROR));
  }
  JoinsSilently(const JoinsSilently&) = delete;
  JoinsSilently& operator=(const JoinsSilently&) = delete;

 private:
  const bool asked_for_ = base::environment_variable("TORCH_CPP_LOG_LEVEL").has_value();
  const int before_ = FLAGS_caffe2_log_level;
};

/// BoundedCalls::run on a separate thread. Errors: also what the interrupt check throws.
template <class Call>
auto run_asking(Call call, std::chrono::milliseconds limit) {
  base::InterruptTimer timer;
  return BoundedCalls().run(std::move(call), limit, [&] {
    if (timer.is_due()) base::ask_interrupt();
    return false;
  });
}

std::string no_answer(const std::string& server, std::chrono::milliseconds limit) {
  return concat("store: no answer for ", in_seconds(limit), " from ", server);
}

// A rank opens files of the process, connections to the store and another rank, pipes of their
// threads.
constexpr int kOpenFiles = 34;

/// c10d repeats the request for a connection that gets no descriptor, as long as its timeout lasts.
void require_open_files(int at_least) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  TESSERA_CHECK(limit.rlim_cur >= static_cast<rlim_t>(at_least), ErrorKind::kIo,
                "open files: found a limit of ", limit.rlim_cur, ", expected at least ", at_least,
                " for the connections of a rank; raise it (ulimit -n)");
}

/// Opens rank 0's socket. A name that only its own host takes for a loopback address (Debian writes
/// such a line into /etc/hosts) would leave the others waiting.
Listener listen_for(const LaunchEnvironment& launch) {
  Listener listener = listen_on(launch.master_addr, launch.master_port);
  require_network_address(launch, listener.address);
  return listener;
}

// The pause before the second request of a wait of PolledStore.
constexpr std::chrono::milliseconds kFirstPause{1};

/// A store whose waits are repeated requests. A connection to the store answers one call at a time,
/// and a wait is one call: two threads that each open a group over the same connection would wait
/// for each other's peers, in a ring over ranks, for ever.
class PolledStore final : public c10d::Store {
 public:
  PolledStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const AbortFlag> abort_flag,
              std::uint64_t marks, std::chrono::milliseconds timeout,
              std::chrono::milliseconds longest_pause,
              std::function<void(const std::string& key)> waits)
      : c10d::Store(timeout),  // c10d's own default of 300 s is no setting of the World's
        store_(std::move(store)),
        abort_flag_(std::move(abort_flag)),
        marks_(marks),
        longest_pause_(longest_pause),
        waits_(std::move(waits)) {}

  using Bytes = std::vector<std::uint8_t>;
  using Keys = std::vector<std::string>;
  using c10d::Store::compareSet;
  using c10d::Store::set;

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PolledStore>(store_->clone(), abort_flag_, marks_, getTimeout(),
                                            longest_pause_, waits_);
  }
  void set(const std::string& key, const Bytes& value) override { store_->set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& next) override {
    return store_->compareSet(key, current, next);
  }
  Bytes get(const std::string& key) override {
    wait({key});
    return store_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const Keys& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  void append(const std::string& key, const Bytes& value) override { store_->append(key, value); }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    wait(keys);
    return store_->multiGet(keys);
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    store_->multiSet(keys, values);
  }

  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  /// Errors: LostRank when the World is aborted or the time is up.
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (std::size_t there = 0; there < keys.size() && !store_->check(keys); ++there) {
      there = first_absent(keys, there);
      if (there == keys.size()) return;
      wait_for(keys[there], deadline, timeout);
    }
  }

 private:
  /// Returns the index of the first missing key, where the first `there` exist.
  std::size_t first_absent(const Keys& keys, std::size_t there) {
    std::size_t end = keys.size();
    while (there < end) {
      const std::size_t middle = there + (end - there) / 2;
      const auto at = [&](std::size_t i) { return keys.begin() + static_cast<std::ptrdiff_t>(i); };
      if (store_->check({at(there), at(middle + 1)})) {
        there = middle + 1;
      } else {
        end = middle;
      }
    }
    return there;
  }

  void wait_for(const std::string& key, std::chrono::steady_clock::time_point deadline,
                std::chrono::milliseconds timeout) {
    if (waits_) waits_(key);
    auto pause = kFirstPause;
    while (!store_->check({key})) {
      // Not check(), which acknowledges: Gloo calls this in threads of the library.
      if (abort_flag_->is_set()) throw LostRank(abort_flag_->why());
      if (abort_flag_->marks() != marks_) throw LostRank("store: the wait was before a recovery");
      if (std::chrono::steady_clock::now() > deadline) {
        throw LostRank(concat("store: no ", key, " within ", in_seconds(timeout)));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, longest_pause_);
    }
    if (waits_) waits_("");
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const AbortFlag> abort_flag_;
  const std::uint64_t marks_;
  const std::chrono::milliseconds longest_pause_;  ///< between two requests of a wait
  const std::function<void(const std::string& key)> waits_;
};

// A group often has the name of the meeting before it is opened, and it takes all keys under its
// name for its own: so meetings have keys under which no group is.
std::string arrivals_at(const std::string& key) { return concat("meetings/arrivals/", key); }
std::string all_at(const std::string& key) { return concat("meetings/all/", key); }

class CountersOf final : public SharedCounters {
 public:
  explicit CountersOf(c10d::Store& store) : store_(store) {}
  std::int64_t add(const std::string& key, std::int64_t what) override {
    return store_.add(key, what);
  }

 private:
  c10d::Store& store_;
};

}  // namespace

/// Runs the interrupt check during one call. A store that answers late gets some more time, so that
/// the connection stays in order, and the others can be told over it.
class Store::Questions {
 public:
  explicit Questions(std::shared_ptr<const AbortFlag> abort_flag)
      : abort_flag_(std::move(abort_flag)) {}

  /// For BoundedCalls::run.
  std::function<bool()> in_vain() {
    if (!base::may_ask_interrupt()) return {};
    return [this] { return ends_the_call(); };
  }
  /// Errors: what the check has thrown.
  void rethrow() const {
    if (!interrupt_) return;
    if (abort_flag_) abort_flag_->tell_interrupted();
    std::rethrow_exception(interrupt_);
  }

 private:
  bool ends_the_call() {
    if (interrupt_) return std::chrono::steady_clock::now() >= ends_;
    if (!timer_.is_due()) return false;
    try {
      base::ask_interrupt();
    } catch (...) {
      interrupt_ = std::current_exception();
      ends_ = std::chrono::steady_clock::now() + kStoreMargin;
    }
    return false;
  }

  const std::shared_ptr<const AbortFlag> abort_flag_;
  base::InterruptTimer timer_;
  std::exception_ptr interrupt_;
  std::chrono::steady_clock::time_point ends_;
};

template <class Operation>
auto Store::call(const std::string& what, Operation operation) const {
  const auto on_store = [store = store_, operation = std::move(operation)] {
    return operation(*store);
  };
  try {
    if (!calls_) return on_store();
    Questions questions(abort_flag_);
    auto answer = calls_->run(on_store, answers_within_, questions.in_vain());
    questions.rethrow();
    if (answer) return *std::move(answer);
  } catch (const std::exception& error) {
    if (base::handles_interrupt()) throw;
    throw LostRank(concat("store: ", what, ": ", one_line(error.what()), " (", server_, ")"));
  }
  throw LostRank(concat(no_answer(server_, answers_within_), " (", what, ")"));
}

Store::Store(c10::intrusive_ptr<c10d::Store> store, std::string server,
             std::chrono::milliseconds timeout, std::chrono::milliseconds answers_within, int ranks)
    : store_(std::move(store)),
      server_(std::move(server)),
      timeout_(timeout),
      answers_within_(answers_within),
      ranks_(ranks) {
  if (answers_within_.count() > 0) calls_ = std::make_unique<BoundedCalls>();
}

std::shared_ptr<Store> Store::in_memory(std::chrono::milliseconds timeout) {
  return std::shared_ptr<Store>(
      new Store(c10::make_intrusive<c10d::HashStore>(), "this process", timeout, {}, 1));
}

std::shared_ptr<Store> Store::connect(const LaunchEnvironment& launch,
                                      std::chrono::milliseconds timeout,
                                      std::chrono::milliseconds answers_within) {
  const JoinsSilently silence;
  c10d::TCPStoreOptions options;
  options.port = launch.master_port;
  options.isServer = launch.rank == 0 && !launch.agent_store;
  options.numWorkers = static_cast<std::size_t>(launch.world_size);
  options.waitWorkers = false;  // meet() waits, and names who is missing
  options.timeout = timeout;
  require_open_files(kOpenFiles + (options.isServer ? launch.world_size : 0));
  if (options.isServer && launch.listen_fd >= 0) {
    options.masterListenFd = launch.listen_fd;
  } else if (options.isServer) {
    options.masterListenFd = listen_for(launch).socket.release();
  }
  const std::string server = concat(launch.agent_store ? "the launcher" : "rank 0", " at ",
                                    launch.master_addr, ":", launch.master_port);
  const auto open = [options, host = launch.master_addr] {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  };
  std::optional<c10::intrusive_ptr<c10d::TCPStore>> tcp;
  try {
    tcp = run_asking(open, timeout + kStoreMargin);
  } catch (const std::exception& error) {
    if (base::handles_interrupt()) throw;
    const std::string why = one_line(error.what());
    TESSERA_CHECK(!options.isServer, ErrorKind::kComm, "store: cannot serve as ", server, ": ",
                  why);
    throw LostRank(concat("store: cannot reach ", server, ": ", why));
  }
  if (!tcp) throw LostRank(no_answer(server, timeout));
  std::shared_ptr<Store> store(
      new Store(c10::make_intrusive<c10d::PrefixStore>(launch.store_prefix, *tcp), server, timeout,
                answers_within, launch.world_size));
  if (!launch.agent_store) store->server_rank_ = 0;
  return store;
}

namespace {

/// c10d's own stores can all clone themselves. A wrapper of the program, written in Python for
/// example, may not: it then throws, or returns nothing.
c10::intrusive_ptr<c10d::Store> clone_or_share(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    if (auto copy = store->clone()) return copy;
  } catch (const std::exception&) {
    // Shared: each of our calls returns at once, since keys are tested before they are read.
  }
  return store;
}

}  // namespace

std::shared_ptr<Store> Store::over(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                   int ranks, std::chrono::milliseconds timeout,
                                   std::chrono::milliseconds answers_within) {
  const JoinsSilently silence;
  const std::string server = "the program's store";
  const auto open = [store, rank] {
    auto connection = clone_or_share(store);
    // Each rank counts for itself: all make their Worlds in one order.
    const auto count = connection->add(concat(kOverStore, "/worlds of rank ", rank), 1);
    return c10::make_intrusive<c10d::PrefixStore>(concat(kOverStore, "/world ", count),
                                                  std::move(connection));
  };
  auto connection = run_asking(open, timeout + kStoreMargin);
  if (!connection) throw LostRank(no_answer(server, timeout));
  return std::shared_ptr<Store>(
      new Store(*std::move(connection), server, timeout, answers_within, ranks));
}

std::shared_ptr<Store> Store::second_connection(std::chrono::milliseconds longer) const {
  auto connection = call("second connection",
                         [store = store_](c10d::Store& /*ours*/) { return clone_or_share(store); });
  return std::shared_ptr<Store>(
      new Store(std::move(connection), server_, timeout_, answers_within_ + longer, ranks_));
}

void Store::set(const std::string& key, const std::string& value) {
  call(key, [=](c10d::Store& store) {
    store.set(key, value);
    return true;
  });
}

std::optional<std::string> Store::find(const std::string& key) {
  return call(key, [=](c10d::Store& store) -> std::optional<std::string> {
    if (!store.check({key})) return std::nullopt;
    return store.get_to_str(key);
  });
}

std::vector<std::optional<std::string>> Store::find_all(const std::vector<std::string>& keys) {
  std::vector<std::optional<std::string>> values;
  if (keys.size() > 1 && call(keys.front(), [=](auto& store) { return store.check(keys); })) {
    for (auto& value : get_all(keys)) values.emplace_back(std::move(value));
  } else {
    for (const auto& key : keys) values.push_back(find(key));
  }
  return values;
}

std::vector<std::string> Store::get_all(const std::vector<std::string>& keys) {
  if (keys.empty()) return {};
  return call(keys.front(), [=](c10d::Store& store) {
    std::vector<std::string> values;
    if (keys.size() > 1 && store.hasExtendedApi()) {
      for (const auto& bytes : store.multiGet(keys))
        values.emplace_back(bytes.begin(), bytes.end());
    } else {
      for (const auto& key : keys) values.push_back(store.get_to_str(key));
    }
    return values;
  });
}

std::string Store::set_if_absent(const std::string& key, const std::string& value) {
  return call(key, [=](c10d::Store& store) { return store.compareSet(key, std::string(), value); });
}

bool Store::is_set(const std::string& key) {
  return call(key, [=](c10d::Store& store) { return store.check({key}); });
}

void Store::arrive(const std::string& key, int self, int members) {
  call(key, [=](c10d::Store& store) {
    CountersOf counters(store);
    if (Arrivals(counters, arrivals_at(key), members).arrive(self)) store.set(all_at(key), "here");
    return true;
  });
}

Missing Store::missing(const std::string& key, int members) {
  return call(key, [=](c10d::Store& store) {
    CountersOf counters(store);
    return Arrivals(counters, arrivals_at(key), members).missing();
  });
}

void Store::require_size(int rank, int size) {
  const std::string first = set_if_absent(kSize, concat(size, " as rank ", rank));
  TESSERA_CHECK(first.starts_with(concat(size, ' ')), ErrorKind::kUsage, "world: found rank ", rank,
                " of ", size, " ranks, expected one of ", first,
                " is; start all with the same number (WORLD_SIZE, or what the launcher sets)");
}

int Store::required_size() {
  const auto first = find(kSize);
  TESSERA_INVARIANT(first, "store: found no rank that has said a number of ranks");
  return std::stoi(*first);
}

void Store::meet(const std::string& key, int self, const std::vector<int>& members,
                 std::chrono::milliseconds timeout, const AbortFlag& abort_flag) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto size = static_cast<int>(members.size());
  arrive(key, static_cast<int>(std::ranges::find(members, self) - members.begin()), size);
  std::chrono::microseconds pause(50);
  const auto longest = std::max(kLongestPause, kPauseForEach * size);
  base::InterruptTimer timer;
  while (!is_set(all_at(key))) {
    abort_flag.check();
    abort_flag.ask_interrupt(timer);
    if (std::chrono::steady_clock::now() > deadline) {
      const Missing absent = missing(key, size);
      if (absent.members.empty() && !absent.and_more) return;  // the last one has just arrived
      std::vector<int> ranks;
      for (const int index : absent.members) {
        ranks.push_back(members[static_cast<std::size_t>(index)]);
      }
      throw LostRank(concat(key, ": rank ", joined(ranks), absent.and_more ? " and others" : "",
                            " of ", size, " did not come within ", in_seconds(timeout),
                            abort_flag.patience.works_of(ranks)));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, longest);
  }
}

c10::intrusive_ptr<c10d::Store> Store::for_group(
    const std::string& prefix, std::shared_ptr<const AbortFlag> abort_flag,
    std::function<void(const std::string& key)> waits) const {
  const std::uint64_t marks = abort_flag->marks();
  return c10::make_intrusive<PolledStore>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                                          std::move(abort_flag), marks, timeout_,
                                          WatchTimes{watch_poll(ranks_)}.pause(), std::move(waits));
}

}  // namespace tessera::comm
