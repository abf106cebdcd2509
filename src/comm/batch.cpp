#include "comm/batch.h"

#include <algorithm>
#include <numeric>

#include "base/hash.h"
#include "comm/sum.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

OpFacts facts(const Op& op) {
  if (const auto* gather = std::get_if<AllGather>(&op)) {
    const auto& buffer = gather->buffer;
    return {Kind::kAllGather, static_cast<std::int64_t>(buffer.nbytes()), buffer.scalar_type(),
            buffer.scalar_type()};
  }
  if (const auto* reduce = std::get_if<ReduceScatter>(&op)) {
    return {Kind::kReduceScatter, static_cast<std::int64_t>(reduce->input.nbytes()),
            reduce->input.scalar_type(), reduce->output.scalar_type()};
  }
  if (const auto* exchange = std::get_if<AllToAll>(&op)) {
    return {Kind::kAllToAll, 0, exchange->input.scalar_type(), exchange->output.scalar_type()};
  }
  const auto relayed = [](Kind kind, const at::Tensor& values) -> OpFacts {
    return {kind, static_cast<std::int64_t>(values.nbytes()), values.scalar_type(),
            values.scalar_type(), true};
  };
  if (const auto* gather = std::get_if<RelayedGather>(&op)) {
    return relayed(Kind::kAllGather, gather->bytes);
  }
  if (const auto* combine = std::get_if<Combine>(&op)) {
    const bool sum = combine->way == Combine::Way::kSum;
    return relayed(sum ? Kind::kSumOf : Kind::kAnyOf, combine->values);
  }
  const auto& all = std::get<AllReduce>(op);
  return {Kind::kAllReduce, static_cast<std::int64_t>(all.data.nbytes()), all.data.scalar_type(),
          all.result().scalar_type(), all.route == Route::kRelayed};
}

std::string describe(const OpFacts& op) {
  if (op.kind == Kind::kAllToAll) return c10::toString(op.wire);
  std::string text = concat(op.bytes, " B ", c10::toString(op.wire));
  if (op.result != op.wire) text += concat(" into ", c10::toString(op.result));
  return text;
}

void check_all_to_all(const AllToAll& op, int ranks, const std::string& unit) {
  const auto sum = [](const auto& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  for (const auto* counts : {&op.sends, &op.receives}) {
    TESSERA_INVARIANT(
        counts->size() == static_cast<std::size_t>(ranks) &&
            std::all_of(counts->begin(), counts->end(), [](auto count) { return count >= 0; }),
        "all_to_all of ", unit, ": found ", counts->size(), " counts or negative ones, expected ",
        ranks);
  }
  TESSERA_INVARIANT(sum(op.sends) == op.input.numel() && sum(op.receives) == op.output.numel() &&
                        op.input.scalar_type() == op.output.scalar_type(),
                    "all_to_all of ", unit, ": found ", op.input.numel(), " elements in and ",
                    op.output.numel(), " out, expected the sums of their counts in one dtype");
}

void check_relayed(const RelayedGather& op, int ranks, const std::string& unit) {
  const auto all = std::accumulate(op.lengths.begin(), op.lengths.end(), std::int64_t{0});
  TESSERA_INVARIANT(
      op.lengths.size() == static_cast<std::size_t>(ranks) && op.bytes.scalar_type() == at::kByte &&
          all == op.bytes.numel() &&
          std::all_of(op.lengths.begin(), op.lengths.end(), [](auto one) { return one >= 0; }),
      "relayed gather of ", unit, ": found ", op.bytes.numel(), " elements and ", op.lengths.size(),
      " lengths of ", all, " in all, expected bytes, and the lengths of ", ranks, " ranks");
}

class Done : public Work {
 public:
  void wait() override {}
};

}  // namespace

std::string to_string(const Entry& entry) {
  std::string text =
      concat(to_string(entry.label.kind), " of ", entry.label.unit, " (#", entry.sequence,
             ", unit ", entry.label.unit_id, ", micro-batch ", entry.label.micro_batch,
             entry.label.controls.empty() ? "" : ", ", entry.label.controls, ":");
  bool first = true;
  for (const OpFacts& op : entry.ops) {
    text += first ? " " : " + ";
    if (entry.label.kind != op.kind) text += concat(to_string(op.kind), " ");
    text += describe(op);
    first = false;
  }
  return text + ")";
}

void describe(const Batch& batch, std::uint64_t sequence, Entry& entry) {
  entry.label = batch.label;
  entry.sequence = sequence;
  entry.ops.clear();
  Hasher hash;
  hash.add(static_cast<std::uint64_t>(batch.label.kind)).add(std::string_view(batch.label.unit));
  hash.add(std::uint64_t{batch.label.unit_id}).add(std::uint64_t{batch.label.micro_batch});
  hash.add(std::string_view(batch.label.controls));
  for (const Op& op : batch.ops) {
    const OpFacts& one = entry.ops.emplace_back(facts(op));
    hash.add(static_cast<std::uint64_t>(one.kind)).add(one.bytes);
    hash.add(static_cast<std::uint64_t>(one.wire)).add(static_cast<std::uint64_t>(one.result));
    hash.add(one.relayed);
  }
  entry.fingerprint = hash.digest();
}

int transfer_tag(std::uint64_t fingerprint, std::uint64_t sequence, std::uint64_t op) {
  return static_cast<int>(Hasher().add(fingerprint).add(sequence).add(op).digest() & 0x7fffffffU);
}

void check_batch(const Batch& batch, int ranks, at::DeviceType device) {
  const auto usable = [&](const at::Tensor& tensor) {
    TESSERA_INVARIANT(tensor.defined() && tensor.is_contiguous(), "batch of ", batch.label.unit,
                      ": found a tensor that is undefined or not contiguous");
    TESSERA_INVARIANT(tensor.device().type() == device, "batch of ", batch.label.unit,
                      ": found a tensor on ", tensor.device(), ", expected ", device);
  };
  for (const Op& op : batch.ops) {
    if (const auto* gather = std::get_if<AllGather>(&op)) {
      usable(gather->buffer);
      TESSERA_INVARIANT(gather->buffer.numel() % ranks == 0, "all_gather of ", batch.label.unit,
                        ": found ", gather->buffer.numel(), " elements, expected a multiple of ",
                        ranks);
    } else if (const auto* reduce = std::get_if<ReduceScatter>(&op)) {
      usable(reduce->input);
      usable(reduce->output);
      TESSERA_INVARIANT(reduce->input.numel() == ranks * reduce->output.numel(),
                        "reduce_scatter of ", batch.label.unit, ": found ", reduce->input.numel(),
                        " elements in and ", reduce->output.numel(), " out of ", ranks, " ranks");
      TESSERA_INVARIANT(can_sum(reduce->input.scalar_type(), reduce->output.scalar_type()),
                        "reduce_scatter of ", batch.label.unit, ": cannot add ",
                        c10::toString(reduce->input.scalar_type()), " into ",
                        c10::toString(reduce->output.scalar_type()));
    } else if (const auto* exchange = std::get_if<AllToAll>(&op)) {
      usable(exchange->input);
      usable(exchange->output);
      check_all_to_all(*exchange, ranks, batch.label.unit);
    } else if (const auto* relayed = std::get_if<RelayedGather>(&op)) {
      usable(relayed->bytes);
      check_relayed(*relayed, ranks, batch.label.unit);
    } else if (const auto* combine = std::get_if<Combine>(&op)) {
      usable(combine->values);
      const auto& values = combine->values;
      const bool sum = combine->way == Combine::Way::kSum;
      TESSERA_INVARIANT(
          sum ? values.scalar_type() == at::kLong && values.dim() == 2 && values.size(0) == 2
              : values.scalar_type() == at::kByte,
          to_string(batch.label.kind), " of ", batch.label.unit, ": found ", values.sizes(), " of ",
          c10::toString(values.scalar_type()), ", expected bytes, or int64 [2, n] for a sum");
    } else {
      const auto& all = std::get<AllReduce>(op);
      usable(all.data);
      usable(all.result());
      TESSERA_INVARIANT(all.data.numel() == all.result().numel(), "all_reduce of ",
                        batch.label.unit, ": found ", all.data.numel(), " elements in and ",
                        all.result().numel(), " out");
      TESSERA_INVARIANT(can_sum(all.data.scalar_type(), all.result().scalar_type()),
                        "all_reduce of ", batch.label.unit, ": cannot add ",
                        c10::toString(all.data.scalar_type()), " into ",
                        c10::toString(all.result().scalar_type()));
    }
  }
}

void run_alone(const Batch& batch) {
  for (const Op& op : batch.ops) {
    if (const auto* all = std::get_if<AllReduce>(&op)) {
      if (all->output.defined()) all->output.copy_(all->data.view(all->output.sizes()));
      continue;
    }
    if (const auto* exchange = std::get_if<AllToAll>(&op)) {
      exchange->output.copy_(exchange->input.view(exchange->output.sizes()));
      continue;
    }
    const auto* reduce = std::get_if<ReduceScatter>(&op);
    if (reduce == nullptr) continue;
    if (!reduce->output.is_cpu()) {
      const auto input = reduce->input.view(reduce->output.sizes());
      reduce->into == Into::kAdd ? reduce->output.add_(input) : reduce->output.copy_(input);
      continue;
    }
    sum_in_rank_order({reduce->input.const_data_ptr()}, reduce->input.scalar_type(),
                      {reduce->output.mutable_data_ptr(), reduce->output.scalar_type(),
                       reduce->output.numel(), reduce->into});
  }
}

std::unique_ptr<Work> SoloGroup::issue(Batch batch) {
  if (poison_) poison_->check();
  if (batch.ops.empty()) return std::make_unique<Done>();
  const at::Tensor& any = first_tensor(batch.ops.front());
  check_batch(batch, 1, any.defined() ? any.device().type() : at::kCPU);
  run_alone(batch);
  return std::make_unique<Done>();
}

}  // namespace tessera::comm
