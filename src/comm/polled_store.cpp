#include "comm/polled_store.h"

#include <algorithm>
#include <thread>

#include "tessera/error.h"

namespace tessera::comm {

constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestWaitPause{16};

c10::intrusive_ptr<c10d::Store> PolledStore::clone() {
  return c10::make_intrusive<PolledStore>(store_->clone(), poison_);
}

void PolledStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  store_->set(key, value);
}

std::vector<std::uint8_t> PolledStore::get(const std::string& key) {
  wait({key});
  return store_->get(key);
}

std::vector<std::vector<std::uint8_t>> PolledStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return store_->multiGet(keys);
}

std::int64_t PolledStore::add(const std::string& key, std::int64_t value) {
  return store_->add(key, value);
}

bool PolledStore::deleteKey(const std::string& key) { return store_->deleteKey(key); }

bool PolledStore::check(const std::vector<std::string>& keys) { return store_->check(keys); }

std::int64_t PolledStore::getNumKeys() { return store_->getNumKeys(); }

void PolledStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void PolledStore::wait(const std::vector<std::string>& keys,
                       const std::chrono::milliseconds& timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  auto pause = kFirstPause;
  while (!store_->check(keys)) {
    poison_->check();
    if (std::chrono::steady_clock::now() > deadline) {
      throw PeerLost(concat("store: no ", keys.front(), " within ", in_seconds(timeout)));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestWaitPause);
  }
}

}  // namespace tessera::comm
