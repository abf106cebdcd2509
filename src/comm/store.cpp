#include "comm/store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Runs one store operation; whatever it throws becomes kComm.
template <class F>
auto guarded(const std::string& what, F&& operation) {
  try {
    return operation();
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kComm, concat("store: ", what, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw Error(ErrorKind::kComm, concat("store: ", what, ": ", error.what()));
  }
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

Store::Store(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

std::shared_ptr<Store> Store::in_memory() {
  return std::shared_ptr<Store>(new Store(c10::make_intrusive<c10d::HashStore>()));
}

std::shared_ptr<Store> Store::connect(const LaunchEnvironment& launch,
                                      std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = launch.master_port;
  options.isServer = launch.rank == 0 && !launch.agent_store;
  options.numWorkers = static_cast<std::size_t>(launch.world_size);
  options.waitWorkers = false;  // meet() waits, and names who is missing
  options.timeout = timeout;
  if (options.isServer && launch.listen_fd >= 0) options.masterListenFd = launch.listen_fd;
  const std::string where = concat(launch.master_addr, ":", launch.master_port);
  return guarded(concat(options.isServer ? "serving at " : "connecting to ", where), [&] {
    auto tcp = c10::make_intrusive<c10d::TCPStore>(launch.master_addr, options);
    if (launch.store_prefix.empty()) return std::shared_ptr<Store>(new Store(std::move(tcp)));
    return std::shared_ptr<Store>(
        new Store(c10::make_intrusive<c10d::PrefixStore>(launch.store_prefix, std::move(tcp))));
  });
}

std::shared_ptr<Store> Store::second_connection() const {
  return guarded("second connection",
                 [&] { return std::shared_ptr<Store>(new Store(store_->clone())); });
}

void Store::set(const std::string& key, const std::string& value) {
  guarded(key, [&] { store_->set(key, value); });
}

std::optional<std::string> Store::find(const std::string& key) {
  return guarded(key, [&]() -> std::optional<std::string> {
    if (!store_->check({key})) return std::nullopt;
    return store_->get_to_str(key);
  });
}

std::string Store::set_if_absent(const std::string& key, const std::string& value) {
  return guarded(key, [&] { return store_->compareSet(key, std::string(), value); });
}

bool Store::all_set(const std::vector<std::string>& keys) {
  return guarded(keys.front(), [&] { return store_->check(keys); });
}

void Store::meet(const std::string& key, int self, const std::vector<int>& members,
                 std::chrono::milliseconds timeout, const Poison& poison) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  set(concat(key, "/", self), "here");
  std::vector<std::string> keys;
  for (const int member : members) keys.push_back(concat(key, "/", member));
  std::chrono::microseconds pause(50);
  while (!all_set(keys)) {
    poison.check();
    if (std::chrono::steady_clock::now() > deadline) {
      std::vector<int> missing;
      for (const int member : members) {
        if (!all_set({concat(key, "/", member)})) missing.push_back(member);
      }
      throw PeerLost(concat(key, ": rank ", list(missing), " of ", members.size(),
                            " did not come within ", in_seconds(timeout)));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(5000));
  }
}

c10::intrusive_ptr<c10d::Store> Store::for_group(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
}

}  // namespace tessera::comm
