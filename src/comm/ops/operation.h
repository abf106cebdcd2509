// Operation: the concept that every collective operation models.
//
// An operation (op) is one struct in one file; the two operations of control messages share
// relayed.h. The struct holds the op's tensors and has the functions that Operation, below, lists.
// A batch holds ops as variants (group.h) and code visits them, so an operation that lacks a
// function does not compile. The Steps of an op (steps.h) say how it travels between pairs of
// ranks; NCCL has its own calls (backends/nccl). Next: all_gather.h, the simplest operation.
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

/// The properties of an op that must agree over ranks. Errors and logs print them.
struct OpFacts {
  Kind kind = Kind::kAllGather;
  std::int64_t bytes = 0;  ///< of the whole buffer; 0 for an all-to-all, where ranks differ
  at::ScalarType wire = at::ScalarType::Float;
  at::ScalarType result = at::ScalarType::Float;
  bool relayed = false;
};

/// The properties of a batch against which its ops are checked.
struct CheckedBatch {
  Kind kind;
  std::string_view unit;
  int ranks;
  at::Device device;
  /// Errors: kInternal unless defined, contiguous and on the device.
  void require_usable(const at::Tensor& tensor) const;
};

/// Whether a twin must have the values of its tensor, or the op overwrites all of them.
enum class Values : std::uint8_t { kKept, kOverwritten };
/// Makes a twin: a tensor with the sizes and dtype of `of` that replaces it while an op runs.
using MakeTwin = std::function<at::Tensor(const at::Tensor& of, Values values)>;

class Steps;

template <class Op>
concept Operation =
    requires(const Op& op, const CheckedBatch& batch, const std::vector<const Op*>& of_all_ranks,
             const MakeTwin& make, int number) {
      /// Returns the tensor that holds what this rank sends.
      { op.first_tensor() } -> std::convertible_to<const at::Tensor&>;
      { op.facts() } -> std::same_as<OpFacts>;
      /// Returns the op's bucket, for traces; the argument where the op belongs to no bucket.
      { op.bucket_or(std::uint32_t{}) } -> std::same_as<std::uint32_t>;
      /// Errors: kInternal for tensors whose sizes, dtypes or devices do not fit.
      { op.check(batch) };
      /// sent_bytes(ranks, rank): the bytes that `rank` sends to all other ranks together.
      { op.sent_bytes(number, number) } -> std::same_as<std::int64_t>;
      /// is_relayed(ranks): whether other ranks pass its messages on (relay.h).
      { op.is_relayed(number) } -> std::same_as<bool>;
      /// Runs the op in a group of one rank, on any device.
      { op.run_alone() };
      /// steps(ranks, rank): the sends and receives of `rank`. The op must outlive them.
      { op.steps(number, number) } -> std::same_as<std::unique_ptr<Steps>>;
      /// Runs the ops of all ranks together, with tensor operations on the current stream of each
      /// rank's device. These streams are ordered after everything that made the tensors. Adds in
      /// rank order, so that the bits are those of other backends.
      { Op::run_on_devices(of_all_ranks) };
      /// Returns the same op over twins of its tensors. Copies on a device go to the current
      /// stream.
      { op.cloned(make) } -> std::same_as<Op>;
      /// Copies the results of this op, a clone, into the tensors of the original op (the
      /// argument).
      { op.deliver(op) };
    };

}  // namespace tessera::comm
