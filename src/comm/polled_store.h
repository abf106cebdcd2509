// PolledStore: a store whose waits are questions asked again and again.
//
// A connection to the store answers one call at a time, and a wait is one call: two threads that
// open a connection each over the same one would wait for each other's peers, ring-wise over ranks,
// for ever. Only what Gloo calls when it connects ranks is there. Private to store.cpp.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/poison.h"

namespace tessera::comm {

/// Threads: any. Errors of waits: PeerLost when the World is poisoned or the time is up.
class PolledStore final : public c10d::Store {
 public:
  PolledStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Poison> poison)
      : store_(std::move(store)), poison_(std::move(poison)) {}

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const Poison> poison_;
};

}  // namespace tessera::comm
