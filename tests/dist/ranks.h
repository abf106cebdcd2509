// Ranks for tests: threads of this process with their Worlds and groups kept between cases.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>

#include "comm/group.h"
#include "comm/stream.h"
#include "comm/thread_ranks.h"
#include "dist/place.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::test {

/// The ranks of one size and backend, made on first use and kept until the process ends; where
/// place() says.
class Ranks {
 public:
  Ranks(int count, ThreadBackend backend, std::chrono::milliseconds timeout)
      : key_{count, place().nccl ? ThreadBackend::kNccl : backend, place().device, timeout},
        side_(place().side) {
    // What one rank alone has launched stays between its devices.
    if (over_nccl()) kept().erase(key_);
  }

  void run(const std::function<void(World&)>& body) {
    try {
      of(key_).run([&](World& world) {
        try {
          run_on(world, body);
        } catch (...) {
          failed_ranks().one();
          throw;
        }
      });
    } catch (...) {
      if (over_nccl()) kept().erase(key_);
      failed_ranks().over();
      throw;
    }
  }

 private:
  using Key = std::tuple<int, ThreadBackend, std::string, std::chrono::milliseconds>;

  bool over_nccl() const { return std::get<ThreadBackend>(key_) == ThreadBackend::kNccl; }
  void run_on(World& world, const std::function<void(World&)>& body) const {
    device_here() = world.device();
    if (!side_) return body(world);
    // What one body leaves to the test or to the next one is read elsewhere.
    const auto outside = comm::Stream::current(world.device());
    const auto side = comm::Stream::make(world.device());
    comm::order(outside, side, comm::EventSite::kIssue);
    {
      const comm::StreamScope here(side);
      body(world);
    }
    comm::order(side, outside, comm::EventSite::kIssue);
  }

  static std::map<Key, std::unique_ptr<comm::ThreadRanks>>& kept() {
    static std::map<Key, std::unique_ptr<comm::ThreadRanks>> all;
    return all;
  }
  static comm::ThreadRanks& of(const Key& key) {
    auto& slot = kept()[key];
    if (!slot) {
      const auto& [count, backend, device, timeout] = key;
      WorldOptions options;
      options.timeout = timeout;
      options.device = device;
      slot = std::make_unique<comm::ThreadRanks>(count, backend, options);
    }
    return *slot;
  }

  const Key key_;
  const bool side_;
};

inline Ranks ranks(int count, ThreadBackend backend = ThreadBackend::kInProcess,
                   std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  return {count, backend, timeout};
}

/// Where the ranks of a test wait for each other without a collective. Every rank takes a seat; one
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

/// The dense mesh with these degrees.
inline Mesh data_mesh(World& world, int replicas = 1) {
  return world.mesh(MeshShape::dense(1, replicas, world.size() / replicas, 1, 1));
}

/// Bit for bit, dtype included: a NaN is the same as itself, and 0 is not -0. Strides and devices
/// may differ.
inline ::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure() << a.scalar_type() << " against " << b.scalar_type();
  }
  if (a.sizes() != b.sizes())
    return ::testing::AssertionFailure() << a.sizes() << " against " << b.sizes();
  const auto one = a.detach().cpu().contiguous();
  const auto other = b.detach().cpu().contiguous();
  const auto bytes_of = [](const at::Tensor& tensor) {
    return std::span(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
  };
  const auto found = std::ranges::mismatch(bytes_of(one), bytes_of(other));
  if (found.in1 == bytes_of(one).end()) return ::testing::AssertionSuccess();
  const auto element =
      (found.in1 - bytes_of(one).begin()) / static_cast<std::ptrdiff_t>(one.element_size());
  const auto value = [&](const at::Tensor& tensor) {
    return tensor.flatten()[element].to(at::kDouble).item<double>();
  };
  return ::testing::AssertionFailure()
         << "element " << element << " of " << one.numel() << ": " << value(one) << " against "
         << value(other) << ", largest difference "
         << (one.to(at::kDouble) - other.to(at::kDouble)).abs().max().item<double>();
}

/// Values that depend on the seed only, not on libtorch's process-wide generator; here().
at::Tensor seeded(std::uint64_t seed, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

}  // namespace tessera::test
