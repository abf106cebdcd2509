// Ranks for tests: threads of this process with their Worlds and groups kept between cases.
#pragma once

#include <barrier>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "comm/group.h"
#include "comm/thread_ranks.h"
#include "support/place.h"
#include "support/tensors.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::test {

/// The ranks of one size and backend, made on first use and kept until the process ends; where
/// place() says.
class Ranks {
 public:
  Ranks(int count, ThreadBackend backend, std::chrono::milliseconds timeout);
  void run(const std::function<void(World&)>& body);

 private:
  using Key = std::tuple<int, ThreadBackend, std::string, std::chrono::milliseconds>;

  bool over_nccl() const { return std::get<ThreadBackend>(key_) == ThreadBackend::kNccl; }
  void run_on(World& world, const std::function<void(World&)>& body) const;
  static std::map<Key, std::unique_ptr<comm::ThreadRanks>>& kept();
  static comm::ThreadRanks& of(const Key& key);

  const Key key_;
  const bool side_;
};

inline Ranks ranks(int count, ThreadBackend backend = ThreadBackend::kInProcess,
                   std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  return {count, backend, timeout};
}

/// A test whose body each rank runs, with its `world`; the arguments after the name are those of
/// ranks().
#define TEST_ON_RANKS(suite, name, ...)                                                   \
  void suite##_##name##_OnRank(::tessera::World& world);                                  \
  TEST(suite, name) { ::tessera::test::ranks(__VA_ARGS__).run(suite##_##name##_OnRank); } \
  void suite##_##name##_OnRank([[maybe_unused]] ::tessera::World& world)

/// The same with parameters: GetParam() is there in the body and in the arguments.
#define TEST_P_ON_RANKS(suite, name, ...)                                      \
  struct suite##_##name##_OnRank : suite {                                     \
    static void on_rank(::tessera::World& world);                              \
  };                                                                           \
  TEST_P(suite, name) {                                                        \
    ::tessera::test::ranks(__VA_ARGS__).run(suite##_##name##_OnRank::on_rank); \
  }                                                                            \
  void suite##_##name##_OnRank::on_rank([[maybe_unused]] ::tessera::World& world)

/// Lets the ranks of a test wait for each other without a collective. Every rank takes a seat; one
/// whose body has ended, by an exception too, is not waited for.
class RankBarrier {
 public:
  explicit RankBarrier(int ranks) : barrier_(ranks) {}
  class Seat {
   public:
    explicit Seat(RankBarrier& meeting) : meeting_(meeting) {}
    ~Seat() { meeting_.barrier_.arrive_and_drop(); }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    void wait() { meeting_.barrier_.arrive_and_wait(); }

   private:
    RankBarrier& meeting_;
  };

 private:
  std::barrier<> barrier_;
};

/// The dense mesh with these degrees; of the ranks that share parameters `context` share rows, too.
inline Mesh data_mesh(World& world, int replicas = 1, int context = 1) {
  return world.mesh(MeshShape::dense(1, replicas, world.size() / replicas / context, context, 1));
}

}  // namespace tessera::test
