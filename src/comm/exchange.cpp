#include "comm/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <thread>

#include "base/joined.h"
#include "base/one_line.h"
#include "comm/tensor_bytes.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// The bytes as c10d takes them. The exchange keeps what owns them.
std::vector<at::Tensor> as_bytes(const void* data, std::int64_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {bytes}, at::TensorOptions().dtype(at::kByte))};
}

/// Gloo's message without the place in its source and without its advice.
std::string reason(const std::string& error) {
  const std::string what = one_line(error);
  auto begin = what.find("] ");
  begin = what.starts_with('[') && begin != std::string::npos ? begin + 2 : 0;
  return what.substr(begin, what.find(". ", begin) - begin);
}

/// Whether what peers send straight lands beside the result, to be added.
bool is_sum(const Op& op) {
  return std::holds_alternative<ReduceScatter>(op) || std::holds_alternative<AllReduce>(op);
}

}  // namespace

// A peer whose own wait has timed out closes its connections before it can say for whom it waited;
// one that has died says nothing. Its words are waited for before it is blamed itself: they travel
// through the store, at which each rank looks now and then. A look that does not end tells of the
// store's host, for whom all those may wait that this rank would blame.
void hear_others(const Poison& poison, const WaitBoard& board) {
  const auto end = std::chrono::steady_clock::now() + poison.patience.words();
  do {
    poison.check();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (std::chrono::steady_clock::now() < end || board.looks_since_before(end));
  poison.check();
}

std::string waited_in_vain(const std::string& what, std::chrono::milliseconds time,
                           const std::vector<int>& world_ranks, const Patience& patience) {
  return concat(what, ": waited ", in_seconds(time), " for rank ", joined(world_ranks),
                patience.why_missing(world_ranks));
}

Channel::Channel(ChannelOptions what)
    : options(std::move(what)),
      log(std::make_shared<IssueLog>(options.name)),
      lines(options.members.size()) {
  options.board->add(log);
}

at::Tensor Channel::take_buffer(std::int64_t bytes) {
  at::Tensor taken;
  {
    const std::lock_guard lock(mutex_);
    taken = free_buffers_.take(bytes);
  }
  return taken.defined() ? taken : at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

void Channel::give_back(at::Tensor buffer) {
  const std::lock_guard lock(mutex_);
  free_buffers_.give_back(std::move(buffer));
}

Exchange::Exchange(std::shared_ptr<Channel> channel, Batch batch, std::uint64_t sequence,
                   std::uint64_t fingerprint)
    : channel_(std::move(channel)),
      batch_(std::move(batch)),
      sequence_(sequence),
      fingerprint_(fingerprint),
      under_way_(batch_.ops.size()) {}

Exchange::~Exchange() {
  // Gloo lets go of a buffer when its work object goes; only then may the memory be used again.
  for (UnderWay& op : under_way_) {
    op.receives.clear();
    op.sends.clear();
  }
  release_buffers();
}

void Exchange::release_buffers() {
  for (UnderWay& op : under_way_) {
    if (op.received.defined()) channel_->give_back(std::move(op.received));
    op.received = at::Tensor();
  }
}

int Exchange::world_rank(int peer) const {
  return channel_->options.members[static_cast<std::size_t>(peer)];
}

std::string Exchange::text() const {
  Entry entry;
  describe(batch_, sequence_, entry);
  return concat(to_string(entry), " on group ", channel_->options.name);
}

Stretch Exchange::own_stretch(const AllReduce& op) const {
  return summed_by(op, channel_->size(), channel_->options.self);
}

/// A transfer cannot even begin: the connection is closed already.
void Exchange::blame(int peer, const std::exception& error) const {
  hear_others(*channel_->options.poison, *channel_->options.board);
  throw PeerLost(concat(text(), ": the connection to rank ", world_rank(peer),
                        " is gone: ", reason(error.what())));
}

void Exchange::post_receive(UnderWay& op, int peer, void* to, std::int64_t bytes,
                            std::size_t index) {
  if (bytes == 0) return;
  auto tensors = as_bytes(to, bytes);
  const auto tag = transfer_tag(fingerprint_, sequence_, index);
  try {
    const Line& line = channel_->lines[static_cast<std::size_t>(peer)];
    op.receives.push_back({line.backend->recv(tensors, line.rank, tag), peer});
  } catch (const std::exception& error) {
    blame(peer, error);
  }
}

void Exchange::post_send(UnderWay& op, int peer, const void* from, std::int64_t bytes,
                         std::size_t index) {
  if (bytes == 0) return;
  auto tensors = as_bytes(from, bytes);
  const auto tag = transfer_tag(fingerprint_, sequence_, index);
  try {
    const Line& line = channel_->lines[static_cast<std::size_t>(peer)];
    op.sends.push_back({line.backend->send(tensors, line.rank, tag), peer});
    posted_bytes_ += bytes;
  } catch (const std::exception& error) {
    blame(peer, error);
  }
}

std::int64_t Exchange::bytes_aside(std::size_t index) const {
  if (const auto* reduce = std::get_if<ReduceScatter>(&batch_.ops[index])) {
    return nbytes(reduce->input) / channel_->size();
  }
  const auto& all = std::get<AllReduce>(batch_.ops[index]);
  if (!in_two_rounds(all, channel_->size())) return nbytes(all.data);
  return own_stretch(all).numel() * static_cast<std::int64_t>(all.data.element_size());
}

void Exchange::receive_aside(UnderWay& op, std::int64_t bytes, std::size_t index) {
  int place = 0;
  for (int peer = 0; peer < channel_->size(); ++peer) {
    if (peer == channel_->options.self) continue;
    post_receive(op, peer, at_byte(op.received, bytes * place++), bytes, index);
  }
}

void Exchange::post_receives(std::size_t index) {
  if (is_relayed(index)) return post_relayed_receives(index);
  UnderWay& op = under_way_[index];
  const int self = channel_->options.self;
  if (const auto* gather = std::get_if<AllGather>(&batch_.ops[index])) {
    const std::int64_t slice = nbytes(gather->buffer) / channel_->size();
    for (int peer = 0; peer < channel_->size(); ++peer) {
      if (peer != self) post_receive(op, peer, at_byte(gather->buffer, slice * peer), slice, index);
    }
  } else if (const auto* exchange = std::get_if<AllToAll>(&batch_.ops[index])) {
    std::int64_t offset = 0;
    for (int peer = 0; peer < channel_->size(); ++peer) {
      const auto bytes = exchange->receives[static_cast<std::size_t>(peer)] *
                         static_cast<std::int64_t>(exchange->output.element_size());
      if (peer != self) post_receive(op, peer, at_byte(exchange->output, offset), bytes, index);
      offset += bytes;
    }
  } else {
    receive_aside(op, bytes_aside(index), index);
  }
}

void Exchange::post_sends(std::size_t index) {
  if (is_relayed(index)) return send_round(index, 0);
  UnderWay& op = under_way_[index];
  // Each rank begins with its successor, so that not all send to rank 0 first.
  for (int step = 1; step < channel_->size(); ++step) {
    const int peer = (channel_->options.self + step) % channel_->size();
    if (const auto* gather = std::get_if<AllGather>(&batch_.ops[index])) {
      const std::int64_t slice = nbytes(gather->buffer) / channel_->size();
      post_send(op, peer, at_byte(gather->buffer, slice * channel_->options.self), slice, index);
    } else if (const auto* reduce = std::get_if<ReduceScatter>(&batch_.ops[index])) {
      const std::int64_t slice = nbytes(reduce->input) / channel_->size();
      post_send(op, peer, at_byte(reduce->input, slice * peer), slice, index);
    } else if (const auto* exchange = std::get_if<AllToAll>(&batch_.ops[index])) {
      const auto element = static_cast<std::int64_t>(exchange->input.element_size());
      post_send(op, peer, at_byte(exchange->input, stretch_begin(exchange->sends, peer) * element),
                exchange->sends[static_cast<std::size_t>(peer)] * element, index);
    } else {
      const auto& all = std::get<AllReduce>(batch_.ops[index]);
      const auto element = static_cast<std::int64_t>(all.data.element_size());
      const Stretch part =
          op.second_phase ? summed_by(all, channel_->size(), peer) : Stretch{0, all.data.numel()};
      post_send(op, peer, at_byte(all.data, part.begin * element), part.numel() * element, index);
    }
  }
}

void Exchange::start() {
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) {
    if (is_relayed(i)) prepare_relay(i);
    if (is_relayed(i) || !is_sum(batch_.ops[i])) continue;
    const auto* all = std::get_if<AllReduce>(&batch_.ops[i]);
    under_way_[i].second_phase = all != nullptr && in_two_rounds(*all, channel_->size());
    under_way_[i].received = channel_->take_buffer(bytes_aside(i) * (channel_->size() - 1));
  }
  // A transfer whose receiver is ready goes out without a round trip: receives come first.
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) post_receives(i);
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) {
    post_sends(i);
    if (const auto* exchange = std::get_if<AllToAll>(&batch_.ops[i])) copy_own_stretch(*exchange);
  }
}

void Exchange::copy_own_stretch(const AllToAll& op) const {
  const int self = channel_->options.self;
  const auto numel = op.sends[static_cast<std::size_t>(self)];
  op.output.view(-1)
      .narrow(0, stretch_begin(op.receives, self), numel)
      .copy_(op.input.view(-1).narrow(0, stretch_begin(op.sends, self), numel));
}

void Exchange::abort() {
  const std::lock_guard lock(mutex_);
  for (UnderWay& op : under_way_) {
    for (Transfer& transfer : op.receives) transfer.work->abort();
    for (Transfer& transfer : op.sends) transfer.work->abort();
  }
}

std::optional<PeerWait> Exchange::waits_for() const {
  const int peer = waits_for_;
  return channel_->log->wait_for(sequence_, peer < 0 ? -1 : world_rank(peer));
}

void Exchange::wait() {
  if (done_) return;
  if (failure_) std::rethrow_exception(failure_);
  const OnBoard on_board(*channel_->options.board, *this);
  patience_ = channel_->options.poison->patience.of(channel_->options.timeout);
  deadline_ = std::chrono::steady_clock::now() + patience_;
  try {
    channel_->options.poison->check();  // after this, whoever poisons finds us on the board
    for (std::size_t i = 0; i < batch_.ops.size(); ++i) finish_first_phase(i);
    for (UnderWay& op : under_way_) {
      finish(op.receives);
      finish(op.sends);
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  check_posted();
  release_buffers();
  batch_.ops.clear();
  done_ = true;
}

void Exchange::check_posted() const {
  const std::int64_t expected = sent_bytes(batch_, channel_->size(), channel_->options.self);
  TESSERA_INVARIANT(posted_bytes_ == expected, text(), ": sent ", posted_bytes_, " B, expected ",
                    expected);
}

void Exchange::add_received(UnderWay& op, const void* own, at::ScalarType wire,
                            const SumInto& result) {
  const auto bytes = result.numel * static_cast<std::int64_t>(c10::elementSize(wire));
  std::vector<const void*> addends;
  addends.reserve(static_cast<std::size_t>(channel_->size()));
  int place = 0;
  for (int rank = 0; rank < channel_->size(); ++rank) {
    addends.push_back(rank == channel_->options.self ? own : at_byte(op.received, bytes * place++));
  }
  sum_in_rank_order(addends, wire, result);
}

void Exchange::finish_first_phase(std::size_t index) {
  if (is_relayed(index)) return finish_relay(index);
  UnderWay& op = under_way_[index];
  if (!is_sum(batch_.ops[index])) return;
  finish(op.receives);
  if (const auto* reduce = std::get_if<ReduceScatter>(&batch_.ops[index])) {
    const std::int64_t slice = nbytes(reduce->input) / channel_->size();
    add_received(op, at_byte(reduce->input, slice * channel_->options.self),
                 reduce->input.scalar_type(),
                 {reduce->output.mutable_data_ptr(), reduce->output.scalar_type(),
                  reduce->output.numel(), reduce->into});
    return;
  }
  // The sum goes where this rank's addends are: they must have left first.
  finish(op.sends);
  const auto& all = std::get<AllReduce>(batch_.ops[index]);
  const auto& result = all.result();
  const Stretch mine = op.second_phase ? own_stretch(all) : Stretch{0, all.data.numel()};
  add_received(op, at_byte(all.data, mine.begin * all.data.element_size()), all.data.scalar_type(),
               {at_byte(result, mine.begin * result.element_size()), result.scalar_type(),
                mine.numel(), Into::kOverwrite});
  if (op.second_phase) start_second_phase(index);
}

void Exchange::start_second_phase(std::size_t index) {
  const std::lock_guard lock(mutex_);
  channel_->options.poison->check();
  UnderWay& op = under_way_[index];
  const auto& all = std::get<AllReduce>(batch_.ops[index]);
  const auto& sums = all.result();
  const auto element = static_cast<std::int64_t>(sums.element_size());
  const std::size_t tag_index = index + batch_.ops.size();
  op.receives.clear();
  op.sends.clear();
  for (int peer = 0; peer < channel_->size(); ++peer) {
    if (peer == channel_->options.self) continue;
    const Stretch part = summed_by(all, channel_->size(), peer);
    post_receive(op, peer, at_byte(sums, part.begin * element), part.numel() * element, tag_index);
  }
  const Stretch mine = own_stretch(all);
  for (int peer = 0; peer < channel_->size(); ++peer) {
    if (peer == channel_->options.self) continue;
    post_send(op, peer, at_byte(sums, mine.begin * element), mine.numel() * element, tag_index);
  }
}

void Exchange::finish(std::vector<Transfer>& transfers) {
  for (Transfer& transfer : transfers) finish(transfer);
}

void Exchange::finish(Transfer& transfer) {
  using std::chrono::milliseconds;
  if (transfer.finished) return;
  waits_for_ = transfer.peer;
  const auto left =
      std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now());
  bool complete = false;
  try {
    complete = transfer.work->wait(std::max(left, milliseconds(1)));
  } catch (const std::exception& error) {
    fail(transfer, error.what());
  }
  if (!complete) fail(transfer, "aborted");
  transfer.finished = true;
}

std::vector<int> Exchange::not_arrived() {
  std::vector<int> ranks;
  for (UnderWay& op : under_way_) {
    for (auto* transfers : {&op.receives, &op.sends}) {
      for (Transfer& transfer : *transfers) {
        if (transfer.finished) continue;
        try {
          // Gloo has closed the connections after the timeout: what is not there throws at once.
          transfer.finished = transfer.work->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {
          ranks.push_back(world_rank(transfer.peer));
        }
      }
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<int> Exchange::missing(const Transfer& transfer) {
  bool relayed = false;
  for (std::size_t i = 0; i < batch_.ops.size(); ++i) relayed = relayed || is_relayed(i);
  if (!relayed) return not_arrived();
  // The rank before may itself wait for another one. If it came later than this one its time is up
  // later: by then it says so, or the watch has seen it wait.
  hear_others(*channel_->options.poison, *channel_->options.board);
  const auto& log = *channel_->log;
  const auto cause = channel_->options.board->cause_of(log.group_hash(), sequence_);
  return {cause.value_or(world_rank(transfer.peer))};
}

void Exchange::fail(const Transfer& transfer, const std::string& what) {
  channel_->options.poison->check();
  // Gloo waits by another clock and may be done a little before ours.
  if (what.find("Timed out waiting") != std::string::npos ||
      std::chrono::steady_clock::now() >= deadline_) {
    throw PeerLost(
        waited_in_vain(text(), patience_, missing(transfer), channel_->options.poison->patience));
  }
  hear_others(*channel_->options.poison, *channel_->options.board);
  throw PeerLost(concat(text(), ": lost rank ", world_rank(transfer.peer), ": ", reason(what)));
}

}  // namespace tessera::comm
