// How an Exchange relays a small message (relay.h): all receives are posted at once, each round's
// send when what it passes on is here.
#include <algorithm>

#include "comm/exchange.h"
#include "comm/relay.h"
#include "comm/tensor_bytes.h"

namespace tessera::comm {

bool Exchange::is_relayed(std::size_t index) const {
  return comm::is_relayed(batch_.ops[index], channel_->size());
}

void Exchange::prepare_relay(std::size_t index) {
  UnderWay& op = under_way_[index];
  const int ranks = channel_->size();
  const auto& mine = first_tensor(batch_.ops[index]);
  if (std::holds_alternative<Combine>(batch_.ops[index])) {
    op.received = channel_->take_buffer(nbytes(mine) * relay::rounds(ranks));
    return;
  }
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(ranks), nbytes(mine));
  std::int64_t own = 0;
  if (const auto* gather = std::get_if<RelayedGather>(&batch_.ops[index])) {
    lengths = gather->lengths;
    own = stretch_begin(lengths, channel_->options.self);
  }
  op.begins = relay::begins(lengths, channel_->options.self);
  op.received = channel_->take_buffer(op.begins.back());
  std::copy_n(at_byte(mine, own), op.begins[1], at_byte(op.received, 0));
}

Stretch Exchange::relayed_part(std::size_t index, int round) const {
  const auto& begins = under_way_[index].begins;
  if (begins.empty()) {
    const std::int64_t bits = nbytes(first_tensor(batch_.ops[index]));
    return {bits * round, bits * (round + 1)};
  }
  const int place = 1 << round;
  const int parts = relay::parts_sent(round, channel_->size());
  return {begins[static_cast<std::size_t>(place)], begins[static_cast<std::size_t>(place + parts)]};
}

void Exchange::post_relayed_receives(std::size_t index) {
  UnderWay& op = under_way_[index];
  for (int round = 0; round < relay::rounds(channel_->size()); ++round) {
    const Stretch part = relayed_part(index, round);
    const int from = relay::round_of(round, channel_->options.self, channel_->size()).from;
    post_receive(op, from, at_byte(op.received, part.begin), part.numel(),
                 index + batch_.ops.size() * static_cast<std::size_t>(round));
  }
}

/// What was combined in earlier rounds: the own values, later what came with them in.
const void* Exchange::combined_before(std::size_t index, int round) const {
  if (round == 0) return first_tensor(batch_.ops[index]).const_data_ptr();
  return at_byte(under_way_[index].received, relayed_part(index, round - 1).begin);
}

void Exchange::send_round(std::size_t index, int round) {
  UnderWay& op = under_way_[index];
  const int to = relay::round_of(round, channel_->options.self, channel_->size()).to;
  const std::size_t tag_index = index + batch_.ops.size() * static_cast<std::size_t>(round);
  if (op.begins.empty()) {
    post_send(op, to, combined_before(index, round), nbytes(first_tensor(batch_.ops[index])),
              tag_index);
    return;
  }
  const auto parts = static_cast<std::size_t>(relay::parts_sent(round, channel_->size()));
  post_send(op, to, at_byte(op.received, 0), op.begins[parts], tag_index);
}

void Exchange::finish_relay(std::size_t index) {
  UnderWay& op = under_way_[index];
  std::size_t next = 0;
  const int rounds = relay::rounds(channel_->size());
  for (int round = 0; round < rounds; ++round) {
    const Stretch part = relayed_part(index, round);
    if (part.numel() > 0) finish(op.receives[next++]);
    if (op.begins.empty()) combine_round(index, round);
    if (round + 1 == rounds) break;
    const std::lock_guard lock(mutex_);
    channel_->options.poison->check();
    send_round(index, round + 1);
  }
  finish(op.sends);  // what is sent lies in `bits`, too
  deliver_relayed(index);
}

void Exchange::combine_round(std::size_t index, int round) {
  const auto& op = std::get<Combine>(batch_.ops[index]);
  const void* before = combined_before(index, round);
  std::byte* received = at_byte(under_way_[index].received, relayed_part(index, round).begin);
  if (op.way == Combine::Way::kSum) {
    relay::add_round(round, channel_->size(), op.values.size(1),
                     static_cast<const std::int64_t*>(before),
                     reinterpret_cast<std::int64_t*>(received));
    return;
  }
  const auto* bits = static_cast<const std::byte*>(before);
  for (std::int64_t i = 0; i < nbytes(op.values); ++i) received[i] |= bits[i];
}

void Exchange::deliver_relayed(std::size_t index) {
  UnderWay& op = under_way_[index];
  const int ranks = channel_->size();
  const int self = channel_->options.self;
  const auto place_of = [&](int rank) {
    return at_byte(op.received,
                   op.begins[static_cast<std::size_t>(relay::place_of(rank, self, ranks))]);
  };
  if (const auto* combine = std::get_if<Combine>(&batch_.ops[index])) {
    const auto* all = static_cast<const std::byte*>(combined_before(index, relay::rounds(ranks)));
    const bool second = combine->way == Combine::Way::kSum && relay::row_of_sum(ranks) == 1;
    const std::int64_t begin = second ? nbytes(combine->values) / 2 : 0;
    std::copy_n(all + begin, nbytes(combine->values) - begin, at_byte(combine->values, 0));
  } else if (const auto* gather = std::get_if<RelayedGather>(&batch_.ops[index])) {
    std::int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t length = gather->lengths[static_cast<std::size_t>(rank)];
      if (rank != self) std::copy_n(place_of(rank), length, at_byte(gather->bytes, begin));
      begin += length;
    }
  } else {
    const auto& all = std::get<AllReduce>(batch_.ops[index]);
    std::vector<const void*> addends;
    for (int rank = 0; rank < ranks; ++rank) addends.push_back(place_of(rank));
    const auto& result = all.result();
    sum_in_rank_order(
        addends, all.data.scalar_type(),
        {result.mutable_data_ptr(), result.scalar_type(), result.numel(), Into::kOverwrite});
  }
}

}  // namespace tessera::comm
