// What a collective operation is: one struct with everything that is known about it, one file each
// (the two of control messages share relayed.h).
//
// A group takes a batch of them as a variant (group.h), and whoever does something with an op
// visits it, so an operation that lacks an answer does not compile. Operation, below, lists the
// answers. How one travels between pairs of ranks is its Steps (steps.h); NCCL has its own calls
// (backends/nccl). Next: all_gather.h, the simplest.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

enum class Kind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kAnyOf,
  kSumOf,
  kBroadcast,
  kBarrier,
  kBatch
};
std::string_view to_string(Kind kind);

enum class Into : std::uint8_t { kOverwrite, kAdd };

/// What of an op must agree over ranks, and is printed.
struct OpFacts {
  Kind kind = Kind::kAllGather;
  std::int64_t bytes = 0;  ///< of the whole buffer; 0 for an all-to-all, where ranks differ
  at::ScalarType wire = at::ScalarType::Float;
  at::ScalarType result = at::ScalarType::Float;
  bool relayed = false;
};

/// The batch of an op that is checked.
struct CheckedBatch {
  Kind kind;
  std::string_view unit;
  int ranks;
  at::Device device;
  /// Errors: kInternal unless defined, contiguous and on the device.
  void require_usable(const at::Tensor& tensor) const;
};

/// Makes a tensor that stands in for `of` while an op runs, with its sizes and dtype; and with its
/// values, where the op does not overwrite all of them.
enum class Values : std::uint8_t { kKept, kOverwritten };
using MakeTwin = std::function<at::Tensor(const at::Tensor& of, Values values)>;

class Steps;

template <class Op>
concept Operation =
    requires(const Op& op, const CheckedBatch& batch, const std::vector<const Op*>& of_all_ranks,
             const MakeTwin& make, int number) {
      { op.first_tensor() } -> std::convertible_to<const at::Tensor&>;  ///< what goes out
      { op.facts() } -> std::same_as<OpFacts>;
      { op.bucket_or(std::uint32_t{}) } -> std::same_as<std::uint32_t>;  ///< its number in traces
      /// Errors: kInternal for tensors whose sizes, dtypes or places do not fit.
      { op.check(batch) };
      /// By one rank (the second number) of so many, to all others together.
      { op.sent_bytes(number, number) } -> std::same_as<std::int64_t>;
      /// Whether it travels over other ranks (relay.h) of so many.
      { op.is_relayed(number) } -> std::same_as<bool>;
      /// The whole of it in a group of one rank, on any device.
      { op.run_alone() };
      /// How a rank (the second number) of so many sends and receives it. The op outlives them.
      { op.steps(number, number) } -> std::same_as<std::unique_ptr<Steps>>;
      /// Runs all of it by tensor operations on the current stream of each rank's device, which is
      /// ordered after all that made the tensors. Adds in rank order: the same bits.
      { Op::run_on_devices(of_all_ranks) };
      /// With twins of its tensors, and the results of such a one back in place: launched on the current
      /// stream, where they are on a device.
      { op.cloned(make) } -> std::same_as<Op>;
      { op.deliver(op) };
    };

}  // namespace tessera::comm
